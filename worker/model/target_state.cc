#include "worker/model/target_state.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/state_export.h"

namespace dflash {

absl::StatusOr<TargetState> TargetState::Allocate(const TargetConfig& config, int64_t max_block_rows,
                                                  int64_t checkpoints, const SequenceTable* table,
                                                  const Stream& stream) {
  TargetState state;
  state.layers_ = config.layers;
  state.kv_heads_ = config.num_key_value_heads;
  state.head_dim_ = config.head_dim;
  state.conv_taps_ = config.conv_kernel;
  state.max_block_rows_ = max_block_rows;
  state.checkpoints_ = checkpoints;
  state.shape_ = {.key_heads = config.linear_key_heads,
                  .value_heads = config.linear_value_heads,
                  .key_dim = config.linear_key_head_dim,
                  .value_dim = config.linear_value_head_dim};
  state.table_ = table;
  state.stream_ = &stream;
  const size_t layers = config.layers.size();
  for (std::vector<Buffer>* pools :
       {&state.key_value_pages_, &state.conv_states_, &state.recurrent_states_, &state.delta_records_,
        &state.checkpoint_states_, &state.checkpoint_convs_})
    pools->resize(layers);
  const int64_t state_bytes = state.shape_.StateFloats() * int64_t{sizeof(float)};
  const int64_t record_bytes = state.shape_.RecordFloats() * int64_t{sizeof(float)};
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto allocate = [&](std::vector<Buffer>& pools, int64_t bytes) -> absl::Status {
      DFLASH_ASSIGN_OR_RETURN(pools[layer], Buffer::Allocate(bytes, stream));
      return absl::OkStatus();
    };
    if (state.IsFull(layer)) {
      DFLASH_RETURN_IF_ERROR(
          allocate(state.key_value_pages_, table->pages() * state.Pool(layer).PageBytes()));
      continue;
    }
    DFLASH_RETURN_IF_ERROR(allocate(state.conv_states_, state.Conv(layer).Bytes()));
    DFLASH_RETURN_IF_ERROR(allocate(state.recurrent_states_, table->slots() * state_bytes));
    // Records are double-buffered.
    DFLASH_RETURN_IF_ERROR(
        allocate(state.delta_records_, table->slots() * 2 * max_block_rows * record_bytes));
    DFLASH_RETURN_IF_ERROR(allocate(state.checkpoint_states_, checkpoints * state_bytes));
    DFLASH_RETURN_IF_ERROR(allocate(state.checkpoint_convs_, state.CheckpointConv(layer).Bytes()));
  }
  return state;
}

KeyValuePool TargetState::Pool(size_t layer) const {
  return {.data = key_value_pages_[layer].data(),
          .page_count = table_->pages(),
          .kv_heads = kv_heads_,
          .head_dim = head_dim_};
}

GatedDeltaNetState TargetState::Recurrent(size_t layer) const {
  return {.states = recurrent_states_[layer].As<float>(),
          .records = delta_records_[layer].As<float>(),
          .slots = table_->slots(),
          .max_rows = max_block_rows_};
}

ConvState TargetState::Conv(size_t layer) const {
  return {.data = conv_states_[layer].data(),
          .slots = table_->slots(),
          .taps = conv_taps_,
          .channels = shape_.QkvCols()};
}

ConvState TargetState::CheckpointConv(size_t layer) const {
  return {.data = checkpoint_convs_[layer].data(),
          .slots = checkpoints_,
          .taps = conv_taps_,
          .channels = shape_.QkvCols()};
}

MatrixView TargetState::RecurrentRows(const Buffer& pool, int32_t index) const {
  return MatrixView(pool.As<float>() + index * shape_.StateFloats(), shape_.value_heads,
                    shape_.key_dim * shape_.value_dim);
}

MatrixView TargetState::ConvRow(const Buffer& pool, int32_t index) const {
  char* row = pool.As<char>() + index * conv_values() * SizeOf(ActivationDType());
  return MatrixView(row, ActivationDType(), 1, conv_values(), conv_values());
}

absl::Status TargetState::KeepRecurrent(size_t layer, int32_t slot, int32_t checkpoint) {
  return CopyRows(RecurrentRows(recurrent_states_[layer], slot),
                  RecurrentRows(checkpoint_states_[layer], checkpoint), *stream_);
}

absl::Status TargetState::Open(int32_t slot) {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (IsFull(layer)) continue;
    const int64_t state_bytes = shape_.StateFloats() * int64_t{sizeof(float)};
    const int64_t conv_bytes = conv_values() * SizeOf(ActivationDType());
    DFLASH_RETURN_IF_ERROR(
        ZeroFill(recurrent_states_[layer].As<char>() + slot * state_bytes, state_bytes, *stream_));
    DFLASH_RETURN_IF_ERROR(
        ZeroFill(conv_states_[layer].As<char>() + slot * conv_bytes, conv_bytes, *stream_));
  }
  return absl::OkStatus();
}

absl::Status TargetState::Restore(int32_t slot, int32_t checkpoint) {
  if (checkpoint < 0 || checkpoint >= checkpoints_)
    return absl::InvalidArgumentError(absl::StrCat("checkpoint ", checkpoint, " of ", checkpoints_));
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (IsFull(layer)) continue;
    DFLASH_RETURN_IF_ERROR(CopyRows(RecurrentRows(checkpoint_states_[layer], checkpoint),
                                    RecurrentRows(recurrent_states_[layer], slot), *stream_));
    DFLASH_RETURN_IF_ERROR(CopyRows(ConvRow(checkpoint_convs_[layer], checkpoint),
                                    ConvRow(conv_states_[layer], slot), *stream_));
  }
  return absl::OkStatus();
}

absl::Status TargetState::Fold(const int32_t* slots, int64_t count) {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (IsFull(layer)) continue;
    DFLASH_RETURN_IF_ERROR(
        GatedDeltaNetFold(shape_, slots, count, table_->pending(), Recurrent(layer), *stream_));
  }
  return absl::OkStatus();
}

absl::Status TargetState::FillPages(const std::vector<int32_t>& pages, float value) {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (IsFull(layer)) DFLASH_RETURN_IF_ERROR(FillKeyValue(Pool(layer), pages, value, *stream_));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<float>>> TargetState::Export(int32_t slot) const {
  std::vector<std::vector<float>> stores;
  const int64_t length = table_->lengths(slot).target_kv;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (IsFull(layer)) {
      DFLASH_ASSIGN_OR_RETURN(std::vector<std::vector<float>> kv,
                              ExportKeyValue(Pool(layer), table_->page_table(), slot, length, *stream_));
      std::move(kv.begin(), kv.end(), std::back_inserter(stores));
      continue;
    }
    const int64_t floats = shape_.StateFloats();
    std::vector<float> recurrent(static_cast<size_t>(floats));
    DFLASH_RETURN_IF_ERROR(CopyToHost(recurrent.data(), recurrent_states_[layer].As<float>() + slot * floats,
                                      floats * int64_t{sizeof(float)}, *stream_));
    stores.push_back(std::move(recurrent));
    DFLASH_ASSIGN_OR_RETURN(std::vector<float> conv,
                            ActivationsToHost(ConvRow(conv_states_[layer], slot), *stream_));
    stores.push_back(std::move(conv));
  }
  return stores;
}

}  // namespace dflash
