// What a worker will allocate on its device, by pool, known before the first weight is read: so a model that
// does not fit is refused at once, with the numbers that would.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/dtype.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"
#include "worker/model/tensor_slice.h"

namespace dflash {

// Everything that the size of the pools follows from. Configurations are the rank's (RankConfig).
struct MemoryDemand {
  TargetConfig target;
  int64_t target_weight_bytes = 0;
  std::optional<DraftConfig> drafter;  // none: no drafter on this rank
  int64_t drafter_weight_bytes = 0;
  int64_t taps = 0;
  int64_t sequences = 1;
  int64_t pages = 1;
  int64_t block_rows = 1;  // rows of one sequence in a verification
  int64_t prefill_rows = 512;
  int64_t checkpoints = 0;  // of recurrent and convolution states, for the prefix cache
  DType activation = DType::kBf16;
};

// Bytes of a rank's slices of all tensors, embedding and head of tied embeddings counted twice, as they are
// held.
int64_t WeightBytes(const Checkpoint& checkpoint, const TensorSlices& slices, bool tied_embeddings);

struct MemoryPool {
  std::string kind;  // label of metrics::kMemoryBytes
  std::string name;  // for people
  int64_t bytes = 0;
};

struct MemoryPlan {
  std::vector<MemoryPool> pools;

  int64_t total() const;
  // One line per pool and one for the whole, for the log.
  std::vector<std::string> Lines() const;
};

MemoryPlan PlanMemory(const MemoryDemand& demand);

// The most pages with which the plan of `demand`, whatever its own pages, and the reserve fit into `bytes`;
// 0: none.
int64_t PagesThatFit(MemoryDemand demand, int64_t bytes);

// ResourceExhausted when the plan of `demand` and a reserve for the runtime's own needs do not fit into
// `free_bytes`; the message says what is needed, what is free, and how many cached tokens, or how many
// sequences, would fit.
absl::Status CheckFits(const MemoryDemand& demand, int64_t free_bytes);
inline constexpr int64_t kMemoryReserve = int64_t{512}
                                          << 20;  // graphs, rounding of allocations, staging of weights

}  // namespace dflash
