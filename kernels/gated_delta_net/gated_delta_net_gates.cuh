#pragma once

#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net_cuda.h"

namespace dflash {

struct Gates {
  float beta, g;
};

__device__ __forceinline__ Gates GatesOf(const DeltaTask& task, int64_t row, int32_t head) {
  const float step = SoftplusF32(task.decay.At(row, head) + task.dt_bias[head]);
  return {SigmoidF32(task.beta.At(row, head)), -(ExpF32(task.a_log[head]) * step)};
}

__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

}  // namespace dflash
