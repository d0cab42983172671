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

  // VERIFY rows: what the preparing kernel leaves to the recurrence, float32, one row per row of the step.
  float* q;          // [T, KeyCols()] normalized and scaled (k goes to the records)
  float* key_query;  // [T, key_heads] k . q
  float* gates;      // [T, 2, value_heads] beta, then e^g
  Bf16Rows v;        // [T, value_heads * value_dim]
  bool is_prepared;  // false: there are no rows

  // Convolution before the recurrence, when conv_taps is not 0.
  int32_t conv_taps;
  Parameters conv_weight;  // [channels, taps]
  Bf16Rows conv_state;     // row slot * (taps - 1) + j
  // Rows and heads of qkv, v and conv_state are whole pieces of 16 bytes; conv_weight is bf16, without gaps,
  // and begins at a multiple of 16 bytes.
  bool inputs_vectorized;
  bool floats_aligned;  // heads of records, q and v are whole pieces of 16 bytes, pairs in states of 8

  // Norm behind it: LaunchDeltaMixer alone.
  Parameters norm_weight;
  Bf16Rows z;
  bool norm_is_silu;
  float norm_eps;

  __host__ __device__ int64_t KeyCols() const { return int64_t{key_heads} * key_dim; }
};

// Floats of the workspace that `rows` rows of a verification take.
constexpr int64_t DeltaScratchFloats(int64_t rows, int64_t key_cols, int64_t key_heads, int64_t value_heads) {
  return rows * (key_cols + key_heads + 2 * value_heads);
}

// Verification, first half: convolution of four taps (if task.conv_taps is 4; v is then written to task.v),
// q, k, gates. `rows`: of the step.
cudaError_t LaunchDeltaPrepare(const DeltaTask& task, int64_t rows, const CudaContext& context);

// Second half, right behind the first; or the fold of `count` slots when task.fold_slots is set. `count`
// segments or slots.
cudaError_t LaunchDeltaVerify(const DeltaTask& task, int64_t count, const CudaContext& context);

// Both halves with the convolution of four taps before and the norm behind them, nothing in the workspace.
// key_dim = value_dim = 128, conv_weight as inputs_vectorized says, heads of states and records at multiples
// of 16 bytes, of qkv, conv_state, z and o of 8; compute capability 9.0.
cudaError_t LaunchDeltaMixer(const DeltaTask& task, int64_t count, const CudaContext& context);

// `rows`: of the step.
cudaError_t LaunchDeltaPrefill(const DeltaTask& task, int64_t rows, const CudaContext& context);

}  // namespace dflash
