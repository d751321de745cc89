#include "tests/fakes/fault_script.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace dmuon_fakes {
namespace {

[[noreturn]] void Unreadable(const std::string& rule) {
  std::fprintf(stderr, "fake_cuda: cannot read the fault '%s'\n", rule.c_str());
  std::abort();
}

// "1s", "50ms"; -1 when it is neither.
int64_t Milliseconds(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || value < 0) return -1;
  if (std::string(end) == "ms") return static_cast<int64_t>(value);
  if (std::string(end) == "s") return static_cast<int64_t>(value * 1000);
  return -1;
}

// Ends by time alone: nobody notifies.
void Wait(int64_t milliseconds) {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  never.wait_for(lock, std::chrono::milliseconds(milliseconds), [] { return false; });
}

}  // namespace

FaultScript& FaultScript::Get() {
  static auto* const script = [] {
    auto* made = new FaultScript();
    if (const char* text = std::getenv("DMUON_FAKE_CUDA_FAULTS"); text != nullptr) made->Add(text);
    return made;
  }();
  return *script;
}

FaultScript::Rule FaultScript::Parse(const std::string& text) {
  const size_t colon = text.find(':');
  const size_t equals = text.find('=');
  if (colon == std::string::npos || equals == std::string::npos || equals < colon) Unreadable(text);
  Rule rule;
  rule.function = text.substr(0, colon);
  const std::string calls = text.substr(colon + 1, equals - colon - 1);
  if (calls == "*") {
    rule.last = UINT64_MAX;
  } else {
    char* end = nullptr;
    rule.first = rule.last = std::strtoull(calls.c_str(), &end, 10);
    if (rule.first == 0 || (*end != 0 && std::string(end) != "+")) Unreadable(text);
    if (*end == '+') rule.last = UINT64_MAX;
  }
  std::string action = text.substr(equals + 1);
  std::string argument;
  if (const size_t open = action.find('('); open != std::string::npos && action.back() == ')') {
    argument = action.substr(open + 1, action.size() - open - 2);
    action.resize(open);
  }
  if (action == "fail") {
    rule.code = std::atoi(argument.c_str());
    if (rule.code <= 0) Unreadable(text);
  } else if (action == "block" && argument.empty()) {
    rule.action = Action::kBlock;
  } else if (action == "delay" || action == "block") {
    rule.action = Action::kDelay;
    rule.milliseconds = Milliseconds(argument);
    if (rule.milliseconds < 0) Unreadable(text);
  } else if (action == "kill" && argument.empty()) {
    rule.action = Action::kKill;
  } else {
    Unreadable(text);
  }
  return rule;
}

void FaultScript::Add(const std::string& script) {
  std::lock_guard lock(mutex_);
  for (size_t begin = 0; begin < script.size();) {
    const size_t end = std::min(script.find(';', begin), script.size());
    if (end > begin) {
      Rule rule = Parse(script.substr(begin, end - begin));
      const uint64_t before = calls_[rule.function];
      rule.first += before;
      if (rule.last != UINT64_MAX) rule.last += before;
      rules_.push_back(rule);
    }
    begin = end + 1;
  }
}

void FaultScript::Fail(const char* function, uint64_t nth, int code) {
  std::lock_guard lock(mutex_);
  if (code == 0) {
    rules_.erase(std::remove_if(rules_.begin(), rules_.end(),
                                [&](const Rule& r) { return r.function == function; }),
                 rules_.end());
    return;
  }
  Rule rule;
  rule.function = function;
  rule.first = rule.last = calls_[rule.function] + nth;
  rule.code = code;
  rules_.push_back(rule);
}

int FaultScript::Enter(const char* function) {
  Rule due;
  {
    std::lock_guard lock(mutex_);
    const uint64_t call = ++calls_[function];
    const auto found = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& r) {
      return r.function == function && r.first <= call && call <= r.last;
    });
    if (found == rules_.end()) return 0;
    due = *found;
  }
  switch (due.action) {
    case Action::kFail: return due.code;
    case Action::kDelay: Wait(due.milliseconds); return 0;
    case Action::kBlock:
      while (true) pause();
    case Action::kKill: raise(SIGKILL);
  }
  return 0;
}

uint64_t FaultScript::Calls(const std::string& function) const {
  std::lock_guard lock(mutex_);
  const auto found = calls_.find(function);
  return found != calls_.end() ? found->second : 0;
}

std::map<std::string, uint64_t> FaultScript::AllCalls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

}  // namespace dmuon_fakes
