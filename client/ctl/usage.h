// What the command line may be, in words: each check answers what is wrong, or "" where nothing is.
#ifndef DMUON_CLIENT_CTL_USAGE_H_
#define DMUON_CLIENT_CTL_USAGE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon::ctl {

// A decimal number from 0 to `most`.
std::string CheckWhole(const std::string& text, uint64_t most);

inline constexpr double kLeastTimeoutSeconds = 0.001;
inline constexpr double kMostTimeoutSeconds = 86400;
std::string CheckTimeout(const std::string& text);

// For a first word that is none of `verbs`: the nearest one, if one is near, and all of them.
std::string UnknownVerb(const std::string& given, const std::vector<std::string>& verbs);

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_USAGE_H_
