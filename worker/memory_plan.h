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
  int64_t pages_of_sequence = 0;  // where `pages` are so many for each of `sequences`; 0: said by themselves
  int64_t block_rows = 1;         // rows of one sequence in a verification
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
  std::string flag;  // that makes it smaller; empty: none does
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

// What pools have to fit into.
struct MemoryRoom {
  int64_t bytes = 0;
  int64_t reserve = 0;  // bytes of it for the runtime's own needs
  std::string name;     // ends the sentence "24.000 GB are ..."
};
inline constexpr int64_t kMemoryReserve = int64_t{512}
                                          << 20;  // graphs, rounding of allocations, staging of weights

// ResourceExhausted when the plans of `ranks`, in their order, which share the memory and differ in nothing
// but their shares of the model, do not fit into `room` together; the message says what is needed, which pool
// takes most of it and which flag makes that smaller, and how many cached tokens, sequences, checkpoints or
// prompt rows would fit.
absl::Status CheckFits(const std::vector<MemoryDemand>& ranks, const MemoryRoom& room);

}  // namespace dflash
