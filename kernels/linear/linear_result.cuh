// What all kernels of bf16 weights do with their sums. Private to kernels/linear.
#pragma once

#include <cstdint>

#include "kernels/device/cuda/vector.cuh"
#include "kernels/elementary/sigmoid.cuh"
#include "kernels/linear/linear_cuda.h"

namespace dflash {

// Rows of a packed weight are places. Where a gate and an up projection take turns, an even group of eight
// places holds gates, the next one the up outputs of the same features.
__device__ __forceinline__ int64_t PlaceOf(int64_t output, int64_t features) {
  if (features == 0) return output;
  const int64_t feature = output < features ? output : output - features;
  return feature / 8 * 16 + feature % 8 + (output < features ? 0 : 8);
}
__device__ __forceinline__ int32_t OutputAt(int32_t place, int32_t features) {
  if (features == 0) return place;
  return place / 16 * 8 + place % 8 + (place % 16 < 8 ? 0 : features);
}

// What Linear and then SwiGlu make of two sums, before the last rounding.
__device__ __forceinline__ float SwiGluOf(float gate, float up) {
  return Rounded(up) * SiluBranchless(Rounded(gate));
}

// Whether the kernels can make it.
inline bool IsLegalResult(const PackedWeight& weight, ConstMatrixView y, LinearResult result) {
  if (result == LinearResult::kSums) return y.cols == weight.out_features;
  return weight.features > 0 && y.cols == weight.features && y.dtype == DType::kBf16;
}

}  // namespace dflash
