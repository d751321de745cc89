// Clipping by the global 2-norm of the reduced gradients of the muon route, before momentum.
#ifndef DMUON_SERVER_CLIP_CLIP_H_
#define DMUON_SERVER_CLIP_CLIP_H_

namespace dmuon::server {

// PyTorch's clip_grad_norm_: min(1, max_norm / (total_norm + 1e-6)). max_norm 0 = no clip.
double ClipCoefficient(double total_norm, double max_norm);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_CLIP_CLIP_H_
