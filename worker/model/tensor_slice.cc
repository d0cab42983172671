#include "worker/model/tensor_slice.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace dflash {
namespace {

enum class Cut : uint8_t {
  kWhole,       // every rank keeps everything
  kRows,        // the rank's share of the rows: whole heads, or feed-forward channels
  kCols,        // the rank's share of the columns
  kKeyValue,    // rows of whole key/value heads; one head serves several ranks where there are more of them
  kQkv,         // three row ranges of their own: queries, keys, values of Gated DeltaNet
  kVocabulary,  // rows of the vocabulary, padded to the same number on every rank
};

struct CutRule {
  std::string_view name;  // the canonical name ends with it, after nothing or a dot
  Cut cut;
};

constexpr CutRule kCutRules[] = {
    {"embed_tokens.weight", Cut::kVocabulary},
    {"lm_head.weight", Cut::kVocabulary},
    {"q_proj.weight", Cut::kRows},  // the target's query and gate rows of a head lie together
    {"k_proj.weight", Cut::kKeyValue},
    {"v_proj.weight", Cut::kKeyValue},
    {"o_proj.weight", Cut::kCols},
    {"in_proj_qkv.weight", Cut::kQkv},
    {"conv1d.weight", Cut::kQkv},
    {"in_proj_z.weight", Cut::kRows},
    {"in_proj_a.weight", Cut::kRows},
    {"in_proj_b.weight", Cut::kRows},
    {"A_log", Cut::kRows},
    {"dt_bias", Cut::kRows},
    {"out_proj.weight", Cut::kCols},
    {"gate_proj.weight", Cut::kRows},
    {"up_proj.weight", Cut::kRows},
    {"down_proj.weight", Cut::kCols},
    {"fc.weight", Cut::kCols},
    {"norm.weight", Cut::kWhole},
    {"input_layernorm.weight", Cut::kWhole},
    {"post_attention_layernorm.weight", Cut::kWhole},
    {"q_norm.weight", Cut::kWhole},
    {"k_norm.weight", Cut::kWhole},
    {"hidden_norm.weight", Cut::kWhole},
};

Cut CutOf(std::string_view name) {
  for (const CutRule& rule : kCutRules) {
    if (!name.ends_with(rule.name)) continue;
    const size_t before = name.size() - rule.name.size();
    if (before == 0 || name[before - 1] == '.') return rule.cut;
  }
  DFLASH_CHECK(false, std::string(name).c_str());  // a tensor that nobody has cut
  return Cut::kWhole;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sizes that the cuts need, of the whole model.
struct Sizes {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t linear_keys = 0;    // rows of the Gated DeltaNet's queries, as many of its keys
  int64_t linear_values = 0;  // rows of its values
};

TensorSlice SliceTensor(const ExpectedTensor& tensor, const Sizes& sizes, GroupRank rank) {
  const int64_t rows = tensor.shape[0].size;
  int64_t cols = 1;
  for (size_t i = 1; i < tensor.shape.size(); ++i) cols *= tensor.shape[i].size;
  const auto share = [&](int64_t offset, int64_t count) {
    return TensorBlock{offset + rank.rank * (count / rank.size), count / rank.size, 0, cols};
  };
  switch (CutOf(tensor.name)) {
    case Cut::kWhole:
      return {.blocks = {{0, rows, 0, cols}}};
    case Cut::kRows:
      return {.blocks = {share(0, rows)}};
    case Cut::kCols:
      return {.blocks = {{0, rows, rank.rank * (cols / rank.size), cols / rank.size}}};
    case Cut::kKeyValue: {
      if (rank.size <= sizes.kv_heads) return {.blocks = {share(0, rows)}};
      const int64_t head = rank.rank * sizes.kv_heads / rank.size;
      return {.blocks = {{head * sizes.head_dim, sizes.head_dim, 0, cols}}};
    }
    case Cut::kQkv:
      return {.blocks = {share(0, sizes.linear_keys), share(sizes.linear_keys, sizes.linear_keys),
                         share(2 * sizes.linear_keys, sizes.linear_values)}};
    case Cut::kVocabulary: {
      const int64_t padded = CeilDiv(rows, rank.size);
      const int64_t first = std::min(rows, rank.rank * padded);
      const int64_t count = std::min(padded, rows - first);
      return {.blocks = {{first, count, 0, cols}}, .zero_rows = padded - count};
    }
  }
  return {};
}

TensorSlices SliceAll(const std::vector<ExpectedTensor>& tensors, const Sizes& sizes, GroupRank rank) {
  TensorSlices slices;
  for (const ExpectedTensor& tensor : tensors) slices[tensor.name] = SliceTensor(tensor, sizes, rank);
  return slices;
}

// Divides sizes of one configuration file over the ranks.
class Divider {
 public:
  Divider(const std::string& origin, GroupRank rank) : origin_(origin), rank_(rank) {}

  void Divide(int64_t& size, const char* key) {
    if (size % rank_.size != 0) Fail(size, key, "does not divide by");
    size /= rank_.size;
  }
  void DivideOrRepeat(int64_t& heads, const char* key) {
    if (heads % rank_.size != 0 && rank_.size % heads != 0)
      Fail(heads, key, "neither divides by nor divides");
    heads = std::max<int64_t>(1, heads / rank_.size);
  }
  const absl::Status& status() const { return status_; }

 private:
  void Fail(int64_t size, const char* key, const char* what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat(origin_, ": ", key, " ", size, " ", what, " the ", rank_.size, " ranks of the group"));
  }

  const std::string& origin_;
  GroupRank rank_;
  absl::Status status_;
};

}  // namespace

int64_t TensorSlice::rows() const {
  int64_t rows = zero_rows;
  for (const TensorBlock& block : blocks) rows += block.row_count;
  return rows;
}

absl::StatusOr<TargetConfig> RankConfig(const TargetConfig& config, GroupRank rank) {
  TargetConfig local = config;
  Divider divider(config.origin, rank);
  divider.Divide(local.num_attention_heads, "num_attention_heads");
  divider.DivideOrRepeat(local.num_key_value_heads, "num_key_value_heads");
  divider.Divide(local.linear_key_heads, "linear_num_key_heads");
  divider.Divide(local.linear_value_heads, "linear_num_value_heads");
  divider.Divide(local.intermediate_size, "intermediate_size");
  local.vocab_size = CeilDiv(config.vocab_size, rank.size);
  DFLASH_RETURN_IF_ERROR(divider.status());
  return local;
}

absl::StatusOr<DraftConfig> RankConfig(const DraftConfig& config, GroupRank rank) {
  DraftConfig local = config;
  Divider divider(config.origin, rank);
  divider.Divide(local.num_attention_heads, "num_attention_heads");
  divider.DivideOrRepeat(local.num_key_value_heads, "num_key_value_heads");
  divider.Divide(local.intermediate_size, "intermediate_size");
  int64_t hidden = config.hidden_size;  // of fc's input, whatever the number of taps
  divider.Divide(hidden, "hidden_size");
  DFLASH_RETURN_IF_ERROR(divider.status());
  return local;
}

TensorSlices SliceTensors(const TargetConfig& config, GroupRank rank) {
  return SliceAll(ExpectedTensors(config),
                  {.kv_heads = config.num_key_value_heads,
                   .head_dim = config.head_dim,
                   .linear_keys = config.linear_key_heads * config.linear_key_head_dim,
                   .linear_values = config.linear_value_size()},
                  rank);
}

TensorSlices SliceTensors(const DraftConfig& config, GroupRank rank) {
  return SliceAll(ExpectedTensors(config),
                  {.kv_heads = config.num_key_value_heads, .head_dim = config.head_dim}, rank);
}

absl::StatusOr<HostTensor> ReadSlice(const Checkpoint& checkpoint, const TensorInfo& tensor,
                                     const TensorSlice& slice, int64_t first_row, int64_t row_count,
                                     const ReadProgress& progress) {
  if (slice.blocks.size() == 1 && first_row + row_count <= slice.blocks[0].row_count) {  // nothing to stack
    TensorBlock block = slice.blocks[0];
    block.first_row += first_row;
    block.row_count = row_count;
    return checkpoint.Read(tensor, block, progress);
  }
  DFLASH_CHECK(first_row >= 0 && first_row + row_count <= slice.rows(), tensor.name.c_str());
  DFLASH_ASSIGN_OR_RETURN(HostTensor stacked, HostTensor::Allocate(tensor.dtype, row_count, slice.cols()));
  const int64_t row_bytes = slice.cols() * SizeOf(tensor.dtype);
  std::byte* to = stacked.data();
  int64_t skip = first_row;
  int64_t left = row_count;
  for (TensorBlock block : slice.blocks) {
    const int64_t skipped = std::min(skip, block.row_count);
    block.first_row += skipped;
    block.row_count = std::min(block.row_count - skipped, left);
    skip -= skipped;
    left -= block.row_count;
    DFLASH_RETURN_IF_ERROR(checkpoint.ReadInto(tensor, block, to, block.row_count * row_bytes, progress));
    to += block.row_count * row_bytes;
  }
  std::memset(to, 0, static_cast<size_t>(left * row_bytes));
  return stacked;
}

}  // namespace dflash
