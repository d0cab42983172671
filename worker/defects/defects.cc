#include "worker/defects/defects.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

void TapsOneTooLow(FeatureContract& contract) {
  for (LayerIndex& tap : contract.taps) tap = LayerIndex{Number(tap) - 1};
}

void WindowsDropped(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) mask.window = 0;
}

void SlidingBidirectional(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) mask.causal = false;
}

void AllThree(FeatureContract& contract) {
  TapsOneTooLow(contract);
  WindowsDropped(contract);
  SlidingBidirectional(contract);
}

struct Defect {
  const char* name;
  void (*mutate)(FeatureContract&);  // null: not in the contract
};
constexpr Defect kDefects[] = {{"offset0", TapsOneTooLow},
                               {"noswa", WindowsDropped},
                               {"noncausal", SlidingBidirectional},
                               {"vllm0201", AllThree},
                               {"dropprefix", nullptr}};

absl::StatusOr<Defect> Find(const std::string& name) {
  for (const Defect& defect : kDefects) {
    if (name == defect.name) return defect;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown defect ", name));
}

// As a prefix cache would that restores the target's state of a prompt but not the drafter's.
class DropsHalfThePrompt final : public Drafter {
 public:
  DropsHalfThePrompt(std::unique_ptr<Drafter> drafter, SequenceTable* table)
      : drafter_(std::move(drafter)), table_(table) {}
  int64_t max_drafts() const override { return drafter_->max_drafts(); }
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override {
    for (const CommittedRows& sequence : rows) {
      if (sequence.phase != Phase::kPrefill) continue;
      // The end of the prompt is known once its last chunk is here; earlier chunks set a lower start.
      const int64_t prompt_so_far = sequence.start_position + sequence.row_count;
      DFLASH_RETURN_IF_ERROR(table_->SetDraftContextStart(sequence.slot, prompt_so_far / 2));
    }
    return drafter_->Ingest(taps, rows);
  }
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments,
                              const int32_t* row_counts) override {
    return drafter_->IngestVerified(taps, segments, row_counts);
  }
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       int32_t* proposals) override {
    return drafter_->Propose(states, slots, count, proposals);
  }
  bool is_capturable() const override { return drafter_->is_capturable(); }
  absl::Status Open(int32_t slot, int64_t start) override { return drafter_->Open(slot, start); }

 private:
  std::unique_ptr<Drafter> drafter_;
  SequenceTable* table_;
};

}  // namespace

std::vector<std::string> DefectNames() {
  std::vector<std::string> names;
  for (const Defect& defect : kDefects) names.emplace_back(defect.name);
  return names;
}

absl::Status PlantDefect(const std::string& name, FeatureContract& contract) {
  DFLASH_ASSIGN_OR_RETURN(const Defect defect, Find(name));
  if (defect.mutate != nullptr) defect.mutate(contract);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Drafter>> PlantDefect(const std::string& name,
                                                     std::unique_ptr<Drafter> drafter, SequenceTable* table) {
  DFLASH_ASSIGN_OR_RETURN(const Defect defect, Find(name));
  if (defect.mutate != nullptr) return drafter;
  return std::make_unique<DropsHalfThePrompt>(std::move(drafter), table);
}

}  // namespace dflash
