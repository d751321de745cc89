#include "kernels/cuda/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <utility>

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
        run_.form == NsForm::kGram ? "gram " : "direct ",
        run_.element == Element::kF32    ? "fp32"
        : run_.element == Element::kBF16 ? "bf16"
                                         : "fp16",
        " (cublaslt, ", products_.gram.choice().name(), "/", products_.square.choice().name(), ")",
        run_.places.together > 1 ? absl::StrCat(", ", run_.places.together, " at once") : "");
  }

  absl::Status Prepare(void* workspace) override {
    RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "selecting the device"));
    if (GraphFor(workspace) != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(const auto streams, RecordingStreams::Create(run_.program.operations.size()));
    char* base = static_cast<char*>(workspace);
    const Lanes main = streams->Group(0, run_.places, base);
    const Lanes aside = streams->Group(1, run_.places, base);
    // Once outside the recording, on whatever is in the workspace: the first use of a kernel loads it.
    Lanes alone = main;
    alone.side = {};
    RETURN_IF_ERROR(Iterate(base, alone, alone, nullptr));
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(main.main), "trying the iteration"));
    ASSIGN_OR_RETURN(Graph graph, Graph::Record(main.main, [&] {
                       return Iterate(base, main, aside, streams.get());
                     }));
    prepared_.push_back({workspace, std::move(graph)});
    return absl::OkStatus();
  }

  void Run(kernels::Stream stream, const float* in, float* out, void* workspace) const override {
    constexpr int64_t kOne[] = {0};
    RunBatch(stream, {.in = in, .out = out, .offsets = kOne, .workspace = workspace});
  }

  void RunBatch(kernels::Stream stream, const kernels::NewtonSchulzBatch& batch) const override {
    auto& state = *static_cast<StreamState*>(stream.handle);
    const auto together = static_cast<size_t>(run_.places.together);
    for (size_t first = 0; first < batch.offsets.size(); first += together) {
      kernels::NewtonSchulzBatch group = batch;
      group.offsets = batch.offsets.subspan(first, together);
      if (group.square_norms != nullptr) group.square_norms += first;
      const absl::Status status = Enqueue(state, group);
      if (!status.ok()) state.Note(Annotate(status, "newton-schulz"));
    }
  }

 private:
  struct Prepared {
    void* workspace;
    Graph graph;
  };

  const Graph* GraphFor(const void* workspace) const {
    for (const Prepared& p : prepared_) {
      if (p.workspace == workspace) return &p.graph;
    }
    return nullptr;
  }

  // As many blocks as run at once, or fewer: what else is in the workspace is computed with, and of no consequence.
  absl::Status Enqueue(StreamState& state, const kernels::NewtonSchulzBatch& batch) const {
    const cudaStream_t stream = state.get();
    char* base = static_cast<char*>(batch.workspace);
    RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "selecting the device"));
    BlockOffsets blocks;
    blocks.count = static_cast<int>(batch.offsets.size());
    std::copy(batch.offsets.begin(), batch.offsets.end(), blocks.at);
    RETURN_IF_ERROR(Load(state, batch, blocks));
    Lanes lanes;
    lanes.main = stream;
    lanes.workspace = base + run_.places.products;
    if (const Graph* graph = GraphFor(base); graph != nullptr) {
      RETURN_IF_ERROR(ToStatus(graph->Launch(stream), "launching the iteration"));
    } else {
      RETURN_IF_ERROR(Iterate(base, lanes, lanes, nullptr));
    }
    return Finish(lanes, base, batch.out, blocks);
  }

  absl::Status Load(StreamState& state, const kernels::NewtonSchulzBatch& batch,
                    const BlockOffsets& blocks) const {
    char* base = static_cast<char*>(batch.workspace);
    NormalizationParams norm;
    norm.in = batch.in;
    norm.blocks = blocks;
    norm.count = run_.places.shape.rows * run_.places.shape.cols;
    norm.exponent = run_.program.x_exponent;
    norm.results = reinterpret_cast<Normalization*>(base);
    norm.square_norms = batch.square_norms;
    norm.scratch = state.scratch();
    RETURN_IF_ERROR(ToStatus(LaunchNormalization(state.get(), norm), "finding the norm"));
    NormalizeParams normalize;
    normalize.from = batch.in;
    normalize.blocks = blocks;
    normalize.by = norm.results;
    normalize.shape = run_.places.shape;
    normalize.to = base + run_.places.x[0];
    return ToStatus(LaunchNormalize(state.get(), run_.element, normalize), "normalising");
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
  std::list<Prepared> prepared_;
};

SymmetricShape GramShape(const Places& p, Element element) {
  return {.order = p.order,
          .depth = p.depth,
          .batch = p.together,
          .transpose_a = p.wide,
          .transpose_b = !p.wide,
          .lda = p.ld(),
          .ldb = p.ld(),
          .element = element};
}

// Both factors are symmetric, so the transpose that cuBLAS likes best (both contiguous along the sum) is free.
SymmetricShape SquareShape(const Places& p, Element element) {
  return {.order = p.order,
          .depth = p.order,
          .batch = p.together,
          .transpose_a = true,
          .transpose_b = false,
          .lda = p.order,
          .ldb = p.order,
          .element = element};
}

MatmulShape ApplyShape(const Places& p, Element element) {
  MatmulShape s;
  s.in = s.out = element;
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

MatmulShape FinalShape(const Places& p, Element element) {
  MatmulShape s = ApplyShape(p, element);
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
  const Places& p = run.places;
  const Element element = run.element;
  std::unique_ptr<MeasuringRoom> room;
  if (tuning.measure) {
    absl::StatusOr<std::unique_ptr<MeasuringRoom>> made =
        MeasuringRoom::Create(context.device(), element, RoomSizes(run));
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
  ASSIGN_OR_RETURN(SymmetricProduct gram,
                   make(GramShape(p, element), tuning.gram_cut, measurements.gram));
  ASSIGN_OR_RETURN(SymmetricProduct square,
                   make(SquareShape(p, element), tuning.square_cut, measurements.square));
  ASSIGN_OR_RETURN(Matmul apply, Matmul::Create(context, ApplyShape(p, element), ground));
  std::optional<Matmul> apply_final;
  if (run.final_as_fp32) {
    ASSIGN_OR_RETURN(apply_final, Matmul::Create(context, FinalShape(p, element), ground));
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
