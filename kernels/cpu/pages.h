// Memory in whole pages of its own: what is freed is the machine's again at once. A heap keeps blocks of some hundred
// kilobytes, and a daemon that serves one job after the other would grow by them.
#ifndef DMUON_KERNELS_CPU_PAGES_H_
#define DMUON_KERNELS_CPU_PAGES_H_

#include <cstddef>

namespace dmuon::kernels::cpu {

// Zeroed and touched, aligned to a page; from 2 MiB on to 2 MiB, in huge pages where the machine has them. Null when there
// is not so much. `bytes` > 0.
void* AllocatePages(size_t bytes);
// Null is allowed.
void FreePages(void* memory);

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_PAGES_H_
