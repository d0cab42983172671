// One rank's share of the target's weights on the device. Projections that read the same input are stacked
// into one matrix.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"
#include "worker/model/checkpoint.h"
#include "worker/model/tensor_slice.h"

namespace dflash {

struct FullAttentionWeights {
  LinearWeight in;  // queries of all heads, output gates of all heads, keys, values
  Matrix q_norm, k_norm;
  LinearWeight out;
};

struct LinearAttentionWeights {
  LinearWeight in;        // q, k, v (conv inputs), z, b, a
  Matrix conv;            // [channels, taps]
  Buffer a_log, dt_bias;  // f32 [value_heads]
  Matrix norm;
  LinearWeight out;
};

struct LayerWeights {
  Matrix input_norm, post_attention_norm;
  std::optional<FullAttentionWeights> full;  // exactly one of the two
  std::optional<LinearAttentionWeights> linear;
  LinearWeight gate_up, down;
};

struct TargetWeights {
  Matrix embedding;  // [rows of the vocabulary, D] as stored
  std::vector<LayerWeights> layers;
  Matrix final_norm;
  LinearWeight head;
};

// Reads and uploads the rank's slices; `config` is the whole model's. Errors: those of RankConfig and
// Checkpoint::Read; ResourceExhausted.
absl::StatusOr<TargetWeights> LoadTargetWeights(const TargetConfig& config,
                                                const TargetCheckpoint& checkpoint, GroupRank rank,
                                                const Stream& stream, const ReadProgress& progress);

}  // namespace dflash
