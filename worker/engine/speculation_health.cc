#include "worker/engine/speculation_health.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

namespace dflash {
namespace {

constexpr int64_t kPartRounds = 256;
constexpr size_t kParts = 8;
constexpr int64_t kFewestRounds = 128;
constexpr int64_t kFewestAtPosition = 64;
// Acceptance of the first draft below which text counts as hard. Even poor text has more on a sound drafter.
constexpr double kHardText = 0.5;
constexpr double kGap = 0.12;
constexpr double kSure = 0.5;
constexpr int64_t kFewestSure = 64;
constexpr double kCliff = 0.3;
constexpr double kBeforeCliff = 0.7;
constexpr double kNoOpinion = 0.01;

// Of the context that a round was drafted from. Drafts of one context have the same probabilities, bit for
// bit, and those of two contexts of one length hardly the same; however many of them are verified, the first
// ones are.
size_t HashOfContext(const DecodedRound& round) {
  constexpr size_t kDrafts = 4;
  const int64_t numbers[] = {round.context_tokens, round.context_missing, static_cast<int64_t>(round.origin)};
  std::string bytes(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  bytes.append(reinterpret_cast<const char*>(round.confidences.data()),
               std::min(round.confidences.size(), kDrafts) * sizeof(float));
  return std::hash<std::string>()(bytes);
}

}  // namespace

const char* Name(HealthVerdict verdict) {
  constexpr const char* kNames[kHealthVerdicts] = {"unknown", "healthy", "hard_text", "broken", "refused"};
  return kNames[static_cast<size_t>(verdict)];
}

const char* Name(HealthReason reason) {
  constexpr const char* kNames[kHealthReasons] = {"none",
                                                  "too_few_rounds",
                                                  "drafter_unsure",
                                                  "confident_and_rejected",
                                                  "cliff_at_position",
                                                  "context_missing",
                                                  "prefix_hits_differ",
                                                  "no_opinion",
                                                  "self_test_failed"};
  return kNames[static_cast<size_t>(reason)];
}

HealthVerdict VerdictOf(HealthReason reason) {
  switch (reason) {
    case HealthReason::kNone:
      return HealthVerdict::kHealthy;
    case HealthReason::kTooFewRounds:
      return HealthVerdict::kUnknown;
    case HealthReason::kDrafterUnsure:
      return HealthVerdict::kHardText;
    case HealthReason::kSelfTestFailed:
      return HealthVerdict::kRefused;
    default:
      return HealthVerdict::kBroken;
  }
}

int32_t ReachedDrafts(const DecodedRound& round) { return std::min(round.round.drafted, round.emitted); }

void HealthMonitor::Reached::Add(double p, bool was_accepted) {
  ++drafts;
  accepted += was_accepted;
  confidence += p;
  variance += p * (1 - p);
}

void HealthMonitor::Reached::Add(const Reached& other) {
  drafts += other.drafts;
  accepted += other.accepted;
  confidence += other.confidence;
  variance += other.variance;
}

bool HealthMonitor::Reached::HasGap(double least) const {
  constexpr double kDeviations = 4;
  return gap() >= least && gap() * static_cast<double>(drafts) > kDeviations * std::sqrt(variance);
}

void HealthMonitor::Sums::Add(const DecodedRound& round) {
  ++rounds;
  rounds_missing += round.context_missing > 0;
  for (const float p : round.confidences) most_confidence = std::max<double>(most_confidence, p);
  const auto reached = static_cast<size_t>(ReachedDrafts(round));
  at.resize(std::max(at.size(), reached));
  for (size_t d = 0; d < reached; ++d) {
    const bool accepted = static_cast<int32_t>(d) < round.round.accepted;
    at[d].Add(round.confidences[d], accepted);
    if (d == 0 && round.confidences[d] >= kSure)
      sure_by_origin[static_cast<size_t>(round.origin)].Add(round.confidences[d], accepted);
  }
}

void HealthMonitor::Sums::Add(const Sums& other) {
  rounds += other.rounds;
  rounds_missing += other.rounds_missing;
  most_confidence = std::max(most_confidence, other.most_confidence);
  at.resize(std::max(at.size(), other.at.size()));
  for (size_t d = 0; d < other.at.size(); ++d) at[d].Add(other.at[d]);
  for (size_t i = 0; i < sure_by_origin.size(); ++i) sure_by_origin[i].Add(other.sure_by_origin[i]);
}

void HealthMonitor::Add(const DecodedRound& round) {
  if (round.round.drafted == 0 || round.temperature > 1 || round.other_law ||
      round.confidences.size() < static_cast<size_t>(round.round.drafted)) {
    return;
  }
  const size_t context = HashOfContext(round);
  if (std::any_of(parts_.begin(), parts_.end(),
                  [context](const Sums& part) { return part.contexts.contains(context); })) {
    return;
  }
  if (parts_.empty() || parts_.back().rounds == kPartRounds) parts_.emplace_back();
  if (parts_.size() > kParts) parts_.pop_front();
  parts_.back().Add(round);
  parts_.back().contexts.insert(context);
}

SpeculationHealth HealthMonitor::Judge() const {
  Sums sums;
  for (const Sums& part : parts_) sums.Add(part);
  SpeculationHealth health;
  health.rounds = sums.rounds;
  if (sums.at.empty()) return health;
  const Reached& first = sums.at[0];
  health.first_confidence = first.mean_confidence();
  health.first_acceptance = first.acceptance();
  const auto judge = [&](HealthReason reason) {
    health.reason = reason;
    return health;
  };
  if (sums.rounds < kFewestRounds) return judge(HealthReason::kTooFewRounds);
  if (sums.rounds_missing > 0) return judge(HealthReason::kContextMissing);
  if (sums.most_confidence < kNoOpinion) return judge(HealthReason::kNoOpinion);
  // Among the drafts that it is sure of, hard text does not hide a defect.
  Reached sure;
  for (const Reached& of_origin : sums.sure_by_origin) sure.Add(of_origin);
  const Reached& cold = sums.sure_by_origin[static_cast<size_t>(ContextOrigin::kCold)];
  const Reached& prefix = sums.sure_by_origin[static_cast<size_t>(ContextOrigin::kPrefix)];
  if (cold.drafts >= kFewestSure && prefix.drafts >= kFewestSure && prefix.HasGap(kGap) &&
      prefix.gap() - cold.gap() >= kGap) {
    return judge(HealthReason::kPrefixHitsDiffer);
  }
  if (sure.drafts >= kFewestSure && sure.HasGap(kGap)) return judge(HealthReason::kConfidentAndRejected);
  for (size_t d = 1; d < sums.at.size(); ++d) {
    if (sums.at[d].drafts >= kFewestAtPosition && sums.at[d].HasGap(kCliff) &&
        sums.at[d - 1].acceptance() >= kBeforeCliff) {
      return judge(HealthReason::kCliffAtPosition);
    }
  }
  if (first.acceptance() < kHardText) return judge(HealthReason::kDrafterUnsure);
  return judge(HealthReason::kNone);
}

}  // namespace dflash
