// Which of the two forms runs on a shape, and what either costs.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_

#include <cstdint>

#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// By options.costs, where it has what the options run: gram where it is at least 5 % cheaper, since smaller differences
// are noise, and in fp32 direct is more accurate. Without: gram from n > 1.5 m on, direct below it; on squares gram is
// slower and 4-9 times less accurate.
NsForm ChooseForm(const NewtonSchulzOptions& options, int64_t rows, int64_t cols);

// FLOPs of `form`, symmetric products at half cost.
double FlopsOfForm(NsForm form, const NewtonSchulzOptions& options, int64_t rows, int64_t cols);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_FORM_H_
