// From what the probe wrote down to findings. Pure functions: nothing here runs the serving path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/doctor/draft_reference.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/report.h"
#include "worker/golden/golden_bundle.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {

using golden::ContractOf;
using golden::ExpectedContract;
using golden::GoldenBundle;
using golden::GoldenPrompt;

// How far numbers may be apart: max |error| / rms.
struct Gates {
  double golden = 0;  // against another implementation's float32
  double stage = 0;   // one stage against double precision
  double margin = 0;  // logits further apart than this keep their order
  // Relative loss of tokens per round, by kind of text. Near ties of 16-bit arithmetic change texts, and from
  // there on rounds are others: four prompts of 1.46 tokens per round then scatter by several percent.
  double acceptance = 0;
};
// Of the backend's activations.
Gates GatesFor(DType activations);

// What all checks know.
struct Checks {
  Report* report = nullptr;
  DraftReference* reference = nullptr;
  const TargetConfig* target_config = nullptr;
  const GoldenBundle* bundle = nullptr;  // null: none
  ExpectedContract own;                  // of our reader of config.json
  bool target_recorded = false;          // the bundle was recorded with these weights, as far as it says
  bool drafter_recorded = false;
  Gates gates;
  int64_t vocabulary = 0;  // real token ids
  int ranks = 1;

  // What the masks, taps and rotation have to be: literals of the bundle only.
  const ExpectedContract* expected() const { return bundle == nullptr ? nullptr : &bundle->contract(); }

  // Sequences; `golden[i]` is the prompt of the bundle that sequences[i] is, if any. sequences[0] is shorter
  // than every window.
  struct Sequences {
    std::vector<SequenceRecord> records;
    std::vector<std::optional<size_t>> golden;
    SequenceRecord perturbed;  // records[0] with another token at perturbed_at
    int64_t perturbed_at = 0;
  };
  absl::Status CheckTarget(const Sequences& sequences) const;
  absl::Status CheckTaps(const Sequences& sequences) const;
  absl::Status CheckContext(const Sequences& sequences) const;  // fusion, injection, rope, next-token
  absl::Status CheckBlock(const Sequences& sequences) const;    // embedding, masks, layers, head, positions
  absl::Status CheckDraftLogits(const Sequences& sequences) const;

  // A context longer than every window, in one chunk and in chunks of a page.
  absl::Status CheckLongContext(const SequenceRecord& whole, const SequenceRecord& chunked,
                                const SequenceRecord& brief) const;
  // `alone`: the same sequences by themselves; forced: the output chooses the mask token.
  absl::Status CheckTogether(const Probe::Together& together, const std::vector<const SequenceRecord*>& alone,
                             bool forced) const;
  void CheckVerifyRows(const Probe::VerifyRecord& record) const;
  void CheckRounds(const RoundsRecord& record, int64_t block_size) const;

  // An output of the drafter's final norm for which the head chooses the mask token; empty rows: none was
  // found.
  absl::StatusOr<Rows> OutputForMask() const;

 private:
  // The closest mask among all causal flags and `windows`, the first of the list where several are.
  struct MaskMatch {
    bool causal = false;
    int64_t window = 0;
    double error = 0;
  };
  MaskMatch ClosestMask(const SequenceRecord& record, size_t layer, const std::vector<bool>& causal,
                        const std::vector<int64_t>& windows) const;
  // The rotation that explains keys best.
  struct RotationMatch {
    Rotation rotation;
    double error = 0;
  };
  RotationMatch ClosestRotation(const Rows& unrotated, const Rows& rotated,
                                const std::vector<int64_t>& positions, const Rotation& first) const;
  std::string Against(const Sequences& sequences) const;
};

}  // namespace dflash::doctor
