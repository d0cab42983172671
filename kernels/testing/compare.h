// Test support: named tolerances and comparisons. Repair the kernel, not the tolerance.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {

// |actual - expected| <= absolute + relative |expected|, element by element.
struct Tolerance {
  double absolute = 0;
  double relative = 0;

  // A few float32 roundings of one element.
  static Tolerance F32Elementwise() { return {1e-37, 4e-7}; }
  // A float32 sum of `terms` products of random values with magnitude up to `scale`, in any fixed order. In
  // the worst order, one after another, the partial sums grow like sqrt(k) and each adds a rounding error of
  // its size times 2^-24, which makes about 8e-9 terms scale (one standard deviation, factors uniform in [-1,
  // 1]). Few terms: a few roundings.
  static Tolerance F32Reduction(int64_t terms, double scale = 1) {
    const double n = static_cast<double>(terms < 1 ? 1 : terms);
    return {scale * std::max(4e-7 * std::sqrt(n), 4e-8 * n), 1e-6};
  }
  // The same sum inside matrix instructions, which add sixteen products at a time and cut the sum off instead
  // of rounding it: the errors of the steps have one sign and add up.
  static Tolerance F32MatrixUnit(int64_t terms, double scale = 1) {
    const Tolerance rounded = F32Reduction(terms, scale);
    return {rounded.absolute * (1 + 0.01 * static_cast<double>(terms)), rounded.relative};
  }
  // One rounding to bf16 after float32 arithmetic.
  static Tolerance Bf16Elementwise() { return {1e-37, 4e-3}; }
  static Tolerance Bf16Reduction(int64_t terms, double scale = 1) {
    Tolerance tolerance = F32Reduction(terms, scale);
    return {4 * tolerance.absolute, 4e-3};
  }
};

// Infinities and NaNs must match exactly, everything else within the tolerance.
inline ::testing::AssertionResult Near(const HostMatrix<float>& actual, const HostMatrix<double>& expected,
                                       Tolerance tolerance) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return ::testing::AssertionFailure()
           << actual.rows << "x" << actual.cols << " instead of " << expected.rows << "x" << expected.cols;
  }
  int64_t wrong = 0;
  double worst = 0;
  int64_t worst_row = 0, worst_col = 0;
  for (int64_t row = 0; row < actual.rows; ++row) {
    for (int64_t col = 0; col < actual.cols; ++col) {
      const double a = static_cast<double>(actual.At(row, col));
      const double e = expected.At(row, col);
      double excess;  // how many times the allowance
      if (std::isnan(a) || std::isnan(e) || std::isinf(a) || std::isinf(e)) {
        excess = (std::isnan(a) && std::isnan(e)) || a == e ? 0 : HUGE_VAL;
      } else {
        excess = std::abs(a - e) / (tolerance.absolute + tolerance.relative * std::abs(e));
        if (a == e) excess = 0;
      }
      if (excess > 1) ++wrong;
      if (excess > worst) {
        worst = excess;
        worst_row = row;
        worst_col = col;
      }
    }
  }
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << wrong << " of " << actual.rows * actual.cols << " elements are off; worst at [" << worst_row
         << ", " << worst_col << "]: " << actual.At(worst_row, worst_col) << " instead of "
         << expected.At(worst_row, worst_col) << ", " << worst << " times the tolerance";
}

// Equal bits; a NaN equals every NaN.
inline bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

inline ::testing::AssertionResult BitEqual(const HostMatrix<float>& actual,
                                           const HostMatrix<float>& expected) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return ::testing::AssertionFailure()
           << actual.rows << "x" << actual.cols << " instead of " << expected.rows << "x" << expected.cols;
  }
  for (int64_t row = 0; row < actual.rows; ++row) {
    for (int64_t col = 0; col < actual.cols; ++col) {
      if (!SameBits(actual.At(row, col), expected.At(row, col))) {
        return ::testing::AssertionFailure() << "[" << row << ", " << col << "]: " << actual.At(row, col)
                                             << " instead of " << expected.At(row, col) << " (difference "
                                             << actual.At(row, col) - expected.At(row, col) << ")";
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace dflash
