// Which part of every tensor a rank of a tensor-parallel group keeps. Column-parallel projections keep whole
// heads (rows of the stored matrix), the row-parallel ones that follow them keep the matching columns, so a
// layer needs one sum over the ranks after attention and one after its feed-forward block.
// Source: docs/spec/qwen3_5.md "Tensor parallelism".
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/host_tensor.h"
#include "worker/model/target_config.h"

namespace dflash {

// Rank `rank` of `size`, 0 <= rank < size.
struct GroupRank {
  int64_t rank = 0;
  int64_t size = 1;
};

// What one rank computes with: `config` with heads, feed-forward width and rows of the vocabulary replaced by
// the rank's share. vocab_size becomes ceil(vocab_size / size), the same for every rank: the last ones may
// hold rows of zeros that stand for no token. Key/value heads are repeated where the group has more ranks
// than heads. Errors: InvalidArgument naming the file and the key that does not divide.
absl::StatusOr<TargetConfig> RankConfig(const TargetConfig& config, GroupRank rank);
absl::StatusOr<DraftConfig> RankConfig(const DraftConfig& config, GroupRank rank);

// Blocks of a stored tensor, stacked in this order, then `zero_rows` rows of zeros.
struct TensorSlice {
  std::vector<TensorBlock> blocks;
  int64_t zero_rows = 0;

  int64_t rows() const;
  int64_t cols() const { return blocks.front().col_count; }
};

// A rank's slice of every tensor of ExpectedTensors(config), by canonical name. `config` is the whole model's
// and RankConfig accepts the group.
using TensorSlices = std::map<std::string, TensorSlice, std::less<>>;
TensorSlices SliceTensors(const TargetConfig& config, GroupRank rank);
TensorSlices SliceTensors(const DraftConfig& config, GroupRank rank);

// Rows [first_row, first_row + row_count) of a slice, and no other byte of the files. Errors: those of
// Checkpoint::Read.
absl::StatusOr<HostTensor> ReadSlice(const Checkpoint& checkpoint, const TensorInfo& tensor,
                                     const TensorSlice& slice, int64_t first_row, int64_t row_count,
                                     const ReadProgress& progress);

}  // namespace dflash
