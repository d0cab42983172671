// Non-owning views of row-major matrices whose element type is known at run time (CPU: float32 activations,
// CUDA: bfloat16). The memory belongs to the backend's device; only kernels and explicit copies touch it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "base/dtype.h"

namespace dflash {

struct ConstMatrixView;

struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements, >= cols

  MatrixView() = default;
  MatrixView(void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride)
      : data(data), dtype(dtype), rows(rows), cols(cols), row_stride(row_stride) {}
  template <typename T>
  MatrixView(T* data, int64_t rows, int64_t cols) : MatrixView(data, DTypeOf<T>::value, rows, cols, cols) {}

  template <typename T>
  T* Row(int64_t row) const {
    DFLASH_CHECK(dtype == DTypeOf<T>::value);
    return static_cast<T*>(data) + row * row_stride;
  }
  // The half-open block [first_row, first_row + row_count) x [first_col, first_col + col_count).
  MatrixView Block(int64_t first_row, int64_t row_count, int64_t first_col, int64_t col_count) const {
    auto* base = static_cast<std::byte*>(data) + (first_row * row_stride + first_col) * SizeOf(dtype);
    return MatrixView(base, dtype, row_count, col_count, row_stride);
  }
  MatrixView Rows(int64_t first_row, int64_t row_count) const { return Block(first_row, row_count, 0, cols); }
  MatrixView Cols(int64_t first_col, int64_t col_count) const { return Block(0, rows, first_col, col_count); }
};

struct ConstMatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  ConstMatrixView() = default;
  ConstMatrixView(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride)
      : data(data), dtype(dtype), rows(rows), cols(cols), row_stride(row_stride) {}
  template <typename T>
  ConstMatrixView(const T* data, int64_t rows, int64_t cols)
      : ConstMatrixView(data, DTypeOf<T>::value, rows, cols, cols) {}
  ConstMatrixView(const MatrixView& view)  // NOLINT: a writable view is a readable one
      : ConstMatrixView(view.data, view.dtype, view.rows, view.cols, view.row_stride) {}

  template <typename T>
  const T* Row(int64_t row) const {
    DFLASH_CHECK(dtype == DTypeOf<T>::value);
    return static_cast<const T*>(data) + row * row_stride;
  }
  ConstMatrixView Block(int64_t first_row, int64_t row_count, int64_t first_col, int64_t col_count) const {
    auto* base = static_cast<const std::byte*>(data) + (first_row * row_stride + first_col) * SizeOf(dtype);
    return ConstMatrixView(base, dtype, row_count, col_count, row_stride);
  }
  ConstMatrixView Rows(int64_t first_row, int64_t row_count) const {
    return Block(first_row, row_count, 0, cols);
  }
  ConstMatrixView Cols(int64_t first_col, int64_t col_count) const {
    return Block(0, rows, first_col, col_count);
  }
};

}  // namespace dflash
