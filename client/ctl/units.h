// Figures for people: three digits and a unit.
#ifndef DMUON_CLIENT_CTL_UNITS_H_
#define DMUON_CLIENT_CTL_UNITS_H_

#include <string>

namespace dmuon::ctl {

std::string HumanBytes(double bytes);      // "1.50 MiB"; binary units
std::string HumanFlops(double flops);      // "4.21 GFLOP"; decimal units
std::string HumanSeconds(double seconds);  // "12.3 ms"

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_UNITS_H_
