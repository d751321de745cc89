// A trainer in this process: speaks to a SessionTable directly, and to its worker through the mapped arenas, as the
// client library does in another process. Also the float64 step that results are held against.
#ifndef DMUON_TESTS_SUPPORT_LOCAL_TRAINER_H_
#define DMUON_TESTS_SUPPORT_LOCAL_TRAINER_H_

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "proto/wire/control_page.h"
#include "server/session/session_table.h"

namespace dmuon::server::testing {

class LocalTrainer {
 public:
  LocalTrainer(SessionTable& table, uint64_t attachment, int rank)
      : table_(table),
        trainer_{AttachmentId(attachment), 1000, static_cast<pid_t>(attachment)},
        rank_(rank) {}
  ~LocalTrainer() {
    for (auto& [base, bytes] : maps_) munmap(base, bytes);
  }

  absl::Status Open(OpenSpec spec) {
    spec.rank = rank_;
    ASSIGN_OR_RETURN(opened_, table_.Open(trainer_, std::move(spec)));
    return absl::OkStatus();
  }
  absl::Status Configure(OptimizerSpec spec) {
    ASSIGN_OR_RETURN(configured_, table_.Configure(trainer_, opened_.id, rank_, std::move(spec)));
    size_t bytes = 0;
    ASSIGN_OR_RETURN(std::byte * control, Map(wire::ArenaKind::kControl, &bytes));
    ASSIGN_OR_RETURN(page_, wire::ControlPage::Attach(control, bytes));
    ASSIGN_OR_RETURN(grad_, Map(wire::ArenaKind::kGrad, nullptr));
    ASSIGN_OR_RETURN(weight_, Map(wire::ArenaKind::kWeight, nullptr));
    return absl::OkStatus();
  }
  absl::Status Register() {
    const Layout& l = configured_.layout;
    return table_
        .Register(trainer_, opened_.id, rank_,
                  {.buffers = {{wire::ArenaKind::kControl, 0, l.control_bytes},
                               {wire::ArenaKind::kGrad, 0, l.grad_bytes},
                               {wire::ArenaKind::kWeight, 0, l.weight_bytes}}})
        .status();
  }
  absl::Status WriteWeight(const std::string& name, const std::vector<float>& values) {
    return table_.WriteState(trainer_, opened_.id, name, StateKind::kWeight,
                             absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                                                 values.size() * sizeof(float)));
  }
  absl::StatusOr<std::vector<float>> Read(const std::string& name, StateKind kind) {
    ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                     table_.ReadState(trainer_, opened_.id, name, kind));
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  absl::Status Close() { return table_.Close(trainer_, opened_.id, rank_); }
  void Die() { table_.OnTrainerGone(trainer_.attachment); }

  void SetGrad(int parameter, const std::vector<float>& values) {
    std::memcpy(grad_ + configured_.layout.grad_offset[parameter], values.data(),
                values.size() * sizeof(float));
    page_.SetPresent(static_cast<uint32_t>(parameter));
  }
  std::vector<float> Weight(int parameter, size_t count) const {
    std::vector<float> values(count);
    std::memcpy(values.data(), weight_ + configured_.layout.weight_offset[parameter],
                count * sizeof(float));
    return values;
  }

  wire::Record NewRecord(wire::RecordType type) const {
    wire::Record r;
    r.type = type;
    r.generation = generation_;
    r.epoch = page_.header().epoch.load();
    r.table_digest = opened_.table_digest;
    return r;
  }
  void Push(const wire::Record& record) {
    while (!page_.Push(record)) page_.TrainerWait(page_.TrainerDoorbell(), absl::Milliseconds(10));
  }
  void Ready(uint32_t boundary, uint32_t micro = 0) {
    wire::Record r = NewRecord(wire::RecordType::kGradsReady);
    r.boundary = boundary;
    r.micro = micro;
    Push(r);
  }
  void Discard() {
    Push(NewRecord(wire::RecordType::kDiscard));
    ++generation_;
    page_.ClearPresence();
  }
  // Sends STEP and does not wait.
  void PushStep(uint64_t step, uint32_t micros = 1, uint32_t flags = 0, double max_norm = 0) {
    wire::Record r = NewRecord(wire::RecordType::kStep);
    r.step = step;
    r.micro = micros;
    r.flags = flags;
    r.max_norm = max_norm;
    ++steps_sent_;
    Push(r);
  }
  // The verdict of the STEP that was sent last.
  absl::Status AwaitVerdict() {
    const wire::Verdict& v = page_.header().verdict;
    RETURN_IF_ERROR(
        Await([&] { return v.answered.load(std::memory_order_acquire) >= steps_sent_; }));
    generation_ = v.next_generation;
    page_.ClearPresence();
    return absl::Status(static_cast<absl::StatusCode>(v.code), v.reason);
  }
  absl::Status Step(uint64_t step, uint32_t micros = 1, uint32_t flags = 0, double max_norm = 0) {
    PushStep(step, micros, flags, max_norm);
    RETURN_IF_ERROR(AwaitVerdict());
    return AwaitWeights(step);
  }
  absl::Status AwaitWeights(uint64_t step) {
    return Await([&] { return page_.header().done_step.load(std::memory_order_acquire) >= step; });
  }
  absl::Status AwaitConsumed(uint32_t boundary, uint32_t micro) {
    const uint64_t mark = wire::ConsumedMark(generation_, micro);
    return Await([&] {
      return page_.boundary(boundary).grads_consumed.load(std::memory_order_acquire) >= mark;
    });
  }
  absl::Status Materialize(uint32_t boundary) {
    wire::Record r = NewRecord(wire::RecordType::kMaterialize);
    r.boundary = boundary;
    r.ticket = ++ticket_;
    Push(r);
    return Await([&] {
      return page_.boundary(boundary).window_grant.load(std::memory_order_acquire) >= ticket_;
    });
  }
  void Release(uint32_t boundary) {
    wire::Record r = NewRecord(wire::RecordType::kRelease);
    r.boundary = boundary;
    Push(r);
  }
  // Until `done`, or the session has failed (ABORTED with the page's reason), or 20 s.
  template <typename F>
  absl::Status Await(F done) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    for (;;) {
      const uint32_t seen = page_.TrainerDoorbell();
      if (done()) return absl::OkStatus();
      if (page_.header().status.load(std::memory_order_acquire) ==
          static_cast<uint32_t>(wire::SessionStatus::kFailed)) {
        return absl::AbortedError(page_.header().failure);
      }
      if (absl::Now() > deadline) return absl::DeadlineExceededError("test: nothing came for 20 s");
      page_.TrainerWait(seen, absl::Milliseconds(50));
    }
  }

  const wire::ControlPage& page() const { return page_; }
  const Opened& opened() const { return opened_; }
  const Configured& configured() const { return configured_; }
  const Trainer& trainer() const { return trainer_; }
  uint64_t generation() const { return generation_; }
  int rank() const { return rank_; }

 private:
  absl::StatusOr<std::byte*> Map(wire::ArenaKind kind, size_t* bytes) {
    ASSIGN_OR_RETURN(const ArenaHandle arena, table_.Arena(trainer_, opened_.id, rank_, kind));
    void* base = mmap(nullptr, arena.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd.get(), 0);
    if (base == MAP_FAILED) return absl::InternalError("mmap");
    maps_.push_back({base, arena.bytes});
    if (bytes != nullptr) *bytes = arena.bytes;
    return static_cast<std::byte*>(base);
  }

  SessionTable& table_;
  const Trainer trainer_;
  const int rank_;
  Opened opened_;
  Configured configured_;
  wire::ControlPage page_;
  std::byte* grad_ = nullptr;
  std::byte* weight_ = nullptr;
  std::vector<std::pair<void*, size_t>> maps_;
  uint64_t generation_ = 1;
  uint64_t steps_sent_ = 0;
  uint64_t ticket_ = 0;
};

using Matrix64 = std::vector<double>;  // row-major

inline Matrix64 Product(const Matrix64& a, const Matrix64& b, int64_t m, int64_t k, int64_t n) {
  Matrix64 c(m * n, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];
    }
  }
  return c;
}

inline Matrix64 Transposed(const Matrix64& a, int64_t rows, int64_t cols) {
  Matrix64 t(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) t[j * rows + i] = a[i * cols + j];
  }
  return t;
}

// Direct Newton-Schulz in float64 with the default (Polar Express) set of docs/numerics.md.
inline Matrix64 NewtonSchulz64(Matrix64 u, int64_t rows, int64_t cols) {
  if (rows > cols)
    return Transposed(NewtonSchulz64(Transposed(u, rows, cols), cols, rows), cols, rows);
  const double set[5][3] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                            {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                            {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                            {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                            {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
  double norm = 0;
  for (double x : u) norm += x * x;
  if (norm == 0) return u;
  for (double& x : u) x /= std::sqrt(norm);
  for (const auto& s : set) {
    const double a = s[0] / 1.05, b = s[1] / std::pow(1.05, 3), c = s[2] / std::pow(1.05, 5);
    const Matrix64 gram = Product(u, Transposed(u, rows, cols), rows, cols, rows);
    const Matrix64 square = Product(gram, gram, rows, rows, rows);
    Matrix64 poly(gram.size());
    for (size_t i = 0; i < poly.size(); ++i) poly[i] = b * gram[i] + c * square[i];
    const Matrix64 product = Product(poly, u, rows, rows, cols);
    for (size_t i = 0; i < u.size(); ++i) u[i] = a * u[i] + product[i];
  }
  return u;
}

// One muon parameter, in float64.
struct Muon64 {
  int64_t rows = 0, cols = 0;
  Matrix64 weight, momentum;
  void Step(const Matrix64& g, double lr, double mu, double decay) {
    if (momentum.empty()) momentum.assign(g.size(), 0);
    Matrix64 u(g.size());
    for (size_t i = 0; i < g.size(); ++i) {
      momentum[i] = mu * momentum[i] + g[i];
      u[i] = g[i] + mu * momentum[i];
    }
    const Matrix64 o = NewtonSchulz64(u, rows, cols);
    const double s = 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    for (size_t i = 0; i < g.size(); ++i) weight[i] = weight[i] * (1 - lr * decay) - lr * s * o[i];
  }
};

// One AdamW parameter, in float64.
struct Adamw64 {
  Matrix64 weight, m, v;
  int64_t steps = 0;
  void Step(const Matrix64& g, double lr, double b1, double b2, double eps, double decay) {
    if (m.empty()) m.assign(g.size(), 0), v.assign(g.size(), 0);
    ++steps;
    for (size_t i = 0; i < g.size(); ++i) {
      weight[i] *= 1 - lr * decay;
      m[i] = b1 * m[i] + (1 - b1) * g[i];
      v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
      weight[i] -= lr * (m[i] / (1 - std::pow(b1, steps))) /
                   (std::sqrt(v[i] / (1 - std::pow(b2, steps))) + eps);
    }
  }
};

// ||a - b|| / ||b||
inline double RelativeError(const std::vector<float>& a, const Matrix64& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace dmuon::server::testing

#endif  // DMUON_TESTS_SUPPORT_LOCAL_TRAINER_H_
