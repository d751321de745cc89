// What the calls of a stand-in do by order of a test: fail, wait, or kill the process.
//
// A script is a list of rules, separated by ';', each FUNCTION:CALLS=ACTION:
//   FUNCTION  the name of a library function, or "execute": an operation that the device runs
//   CALLS     3 (the third call), 3+ (the third and all that follow), or * (all)
//   ACTION    fail(CODE)    the call does nothing and answers CODE, a number
//             block         the call never returns; block(DURATION): it returns after that, having done its work
//             delay(DURATION)  the same as block(DURATION)
//             kill          the process dies by SIGKILL inside the call
// A DURATION is a number with "ms" or "s". DMUON_FAKE_CUDA_FAULTS holds one for the process's whole life.
#ifndef DMUON_TESTS_FAKES_FAULT_SCRIPT_H_
#define DMUON_TESTS_FAKES_FAULT_SCRIPT_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace dmuon_fakes {

class FaultScript {
 public:
  // The process's own, which starts with what DMUON_FAKE_CUDA_FAULTS says. A rule that nobody can read ends the process.
  static FaultScript& Get();

  // Counts this call and does what the script says. Returns the code to answer, 0 to go on. May block: hold no lock.
  int Enter(const char* function);
  // Rules that count from now on.
  void Add(const std::string& script);
  // A rule for the nth call from now; code 0 takes back what is written for this function.
  void Fail(const char* function, uint64_t nth, int code);
  uint64_t Calls(const std::string& function) const;
  std::map<std::string, uint64_t> AllCalls() const;

 private:
  enum class Action { kFail, kBlock, kDelay, kKill };
  struct Rule {
    std::string function;
    uint64_t first = 1, last = 1;
    Action action = Action::kFail;
    int code = 0;
    int64_t milliseconds = 0;
  };
  static Rule Parse(const std::string& text);

  mutable std::mutex mutex_;
  std::map<std::string, uint64_t> calls_;
  std::vector<Rule> rules_;
};

}  // namespace dmuon_fakes

#endif  // DMUON_TESTS_FAKES_FAULT_SCRIPT_H_
