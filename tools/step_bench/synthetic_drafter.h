// A drafter whose proposals are accepted as a schedule says, for measurements on weights that mean nothing:
// all work of the real drafter is done, then its proposals are overwritten. The text is still the target's
// own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "worker/draft/forwarding_drafter.h"

namespace dflash::bench {

class SyntheticDrafter final : public ForwardingDrafter {
 public:
  // `real` and `stream` are not owned. Errors: ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<SyntheticDrafter>> Create(Drafter* real, int64_t max_sequences,
                                                                  const Stream& stream);

  // What the next round's sequences propose, in their order, max_drafts() tokens each. Enqueued: call it
  // before the round is.
  absl::Status Schedule(const std::vector<std::vector<int32_t>>& proposals);

  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override;

 private:
  SyntheticDrafter(Drafter* real, const Stream* stream, Buffer schedule)
      : ForwardingDrafter(real), stream_(stream), schedule_(std::move(schedule)) {}
  const Stream* stream_;
  Buffer schedule_;  // int32 [max_sequences, max_drafts]
};

}  // namespace dflash::bench
