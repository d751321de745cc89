// Which of the two forms runs on a shape, and what it costs.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_

#include <cstdint>

#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// Gram from n > 1.5 m on, direct below it: on squares gram is slower and 4-9 times less accurate.
NsForm ChooseForm(const NewtonSchulzOptions& options, int64_t rows, int64_t cols);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_
