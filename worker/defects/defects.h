// The integration defects that other engines are known for, to be planted on purpose: in what was loaded (the
// feature contract) or around the drafter of the serving path. The configuration is read as ever, so a doctor
// that looks at files alone sees nothing. Acceptance that the classic ones cost: tests/golden/README.md.
// Two libraries implement this header: worker_defects (tests, preset `defects`) and worker_no_defects (every
// other build), whose only answer is Unimplemented.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/drafter.h"
#include "worker/model/feature_contract.h"

namespace dflash {

// In the contract:
//   offset0            tap ids one too low
//   permuted-taps      taps concatenated in another order
//   noswa              windows dropped, still causal
//   window-off-by-one  windows one token too long
//   noncausal          sliding layers bidirectional in the block
//   full-causal        full layers causal
//   vllm0201           offset0, noswa and noncausal together
//   target-norm        the target's norms, (1 + w), in the drafter
//   theta              RoPE's base from another place than the drafter's own
//   partial-rotary     the target's partial rotary factor
// Around the drafter:
//   dropprefix         a prefix restored without drafter context: the first half of the prompt is hidden
//   last-chunk         only the last prefill chunk's taps are kept
//   shifted-context    accepted rows enter the context at positions shifted by the rejected count
//   rejected-kept      rejected rows stay in the context
//   zero-head          the drafter's head is zero
//   mask-stripped      drafts equal to the mask token are stripped
// In the prompt:
//   thinking-flag      the chat template's thinking flag is the other one
// Empty outside builds with defects.
std::vector<std::string> DefectNames();

// Mutates a loaded contract; changes nothing for defects elsewhere. InvalidArgument: unknown name.
// Unimplemented: a build without defects.
absl::Status PlantDefect(const std::string& name, FeatureContract& contract);

// The drafter as the defect leaves it: `drafter` itself, or a wrapper around it that cannot be captured.
// Table and stream are not owned. Errors as PlantDefect.
absl::StatusOr<std::unique_ptr<Drafter>> PlantDefect(const std::string& name, const FeatureContract& contract,
                                                     std::unique_ptr<Drafter> drafter, SequenceTable* table,
                                                     const Stream& stream);

// The template variable enable_thinking as the defect leaves it. Errors as PlantDefect.
absl::Status PlantDefect(const std::string& name, std::optional<bool>& enable_thinking);

}  // namespace dflash
