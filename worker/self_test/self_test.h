// The self-test of a worker group: a few golden prompts through its own engine before it serves. It asks what
// can be known at start: is the drafter read as recorded, does speculation leave the text alone, and are as
// many drafts accepted as where the bundle was made? The doctor says which interface is to blame.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/engine/engine.h"
#include "worker/golden/golden_bundle.h"
#include "worker/model/feature_contract.h"

namespace dflash {

// Two plain tokens: a checkpoint whose weights are no numbers, or a device that computes none, is found
// before a client is served. Runs the engine as RunSelfTest does. Errors: those of Engine::Step; Internal
// with reason NUMERIC_FAULT: the target's logits are not numbers.
absl::Status CheckTargetComputes(Engine* engine);

struct SelfTestOptions {
  int64_t max_prompts = 4;  // the best predicted ones of every kind, in turn
  int64_t max_tokens = 64;  // of each
  std::vector<int32_t> stop_token_ids = {};
  // Smallest share of the recorded tokens per round, by kind of prompt, that passes. Near ties of 16-bit
  // arithmetic move single rounds.
  double least_share = 0.8;
  // The same where the engine's max_verify_rows cuts blocks: their rounds begin elsewhere than the recorded
  // ones, which are counted as if they had been cut, too.
  double least_share_of_cut = 0.5;
};

struct SelfTestReport {
  bool passed = false;
  std::string detail = {};  // one sentence
};

// Runs the engine on the calling thread, before its Run; nothing else may be submitted. Errors: those of
// Engine::Step; InvalidArgument, naming bundle and prompt: no prompt fits into the context or has recorded
// rounds, or the engine refuses one.
absl::StatusOr<SelfTestReport> RunSelfTest(const golden::GoldenBundle& bundle,
                                           const FeatureContract& contract, const SelfTestOptions& options,
                                           Engine* engine);

}  // namespace dflash
