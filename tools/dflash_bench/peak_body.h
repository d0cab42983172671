// Included by peak_{scalar,avx2,avx512}.cc.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "tools/dflash_bench/peak.h"

namespace dflash::DFLASH_SIMD_NAMESPACE {

static int32_t ReadAll(const void* data, int64_t bytes) {
  constexpr int kVectors = 8;
  const float* p = static_cast<const float*>(data);
  I32x16 seen[kVectors];
  for (int v = 0; v < kVectors; ++v) seen[v] = I32x16::Broadcast(0);
  for (int64_t i = 0; i < bytes / 4; i += kVectors * kLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) seen[v] = seen[v] ^ BitsOf(Load(p + i + v * kLanes));
  }
  for (int v = 1; v < kVectors; ++v) seen[0] = seen[0] ^ seen[v];
  float lanes[kLanes];
  Store(lanes, FromBits(seen[0]));
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, lanes + i, sizeof(bits));
    all ^= bits;
  }
  return all;
}

static float MultiplyAdd(int64_t steps, float factor) {
  constexpr int kSums = dflash::bench::kMultiplyAddsPerStep / kLanes;
  F32x16 sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = F32x16::Broadcast(static_cast<float>(i));
  const F32x16 a = F32x16::Broadcast(factor), b = F32x16::Broadcast(1.0f - factor);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = Fma(sum[i], a, b);
  }
  F32x16 total = sum[0];
  for (int i = 1; i < kSums; ++i) total = total + sum[i];
  return ReduceAdd(total);
}

}  // namespace dflash::DFLASH_SIMD_NAMESPACE

namespace dflash::bench {

const PeakKernels DFLASH_SIMD_NAME(kPeak) = {DFLASH_SIMD_NAMESPACE::ReadAll,
                                             DFLASH_SIMD_NAMESPACE::MultiplyAdd};

}  // namespace dflash::bench
