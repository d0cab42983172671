// A drafter that hands every call on to another one: the base of those that do one thing differently.
#pragma once

#include <vector>

#include "worker/draft/drafter.h"

namespace dflash {

class ForwardingDrafter : public Drafter {
 public:
  int64_t max_drafts() const override { return inner_->max_drafts(); }
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override {
    return inner_->Ingest(taps, rows);
  }
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments,
                              const int32_t* row_counts) override {
    return inner_->IngestVerified(taps, segments, row_counts);
  }
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override {
    return inner_->Propose(states, slots, count, proposals);
  }
  bool is_capturable() const override { return inner_->is_capturable(); }
  absl::Status Open(int32_t slot, int64_t start) override { return inner_->Open(slot, start); }

 protected:
  // Not owned.
  explicit ForwardingDrafter(Drafter* inner) : inner_(inner) {}
  Drafter* inner() const { return inner_; }

 private:
  Drafter* inner_;
};

}  // namespace dflash
