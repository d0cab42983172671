// Whether the drafter of a running group is sound, judged from its recent rounds. Few accepted drafts have
// two causes: text that is hard to foresee, and a broken integration. The drafter's own probabilities tell
// them apart: on hard text it knows that it does not know; with a broken integration it is confident and
// rejected. Source: docs/spec/verification.md "Health".
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_set>
#include <vector>

#include "worker/engine/engine.h"

namespace dflash {

enum class HealthVerdict : uint8_t {
  kUnknown,   // too few rounds
  kHealthy,   //
  kHardText,  // few first drafts are accepted, and the drafter expected no more
  kBroken,    // the integration: run dflashctl doctor
  kRefused,   // the self-test failed, nobody is drafted for
};
inline constexpr int kHealthVerdicts = 5;

enum class HealthReason : uint8_t {
  kNone,
  kTooFewRounds,
  kDrafterUnsure,
  kConfidentAndRejected,  // first drafts that the drafter is sure of are accepted far less often
  kCliffAtPosition,       // one position of the block is, behind accepted ones
  kContextMissing,        // positions before the anchors are not in the drafter's context
  kPrefixHitsDiffer,      // sequences that began with a cached prefix are, others are not
  kNoOpinion,             // every draft has next to no probability: head zeroed or not the target's
  kSelfTestFailed,
};
inline constexpr int kHealthReasons = 9;

const char* Name(HealthVerdict verdict);  // "hard_text"
const char* Name(HealthReason reason);    // "drafter_unsure"
// Every reason belongs to one verdict.
HealthVerdict VerdictOf(HealthReason reason);

struct SpeculationHealth {
  HealthReason reason = HealthReason::kTooFewRounds;
  int64_t rounds = 0;           // that were judged
  double first_confidence = 0;  // of first drafts: mean probability, and share accepted
  double first_acceptance = 0;
  HealthVerdict verdict() const { return VerdictOf(reason); }
  // Above 0: more was expected than accepted.
  double gap() const { return first_confidence - first_acceptance; }
};

// Judges the last 2,048 rounds that can be judged: with drafts and their probabilities, at a temperature of
// at most 1, and under no rules of the request's parameters (else the target rightly refuses what the drafter
// rightly expects). A round of a context that has been judged, as of a request that is sent again, says
// nothing new: of several the first one counts, so that one prompt sent a hundred times is no hundred
// accidents. One thread.
class HealthMonitor {
 public:
  void Add(const DecodedRound& round);
  SpeculationHealth Judge() const;

 private:
  // Drafts that verification reached: all before them were accepted.
  struct Reached {
    int64_t drafts = 0;
    int64_t accepted = 0;
    double confidence = 0;  // sum
    double variance = 0;    // sum of p (1 - p): of the accepted ones, if the drafter is right

    void Add(double p, bool was_accepted);
    void Add(const Reached& other);
    double mean_confidence() const { return drafts == 0 ? 0 : confidence / static_cast<double>(drafts); }
    double acceptance() const {
      return drafts == 0 ? 0 : static_cast<double>(accepted) / static_cast<double>(drafts);
    }
    double gap() const { return mean_confidence() - acceptance(); }
    // The gap is at least `least`, and no accident of so few drafts.
    bool HasGap(double least) const;
  };
  struct Sums {
    std::unordered_set<size_t> contexts;  // hashes of what the rounds were drafted from
    int64_t rounds = 0;
    int64_t rounds_missing = 0;                           // context
    double most_confidence = 0;                           // of any draft
    std::vector<Reached> at;                              // by position
    std::array<Reached, kContextOrigins> sure_by_origin;  // first drafts of probability 1/2 and more

    void Add(const DecodedRound& round);
    void Add(const Sums& other);
  };
  std::deque<Sums> parts_;  // oldest first
};

// How many drafts of a round were compared with the target: those behind a rejected one were not, nor those
// behind a token that ended the output.
int32_t ReachedDrafts(const DecodedRound& round);

}  // namespace dflash
