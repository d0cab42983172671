#include "daemon/rpc/diagnosis.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dflash {

v1::SpeculationHealth HealthOf(const Exporter& exporter, const Dispatcher::GroupStats& group) {
  v1::SpeculationHealth health;
  if (const auto labels = exporter.InForce(group.name, metrics::kSpecHealth)) {
    health.set_verdict(labels->at("verdict"));
    health.set_reason(labels->at("reason"));
  }
  const double acceptance = exporter.Sum(group.name, metrics::kSpecFirstDraftAcceptance);
  health.set_rounds(static_cast<uint64_t>(exporter.Sum(group.name, metrics::kSpecHealthRounds)));
  health.set_first_draft_acceptance(acceptance);
  health.set_first_draft_confidence(acceptance + exporter.Sum(group.name, metrics::kSpecCalibrationGap));
  health.set_self_test(group.info.self_test);
  health.set_self_test_detail(group.info.self_test_detail);
  return health;
}

v1::GroupDiagnosis DiagnosisOf(const Exporter& exporter, const Dispatcher::GroupStats& group) {
  const auto sum = [&](const MetricInfo& info, const MetricLabels& labels = {}) {
    return static_cast<uint64_t>(exporter.Sum(group.name, info, labels));
  };
  v1::GroupDiagnosis diagnosis;
  diagnosis.set_name(group.name);
  diagnosis.set_ranks(static_cast<uint32_t>(group.info.ranks));
  diagnosis.set_backend(group.info.backend);
  diagnosis.set_feature_contract(group.info.feature_contract);
  if (group.info.fingerprints != nullptr)
    diagnosis.mutable_fingerprints()->insert(group.info.fingerprints->begin(),
                                             group.info.fingerprints->end());
  *diagnosis.mutable_health() = HealthOf(exporter, group);
  diagnosis.set_rounds(sum(metrics::kSpecDrafts));
  diagnosis.set_drafted_tokens(sum(metrics::kSpecDraftTokens));
  diagnosis.set_accepted_tokens(sum(metrics::kSpecAcceptedTokens));
  for (int64_t depth = 0; depth + 1 < group.info.dflash_block_size; ++depth) {
    const MetricLabels position = {{"position", absl::StrCat(depth)}};
    v1::PositionCounts* counts = diagnosis.add_positions();
    counts->set_drafted(sum(metrics::kSpecDraftTokensPerPosition, position));
    counts->set_accepted(sum(metrics::kSpecAcceptedTokensPerPosition, position));
    counts->set_predicted(exporter.Sum(group.name, metrics::kSpecPredictedTokensPerPosition, position));
  }
  for (int tenth = 0; tenth < 10; ++tenth) {
    const MetricLabels labels = {{"confidence", absl::StrCat("0.", tenth)}};
    v1::ConfidenceCounts* counts = diagnosis.add_confidences();
    counts->set_confidence(tenth / 10.0);
    counts->set_drafts(sum(metrics::kSpecConfidenceDrafts, labels));
    counts->set_accepted(sum(metrics::kSpecConfidenceAccepted, labels));
  }
  for (const char* name : {"thinking", "tool", "code", "text"}) {
    const MetricLabels labels = {{"content", name}};
    v1::RoundCounts* counts = diagnosis.add_contents();
    counts->set_name(name);
    counts->set_rounds(sum(metrics::kSpecContentDrafts, labels));
    counts->set_accepted_tokens(sum(metrics::kSpecContentAcceptedTokens, labels));
    counts->set_first_accepted(sum(metrics::kSpecContentFirstAccepted, labels));
  }
  for (const char* name : {"cold", "prefix", "resumed"}) {
    const MetricLabels labels = {{"origin", name}};
    v1::RoundCounts* counts = diagnosis.add_origins();
    counts->set_name(name);
    counts->set_rounds(sum(metrics::kSpecOriginDrafts, labels));
    counts->set_accepted_tokens(sum(metrics::kSpecOriginAcceptedTokens, labels));
    counts->set_first_accepted(sum(metrics::kSpecOriginFirstAccepted, labels));
  }
  diagnosis.set_context_tokens(sum(metrics::kSpecContextTokens));
  diagnosis.set_context_missing_tokens(sum(metrics::kSpecContextMissingTokens));
  return diagnosis;
}

}  // namespace dflash
