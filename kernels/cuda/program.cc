#include "kernels/cuda/program.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "kernels/newton_schulz/iteration.h"

namespace dmuon::cuda {
namespace {

using Kind = Operation::Kind;

// X X^T and what follows from it has eigenvalues up to 4 for the published sets cut short, 1.3 for whole ones:
// 2^13 times that is inside fp16's 65504.
constexpr int kGramExponent = 13;
// Entries of X stay below 2: 2^14 times that is inside.
constexpr int kMostXExponent = 14;
// Two would do for the order in which the iteration is written; more let Q run beside R.
constexpr int kBuffers = 6;

int XExponent(int64_t rows, int64_t cols) {
  const double typical = std::sqrt(static_cast<double>(rows) * static_cast<double>(cols));
  return std::clamp(static_cast<int>(std::log2(typical)), 0, kMostXExponent);
}

// For Z = b R + c R R, with R up to 1.3.
int PolynomialExponent(double b, double c) {
  const double most = 1.3 * std::fabs(b) + 1.7 * std::fabs(c);
  if (!(most > 0) || !std::isfinite(most)) return 0;
  return std::clamp(static_cast<int>(std::floor(std::log2(32768.0 / most))), 0, kGramExponent);
}

// Gives every result a buffer of its own as long as it is needed, so that only true dependencies order the operations.
class Recorder final : public kernels::MatrixOps {
 public:
  explicit Recorder(Program* program) : program_(program) { last_use_.fill(-1); }

  void Gram(int r) override {
    Operation op;
    op.kind = Kind::kGram;
    op.x = x_;
    op.alpha = std::ldexp(1.0, kGramExponent - 2 * program_->x_exponent);
    op.out = NewBuffer(r, kGramExponent);
    Add(op);
  }

  void Multiply(int out, double alpha, int left, int right, double beta, int e) override {
    Operation op;
    op.left = at_[left];
    op.right = at_[right];
    op.e = at_[e];
    const int exponent = left == right ? PolynomialExponent(beta, alpha) : exponent_[e];
    op.alpha = std::ldexp(alpha, exponent - exponent_[left] - exponent_[right]);
    op.beta = std::ldexp(beta, exponent - exponent_[e]);
    Use({op.left, op.right, op.e});
    op.out = NewBuffer(out, exponent);
    Add(op);
  }

  void AddIdentity(int out, int z, double a) override {
    // The iteration asks for Z + a I right after Z, so it is written together with Z's other triangle.
    Operation& op = program_->operations.back();
    op.scale = std::ldexp(1.0, -exponent_[z]);
    op.diagonal = a;
    Use({at_[z]});
    op.shifted = NewBuffer(out, 0);
  }

  void Apply(int q, double a, bool /*last*/) override {
    Operation op;
    op.kind = Kind::kApply;
    op.left = at_[q];
    op.alpha = std::ldexp(1.0, -exponent_[q]);
    op.beta = a;
    op.x = x_;
    Use({op.left});
    Add(op);
    x_ = 1 - x_;
  }

 private:
  void Add(const Operation& op) { program_->operations.push_back(op); }
  void Use(std::initializer_list<int> buffers) {
    for (int b : buffers) last_use_[static_cast<size_t>(b)] = clock_++;
  }
  // The buffer, of those that hold nothing any more, that was used longest ago.
  int NewBuffer(int slot, int exponent) {
    at_[slot] = -1;
    int best = -1;
    for (int b = 0; b < kBuffers; ++b) {
      if (std::find(std::begin(at_), std::end(at_), b) != std::end(at_)) continue;
      if (best < 0 || last_use_[static_cast<size_t>(b)] < last_use_[static_cast<size_t>(best)])
        best = b;
    }
    at_[slot] = best;
    exponent_[slot] = exponent;
    last_use_[static_cast<size_t>(best)] = clock_++;
    program_->buffers = std::max(program_->buffers, best + 1);
    return best;
  }

  Program* program_;
  int at_[kSymmetricSlots] = {-1, -1, -1, -1};
  int exponent_[kSymmetricSlots] = {};
  std::array<int, kBuffers> last_use_;
  int clock_ = 0;
  int x_ = 0;
};

struct Accesses {
  std::vector<int> reads, writes;
};

Accesses AccessesOf(const Operation& op) {
  const auto x = [](int which) { return kBuffers + which; };
  Accesses a;
  switch (op.kind) {
    case Kind::kGram:
      a.reads = {x(op.x)};
      a.writes = {op.out};
      break;
    case Kind::kMultiply:
      a.reads = {op.left, op.right, op.e};
      a.writes = {op.out};
      if (op.shifted >= 0) a.writes.push_back(op.shifted);
      break;
    case Kind::kApply:
      a.reads = {op.left, x(op.x)};
      a.writes = {x(1 - op.x)};
      break;
  }
  return a;
}

// For each operation the earlier ones that it must follow.
std::vector<std::vector<int>> Dependencies(const std::vector<Operation>& operations) {
  std::vector<std::vector<int>> after(operations.size());
  std::map<int, int> writer;
  std::map<int, std::vector<int>> readers;
  for (size_t i = 0; i < operations.size(); ++i) {
    const Accesses a = AccessesOf(operations[i]);
    for (int b : a.reads) {
      if (writer.count(b) > 0) after[i].push_back(writer[b]);
    }
    for (int b : a.writes) {
      if (writer.count(b) > 0) after[i].push_back(writer[b]);
      for (int reader : readers[b]) after[i].push_back(reader);
    }
    for (int b : a.reads) readers[b].push_back(static_cast<int>(i));
    for (int b : a.writes) {
      writer[b] = static_cast<int>(i);
      readers[b].clear();
    }
  }
  return after;
}

// Products that could start later without making the whole longer go to the second stream.
void Schedule(std::vector<Operation>& operations) {
  const std::vector<std::vector<int>> after = Dependencies(operations);
  const int count = static_cast<int>(operations.size());
  std::vector<int> earliest(operations.size(), 0);
  for (int i = 0; i < count; ++i) {
    for (int before : after[i]) earliest[i] = std::max(earliest[i], earliest[before] + 1);
  }
  std::vector<int> latest(operations.size(), earliest.back());
  for (int i = count - 1; i >= 0; --i) {
    for (int before : after[i]) latest[before] = std::min(latest[before], latest[i] - 1);
  }
  for (int i = 0; i < count; ++i) {
    operations[i].aside = operations[i].kind == Kind::kMultiply && latest[i] > earliest[i];
  }
  for (int i = 0; i < count; ++i) {
    for (int before : after[i]) {
      std::vector<int>& wait_for = operations[i].wait_for;
      if (operations[before].aside == operations[i].aside) continue;
      if (std::find(wait_for.begin(), wait_for.end(), before) != wait_for.end()) continue;
      wait_for.push_back(before);
      operations[before].waited_for = true;
    }
  }
}

}  // namespace

Program RecordProgram(kernels::NsForm form, absl::Span<const kernels::Coefficients> schedule,
                      absl::Span<const int> restarts, int64_t rows, int64_t cols) {
  Program program;
  program.x_exponent = XExponent(rows, cols);
  Recorder recorder(&program);
  if (form == kernels::NsForm::kGram) {
    kernels::IterateGram(schedule, restarts, recorder);
  } else {
    kernels::IterateDirect(schedule, recorder);
  }
  Schedule(program.operations);
  return program;
}

}  // namespace dmuon::cuda
