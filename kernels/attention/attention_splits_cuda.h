// Where the CUDA backend's splits of the keys begin: a function of the position alone. Private to
// kernels/attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dflash {

enum class SplitKind : uint8_t {
  kVerify,    // few rows: one sequence must fill the machine, so splits are small and grow with the position
  kWindowed,  // few rows that see few keys, anywhere
  kPrefill,   // many rows: tiles fill the machine, so splits are large
};

// VERIFY: 4 blocks up to position 2048, 8 up to 8192; then 16 splits for every doubling. So at any length the
// largest split is about what each of some hundred multiprocessors has to do for one sequence of four KV
// heads, and the partial results of many sequences stay small beside their keys and values. Windowed: a
// window of 2048 keys of eight KV heads is one wave of items.
struct SplitSchedule {
  SplitKind kind;

  static constexpr int32_t kWindowed = 4, kPrefill = 64;
  static constexpr int32_t kFineEnd = 32, kFine = 4;
  static constexpr int32_t kMiddleEnd = 128, kMiddle = 8;
  static constexpr int32_t kPerDoubling = 16;
  static constexpr int32_t kFineSplits = kFineEnd / kFine;
  static constexpr int32_t kMiddleSplits = kFineSplits + (kMiddleEnd - kFineEnd) / kMiddle;

  __host__ __device__ int32_t SplitOf(int32_t block) const {
    if (kind == SplitKind::kWindowed) return block / kWindowed;
    if (kind == SplitKind::kPrefill) return block / kPrefill;
    if (block < kFineEnd) return block / kFine;
    if (block < kMiddleEnd) return kFineSplits + (block - kFineEnd) / kMiddle;
    int32_t doubling = 0;
    while (block >> doubling >= 2 * kMiddleEnd) ++doubling;
    const int32_t inside = block - (kMiddleEnd << doubling);
    return kMiddleSplits + kPerDoubling * doubling + (inside / (kMiddleEnd / kPerDoubling) >> doubling);
  }
  __host__ __device__ int32_t FirstBlock(int32_t split) const {
    if (kind == SplitKind::kWindowed) return split * kWindowed;
    if (kind == SplitKind::kPrefill) return split * kPrefill;
    if (split <= kFineSplits) return split * kFine;
    if (split <= kMiddleSplits) return kFineEnd + (split - kFineSplits) * kMiddle;
    const int32_t doubling = (split - kMiddleSplits) / kPerDoubling;
    const int32_t inside = (split - kMiddleSplits) % kPerDoubling;
    return (kMiddleEnd << doubling) + inside * (kMiddleEnd / kPerDoubling << doubling);
  }
};

}  // namespace dflash
