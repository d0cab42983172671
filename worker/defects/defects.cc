#include "worker/defects/defects.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/defect_names.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "worker/draft/forwarding_drafter.h"

namespace dflash {
namespace {

// --- in the contract

void TapsOneTooLow(FeatureContract& contract) {
  for (LayerIndex& tap : contract.taps) tap = LayerIndex{Number(tap) - 1};
}
void TapsPermuted(FeatureContract& contract) {
  std::rotate(contract.taps.begin(), contract.taps.begin() + 1, contract.taps.end());
}
void WindowsDropped(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) mask.window = 0;
}
void WindowsOneTooLong(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) mask.window += mask.window > 0;
}
void SlidingBidirectional(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) {
    if (mask.kind == DraftLayerKind::kSliding) mask.causal = false;
  }
}
void FullCausal(FeatureContract& contract) {
  for (DraftLayerMask& mask : contract.layers) {
    if (mask.kind == DraftLayerKind::kFull) mask.causal = true;
  }
}
void ClassicThree(FeatureContract& contract) {
  TapsOneTooLow(contract);
  WindowsDropped(contract);
  SlidingBidirectional(contract);
}
void TargetsNorm(FeatureContract& contract) { contract.norm_weight = NormWeight::kOnePlus; }
// Drafters of this family have 1e6 or 1e7; converters have written the one for the other.
void OtherTheta(FeatureContract& contract) { contract.rope_theta = contract.rope_theta == 1e7 ? 1e6 : 1e7; }
void PartialRotary(FeatureContract& contract) { contract.rotary_fraction = 0.25; }

// --- around the drafter

// Owns the drafter that it changes. Defects are made by looking at device memory, so no round is captured.
class Wrapper : public ForwardingDrafter {
 public:
  Wrapper(std::unique_ptr<Drafter> drafter, SequenceTable* table, const Stream* stream)
      : ForwardingDrafter(drafter.get()), table_(table), stream_(stream), drafter_(std::move(drafter)) {}
  bool is_capturable() const override { return false; }

 protected:
  template <typename T>
  absl::StatusOr<std::vector<T>> Read(const T* device, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    DFLASH_RETURN_IF_ERROR(CopyToHost(values.data(), device, count * int64_t{sizeof(T)}, *stream_));
    return values;
  }
  template <typename T>
  absl::Status Write(T* device, const std::vector<T>& values) const {
    return CopyToDevice(device, values.data(), static_cast<int64_t>(values.size() * sizeof(T)), *stream_);
  }

  SequenceTable* table_;
  const Stream* stream_;

 private:
  std::unique_ptr<Drafter> drafter_;
};

// As a prefix cache would that restores the target's state of a prompt but not the drafter's.
class DropsHalfThePrompt final : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override {
    for (const CommittedRows& sequence : rows) {
      if (sequence.phase != Phase::kPrefill) continue;
      // The end of the prompt is known once its last chunk is here; earlier chunks set a lower start.
      const int64_t prompt_so_far = sequence.start_position + sequence.row_count;
      DFLASH_RETURN_IF_ERROR(table_->SetDraftContextStart(sequence.slot, prompt_so_far / 2));
    }
    return ForwardingDrafter::Ingest(taps, rows);
  }
};

class KeepsTheLastChunk final : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override {
    for (const CommittedRows& sequence : rows) {
      if (sequence.phase != Phase::kPrefill) continue;
      DFLASH_RETURN_IF_ERROR(table_->SetDraftContextStart(sequence.slot, sequence.start_position));
    }
    return ForwardingDrafter::Ingest(taps, rows);
  }
};

// Ingestion of verified rows with other segments and counts than the round's; the lengths move as the round
// says, so that nothing but the content is wrong.
class ChangesVerifiedRows : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments,
                              const int32_t* row_counts) override {
    DFLASH_ASSIGN_OR_RETURN(std::vector<Segment> changed, Read(segments.data, segments.count));
    DFLASH_ASSIGN_OR_RETURN(std::vector<int32_t> counts, Read(row_counts, segments.count));
    std::vector<int32_t> correction = counts;
    for (size_t i = 0; i < changed.size(); ++i) {
      Change(changed[i], counts[i]);
      correction[i] -= counts[i];
    }
    DFLASH_ASSIGN_OR_RETURN(const Buffer list,
                            Buffer::Allocate(segments.count * int64_t{sizeof(Segment)}, *stream_));
    DFLASH_ASSIGN_OR_RETURN(const Buffer numbers,
                            Buffer::Allocate(segments.count * int64_t{sizeof(int32_t)}, *stream_));
    DFLASH_RETURN_IF_ERROR(Write(list.As<Segment>(), changed));
    DFLASH_RETURN_IF_ERROR(Write(numbers.As<int32_t>(), counts));
    DFLASH_RETURN_IF_ERROR(ForwardingDrafter::IngestVerified(
        taps, {.data = list.As<Segment>(), .count = segments.count}, numbers.As<int32_t>()));
    int32_t* ends = table_->device_lengths().draft_context_end;
    for (size_t i = 0; i < changed.size(); ++i) {
      DFLASH_ASSIGN_OR_RETURN(std::vector<int32_t> end, Read(ends + changed[i].slot, 1));
      end[0] += correction[i];
      DFLASH_RETURN_IF_ERROR(Write(ends + changed[i].slot, end));
    }
    return stream_->Synchronize();  // the buffers go
  }

 protected:
  // Of one sequence: the rows that its round verified, and how many of them were accepted.
  virtual void Change(Segment& rows, int32_t& count) = 0;
};

class ShiftsByTheRejected final : public ChangesVerifiedRows {
 public:
  using ChangesVerifiedRows::ChangesVerifiedRows;

 protected:
  void Change(Segment& rows, int32_t& count) override {
    rows.start_position = std::max(0, rows.start_position - (rows.row_count - count));
  }
};

class KeepsRejectedRows final : public ChangesVerifiedRows {
 public:
  using ChangesVerifiedRows::ChangesVerifiedRows;
  absl::Status Open(int32_t slot, int64_t start) override {
    written_end_.erase(slot);
    return ForwardingDrafter::Open(slot, start);
  }

 protected:
  // Every position keeps the first row that was ever verified for it.
  void Change(Segment& rows, int32_t& count) override {
    int32_t& end = written_end_[rows.slot];
    const int32_t skip = std::clamp(end - rows.start_position, 0, rows.row_count);
    rows.first_row += skip;
    rows.start_position += skip;
    rows.row_count -= skip;
    count = rows.row_count;
    end = std::max(end, rows.start_position + rows.row_count);
  }

 private:
  std::map<int32_t, int32_t> written_end_;  // by slot
};

class ChangesProposals : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override {
    DFLASH_RETURN_IF_ERROR(ForwardingDrafter::Propose(states, slots, count, proposals));
    DFLASH_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, Read(proposals.tokens, count * proposals.depth));
    for (int32_t& token : tokens) token = Change(token);
    return Write(proposals.tokens, tokens);
  }

 protected:
  virtual int32_t Change(int32_t token) = 0;
};

// All logits are zero, and ties go to the lowest id; all tokens are equally probable, which is as good as 0.
class ZeroHead final : public ChangesProposals {
 public:
  using ChangesProposals::ChangesProposals;
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override {
    DFLASH_RETURN_IF_ERROR(ChangesProposals::Propose(states, slots, count, proposals));
    if (proposals.confidences == nullptr) return absl::OkStatus();
    return Write(proposals.confidences, std::vector<float>(static_cast<size_t>(count * proposals.depth)));
  }

 protected:
  int32_t Change(int32_t) override { return 0; }
};

class StripsMask final : public ChangesProposals {
 public:
  StripsMask(int32_t mask, std::unique_ptr<Drafter> drafter, SequenceTable* table, const Stream* stream)
      : ChangesProposals(std::move(drafter), table, stream), mask_(mask) {}

 protected:
  int32_t Change(int32_t token) override { return token == mask_ ? -1 : token; }

 private:
  int32_t mask_;
};

// --- all of them

using Wrap = std::unique_ptr<Drafter> (*)(int32_t mask, std::unique_ptr<Drafter>, SequenceTable*,
                                          const Stream*);
template <typename T>
std::unique_ptr<Drafter> Make(int32_t, std::unique_ptr<Drafter> drafter, SequenceTable* table,
                              const Stream* stream) {
  return std::make_unique<T>(std::move(drafter), table, stream);
}
std::unique_ptr<Drafter> MakeStripsMask(int32_t mask, std::unique_ptr<Drafter> drafter, SequenceTable* table,
                                        const Stream* stream) {
  return std::make_unique<StripsMask>(mask, std::move(drafter), table, stream);
}

constexpr char kThinkingFlag[] = "thinking-flag";

struct Defect {
  const char* name;
  void (*mutate)(FeatureContract&) = nullptr;  // null: not in the contract
  Wrap wrap = nullptr;                         // null: not around the drafter
};
constexpr Defect kDefects[] = {{"offset0", TapsOneTooLow},
                               {"permuted-taps", TapsPermuted},
                               {"noswa", WindowsDropped},
                               {"window-off-by-one", WindowsOneTooLong},
                               {"noncausal", SlidingBidirectional},
                               {"full-causal", FullCausal},
                               {"vllm0201", ClassicThree},
                               {"target-norm", TargetsNorm},
                               {"theta", OtherTheta},
                               {"partial-rotary", PartialRotary},
                               {"dropprefix", nullptr, Make<DropsHalfThePrompt>},
                               {"last-chunk", nullptr, Make<KeepsTheLastChunk>},
                               {"shifted-context", nullptr, Make<ShiftsByTheRejected>},
                               {"rejected-kept", nullptr, Make<KeepsRejectedRows>},
                               {"zero-head", nullptr, Make<ZeroHead>},
                               {"mask-stripped", nullptr, MakeStripsMask},
                               {kThinkingFlag}};

constexpr bool HaveTheirNames() {
  if (std::size(kDefects) != std::size(kDefectNames)) return false;
  for (size_t i = 0; i < std::size(kDefects); ++i) {
    if (kDefects[i].name != kDefectNames[i]) return false;
  }
  return true;
}
static_assert(HaveTheirNames(), "base/defect_names.h has other defects");

absl::StatusOr<Defect> Find(const std::string& name) {
  for (const Defect& defect : kDefects) {
    if (name == defect.name) return defect;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown defect ", name));
}

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

absl::StatusOr<std::unique_ptr<Drafter>> PlantDefect(const std::string& name, const FeatureContract& contract,
                                                     std::unique_ptr<Drafter> drafter, SequenceTable* table,
                                                     const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(const Defect defect, Find(name));
  if (defect.wrap == nullptr) return drafter;
  return defect.wrap(contract.mask_token_id, std::move(drafter), table, &stream);
}

absl::Status PlantDefect(const std::string& name, std::optional<bool>& enable_thinking) {
  DFLASH_RETURN_IF_ERROR(Find(name).status());
  if (name == kThinkingFlag) enable_thinking = !enable_thinking.value_or(true);
  return absl::OkStatus();
}

}  // namespace dflash
