#include "kernels/swiglu/swiglu_cpu.h"

#include <algorithm>

#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/linear/linear_parts_cpu.h"
#include "kernels/swiglu/swiglu_backend.h"

namespace dflash::backend {
namespace {

constexpr int64_t kElementsPerPart = 2048;

const SwiGluKernels& Kernels() { return ForCurrentInstructionSet(kSwiGluScalar, kSwiGluAvx2, kSwiGluAvx512); }

// Calls fn(row, first column, columns) on pieces that cover [0, rows) x [0, cols).
template <typename Fn>
void ForEachPiece(const Stream& stream, int64_t rows, int64_t cols, const Fn& fn) {
  const int64_t width = std::min(cols, kElementsPerPart);
  const int64_t pieces = (cols + width - 1) / width;
  ParallelFor(stream, rows * pieces, std::max<int64_t>(1, kElementsPerPart / width),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  const int64_t col = i % pieces * width;
                  fn(i / pieces, col, std::min(width, cols - col));
                }
              });
}

}  // namespace

absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream) {
  const SwiGluKernels& kernels = Kernels();
  ForEachPiece(stream, y.rows, y.cols, [&](int64_t row, int64_t col, int64_t cols) {
    const float* gate = gate_up.Row<float>(row) + col;
    kernels.silu_product(gate, gate + y.cols, cols, y.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

// A part makes the gate columns and the up columns that belong together, and their product while both are in
// its cache.
absl::StatusOr<bool> LinearSwiGlu(ConstMatrixView x, const LinearWeight& w, Phase, MatrixView gate_up,
                                  MatrixView y, const Stream& stream) {
  if (y.cols % kLinearBlock != 0) return false;
  const SwiGluKernels& kernels = Kernels();
  const int64_t blocks = y.cols / kLinearBlock;
  ForEachLinearPart(stream, x.rows, blocks, 2 * w.in_features(), [&](const LinearPart& part) {
    LinearPart up = part;
    up.first_block += blocks;
    RunLinearPart(x, w, part, gate_up);
    RunLinearPart(x, w, up, gate_up);
    const int64_t column = part.first_block * kLinearBlock;
    for (int64_t row = part.first_row; row < part.first_row + part.rows; ++row) {
      const float* gate = gate_up.Row<float>(row) + column;
      kernels.silu_product(gate, gate + y.cols, part.blocks * kLinearBlock, y.Row<float>(row) + column);
    }
  });
  return true;
}

absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream) {
  const SwiGluKernels& kernels = Kernels();
  ForEachPiece(stream, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t cols) {
    kernels.sigmoid_gate(gate.Row<float>(row) + col, cols, x.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
