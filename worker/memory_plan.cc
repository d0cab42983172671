#include "worker/memory_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/attention/attention.h"
#include "kernels/gated_delta_net/gated_delta_net.h"

namespace dflash {
namespace {

constexpr int64_t kFloat = sizeof(float);

std::string Gigabytes(int64_t bytes) { return absl::StrFormat("%.3f GB", static_cast<double>(bytes) / 1e9); }

int64_t PageBytes(int64_t kv_heads, int64_t head_dim, DType activation) {
  return 2 * kPageTokens * kv_heads * head_dim * SizeOf(activation);
}

}  // namespace

int64_t WeightBytes(const Checkpoint& checkpoint, const TensorSlices& slices, bool tied_embeddings) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    const TensorSlice& slice = slices.find(name)->second;
    const int64_t size = slice.rows() * slice.cols() * SizeOf(tensor.dtype);
    bytes += size;
    if (tied_embeddings && name == "embed_tokens.weight") bytes += size;
  }
  return bytes;
}

int64_t MemoryPlan::total() const {
  int64_t total = 0;
  for (const MemoryPool& pool : pools) total += pool.bytes;
  return total;
}

std::vector<std::string> MemoryPlan::Lines() const {
  std::vector<std::string> lines;
  for (const MemoryPool& pool : pools)
    lines.push_back(absl::StrFormat("memory: %10s  %s", Gigabytes(pool.bytes), pool.name));
  lines.push_back(absl::StrFormat("memory: %10s  in all", Gigabytes(total())));
  return lines;
}

MemoryPlan PlanMemory(const MemoryDemand& demand) {
  const TargetConfig& target = demand.target;
  const int64_t act = SizeOf(demand.activation);
  const auto full_layers = static_cast<int64_t>(
      std::count(target.layers.begin(), target.layers.end(), TargetLayerKind::kFullAttention));
  const int64_t linear_layers = target.num_layers() - full_layers;
  const GatedDeltaNetShape gdn = {.key_heads = target.linear_key_heads,
                                  .value_heads = target.linear_value_heads,
                                  .key_dim = target.linear_key_head_dim,
                                  .value_dim = target.linear_value_head_dim};
  const int64_t query_cols = target.num_attention_heads * target.head_dim;
  const int64_t kv_cols = target.num_key_value_heads * target.head_dim;
  const int64_t full_cols = 2 * query_cols + 2 * kv_cols;
  const int64_t linear_cols = gdn.QkvCols() + target.linear_value_size() + 2 * target.linear_value_heads;

  const char* cache_flag =
      demand.pages_of_sequence > 0 ? "--cache-tokens or --max-sequences" : "--cache-tokens";

  MemoryPlan plan;
  plan.pools.push_back({"weights", "target weights", demand.target_weight_bytes, ""});
  plan.pools.push_back(
      {"kv", absl::StrCat("target keys and values: ", demand.pages * kPageTokens, " tokens"),
       demand.pages * full_layers * PageBytes(target.num_key_value_heads, target.head_dim, demand.activation),
       cache_flag});
  plan.pools.push_back({"state", absl::StrCat("recurrent states: ", demand.sequences, " sequences"),
                        demand.sequences * linear_layers * gdn.StateFloats() * kFloat, "--max-sequences"});
  plan.pools.push_back(
      {"delta_records", "delta records",
       demand.sequences * linear_layers * 2 * demand.block_rows * gdn.RecordFloats() * kFloat,
       "--max-sequences"});
  plan.pools.push_back({"conv_state", "convolution states",
                        demand.sequences * linear_layers * (target.conv_kernel - 1) * gdn.QkvCols() * act,
                        "--max-sequences"});
  plan.pools.push_back({"checkpoint",
                        absl::StrCat("state checkpoints of the prefix cache: ", demand.checkpoints),
                        demand.checkpoints * linear_layers *
                            (gdn.StateFloats() * kFloat + (target.conv_kernel - 1) * gdn.QkvCols() * act),
                        "--prefix-checkpoints"});
  // Scratch, as Target::Load has it.
  const int64_t verify_rows = demand.sequences * demand.block_rows;
  const int64_t rows = std::max(demand.prefill_rows, verify_rows);
  const char* scratch_flag = demand.prefill_rows > verify_rows ? "--max-prefill-tokens" : "--max-sequences";
  const int64_t logits_rows = verify_rows + demand.sequences;
  plan.pools.push_back(
      {"scratch", "target scratch",
       act * (verify_rows * (full_layers * full_cols + linear_layers * linear_cols) +
              demand.prefill_rows * std::max(full_cols, linear_cols) +
              rows * (3 * target.hidden_size + std::max(query_cols, target.linear_value_size()) +
                      gdn.QkvCols() + 3 * target.intermediate_size) +
              logits_rows * target.hidden_size +
              (demand.prefill_rows + verify_rows) * demand.taps * target.hidden_size) +
           logits_rows * target.vocab_size * kFloat,
       scratch_flag});
  if (!demand.drafter) return plan;

  const DraftConfig& drafter = *demand.drafter;
  const int64_t draft_kv_cols = drafter.num_key_value_heads * drafter.head_dim;
  plan.pools.push_back({"draft_weights", "drafter weights", demand.drafter_weight_bytes, ""});
  plan.pools.push_back({"draft_kv", "drafter keys and values",
                        demand.pages * drafter.num_layers() *
                            PageBytes(drafter.num_key_value_heads, drafter.head_dim, demand.activation),
                        cache_flag});
  plan.pools.push_back(
      {"draft_scratch", "drafter scratch",
       act * (demand.prefill_rows * (2 * drafter.hidden_size + 2 * draft_kv_cols) +
              verify_rows * (4 * drafter.hidden_size + 2 * drafter.num_attention_heads * drafter.head_dim +
                             2 * draft_kv_cols + 3 * drafter.intermediate_size)) +
           verify_rows * target.vocab_size * kFloat,
       scratch_flag});
  return plan;
}

int64_t PagesThatFit(MemoryDemand demand, int64_t bytes) {
  demand.pages = 0;
  const int64_t without = PlanMemory(demand).total();
  demand.pages = 1;
  const int64_t page = PlanMemory(demand).total() - without;
  return std::max<int64_t>((bytes - kMemoryReserve - without) / page, 0);
}

absl::Status CheckFits(const std::vector<MemoryDemand>& ranks, const MemoryRoom& room) {
  // The same change to the demands of all ranks.
  const auto with = [&](auto&& change) {
    std::vector<MemoryDemand> changed = ranks;
    for (MemoryDemand& demand : changed) change(demand);
    return changed;
  };
  const auto needed = [&](const std::vector<MemoryDemand>& demands) {
    int64_t bytes = room.reserve;
    for (const MemoryDemand& demand : demands) bytes += PlanMemory(demand).total();
    return bytes;
  };
  if (needed(ranks) <= room.bytes) return absl::OkStatus();

  const MemoryDemand& first = ranks.front();
  std::vector<MemoryPool> pools = PlanMemory(first).pools;  // of all ranks; the first has every kind
  for (size_t i = 1; i < ranks.size(); ++i) {
    for (const MemoryPool& pool : PlanMemory(ranks[i]).pools) {
      for (MemoryPool& sum : pools) sum.bytes += sum.kind == pool.kind ? pool.bytes : 0;
    }
  }
  const MemoryPool& most = *std::max_element(pools.begin(), pools.end(),
                                             [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  std::string text = absl::StrCat(
      "the memory is too small: ", Gigabytes(needed(ranks)), " are needed for ", first.sequences,
      " sequences, a cache of ", first.pages * kPageTokens, " tokens and ", first.checkpoints,
      " prefix checkpoints, most of it for ", most.name, " (", Gigabytes(most.bytes),
      most.flag.empty() ? "" : "; less with ", most.flag, "), ", Gigabytes(room.bytes), " are ", room.name);

  struct Choice {
    int64_t MemoryDemand::*field;
    int64_t least;  // that is worth anything
    int64_t unit;   // of the field, in what the flag counts
    const char* flag;
    const char* what;  // after a number
  };
  constexpr Choice kChoices[] = {
      {&MemoryDemand::pages, 1, kPageTokens, "--cache-tokens", "tokens in the cache"},
      {&MemoryDemand::sequences, 1, 1, "--max-sequences", "sequences"},
      {&MemoryDemand::checkpoints, 0, 1, "--prefix-checkpoints", "prefix checkpoints"},
      {&MemoryDemand::prefill_rows, 64, 1, "--max-prefill-tokens", "prompt tokens in a step"}};
  bool any = false;
  for (const Choice& choice : kChoices) {
    const auto fits = [&](int64_t value) {
      return needed(with([&](MemoryDemand& demand) {
               demand.*choice.field = value;
               if (choice.field == &MemoryDemand::sequences && demand.pages_of_sequence > 0)
                 demand.pages = value * demand.pages_of_sequence;
             })) <= room.bytes;
    };
    int64_t low = choice.least, high = first.*choice.field;  // high does not fit
    if (low >= high || !fits(low)) continue;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    absl::StrAppend(&text, "; ", low * choice.unit, " ", choice.what, " would fit (", choice.flag, " ",
                    low * choice.unit, ")");
    any = true;
  }
  if (!any) {
    int64_t weights = 0;
    for (const MemoryDemand& demand : ranks)
      weights += demand.target_weight_bytes + demand.drafter_weight_bytes;
    const std::vector<MemoryDemand> least = with([&](MemoryDemand& demand) {
      for (const Choice& choice : kChoices) demand.*choice.field = choice.least;
    });
    absl::StrAppend(&text, "; one sequence, ", kPageTokens, " tokens and no prefix cache need ",
                    Gigabytes(needed(least)), ", of which the weights are ", Gigabytes(weights));
  }
  return absl::ResourceExhaustedError(text);
}

}  // namespace dflash
