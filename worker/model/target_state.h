// What the target keeps of its sequences, layer by layer: pages of keys and values where a layer attends to
// all positions; recurrent and conv states of every slot, with delta records, where it is linear; and
// checkpoints of those states, as if they were slots. Views only: what is written there and when is the
// target's. Source: docs/ARCHITECTURE.md "State of a sequence".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/attention/attention.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "worker/cache/sequence_table.h"
#include "worker/model/target_config.h"

namespace dflash {

// Not thread-safe. Everything is enqueued on the stream; only Export waits for it.
class TargetState {
 public:
  TargetState() = default;
  // `config`: what this rank computes with. max_block_rows: delta records of a slot. `table`, whose slots and
  // pages these are, and `stream` are not owned and must outlive it. Errors: ResourceExhausted.
  static absl::StatusOr<TargetState> Allocate(const TargetConfig& config, int64_t max_block_rows,
                                              int64_t checkpoints, const SequenceTable* table,
                                              const Stream& stream);

  bool IsFull(size_t layer) const { return layers_[layer] == TargetLayerKind::kFullAttention; }
  // Of a full layer.
  KeyValuePool Pool(size_t layer) const;
  // Of a linear layer.
  const GatedDeltaNetShape& shape() const { return shape_; }
  GatedDeltaNetState Recurrent(size_t layer) const;
  ConvState Conv(size_t layer) const;
  ConvState CheckpointConv(size_t layer) const;
  // Makes a slot's recurrent state that of a checkpoint, in a linear layer.
  absl::Status KeepRecurrent(size_t layer, int32_t slot, int32_t checkpoint);

  // Sets a slot's recurrent and conv states to zero, or to a checkpoint's. InvalidArgument: no such
  // checkpoint.
  absl::Status Open(int32_t slot);
  absl::Status Restore(int32_t slot, int32_t checkpoint);
  // Folds pending delta records of slots into their recurrent states; slots: device memory.
  absl::Status Fold(const int32_t* slots, int64_t count);

  // Overwrites keys and values of whole pages.
  absl::Status FillPages(const std::vector<int32_t>& pages, float value);
  // Target::ExportState, of a slot that has nothing pending.
  absl::StatusOr<std::vector<std::vector<float>>> Export(int32_t slot) const;

 private:
  // One slot's recurrent states of a layer in either pool, one row per head; its conv states, as one row.
  MatrixView RecurrentRows(const Buffer& pool, int32_t index) const;
  MatrixView ConvRow(const Buffer& pool, int32_t index) const;
  int64_t conv_values() const { return (conv_taps_ - 1) * shape_.QkvCols(); }

  std::vector<TargetLayerKind> layers_;
  int64_t kv_heads_ = 0, head_dim_ = 0, conv_taps_ = 0;
  int64_t max_block_rows_ = 0, checkpoints_ = 0;
  GatedDeltaNetShape shape_;
  const SequenceTable* table_ = nullptr;
  const Stream* stream_ = nullptr;
  // By layer; empty where a layer is of the other kind.
  std::vector<Buffer> key_value_pages_;
  std::vector<Buffer> conv_states_;
  std::vector<Buffer> recurrent_states_;
  std::vector<Buffer> delta_records_;
  std::vector<Buffer> checkpoint_states_;
  std::vector<Buffer> checkpoint_convs_;
};

}  // namespace dflash
