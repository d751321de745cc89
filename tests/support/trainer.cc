#include "tests/support/trainer.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "base/status_macros.h"
#include "client/session_impl.h"

namespace dmuon::testing {

using client::StateKind;

namespace {

// A stream for each thread that trains on a device; it lives as long as the thread.
class ThreadStream {
 public:
  ~ThreadStream() {
    if (stream_ != nullptr) cuda_->stream_destroy(stream_);
  }
  absl::StatusOr<void*> Get(const client::Session::Impl& s) {
    if (stream_ != nullptr && device_ == s.device) return stream_;
    if (stream_ != nullptr) cuda_->stream_destroy(std::exchange(stream_, nullptr));
    cuda_ = s.cuda;
    device_ = s.device;
    RETURN_IF_ERROR(cuda_->Check(cuda_->set_device(device_), "selecting the device"));
    constexpr unsigned kNonBlocking = 1;
    RETURN_IF_ERROR(
        cuda_->Check(cuda_->stream_create(&stream_, kNonBlocking), "creating a stream"));
    return stream_;
  }

 private:
  const client::CudaRuntime* cuda_ = nullptr;
  int device_ = -1;
  void* stream_ = nullptr;
};
thread_local ThreadStream t_stream;

}  // namespace

absl::Status PutGradient(client::Session& session, int parameter, const void* host, size_t bytes) {
  if (!session.device().has_value()) {
    std::memcpy(session.grad(parameter), host, bytes);
    return absl::OkStatus();
  }
  const client::Session::Impl& s = session.impl();
  constexpr int kHostToDevice = 1;
  ASSIGN_OR_RETURN(void* stream, t_stream.Get(s));
  return s.cuda->Check(
      s.cuda->memcpy_async(session.grad(parameter), host, bytes, kHostToDevice, stream),
      "writing a gradient");
}

absl::Status GetWeight(client::Session& session, int parameter, void* host, size_t bytes) {
  if (!session.device().has_value()) {
    std::memcpy(host, session.weight(parameter), bytes);
    return absl::OkStatus();
  }
  const client::Session::Impl& s = session.impl();
  return s.device_weight.CopyOut(s.weight_offset[static_cast<size_t>(parameter)], host, bytes);
}

absl::Status SendReady(client::Session& session, int boundary) {
  if (!session.device().has_value()) return session.Ready(boundary);
  ASSIGN_OR_RETURN(void* stream, t_stream.Get(session.impl()));
  return session.Ready(boundary, {stream});
}

absl::Status SendRelease(client::Session& session, int boundary) {
  if (!session.device().has_value()) return session.Release(boundary);
  ASSIGN_OR_RETURN(void* stream, t_stream.Get(session.impl()));
  return session.Release(boundary, {stream});
}

client::OpenOptions LayerTable(const JobOptions& job, int rank, int layers) {
  client::OpenOptions options = SmallTable(job, rank);
  options.boundaries.clear();
  options.parameters.clear();
  for (int i = 0; i < layers; ++i) {
    const std::string name = "layers." + std::to_string(i);
    options.boundaries.push_back({name, false});
    options.parameters.push_back({name + ".weight", {32, 32}, client::Route::kMuon, i, {}});
  }
  return options;
}

client::OpenOptions SmallTable(const JobOptions& job, int rank) {
  client::OpenOptions options;
  options.job = job.job;
  options.rank = rank;
  options.mesh.shard = job.world;
  options.reshard_after_forward = job.z3;
  options.formation_timeout = job.formation_timeout;
  // Where the daemon computes on GPUs: ranks take turns on so many of them.
  const char* devices = std::getenv("DMUON_TEST_DEVICES");
  if (devices != nullptr) options.device = rank % std::max(1, atoi(devices));
  options.boundaries = {{"layers.0", false}, {"layers.1", false}};
  options.parameters = {{"layers.0.weight", {24, 16}, client::Route::kMuon, 0, {}},
                        {"layers.0.bias", {24}, client::Route::kAdamw, 0, {}},
                        {"layers.1.weight", {8, 24}, client::Route::kMuon, 1, {}},
                        {"layers.1.bias", {8}, client::Route::kAdamw, 1, {}}};
  return options;
}

client::OptimizerOptions SmallOptimizer() {
  client::OptimizerOptions options;
  options.groups = {{"matrices", client::Route::kMuon}, {"vectors", client::Route::kAdamw}};
  for (int group : {kMuonGroup, kAdamwGroup, kMuonGroup, kAdamwGroup})
    options.parameters.push_back({.group = group});
  options.newton_schulz.form = client::NsForm::kDirect;
  options.newton_schulz.deterministic = true;
  return options;
}

int64_t Elements(const client::Parameter& parameter) {
  int64_t count = 1;
  for (int64_t d : parameter.shape) count *= d;
  return count;
}

std::vector<float> Values(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (float& value : values) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    value = static_cast<float>(static_cast<double>(state >> 11) / (1ull << 52) - 1.0);
  }
  return values;
}

std::vector<float> InitialValues(const client::Parameter& parameter, int index) {
  return Values(Elements(parameter), 7 + static_cast<uint64_t>(index));
}

std::vector<float> Gradient(const client::Parameter& parameter, int index, int rank,
                            uint64_t step) {
  return Values(Elements(parameter),
                1000003 * step + 1009 * static_cast<uint64_t>(rank) + static_cast<uint64_t>(index));
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Start(const std::string& endpoint,
                                                        const JobOptions& job, int rank) {
  return Start(endpoint, SmallTable(job, rank), SmallOptimizer());
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Start(const std::string& endpoint,
                                                        client::OpenOptions table,
                                                        client::OptimizerOptions optimizer) {
  auto trainer = std::make_unique<Trainer>();
  trainer->table_ = std::move(table);
  ASSIGN_OR_RETURN(trainer->connection_, client::Connection::Open(endpoint));
  ASSIGN_OR_RETURN(trainer->session_, trainer->connection_->OpenSession(trainer->table_));
  RETURN_IF_ERROR(trainer->session_->Configure(std::move(optimizer)));
  for (size_t p = 0; p < trainer->parameters().size(); ++p) {
    if (trainer->session_->placement().parameters[p].owner != trainer->rank()) continue;
    const std::vector<float> values = InitialValues(trainer->parameters()[p], static_cast<int>(p));
    RETURN_IF_ERROR(trainer->session_->WriteState(
        trainer->parameters()[p].name, StateKind::kWeight,
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                            values.size() * sizeof(float))));
  }
  RETURN_IF_ERROR(trainer->session_->Start());
  return trainer;
}

absl::Status Trainer::Backward() { return Backward(session_->step() + 1, rank()); }

absl::Status Trainer::Backward(uint64_t seed, int as_rank) {
  const int boundaries = static_cast<int>(table_.boundaries.size());
  const bool z3 = table_.reshard_after_forward;
  for (int b = 0; b < boundaries; ++b) {
    RETURN_IF_ERROR(z3 ? session_->Materialize(b) : session_->WaitWeights(b));
    if (z3) RETURN_IF_ERROR(SendRelease(*session_, b));
  }
  for (int b = boundaries - 1; b >= 0; --b) {
    if (z3) RETURN_IF_ERROR(session_->Materialize(b));
    RETURN_IF_ERROR(session_->WaitGradWritable(b));
    for (size_t p = 0; p < parameters().size(); ++p) {
      if (parameters()[p].boundary != b) continue;
      const std::vector<float> gradient =
          Gradient(parameters()[p], static_cast<int>(p), as_rank, seed);
      RETURN_IF_ERROR(PutGradient(*session_, static_cast<int>(p), gradient.data(),
                                  gradient.size() * sizeof(float)));
      session_->SetPresent(static_cast<int>(p));
    }
    RETURN_IF_ERROR(SendReady(*session_, b));
    if (z3) RETURN_IF_ERROR(SendRelease(*session_, b));
  }
  session_->EndBackward();
  return absl::OkStatus();
}

absl::StatusOr<client::StepResult> Trainer::Step(const client::StepOptions& options) {
  session_->SetHyper(kMuonGroup, kMuonHyper);
  session_->SetHyper(kAdamwGroup, kAdamwHyper);
  return session_->Step(options);
}

absl::Status Trainer::Train(int count) {
  for (int i = 0; i < count; ++i) {
    RETURN_IF_ERROR(Backward());
    RETURN_IF_ERROR(Step().status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> Trainer::Read(const std::string& parameter, StateKind kind) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, session_->ReadState(parameter, kind));
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

absl::StatusOr<std::vector<float>> Trainer::Weight(int parameter) {
  const client::Parameter& p = parameters()[static_cast<size_t>(parameter)];
  const bool z3 = table_.reshard_after_forward;
  RETURN_IF_ERROR(z3 ? session_->Materialize(p.boundary) : session_->WaitWeights(p.boundary));
  std::vector<float> values(static_cast<size_t>(Elements(p)));
  RETURN_IF_ERROR(GetWeight(*session_, parameter, values.data(), values.size() * sizeof(float)));
  if (z3) RETURN_IF_ERROR(session_->Release(p.boundary));
  return values;
}

absl::Status Trainer::Close() {
  const absl::Status status = session_->Close();
  session_.reset();
  connection_.reset();
  return status;
}

std::vector<std::unique_ptr<Trainer>> StartAll(const std::string& endpoint, const JobOptions& job) {
  auto started = OnRanks(job.world, [&](int rank) { return Trainer::Start(endpoint, job, rank); });
  std::vector<std::unique_ptr<Trainer>> ranks;
  for (auto& rank : started) {
    if (!rank.ok()) {
      fprintf(stderr, "starting job '%s': %s\n", job.job.c_str(), rank.status().ToString().c_str());
      abort();
    }
    ranks.push_back(*std::move(rank));
  }
  return ranks;
}

absl::Status TrainAll(std::vector<std::unique_ptr<Trainer>>& ranks, int steps) {
  const auto results = OnRanks(static_cast<int>(ranks.size()), [&](int rank) {
    return ranks[static_cast<size_t>(rank)]->Train(steps);
  });
  for (const absl::Status& status : results) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

}  // namespace dmuon::testing
