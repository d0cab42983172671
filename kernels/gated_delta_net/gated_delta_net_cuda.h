// What the CUDA kernels of Gated DeltaNet are told. Private to kernels/gated_delta_net.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/batch/segments.h"
#include "kernels/device/cuda/context.h"
#include "kernels/device/cuda/vector.cuh"

namespace dflash {

inline constexpr int kMaxKeyDim = 128;

struct DeltaTask {
  int32_t key_heads, value_heads, key_dim, value_dim;
  Bf16Rows qkv, o;
  Parameters beta, decay;  // the logits b and a
  const float* a_log;
  const float* dt_bias;
  float query_scale;  // 1 / sqrt(key_dim)
  const Segment* segments;
  int32_t segment_count;
  const int32_t* fold_slots;  // not null: no rows, these slots
  const int32_t* pending_buffer;
  const int32_t* pending_count;
  float* states;
  float* records;
  int32_t max_rows;
  int64_t record_floats;

  __host__ __device__ int64_t KeyCols() const { return int64_t{key_heads} * key_dim; }
};

// Verification, or the fold of `count` slots when task.fold_slots is set; `count` segments or slots.
cudaError_t LaunchDeltaVerify(const DeltaTask& task, int64_t count, const CudaContext& context);

// `rows`: of the step.
cudaError_t LaunchDeltaPrefill(const DeltaTask& task, int64_t rows, const CudaContext& context);

}  // namespace dflash
