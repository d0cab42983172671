// Numbers on the host, and how far two of them are apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/check.h"

namespace dflash::golden {

// A dense row-major matrix in double precision.
struct Rows {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;

  Rows() = default;
  Rows(int64_t row_count, int64_t col_count)
      : rows(row_count), cols(col_count), values(static_cast<size_t>(row_count * col_count)) {}
  template <typename T>
  Rows(int64_t row_count, int64_t col_count, const std::vector<T>& from)
      : rows(row_count), cols(col_count), values(from.begin(), from.end()) {}

  const double* row(int64_t i) const { return values.data() + i * cols; }
  double* row(int64_t i) { return values.data() + i * cols; }

  // The block [first_row, first_row + row_count) x [first_col, first_col + col_count), which must be inside.
  Rows Block(int64_t first_row, int64_t row_count, int64_t first_col, int64_t col_count) const {
    DFLASH_CHECK(first_row >= 0 && row_count >= 0 && first_row <= rows - row_count);
    DFLASH_CHECK(first_col >= 0 && col_count >= 0 && first_col <= cols - col_count);
    Rows block(row_count, col_count);
    for (int64_t i = 0; i < row_count; ++i)
      std::copy_n(row(first_row + i) + first_col, col_count, block.row(i));
    return block;
  }
  Rows Slice(int64_t first_row, int64_t row_count) const { return Block(first_row, row_count, 0, cols); }
  Rows Columns(int64_t first_col, int64_t col_count) const { return Block(0, rows, first_col, col_count); }
  void Append(const Rows& more) {
    cols = more.cols;
    rows += more.rows;
    values.insert(values.end(), more.values.begin(), more.values.end());
  }
  bool operator==(const Rows&) const = default;
};

// max |actual - expected| / rms(expected): how all comparisons here are measured. Infinite when the shapes
// differ or anything is not a number.
inline double RelativeError(const Rows& actual, const Rows& expected) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (actual.rows != expected.rows || actual.cols != expected.cols) return kNone;
  double square = 0, worst = 0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    square += expected.values[i] * expected.values[i];
    const double error = std::abs(actual.values[i] - expected.values[i]);
    if (!std::isfinite(error)) return kNone;
    worst = std::max(worst, error);
  }
  if (worst == 0) return 0;
  return worst / std::sqrt(square / static_cast<double>(expected.values.size()));
}

}  // namespace dflash::golden
