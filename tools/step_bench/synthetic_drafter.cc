#include "tools/step_bench/synthetic_drafter.h"

#include "base/matrix_view.h"
#include "base/status.h"

namespace dflash::bench {

absl::StatusOr<std::unique_ptr<SyntheticDrafter>> SyntheticDrafter::Create(Drafter* real,
                                                                           int64_t max_sequences,
                                                                           const Stream& stream) {
  const int64_t bytes = max_sequences * real->max_drafts() * int64_t{sizeof(int32_t)};
  DFLASH_ASSIGN_OR_RETURN(Buffer schedule, Buffer::Allocate(bytes, stream));
  return std::unique_ptr<SyntheticDrafter>(new SyntheticDrafter(real, &stream, std::move(schedule)));
}

absl::Status SyntheticDrafter::Schedule(const std::vector<std::vector<int32_t>>& proposals) {
  std::vector<int32_t> all;
  for (const std::vector<int32_t>& proposal : proposals)
    all.insert(all.end(), proposal.begin(), proposal.end());
  return CopyToDevice(schedule_.data(), all.data(), static_cast<int64_t>(all.size() * sizeof(int32_t)),
                      *stream_);
}

absl::Status SyntheticDrafter::Propose(DecodeStates states, const int32_t* slots, int64_t count,
                                       const Proposals& proposals) {
  DFLASH_RETURN_IF_ERROR(ForwardingDrafter::Propose(states, slots, count, proposals));
  // Copied as 32-bit words, whatever they mean.
  const int64_t cols = proposals.depth;
  return CopyRows(ConstMatrixView(schedule_.data(), DType::kF32, count, cols, max_drafts()),
                  MatrixView(proposals.tokens, DType::kF32, count, cols, cols), *stream_);
}

}  // namespace dflash::bench
