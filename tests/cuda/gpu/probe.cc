// The CUDA backend behind plain C functions, for the measurements in Python (scripts/gpu_check.sh): it opens the module that
// ships, through the loader that ships. Device memory and streams come from the caller where it has its own.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/loader.h"
#include "kernels/cuda/stream.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace {

using dmuon::Dtype;
using dmuon::cuda::CudaBackend;
using dmuon::cuda::CudaNewtonSchulz;
using dmuon::cuda::CutMeasurement;
using dmuon::kernels::kOneBlock;
using dmuon::kernels::NewtonSchulz;
using dmuon::kernels::Stream;

CudaBackend* g_backend = nullptr;

void Say(const std::string& text, char* to, size_t bytes) {
  std::snprintf(to, bytes, "%s", text.c_str());
}

std::string Json(const std::vector<CutMeasurement>& measured) {
  std::string out = "[";
  for (const CutMeasurement& m : measured) {
    absl::StrAppend(&out, out.size() > 1 ? "," : "", "{\"cut\":\"", m.choice.name(),
                    "\",\"ms\":", m.milliseconds, ",\"difference\":",
                    m.difference == m.difference ? absl::StrCat(m.difference) : "null",
                    ",\"agrees\":", m.agrees ? "true" : "false", "}");
  }
  return out + "]";
}

}  // namespace

#define PROBE extern "C" __attribute__((visibility("default")))

PROBE int probe_open(const char* folder, char* text, size_t bytes) {
  const std::string places[] = {folder};
  auto backend = dmuon::cuda::LoadBackend(0, places);
  if (!backend.ok()) {
    Say(backend.status().ToString(), text, bytes);
    return -1;
  }
  // The module makes nothing else.
  g_backend = static_cast<CudaBackend*>(backend->release());
  Say(g_backend->description(), text, bytes);
  return 0;
}

PROBE void* probe_stream() {
  auto stream = g_backend->CreateStream();
  return stream.ok() ? stream->handle : nullptr;
}
PROBE void* probe_cuda_stream(void* stream) {
  return static_cast<dmuon::cuda::StreamState*>(stream)->get();
}
PROBE int probe_synchronize(void* stream, char* text, size_t bytes) {
  const absl::Status status = g_backend->Synchronize(Stream{stream});
  if (!status.ok()) Say(status.ToString(), text, bytes);
  return status.ok() ? 0 : -1;
}

struct ProbePlan {
  int64_t rows, cols;
  int dtype;                                           // 1 fp32, 2 bf16, 3 fp16
  int direct;                                          // 1: the direct form whatever the shape
  int measure;                                         // 0: the library's first choices
  int gram_cut, gram_parts, square_cut, square_parts;  // a cut of -1: not forced
  int64_t workspace_bytes;
};

// The plan, and in `text` what it is as JSON; or null and why.
PROBE void* probe_plan(ProbePlan* p, char* text, size_t bytes) {
  dmuon::kernels::NewtonSchulzOptions options;
  options.iteration_dtype = static_cast<Dtype>(p->dtype);
  if (p->direct != 0) options.form = dmuon::kernels::NsForm::kDirect;
  dmuon::cuda::NewtonSchulzTuning tuning;
  tuning.measure = p->measure != 0;
  if (p->gram_cut >= 0)
    tuning.gram_cut = {static_cast<dmuon::cuda::Cut>(p->gram_cut), p->gram_parts};
  if (p->square_cut >= 0)
    tuning.square_cut = {static_cast<dmuon::cuda::Cut>(p->square_cut), p->square_parts};
  const absl::Time start = absl::Now();
  auto plan = g_backend->MakeTuned(options, tuning, p->rows, p->cols, 1);
  if (!plan.ok()) {
    Say(plan.status().ToString(), text, bytes);
    return nullptr;
  }
  p->workspace_bytes = static_cast<int64_t>((*plan)->workspace_bytes());
  Say(absl::StrCat("{\"kernel\":\"", (*plan)->kernel(),
                   "\",\"workspace_bytes\":", p->workspace_bytes,
                   ",\"plan_ms\":", absl::ToDoubleMilliseconds(absl::Now() - start),
                   ",\"gram\":", Json((*plan)->measurements().gram),
                   ",\"square\":", Json((*plan)->measurements().square), "}"),
      text, bytes);
  return plan->release();
}
PROBE int probe_prepare(void* plan, const float* in, float* out, void* workspace, char* text,
                        size_t bytes) {
  const absl::Status status = static_cast<NewtonSchulz*>(plan)->Prepare(
      {.in = in, .out = out, .offsets = kOneBlock, .workspace = workspace});
  if (!status.ok()) Say(status.ToString(), text, bytes);
  return status.ok() ? 0 : -1;
}
PROBE void probe_run(void* stream, void* plan, const float* in, float* out, void* workspace) {
  static_cast<const NewtonSchulz*>(plan)->Run(Stream{stream}, in, out, workspace);
}
PROBE void probe_free_plan(void* plan) { delete static_cast<NewtonSchulz*>(plan); }

PROBE void probe_mean(void* stream, const void* const* inputs, int ranks, int dtype, int64_t count,
                      float* mean, double* square_sum) {
  dmuon::kernels::MeanArgs args;
  args.inputs = absl::MakeConstSpan(inputs, static_cast<size_t>(ranks));
  args.dtype = static_cast<Dtype>(dtype);
  args.count = count;
  args.divisor = static_cast<float>(ranks);
  args.mean = mean;
  args.square_sum = square_sum;
  g_backend->MeanOverRanks(Stream{stream}, args);
}
PROBE void probe_lookahead(void* stream, const float* momentum, const float* gradient,
                           float* update, int64_t count) {
  g_backend->Lookahead(
      Stream{stream},
      {.momentum = momentum, .gradient = gradient, .update = update, .count = count, .mu = 0.95f});
}
PROBE void probe_commit(void* stream, float* momentum, const float* gradient, float* weight,
                        const float* orthogonal, int64_t count, double* square_sum) {
  g_backend->MuonCommit(Stream{stream}, {.momentum = momentum,
                                         .gradient = gradient,
                                         .weight = weight,
                                         .orthogonal = orthogonal,
                                         .count = count,
                                         .mu = 0.95f,
                                         .decay = 1e-4f,
                                         .scale = 0.01f,
                                         .square_sums = square_sum});
}
PROBE void probe_orthogonality(void* stream, const float* orthogonal, int64_t rows, int64_t cols,
                               double* square_error) {
  g_backend->Orthogonality(
      Stream{stream},
      {.orthogonal = orthogonal, .rows = rows, .cols = cols, .square_errors = square_error});
}
PROBE void probe_adamw(void* stream, float* weight, float* exp_avg, float* exp_avg_sq,
                       const float* gradient, int64_t count, int64_t step) {
  g_backend->Adamw(Stream{stream}, {.weight = weight,
                                    .exp_avg = exp_avg,
                                    .exp_avg_sq = exp_avg_sq,
                                    .gradient = gradient,
                                    .count = count,
                                    .lr = 1e-3,
                                    .beta1 = 0.9,
                                    .beta2 = 0.999,
                                    .eps = 1e-8,
                                    .weight_decay = 0.01,
                                    .step = step});
}
PROBE void probe_publish(void* stream, const float* from, int dtype, void* to, int64_t count) {
  g_backend->Publish(Stream{stream}, from, static_cast<Dtype>(dtype), to, count);
}
