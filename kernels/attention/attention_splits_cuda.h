// Where the CUDA backend's splits of the keys begin: a function of the position alone. Private to kernels/attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dflash {

// Splits of 2 blocks up to position 2048 (and everywhere under a window), of 8 up to 32768, of 32 beyond.
// Small enough to fill the machine with one sequence, large enough for their partial results to cost little.
struct SplitSchedule {
  bool windowed;

  static constexpr int32_t kFineEnd = 32, kFine = 2;
  static constexpr int32_t kMiddleEnd = 512, kMiddle = 8;
  static constexpr int32_t kCoarse = 32;
  static constexpr int32_t kFineSplits = kFineEnd / kFine;
  static constexpr int32_t kMiddleSplits = (kMiddleEnd - kFineEnd) / kMiddle;

  __host__ __device__ int32_t SplitOf(int32_t block) const {
    if (windowed || block < kFineEnd) return block / kFine;
    if (block < kMiddleEnd) return kFineSplits + (block - kFineEnd) / kMiddle;
    return kFineSplits + kMiddleSplits + (block - kMiddleEnd) / kCoarse;
  }
  __host__ __device__ int32_t FirstBlock(int32_t split) const {
    if (windowed || split <= kFineSplits) return split * kFine;
    if (split <= kFineSplits + kMiddleSplits) return kFineEnd + (split - kFineSplits) * kMiddle;
    return kMiddleEnd + (split - kFineSplits - kMiddleSplits) * kCoarse;
  }
};

}  // namespace dflash
