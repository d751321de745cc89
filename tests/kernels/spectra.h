// Matrices with the singular values that break Newton-Schulz elsewhere.
#ifndef DMUON_TESTS_KERNELS_SPECTRA_H_
#define DMUON_TESTS_KERNELS_SPECTRA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "tests/kernels/reference.h"

namespace dmuon::kernels::reference {

// Standard normal entries, the same for the same seed on every machine.
Matrix<float> Gaussian(int64_t rows, int64_t cols, uint64_t seed);

// Random orthonormal singular vectors around the given values; at most min(rows, cols) of them are used.
Matrix<float> WithSingularValues(int64_t rows, int64_t cols, const std::vector<double>& values,
                                 uint64_t seed);

// A matrix with these singular values, and its Newton-Schulz: both by construction, in n^2 log n, for sizes at which the
// reference would take minutes. REQUIRES: both sides are powers of two, min(rows, cols) values.
struct Known {
  Matrix<float> in;
  Matrix<double> exact;
};
Known WithKnownResult(int64_t rows, int64_t cols, const std::vector<double>& values,
                      absl::Span<const Coefficients> schedule, uint64_t seed);

struct Spectrum {
  std::string name;
  Matrix<float> matrix;
};

// The twelve of docs/numerics.md.
std::vector<Spectrum> AllSpectra(int64_t rows, int64_t cols, uint64_t seed);

}  // namespace dmuon::kernels::reference

#endif  // DMUON_TESTS_KERNELS_SPECTRA_H_
