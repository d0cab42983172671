// Requests of every kind, and ways to run them in each other's company: what one gets must not depend on it.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/engine/engine.h"
#include "worker/testing/tiny_pair.h"

namespace dflash::testing {

struct MixedRequestsOptions {
  int64_t longest_prompt = 320;
  int64_t most_tokens = 64;  // of an output
};

// `count` requests made from a seed: chat, code and stitched prompts of every length, greedy and sampled in
// every way, with whole blocks, short ones and none, ended by tokens, strings and budgets, from several
// clients with several priorities.
std::vector<GenerationRequest> MixedRequests(size_t count, uint32_t seed,
                                             const MixedRequestsOptions& options);

// Some of the parameters that change what a request may choose or what it reports, at random.
void AddParameters(std::mt19937& random, GenerationRequest& request);

// Each request run to its end before the next one is submitted.
absl::StatusOr<std::vector<GenerationOutcome>> RunOneByOne(Engine& engine,
                                                           const std::vector<GenerationRequest>& requests);

struct Company {
  uint32_t seed = 1;
  uint32_t most_arrivals = 4;  // in a step
  size_t cancelled = 0;        // further requests that are cancelled on the way
};

// The requests arrive at random steps, among others that are cancelled at random steps. Everything is run to
// its end; outcomes are those of `requests`, in their order.
absl::StatusOr<std::vector<GenerationOutcome>> RunInCompany(Engine& engine,
                                                            const std::vector<GenerationRequest>& requests,
                                                            const Company& company);

// Adds up what the steps of an engine did.
class StepTotals final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges& gauges) override;
  int64_t steps = 0, mixed_steps = 0, preemptions = 0, refed_rows = 0, drafted = 0, accepted = 0;
  int64_t most_running = 0;
};

// Tokens, text, reason and every round of the two are equal.
void ExpectSameOutcome(const GenerationOutcome& actual, const GenerationOutcome& expected);

}  // namespace dflash::testing
