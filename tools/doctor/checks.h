// From what the probe wrote down to findings. Nothing here runs the serving path. One function per interface,
// or per few that are read off the same numbers; a file per stage:
//
//   text_checks.cc          tokenizer, template
//   target_checks.cc        target, tap-point, tap-alignment, next-token, tap-layer, tap-order
//   context_checks.cc       fusion, injection, rope
//   block_checks.cc         embedding, masks, draft-layers, positions, block-size
//   draft_checks.cc         head, draft-rows, dtype, draft-logits, batching, draft-temperature, mask-token
//   long_context_checks.cc  window, paging, chunked-prefill, prefix (the first half)
//   round_checks.cc         verify-rows, acceptance, rollback, context-update
//
// Elsewhere: files, weights, config in doctor.cc, revisions in revisions.cc, and in engine_checks.cc what
// only whole requests show: ranks, preemption, prefix (the second half), sampling, limits, metrics,
// calibration, end-to-end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "text/tokenizer.h"
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
  // How far honest rounding may move what weights make sensitive: some unit roundoffs, of activations for
  // numbers that are kept, and of float32, in which sums run whatever the activations are.
  Rounding rounding;
};
// Of the backend's activations.
inline Gates GatesFor(DType activations) {
  return activations == DType::kF32 ? Gates{.golden = 5e-5,
                                            .stage = 2e-5,
                                            .margin = 1e-4,
                                            .rounding = {.number = 16 * 0x1p-24, .sum = 16 * 0x1p-24}}
                                    : Gates{.golden = 0.2,
                                            .stage = 0.06,
                                            .margin = 0.25,
                                            .rounding = {.number = 4 * 0x1p-8, .sum = 16 * 0x1p-24}};
}

// The pair that is examined, as every check knows it. Nothing is owned.
struct Subject {
  Report* report = nullptr;
  DraftReference* reference = nullptr;
  const TargetConfig* target_config = nullptr;
  const GoldenBundle* bundle = nullptr;  // null: none
  ExpectedContract own;                  // of our reader of config.json
  bool target_recorded = false;          // the bundle was recorded with these weights, as far as it says
  bool drafter_recorded = false;
  Gates gates;
  int64_t vocabulary = 0;  // real token ids

  // What taps, masks and rotation have to be: literals of the bundle. Without one it is what our reader says,
  // which shares the mistakes of the serving path: enough to say what is seen, never to pass or to fail it.
  const ExpectedContract& contract() const { return bundle == nullptr ? own : bundle->contract(); }
};

// --- texts

absl::Status CheckTokenizer(const Subject& subject, const Tokenizer& tokenizer);
// Renders with the template in `model_folder`, and with the thinking flag as the planted defect leaves it.
absl::Status CheckTemplate(const Subject& subject, const std::string& model_folder,
                           const std::string& defect);

// --- the first draft pass of several prompts

struct Sequences {
  std::vector<SequenceRecord> records;        // the first one is shorter than every window
  std::vector<std::optional<size_t>> golden;  // golden[i] is the prompt of the bundle that records[i] is
  // records[0] with another token at perturbed_at; none where all tokens have one embedding
  std::optional<SequenceRecord> perturbed;
  int64_t perturbed_at = 0;
};
absl::Status CheckTarget(const Subject& subject, const Sequences& sequences);
absl::Status CheckTaps(const Subject& subject, const Sequences& sequences);
// After CheckTaps: what the bundle says of fusion counts only behind taps that are right.
absl::Status CheckContext(const Subject& subject, const Sequences& sequences);
absl::Status CheckBlock(const Subject& subject, const SequenceRecord& record);
absl::Status CheckDrafts(const Subject& subject, const DraftPass& pass);
absl::Status CheckDraftLogits(const Subject& subject, const Sequences& sequences);

// --- a context that is longer than every window

// `whole` in one chunk, `chunked` in chunks of a page, `brief` shorter than every window.
absl::Status CheckLongContext(const Subject& subject, const SequenceRecord& whole,
                              const SequenceRecord& chunked, const SequenceRecord& brief);

// --- sequences in company

// An output of the drafter's final norm for which the head chooses the mask token.
struct MaskOutput {
  Rows y;              // [1, D]
  int64_t second = 0;  // the best of all other tokens
};
// None: none was found.
absl::StatusOr<std::optional<MaskOutput>> OutputForMask(const Subject& subject);
// After CheckDrafts. `alone`: the same sequences by themselves. output: what `together.forced` came of.
void CheckTogether(const Subject& subject, const Probe::Together& together,
                   const std::vector<const SequenceRecord*>& alone, const std::optional<MaskOutput>& output);

// --- rounds

void CheckVerifyRows(const Subject& subject, const Probe::VerifyRecord& record);
void CheckRounds(const Subject& subject, const RoundsRecord& record, int64_t block_size);

}  // namespace dflash::doctor
