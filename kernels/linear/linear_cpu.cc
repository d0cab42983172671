#include "kernels/linear/linear_cpu.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/linear/linear_backend.h"
#include "kernels/linear/linear_parts_cpu.h"

namespace dflash {
namespace {

// A part of the loop over blocks must be worth its hand-over to another thread: about a microsecond. Sixteen
// parts a thread keep the wait for the last of them short.
constexpr int64_t kMultiplicationsPerPart = 1 << 15;
constexpr int64_t kPartsPerThread = 16;
constexpr int64_t kFewRows = 3;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Copies output `lane` of a block into place, T = float or uint16_t (the bits of a bf16).
template <typename T>
void PackRow(const T* row, int64_t in_features, int64_t lane, T* block) {
  // bf16: output i lies in the low half of word i, output i + 16 in its high half.
  const int64_t place = sizeof(T) == 4 ? lane : 2 * (lane % 16) + lane / 16;
  for (int64_t k = 0; k < in_features; ++k) block[k * kLinearBlock + place] = row[k];
}

}  // namespace

namespace backend {

absl::StatusOr<int64_t> PackedLinearBytes(int64_t out_features, int64_t in_features, DType dtype) {
  return CeilDiv(out_features, kLinearBlock) * kLinearBlock * in_features * SizeOf(dtype);
}

absl::Status PackRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                      const Stream& stream) {
  const int64_t size = SizeOf(rows.dtype);
  const int64_t in_features = weight.in_features();
  const int64_t block_bytes = kLinearBlock * in_features * size;
  ParallelFor(stream, rows.rows, kLinearBlock, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t output = first_output + row;
      char* block = weight.packed().As<char>() + output / kLinearBlock * block_bytes;
      const char* source = static_cast<const char*>(rows.data) + row * rows.row_stride * size;
      if (rows.dtype == DType::kBf16) {
        PackRow(reinterpret_cast<const uint16_t*>(source), in_features, output % kLinearBlock,
                reinterpret_cast<uint16_t*>(block));
      } else {
        PackRow(reinterpret_cast<const float*>(source), in_features, output % kLinearBlock,
                reinterpret_cast<float*>(block));
      }
    }
  });
  return absl::OkStatus();
}

absl::Status PackHostRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                          const Stream& stream) {
  return PackRows(rows, first_output, weight, stream);
}

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase, MatrixView y, const Stream& stream) {
  ForEachLinearPart(stream, x.rows, CeilDiv(w.out_features(), kLinearBlock), w.in_features(),
                    [&](const LinearPart& part) { RunLinearPart(x, w, part, y); });
  return absl::OkStatus();
}

}  // namespace backend

Phase FasterLinearPhase(int64_t) { return Phase::kVerify; }

int64_t LinearGrain(int64_t blocks, int64_t rows, int64_t depth, int threads) {
  const int64_t fair = CeilDiv(blocks, threads * kPartsPerThread);
  const int64_t grain = std::max(fair, CeilDiv(kMultiplicationsPerPart, kLinearBlock * depth * rows));
  // The tiles of few rows hold up to four blocks.
  const int64_t tiled = rows <= kFewRows && grain > 1 ? CeilDiv(grain, 4) * 4 : grain;
  // Of few parts every thread gets equally many: a share more for one of them would be what all wait for.
  const int64_t parts = CeilDiv(blocks, tiled);
  if (parts <= threads || parts >= 4 * threads || parts % threads == 0) return tiled;
  return CeilDiv(blocks, parts / threads * threads);
}

void RunLinearPart(const ConstMatrixView& x, const LinearWeight& w, const LinearPart& part,
                   const MatrixView& y) {
  const LinearKernels& kernels = ForCurrentInstructionSet(kLinearScalar, kLinearAvx2, kLinearAvx512);
  LinearTask task;
  task.x = x.Row<float>(part.first_row);
  task.x_stride = x.row_stride;
  task.rows = part.rows;
  task.packed = w.packed().data();
  task.in_features = w.in_features();
  task.out_features = w.out_features();
  task.y = y.Row<float>(part.first_row);
  task.y_stride = y.row_stride;
  task.first_block = part.first_block;
  task.block_count = part.blocks;
  (w.dtype() == DType::kBf16 ? kernels.bf16_weights : kernels.f32_weights)(task);
}

}  // namespace dflash
