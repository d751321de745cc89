// Environment variables for what is started in a scope.
#ifndef DMUON_TESTS_SUPPORT_ENVIRONMENT_H_
#define DMUON_TESTS_SUPPORT_ENVIRONMENT_H_

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace dmuon::testing {

using Environment = std::vector<std::pair<std::string, std::string>>;

class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const Environment& values) {
    for (const auto& [name, value] : values) {
      const char* before = std::getenv(name.c_str());
      before_.emplace_back(name,
                           before != nullptr ? std::optional<std::string>(before) : std::nullopt);
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) {
      if (value.has_value()) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_SUPPORT_ENVIRONMENT_H_
