// Test support: matrices on the host with reproducible contents. Works with every backend.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "base/matrix_view.h"

namespace dflash {

// A dense row-major matrix of float, double or bf16.
template <typename T>
struct HostMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<T> values;

  HostMatrix() = default;
  HostMatrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {}
  HostMatrix(int64_t rows, int64_t cols, std::vector<T> values)
      : rows(rows), cols(cols), values(std::move(values)) {
    DFLASH_CHECK(static_cast<int64_t>(this->values.size()) == rows * cols);
  }

  T* Row(int64_t row) { return values.data() + row * cols; }
  const T* Row(int64_t row) const { return values.data() + row * cols; }
  T& At(int64_t row, int64_t col) { return Row(row)[col]; }
  const T& At(int64_t row, int64_t col) const { return Row(row)[col]; }
  ConstMatrixView view() const { return ConstMatrixView(values.data(), rows, cols); }

  HostMatrix Rows(int64_t first_row, int64_t row_count) const {
    return HostMatrix(row_count, cols, std::vector<T>(Row(first_row), Row(first_row + row_count)));
  }
};

// Uniform values in [low, high), the same for the same seed everywhere (no std:: distribution).
template <typename T>
HostMatrix<T> RandomMatrix(int64_t rows, int64_t cols, uint32_t seed, float low = -1, float high = 1) {
  HostMatrix<T> matrix(rows, cols);
  std::mt19937 generator(seed);
  for (T& value : matrix.values) {
    value = T(low + (high - low) * (static_cast<float>(generator() >> 8) * 0x1p-24f));
  }
  return matrix;
}

template <typename To, typename From>
HostMatrix<To> Converted(const HostMatrix<From>& from) {
  HostMatrix<To> to(from.rows, from.cols);
  for (size_t i = 0; i < from.values.size(); ++i) to.values[i] = static_cast<To>(from.values[i]);
  return to;
}

}  // namespace dflash
