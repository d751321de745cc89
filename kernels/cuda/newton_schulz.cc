#include "kernels/cuda/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/measuring_room.h"
#include "kernels/cuda/recording_streams.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/stream.h"

namespace dmuon::cuda {
namespace {

using kernels::NewtonSchulzOptions;
using kernels::NsForm;
using Kind = Operation::Kind;

// The products of a plan. Every order x order product has the same shape.
struct Products {
  SymmetricProduct gram, square;
  Matmul apply;  // into the other X
  std::optional<Matmul>
      apply_final;  // as fp32: of one block into the output, where its rows are aligned
};

const char* ArithmeticName(const RunPlan& run) {
  switch (run.element) {
    case Element::kF32: return run.tf32 ? "tf32" : "fp32";
    case Element::kBF16: return "bf16";
    case Element::kF16: return "fp16";
  }
  return "?";
}

class Plan final : public CudaNewtonSchulz {
 public:
  Plan(int device, RunPlan run, Products products, NewtonSchulzMeasurements measurements)
      : device_(device),
        run_(std::move(run)),
        products_(std::move(products)),
        measurements_(std::move(measurements)) {}

  size_t workspace_bytes() const override { return run_.places.bytes; }
  NsForm form() const override { return run_.form; }
  const NewtonSchulzMeasurements& measurements() const override { return measurements_; }

  std::string kernel() const override {
    return absl::StrCat(
        run_.form == NsForm::kGram ? "gram " : "direct ", ArithmeticName(run_), " (cublaslt, ",
        products_.gram.choice().name(), "/", products_.square.choice().name(), ")",
        run_.places.together > 1 ? absl::StrCat(", ", run_.places.together, " at once") : "");
  }

  absl::Status Prepare(const kernels::NewtonSchulzBatch& batch) override {
    RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "selecting the device"));
    if (Find(batch) != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(const auto streams, RecordingStreams::Create(run_.program.operations.size()));
    char* base = static_cast<char*>(batch.workspace);
    const Lanes main = streams->Group(0, run_.places, base);
    const Lanes aside = streams->Group(1, run_.places, base);
    Lanes alone = main;
    alone.side = {};
    Prepared prepared(batch);
    for (size_t first = 0; first < batch.offsets.size(); first += together()) {
      const Group group = GroupAt(batch, first);
      // Once outside the recording, on whatever is there: the first use of a kernel loads it.
      RETURN_IF_ERROR(Enqueue(group, alone, alone, nullptr));
      RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(main.main), "trying the iteration"));
      absl::StatusOr<Graph> recorded =
          Graph::Record(main.main, [&] { return Enqueue(group, main, aside, streams.get()); });
      // Then it runs as it is enqueued.
      if (absl::IsUnimplemented(recorded.status())) return absl::OkStatus();
      ASSIGN_OR_RETURN(Graph graph, std::move(recorded));
      RETURN_IF_ERROR(ToStatus(graph.Upload(main.main), "uploading the iteration"));
      prepared.graphs.push_back(std::move(graph));
    }
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(main.main), "uploading the iteration"));
    prepared_.push_back(std::move(prepared));
    return absl::OkStatus();
  }

  void Run(kernels::Stream stream, const float* in, float* out, void* workspace) const override {
    RunBatch(stream, {.in = in, .out = out, .offsets = kernels::kOneBlock, .workspace = workspace});
  }

  void RunBatch(kernels::Stream stream, const kernels::NewtonSchulzBatch& batch) const override {
    auto& state = *static_cast<StreamState*>(stream.handle);
    state.Select();
    const Prepared* prepared = Find(batch);
    Lanes lanes;
    lanes.main = state.get();
    lanes.workspace = static_cast<char*>(batch.workspace) + run_.places.products;
    for (size_t first = 0; first < batch.offsets.size(); first += together()) {
      const Group group = GroupAt(batch, first);
      if (batch.norms == nullptr) state.Note(FindNorms(state, group), "finding the norm");
      const absl::Status status =
          prepared != nullptr
              ? ToStatus(prepared->graphs[first / together()].Launch(state.get()), "launching")
              : Enqueue(group, lanes, lanes, nullptr);
      if (!status.ok()) state.Note(Annotate(status, "newton-schulz"));
    }
  }

 private:
  // What was recorded for a batch: a graph for each group.
  struct Prepared {
    explicit Prepared(const kernels::NewtonSchulzBatch& batch)
        : of(batch), offsets(batch.offsets.begin(), batch.offsets.end()) {}
    kernels::NewtonSchulzBatch of;  // but for its offsets
    std::vector<int64_t> offsets;
    std::vector<Graph> graphs;
  };

  // As many blocks of a batch as run at once, or fewer: what else is in the workspace is computed with, and of no consequence.
  struct Group {
    BlockOffsets blocks;
    const float* in;
    float* out;
    char* base;  // of the workspace
    const kernels::BlockNorm* norms;
  };

  size_t together() const { return static_cast<size_t>(run_.places.together); }

  const Prepared* Find(const kernels::NewtonSchulzBatch& batch) const {
    for (const Prepared& p : prepared_) {
      if (p.of.in == batch.in && p.of.out == batch.out && p.of.workspace == batch.workspace &&
          p.of.norms == batch.norms && absl::MakeConstSpan(p.offsets) == batch.offsets)
        return &p;
    }
    return nullptr;
  }

  Group GroupAt(const kernels::NewtonSchulzBatch& batch, size_t first) const {
    const absl::Span<const int64_t> offsets = batch.offsets.subspan(first, together());
    Group group;
    group.blocks.count = static_cast<int>(offsets.size());
    std::copy(offsets.begin(), offsets.end(), group.blocks.at);
    group.in = batch.in;
    group.out = batch.out;
    group.base = static_cast<char*>(batch.workspace);
    group.norms = batch.norms != nullptr
                      ? batch.norms + first
                      : reinterpret_cast<const kernels::BlockNorm*>(batch.workspace);
    return group;
  }

  cudaError_t FindNorms(StreamState& state, const Group& group) const {
    NormsParams p;
    p.in = group.in;
    p.blocks = group.blocks;
    p.count = run_.places.shape.rows * run_.places.shape.cols;
    p.norms = reinterpret_cast<kernels::BlockNorm*>(group.base);
    p.scratch = state.scratch();
    return LaunchNorms(state.get(), p);
  }

  absl::Status Enqueue(const Group& group, const Lanes& main, const Lanes& aside,
                       const RecordingStreams* recording) const {
    NormalizeParams normalize;
    normalize.from = group.in;
    normalize.blocks = group.blocks;
    normalize.norms = group.norms;
    normalize.exponent = run_.program.x_exponent;
    normalize.shape = run_.places.shape;
    normalize.to = group.base + run_.places.x[0];
    RETURN_IF_ERROR(ToStatus(LaunchNormalize(main.main, run_.element, normalize), "normalising"));
    RETURN_IF_ERROR(Iterate(group.base, main, aside, recording));
    return Finish(main, group.base, group.out, group.blocks);
  }

  // All operations but the last.
  absl::Status Iterate(char* base, const Lanes& main, const Lanes& aside,
                       const RecordingStreams* recording) const {
    for (size_t i = 0; i + 1 < run_.program.operations.size(); ++i) {
      const Operation& op = run_.program.operations[i];
      const Lanes& lanes = op.aside && recording != nullptr ? aside : main;
      if (recording != nullptr) {
        for (int before : op.wait_for) {
          RETURN_IF_ERROR(ToStatus(
              cudaStreamWaitEvent(lanes.main, recording->done(static_cast<size_t>(before)), 0),
              "ordering products"));
        }
      }
      RETURN_IF_ERROR(Enqueue(op, lanes, base));
      if (recording != nullptr && op.waited_for) {
        RETURN_IF_ERROR(
            ToStatus(cudaEventRecord(recording->done(i), lanes.main), "ordering products"));
      }
    }
    if (recording == nullptr) return absl::OkStatus();
    for (int before : run_.program.operations.back().wait_for) {
      RETURN_IF_ERROR(
          ToStatus(cudaStreamWaitEvent(main.main, recording->done(static_cast<size_t>(before)), 0),
                   "ordering products"));
    }
    return absl::OkStatus();
  }

  absl::Status Enqueue(const Operation& op, const Lanes& lanes, char* base) const {
    MatmulOperands m;
    m.alpha = static_cast<float>(op.alpha);
    m.beta = static_cast<float>(op.beta);
    switch (op.kind) {
      case Kind::kGram:
        m.a = m.b = base + run_.places.x[op.x];
        m.d = At(base, op.out);
        return products_.gram.Run(lanes, m);
      case Kind::kMultiply:
        m.a = At(base, op.left);
        m.b = At(base, op.right);
        m.c = At(base, op.e);
        m.d = At(base, op.out);
        if (op.shifted < 0) return products_.square.Run(lanes, m);
        return products_.square.RunShifted(lanes, m, static_cast<float>(op.scale),
                                           static_cast<float>(op.diagonal), At(base, op.shifted));
      case Kind::kApply: return Apply(op, lanes, base, base + run_.places.x[1 - op.x]);
    }
    return absl::InternalError("no such operation");
  }

  absl::Status Apply(const Operation& op, const Lanes& lanes, char* base, void* to) const {
    MatmulOperands m;
    m.alpha = static_cast<float>(op.alpha);
    m.beta = static_cast<float>(op.beta);
    SetFactors(op, base, m);
    if (op.beta != 0) m.c = base + run_.places.x[op.x];
    m.d = to;
    return ToStatus(products_.apply.Run(lanes.main, m, lanes.workspace), "a matrix product");
  }

  // The last product of one block writes the output itself where it can: its sums are fp32, and so is the output. Outputs of
  // several lie wherever the caller has them, so their sums are kept as fp32 and spread.
  absl::Status Finish(const Lanes& lanes, char* base, float* out,
                      const BlockOffsets& blocks) const {
    const Operation& op = run_.program.operations.back();
    const float unscale = std::ldexp(1.0f, -run_.program.x_exponent);
    UnpadParams unpad;
    unpad.from = base + run_.places.x[1 - op.x];
    unpad.shape = run_.places.shape;
    unpad.to = out;
    unpad.blocks = blocks;
    const bool together = run_.places.together > 1;
    float* to = out + blocks.at[0];
    if (products_.apply_final.has_value() &&
        (together || reinterpret_cast<uintptr_t>(to) % kOutputAlignment == 0)) {
      MatmulOperands m;
      m.alpha = static_cast<float>(op.alpha) * unscale;
      SetFactors(op, base, m);
      m.d = together ? base + run_.places.x[1 - op.x] : reinterpret_cast<char*>(to);
      RETURN_IF_ERROR(
          ToStatus(products_.apply_final->Run(lanes.main, m, lanes.workspace), "a matrix product"));
      if (!together) return absl::OkStatus();
      return ToStatus(LaunchUnpad(lanes.main, Element::kF32, unpad), "writing the output");
    }
    RETURN_IF_ERROR(Apply(op, lanes, base, base + run_.places.x[1 - op.x]));
    unpad.scale = unscale;
    return ToStatus(LaunchUnpad(lanes.main, run_.element, unpad), "writing the output");
  }

  void SetFactors(const Operation& op, char* base, MatmulOperands& m) const {
    m.a = base + run_.places.x[op.x];
    m.b = At(base, op.left);
    if (!run_.places.wide) std::swap(m.a, m.b);
  }

  void* At(char* base, int buffer) const {
    return base + run_.places.buffers + static_cast<size_t>(buffer) * run_.places.buffer_bytes;
  }

  const int device_;
  const RunPlan run_;
  const Products products_;
  const NewtonSchulzMeasurements measurements_;
  std::vector<Prepared> prepared_;
};

SymmetricShape GramShape(const RunPlan& run) {
  const Places& p = run.places;
  return {.order = p.order,
          .depth = p.depth,
          .batch = p.together,
          .transpose_a = p.wide,
          .transpose_b = !p.wide,
          .lda = p.ld(),
          .ldb = p.ld(),
          .element = run.element,
          .tf32 = run.tf32};
}

// Both factors are symmetric, so the transpose that cuBLAS likes best (both contiguous along the sum) is free.
SymmetricShape SquareShape(const RunPlan& run) {
  const Places& p = run.places;
  return {.order = p.order,
          .depth = p.order,
          .batch = p.together,
          .transpose_a = true,
          .transpose_b = false,
          .lda = p.order,
          .ldb = p.order,
          .element = run.element,
          .tf32 = run.tf32};
}

MatmulShape ApplyShape(const RunPlan& run) {
  const Places& p = run.places;
  MatmulShape s;
  s.in = s.out = run.element;
  s.tf32 = run.tf32;
  s.k = p.order;
  s.ldd = p.ld();
  s.batch = p.together;
  s.stride_d = p.x_elements();
  if (p.wide) {  // Y Q
    s.m = p.depth, s.n = p.order, s.lda = p.ld(), s.ldb = p.order;
    s.stride_a = p.x_elements(), s.stride_b = p.buffer_elements();
  } else {  // Q X
    s.m = p.order, s.n = p.depth, s.transpose_a = true, s.lda = p.order, s.ldb = p.ld();
    s.stride_a = p.buffer_elements(), s.stride_b = p.x_elements();
  }
  return s;
}

MatmulShape FinalShape(const RunPlan& run) {
  const Places& p = run.places;
  MatmulShape s = ApplyShape(run);
  s.out = Element::kF32;
  if (p.together > 1) return s;
  s.m = p.shape.cols;
  s.n = p.shape.rows;
  s.ldd = p.shape.cols;
  s.alignment_d = kOutputAlignment;
  return s;
}

absl::StatusOr<Products> MakeProducts(LtContext& context, CutRecord& record, const RunPlan& run,
                                      const NewtonSchulzTuning& tuning,
                                      NewtonSchulzMeasurements& measurements) {
  std::unique_ptr<MeasuringRoom> room;
  if (tuning.measure) {
    absl::StatusOr<std::unique_ptr<MeasuringRoom>> made =
        MeasuringRoom::Create(context.device(), run.element, RoomSizes(run));
    // Without room to measure in, the library's own choices have to do.
    if (!made.ok() && !absl::IsResourceExhausted(made.status())) return made.status();
    if (made.ok()) room = *std::move(made);
  }
  const CutChoice plain = {Cut::kMirror, 0};
  const auto make = [&](const SymmetricShape& shape, const std::optional<CutChoice>& fixed,
                        std::vector<CutMeasurement>& measured) -> absl::StatusOr<SymmetricProduct> {
    CutChoice choice = fixed.value_or(plain);
    if (room != nullptr && !fixed.has_value()) {
      ASSIGN_OR_RETURN(choice, room->BestCut(context, record, shape, measured));
    }
    return SymmetricProduct::Create(context, shape, choice,
                                    room != nullptr ? &room->ground() : nullptr);
  };
  const MeasuringGround* ground = room != nullptr ? &room->ground() : nullptr;
  ASSIGN_OR_RETURN(SymmetricProduct gram, make(GramShape(run), tuning.gram_cut, measurements.gram));
  ASSIGN_OR_RETURN(SymmetricProduct square,
                   make(SquareShape(run), tuning.square_cut, measurements.square));
  ASSIGN_OR_RETURN(Matmul apply, Matmul::Create(context, ApplyShape(run), ground));
  std::optional<Matmul> apply_final;
  if (run.final_as_fp32) {
    ASSIGN_OR_RETURN(apply_final, Matmul::Create(context, FinalShape(run), ground));
  }
  return Products{std::move(gram), std::move(square), std::move(apply), std::move(apply_final)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaNewtonSchulz>> PlanOnCuda(LtContext& context, CutRecord& record,
                                                             const NewtonSchulzOptions& options,
                                                             const NewtonSchulzTuning& tuning,
                                                             const BlockShape& shape) {
  ASSIGN_OR_RETURN(RunPlan run, PlanRun(options, shape));
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(context.device()), "selecting the device"));
  NewtonSchulzTuning how = tuning;
  how.measure = tuning.measure && options.measure && !options.deterministic;
  NewtonSchulzMeasurements measurements;
  ASSIGN_OR_RETURN(Products products, MakeProducts(context, record, run, how, measurements));
  return std::make_unique<Plan>(context.device(), std::move(run), std::move(products),
                                std::move(measurements));
}

}  // namespace dmuon::cuda
