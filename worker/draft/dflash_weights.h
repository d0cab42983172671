// One rank's share of the DFlash drafter's weights on the device. It has no embedding and no head: both are
// the target's.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"
#include "worker/model/checkpoint.h"
#include "worker/model/tensor_slice.h"

namespace dflash {

struct DFlashLayerWeights {
  Matrix input_norm, post_attention_norm;
  LinearWeight q;
  LinearWeight kv;  // keys, values; the same for context features and for block rows
  Matrix q_norm, k_norm;
  LinearWeight out;
  LinearWeight gate_up, down;
};

struct DFlashWeights {
  LinearWeight fc;  // [D, taps * D / ranks]
  Matrix hidden_norm;
  std::vector<DFlashLayerWeights> layers;
  Matrix norm;
};

// Reads and uploads the rank's slices; `config` is the whole drafter's and RankConfig accepts the group.
// Errors: those of Checkpoint::Read; ResourceExhausted.
absl::StatusOr<DFlashWeights> LoadDFlashWeights(const DraftConfig& config, const DraftCheckpoint& checkpoint,
                                                GroupRank rank, const Stream& stream,
                                                const ReadProgress& progress);

}  // namespace dflash
