// How far a word is from the one that was meant.
#ifndef DMUON_BASE_EDIT_DISTANCE_H_
#define DMUON_BASE_EDIT_DISTANCE_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace dmuon {

// How many letters must be put in, taken out or changed. Takes the product of the lengths.
size_t EditDistance(absl::string_view a, absl::string_view b);

}  // namespace dmuon

#endif  // DMUON_BASE_EDIT_DISTANCE_H_
