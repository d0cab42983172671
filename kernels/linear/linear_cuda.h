// The CUDA backend's layout of linear weights and the kernels that read it. Private to kernels/linear.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/device/cuda/context.h"

namespace dflash {

// A bf16 weight [N, K] is held as blocks of up to 256 outputs x 64 k, one after the other: all k blocks of
// the first 256 outputs, then those of the next. A block is the image that matrix instructions want in shared
// memory: rows of 128 bytes, the 16-byte piece p of row r at piece p xor (r mod 8). The last k block is
// padded with zeros; the last 256 outputs are padded to a multiple of 8 only. So every block is one
// contiguous copy, and both phases read the same bytes. (f32 weights are held as they are, dense.)
inline constexpr int kBlockOutputs = 256;
inline constexpr int kBlockK = 64;

struct PackedWeight {
  const void* data = nullptr;
  int64_t out_features = 0;
  int64_t in_features = 0;

  int64_t KBlocks() const { return (in_features + kBlockK - 1) / kBlockK; }
  int64_t Tiles() const { return (out_features + kBlockOutputs - 1) / kBlockOutputs; }
  // Rows of a block of the last tile; the others hold kBlockOutputs.
  int64_t LastTileRows() const { return (out_features - (Tiles() - 1) * kBlockOutputs + 7) / 8 * 8; }
  int64_t Bytes() const {
    return ((Tiles() - 1) * kBlockOutputs + LastTileRows()) * KBlocks() * kBlockK * SizeOf(DType::kBf16);
  }
};

// Packs `rows` (bf16, device memory) as outputs [first_output, first_output + rows.rows).
cudaError_t LaunchPackRows(ConstMatrixView rows, int64_t first_output, const PackedWeight& weight,
                           void* packed, const CudaContext& context);

// Which matrix instruction the streaming kernel uses; the bits of a result belong to the instruction.
enum class MatrixUnit { kWarp, kWarpgroup };  // mma.sync; wgmma (compute capability 9.0 alone)

// VERIFY rows: streams the weight once for up to kStreamRows rows. x: every row at a multiple of 16 bytes.
// Errors: cudaErrorNotSupported before compute capability 9.0.
inline constexpr int64_t kStreamRows = 256;
struct StreamTuning {
  int prefetch_blocks = 4;
  bool exclusive = false;
};
cudaError_t LaunchLinearStream(ConstMatrixView x, const PackedWeight& weight, MatrixView y, MatrixUnit unit,
                               const CudaContext& context, const StreamTuning& tuning = {});

// PREFILL rows: one sum over all of K per output. Same demands.
cudaError_t LaunchLinearTiled(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                              const CudaContext& context);

// f32 weights [N, K], dense; both phases. No demands on x.
cudaError_t LaunchLinearF32(ConstMatrixView x, const float* weight, int64_t in_features, MatrixView y,
                            const CudaContext& context);

// Both phases on GPUs before compute capability 9.0, where neither kernel above runs. x as there.
cudaError_t LaunchLinearPortable(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                                 const CudaContext& context);

// Whether the copies of the kernels of bf16 weights can read x as it lies.
inline bool IsBulkReadable(ConstMatrixView x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride * SizeOf(x.dtype) % 16 == 0;
}

}  // namespace dflash
