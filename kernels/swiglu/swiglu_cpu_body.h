// Included once per instruction set.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"
#include "kernels/swiglu/swiglu_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {
namespace {

void SiluProduct(const float* gate, const float* up, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(y + i, Silu(Load(gate + i)) * Load(up + i));
  if (i == count) return;
  const int lanes = static_cast<int>(count - i);
  StorePartial(y + i, Silu(LoadPartial(gate + i, lanes)) * LoadPartial(up + i, lanes), lanes);
}

void MultiplyBySigmoid(const float* gate, int64_t count, float* x) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(x + i, Load(x + i) * Sigmoid(Load(gate + i)));
  if (i == count) return;
  const int lanes = static_cast<int>(count - i);
  StorePartial(x + i, LoadPartial(x + i, lanes) * Sigmoid(LoadPartial(gate + i, lanes)), lanes);
}

}  // namespace
}  // namespace DFLASH_SIMD_NAMESPACE

const SwiGluKernels DFLASH_SIMD_NAME(kSwiGlu) = {DFLASH_SIMD_NAMESPACE::SiluProduct,
                                                 DFLASH_SIMD_NAMESPACE::MultiplyBySigmoid};

}  // namespace dflash
