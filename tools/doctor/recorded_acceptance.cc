#include "tools/doctor/recorded_acceptance.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace dflash::doctor {

double RecordedAcceptance::Sums::ours() const { return tokens / std::max(rounds, 1.0); }

void RecordedAcceptance::Add(const golden::GoldenPrompt& golden, int64_t rounds, int64_t tokens) {
  if (golden.acceptance_lengths.empty()) return;
  Sums& sums = kinds_[golden.kind];
  sums.tokens += static_cast<double>(tokens);
  sums.rounds += static_cast<double>(rounds);
  for (const int64_t length : golden.acceptance_lengths) sums.golden_tokens += static_cast<double>(length);
  sums.golden_rounds += static_cast<double>(golden.acceptance_lengths.size());
}

double RecordedAcceptance::loss() const {
  double loss = 0;
  for (const auto& [kind, sums] : kinds_) loss = std::max(loss, 1 - sums.ours() / sums.golden());
  return loss;
}

std::string RecordedAcceptance::Describe() const {
  std::vector<std::string> lines;
  for (const auto& [kind, sums] : kinds_)
    lines.push_back(absl::StrFormat("%s %.2f, recorded %.2f", kind, sums.ours(), sums.golden()));
  return absl::StrJoin(lines, "; ");
}

}  // namespace dflash::doctor
