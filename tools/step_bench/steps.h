// Whole steps and rounds of a group at work: what the engine enqueues, timed on the device and by the host's
// clock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sampling/sampling.h"
#include "worker/decode/decode_rounds.h"
#include "worker/load_group.h"

namespace dflash::bench {

// Sequences with equally long prompts of random tokens that decode together.
struct RoundCase {
  int64_t sequences = 1;
  int64_t context_tokens = 1024;
  SamplingParams sampling;
  // Of the synthetic acceptance of whole blocks. Uniform: drafts accepted are uniform in [0, 2 (this - 1)].
  // Geometric: each one is accepted with the same probability if those before it are.
  double tokens_per_round = 6.5;
  enum class Acceptance : uint8_t { kUniform, kGeometric } acceptance = Acceptance::kUniform;
  std::vector<int64_t> block_rows;  // lengths of blocks, in this order; empty: whole blocks
  int64_t rounds = 48;              // that are timed
};

// One entry per timed round, in seconds.
struct RoundTimes {
  std::vector<double> draft, target, sample, commit, ingest;  // of DecodeRounds::Outcome, on the device
  std::vector<double> round;                                  // by the host's clock, from result to result
};

struct DraftedFigures {
  int64_t block_rows = 0;
  RoundTimes times;
  double tokens_per_round = 0;  // committed, measured
};

struct RoundFigures {
  RoundTimes plain;                     // one row a sequence, no drafter at all
  std::vector<DraftedFigures> drafted;  // a block of rows a sequence
  std::vector<int32_t> acceptance;      // drafts accepted in the timed rounds of whole blocks
};

// Decodes plainly, then the same prompts again with drafts that are accepted as scheduled, once for every
// length. Errors: DataLoss when the two texts differ; those of the group; ResourceExhausted when slots or
// pages do not suffice.
absl::StatusOr<RoundFigures> MeasureRounds(const Group& group, const RoundCase& c,
                                           int64_t max_prefill_tokens);

// What so many sequences get in all, tokens a second.
struct LoadFigures {
  double plain = 0, best = 0;
  int64_t best_rows = 1;  // of a block
  double chosen = 0;      // with the length that the scheduler chooses, told these times and acceptances
  int64_t chosen_rows = 1;
};
LoadFigures SumUpLoad(const RoundCase& c, const RoundFigures& figures, int64_t whole_block_rows);

// Seconds that a prompt of so many random tokens takes, in pieces of max_prefill_tokens, drafter context
// included.
absl::StatusOr<std::vector<double>> MeasurePrefill(const Group& group, int64_t tokens,
                                                   int64_t max_prefill_tokens, int repeats);

// Seconds from the arrival of a request of random tokens at the engine to its first token.
absl::StatusOr<std::vector<double>> MeasureFirstToken(Engine& engine, int64_t vocabulary, int64_t tokens,
                                                      int repeats);

}  // namespace dflash::bench
