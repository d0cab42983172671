// How many rows the sequences of a decode round verify: with few sequences a whole block of drafts costs
// hardly more than one row, with many of them rows are what a step costs, and drafts that are mostly refused
// cost more than they give. A pure function of what was measured (docs/adr/0018-block-length-by-load.md). The
// text does not depend on it.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/engine/round_costs.h"

namespace dflash {

// How often drafts were accepted lately, by their depth.
class DraftSurvival {
 public:
  // A round of a sequence. What lies behind a refused draft, or was not drafted, says nothing.
  void Observe(int64_t drafted, int64_t accepted);
  // A round without drafts: the text goes on, and what was observed before it weighs less against the next
  // observation. Plain rounds are probed rarely, and without this a hundred probes would be needed to forget.
  void Fade();
  // Entry d: the probability that draft d + 1 is accepted, and so all before it. Depths of which little is
  // known count as good, so that they are tried.
  std::vector<double> Probabilities(int64_t depths) const;

 private:
  // How often the draft before was accepted (or this is the first), and how often this one too. What is
  // believed of it before it is known: one hard beginning is not enough to give up.
  struct Depth {
    double reached = 16, accepted = 15.2;
  };
  std::vector<Depth> depths_;
};

enum class BlockReason : uint8_t {
  kWhole,     // blocks are never cut
  kRowLimit,  // the rows of a round are limited
  kNoDrafts,  // nobody in the round may speculate
  kAsked,     // a request wants whole blocks
  kBest,      // most tokens a second
  kProbe,     // to know again what another length costs and gives
};
const char* Name(BlockReason reason);  // for metrics: "whole", "row_limit", ...

// Everything that was measured and decided so far.
struct BlockStatistics {
  // All sequences that draft have the rows of the longest of them (captured rounds). Otherwise costs are kept
  // by what they have on average.
  bool uniform_rows = false;
  RoundCosts costs;
  DraftSurvival survival;
  int64_t rows = 0;  // of the last round that was not a probe; 0: there was none
  int64_t rounds_since_probe = 0;
  double seconds_since_probe = 0;  // of those rounds
};

struct BlockChoice {
  int64_t rows = 1;  // anchor and drafts; 1 is plain decoding
  BlockReason reason = BlockReason::kWhole;
  // One sequence alone would decode plainly too: it is not the load, but that drafts are not accepted.
  bool low_acceptance = false;
};

// Lengths that are considered: 1, a quarter, half and all of a block. A GPU has a graph for each.
std::vector<int64_t> BlockLengths(int64_t block_rows);

// Among BlockLengths and most_rows those up to most_rows (<= block_rows); of these the one with the most
// expected tokens a second. The length of the last round stays unless another one is 5 % better, so that
// noise does not make it flap. Every 256th round at most, and in at most 2 % of the time, another one is
// probed: the one that was measured longest ago. `drafts` has, for every sequence of the round, how many
// drafts it may have.
BlockChoice ChooseBlock(const std::vector<int64_t>& drafts, int64_t block_rows, int64_t most_rows,
                        const BlockStatistics& statistics);

}  // namespace dflash
