#include "kernels/device/cuda/tensor_map.h"

#include <cudaTypedefs.h>

namespace dflash {
namespace {

// The driver's encoder, looked up because libcuda is absent where no driver is.
PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

template <int kRank>
cudaError_t Encode(const void* data, const cuuint64_t (&size)[kRank], const cuuint64_t (&stride)[kRank - 1],
                   const cuuint32_t (&box)[kRank], BoxLayout layout, CUtensorMap* map) {
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  cuuint32_t element_stride[kRank];
  for (cuuint32_t& step : element_stride) step = 1;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), size, stride, box,
             element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
             layout == BoxLayout::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t MakeRowsTensorMap(ConstMatrixView matrix, int box_rows, BoxLayout layout, CUtensorMap* map) {
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(matrix.row_stride * SizeOf(matrix.dtype))};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  return Encode(matrix.data, size, stride, box, layout, map);
}

cudaError_t MakeHeadsTensorMap(ConstMatrixView matrix, int64_t head_dim, int box_heads, int box_rows,
                               CUtensorMap* map) {
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(matrix.cols / head_dim),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(head_dim * SizeOf(matrix.dtype)),
                                static_cast<cuuint64_t>(matrix.row_stride * SizeOf(matrix.dtype))};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows)};
  return Encode(matrix.data, size, stride, box, BoxLayout::kSwizzled, map);
}

}  // namespace dflash
