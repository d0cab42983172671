// The CUDA backend's layout of linear weights and the kernels that read it. Private to kernels/linear.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/device/cuda/context.h"

namespace dflash {

class LinearWeight;

// A bf16 weight [N, K] is held as blocks of up to 128 outputs x 64 k, one after the other: all k blocks of
// the first 128 outputs, then those of the next. A block is the image that matrix instructions want in shared
// memory: rows of 128 bytes, the 16-byte piece p of row r at piece p xor (r mod 8). The last k block is
// padded with zeros; the last outputs are padded to a multiple of 8 only. So every block is one contiguous
// copy, and both phases read the same bytes. (f32 weights are held as they are, dense.)
//
// The outputs of a gate and an up projection take turns there, eight by eight: then the sums of a gate and of
// its up output are in the same thread of every kernel. `features`: outputs of either of the two, a multiple
// of 8; 0: the outputs lie in order.
inline constexpr int kBlockOutputs = 128;
inline constexpr int kBlockK = 64;
inline constexpr int kBlockRowBytes = kBlockK * 2;

struct PackedWeight {
  const void* data = nullptr;
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t features = 0;

  int64_t KBlocks() const { return (in_features + kBlockK - 1) / kBlockK; }
  // Tiles of outputs, each a row of KBlocks() blocks.
  int64_t Tiles() const { return (out_features + kBlockOutputs - 1) / kBlockOutputs; }
  // Rows of a block of the last tile; the others hold kBlockOutputs.
  int64_t LastTileRows() const { return (out_features - (Tiles() - 1) * kBlockOutputs + 7) / 8 * 8; }
  // All rows of 64 elements.
  int64_t PackedRows() const { return ((Tiles() - 1) * kBlockOutputs + LastTileRows()) * KBlocks(); }
  int64_t Bytes() const { return PackedRows() * kBlockRowBytes; }
};

PackedWeight PackedWeightOf(const LinearWeight& weight);  // bf16

// What becomes of the sums.
enum class LinearResult : uint8_t {
  kSums,    // y [T, N]
  kSwiGlu,  // y [T, features], bf16: silu(gate) up, both rounded to bf16 first; of weights with features
};

// Packs `rows` (bf16, device memory) as outputs [first_output, first_output + rows.rows).
cudaError_t LaunchPackRows(ConstMatrixView rows, int64_t first_output, const PackedWeight& weight,
                           void* packed, const CudaContext& context);

// VERIFY rows: streams the weight once for up to kStreamRows rows. x: every row at a multiple of 16 bytes.
// Compute capability 9.0 only.
inline constexpr int64_t kStreamRows = 256;
cudaError_t LaunchLinearStream(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                               const CudaContext& context, LinearResult result = LinearResult::kSums);

// PREFILL rows: one sum over all of K per output. Same demands.
cudaError_t LaunchLinearTiled(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                              const CudaContext& context, LinearResult result = LinearResult::kSums);

// f32 weights [N, K], dense; both phases. No demands on x.
cudaError_t LaunchLinearF32(ConstMatrixView x, const float* weight, int64_t in_features, MatrixView y,
                            const CudaContext& context);

// Both phases on every other GPU. x as there.
cudaError_t LaunchLinearPortable(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                                 const CudaContext& context, LinearResult result = LinearResult::kSums);

// Whether the copies of the kernels of bf16 weights can read x as it lies.
inline bool IsBulkReadable(ConstMatrixView x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride * SizeOf(x.dtype) % 16 == 0;
}

}  // namespace dflash
