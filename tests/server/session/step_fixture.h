// A session of a few small parameters, stepped over real workers and arenas.
#ifndef DMUON_TESTS_SERVER_SESSION_STEP_FIXTURE_H_
#define DMUON_TESTS_SERVER_SESSION_STEP_FIXTURE_H_

#include <memory>
#include <vector>

#include "tests/server/session/reference.h"

namespace dmuon::server::testing {

using Trainers = std::vector<std::unique_ptr<LocalTrainer>>;

class StepTest : public SessionTest {
 protected:
  StepTest() = default;
  explicit StepTest(SessionLimits limits) : SessionTest(limits) {}

  static std::vector<float> GradOf(int parameter, int rank, int step, int micro = 0) {
    return Gaussian(SmallTable().parameters[parameter].numel(),
                    1 + parameter + 10 * rank + 1000 * step + 100000 * micro);
  }
  static void SendGrads(LocalTrainer& t, int step, int micro = 0) {
    const ParameterTable table = SmallTable();
    for (size_t p = 0; p < table.parameters.size(); ++p) {
      t.SetGrad(static_cast<int>(p), GradOf(static_cast<int>(p), t.rank(), step, micro));
    }
    for (uint32_t b = 0; b < 3; ++b) t.Ready(b, micro);
  }
  // In Z3 a boundary's window is written only after the one before it in the same window was read.
  static absl::Status SendGradsZ3(LocalTrainer& t, int step, int micro = 0) {
    const ParameterTable table = SmallTable();
    for (uint32_t b = 0; b < 3; ++b) {
      for (size_t p = 0; p < table.parameters.size(); ++p) {
        if (table.parameters[p].boundary.index() == b) {
          t.SetGrad(static_cast<int>(p), GradOf(static_cast<int>(p), t.rank(), step, micro));
        }
      }
      t.Ready(b, micro);
      RETURN_IF_ERROR(t.AwaitConsumed(b, micro));
    }
    return absl::OkStatus();
  }
  static std::vector<absl::Status> StepAll(Trainers& trainers, int step) {
    return OnRanks(static_cast<int>(trainers.size()), [&](int r) {
      SendGrads(*trainers[r], step);
      return trainers[r]->Step(step);
    });
  }
  std::vector<float> Master(LocalTrainer& t, int parameter) {
    return *t.Read(SmallTable().parameters[parameter].name, StateKind::kWeight);
  }
};

}  // namespace dmuon::server::testing

#endif  // DMUON_TESTS_SERVER_SESSION_STEP_FIXTURE_H_
