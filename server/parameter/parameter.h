// The table of a session: its parameters and the boundaries that carry them. The same on all ranks.
#ifndef DMUON_SERVER_PARAMETER_PARAMETER_H_
#define DMUON_SERVER_PARAMETER_PARAMETER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/strong_id.h"
#include "kernels/ops/dtype.h"

namespace dmuon::server {

using ParameterId = StrongId<struct ParameterTag>;  // index into the table
using BoundaryId = StrongId<struct BoundaryTag>;    // index into the boundaries
using SlotId = StrongId<struct SlotTag>;            // slot r serves rank r

enum class Route { kMuon = 1, kAdamw = 2, kShardedAdamw = 3 };
absl::string_view Name(Route route);

// Rows [begin, end) of a parameter seen as a matrix of dim 0 x rest: one matrix for Newton-Schulz.
struct Block {
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  Route route = Route::kMuon;
  BoundaryId boundary;
  std::vector<Block> blocks;  // muon; empty until ResolveBlocks

  int64_t numel() const;
};

// The matrix that Newton-Schulz sees: rows = out, cols = in of a PyTorch Linear; a convolution is out x rest; with
// three dimensions the leading one counts matrices, so rows = dim 0 * dim 1.
struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
MatrixShape AsMatrix(const Parameter& parameter);

struct Boundary {
  std::string name;
  bool exclusive_window = false;
};

struct ParameterTable {
  std::vector<Parameter> parameters;
  std::vector<Boundary> boundaries;
};

enum class EmptyName { kRefused, kAllowed };

// A name that others will read in logs and tables: at most 256 bytes, none a control character. `what`: "job".
absl::Status CheckName(absl::string_view what, absl::string_view name, EmptyName empty);

// INVALID_ARGUMENT names the parameter, the expected and the given: empty or long or repeated names, shapes, a muon
// route on fewer than two dimensions, blocks that do not tile the rows, a boundary out of range, too many of anything.
// UNIMPLEMENTED for sharded_adamw. Fills the default blocks.
absl::Status CheckAndResolve(ParameterTable& table);

// A digest of everything above that is the same on every machine and in every build.
uint64_t Digest(const ParameterTable& table);

// The first difference between two tables in words ("parameter 3: 'a.weight' (4 x 4) against 'b.weight' (4 x 4)");
// empty when there is none.
std::string FirstDifference(const ParameterTable& a, const ParameterTable& b);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_PARAMETER_PARAMETER_H_
