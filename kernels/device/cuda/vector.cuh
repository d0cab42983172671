// How kernels read and write rows of activations: bf16 in memory, float in registers, sixteen bytes at a time
// where the addresses allow it.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "base/matrix_view.h"

namespace dflash {

// Elements that a thread of an element-wise kernel holds at a time: sixteen bytes of bf16.
inline constexpr int kChunk = 8;

// Whether every row begins at a multiple of 16 bytes and holds whole pieces of 16 bytes.
inline bool IsVectorized(ConstMatrixView view) {
  const int64_t per_vector = 16 / SizeOf(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride % per_vector == 0 &&
         view.cols % per_vector == 0;
}

// Eight bf16 as floats.
__device__ __forceinline__ void Unpack(const uint4& words, float (&values)[kChunk]) {
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(parts[i] << 16);
    values[2 * i + 1] = __uint_as_float(parts[i] & 0xffff0000u);
  }
}

// Reads up to kChunk consecutive elements, zeros beyond `count`. Vectorized: the address is a multiple of 16
// and count is kChunk. Both forms give a thread the same elements, so that sums do not depend on alignment.
template <bool kVectorized>
__device__ __forceinline__ void Load(const __nv_bfloat16* from, int count, float (&values)[kChunk]) {
  if constexpr (kVectorized) {
    Unpack(*reinterpret_cast<const uint4*>(from), values);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = i < count ? __bfloat162float(from[i]) : 0.0f;
  }
}

// Two floats rounded to nearest even, the first in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <bool kVectorized>
__device__ __forceinline__ void Store(__nv_bfloat16* to, int count, const float (&values)[kChunk]) {
  if constexpr (kVectorized) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(PackBf16(values[0], values[1]), PackBf16(values[2], values[3]),
                   PackBf16(values[4], values[5]), PackBf16(values[6], values[7]));
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) to[i] = __float2bfloat16_rn(values[i]);
    }
  }
}

__device__ __forceinline__ float Rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// Parameters of the model (norm weights, taps, tables), bf16 or f32: constants of the whole run.
struct Parameters {
  const void* data;
  int64_t stride;  // of a row
  bool is_bf16;

  __device__ __forceinline__ float At(int64_t row, int64_t col) const {
    const int64_t i = row * stride + col;
    return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                   : static_cast<const float*>(data)[i];
  }
};

inline Parameters ParametersOf(ConstMatrixView view) {
  return {view.data, view.row_stride, view.dtype == DType::kBf16};
}

// A bf16 activation matrix as a kernel parameter.
struct Bf16Rows {
  __nv_bfloat16* data;
  int64_t stride;

  __device__ __forceinline__ __nv_bfloat16* Row(int64_t row) const { return data + row * stride; }
};

inline Bf16Rows Bf16RowsOf(ConstMatrixView view) {
  return {static_cast<__nv_bfloat16*>(const_cast<void*>(view.data)), view.row_stride};
}

}  // namespace dflash
