#include "worker/engine/block_length.h"

#include <algorithm>
#include <optional>

namespace dflash {
namespace {

// A depth has the weight of this many rounds: some seconds of one sequence.
constexpr double kMemory = 256;
constexpr double kMargin = 1.05;  // of another length over the present one
constexpr int64_t kRoundsBetweenProbes = 256;
constexpr double kProbeShare = 0.02;  // of the time

class Rates {
 public:
  Rates(const std::vector<int64_t>& drafts, int64_t block_rows, const BlockStatistics& statistics)
      : drafts_(drafts), costs_(statistics.costs), uniform_rows_(statistics.uniform_rows) {
    tokens_ = {1};
    for (double probability : statistics.survival.Probabilities(block_rows - 1))
      tokens_.push_back(tokens_.back() + probability);
    for (int64_t most : drafts) drafting_ += most > 0;
  }
  // Rows that a sequence which drafts has on average.
  int64_t MeanRows(int64_t rows) const {
    if (uniform_rows_) return rows;
    int64_t all = drafting_;
    for (int64_t most : drafts_) all += std::min(most, rows - 1);
    return (2 * all + drafting_) / (2 * drafting_);
  }
  double Seconds(int64_t rows) const {
    const auto sequences = static_cast<int64_t>(drafts_.size());
    const double share = static_cast<double>(drafting_) / static_cast<double>(sequences);
    return share * costs_.Estimate(MeanRows(rows), sequences) + (1 - share) * costs_.Estimate(1, sequences);
  }
  double Tokens(int64_t rows) const {
    double tokens = 0;
    for (int64_t most : drafts_) {
      const int64_t depth = std::min({most, rows - 1, static_cast<int64_t>(tokens_.size()) - 1});
      tokens += tokens_[static_cast<size_t>(depth)];
    }
    return tokens;
  }
  double Rate(int64_t rows) const {
    const double seconds = Seconds(rows);
    return seconds > 0 ? Tokens(rows) / seconds : 0;
  }
  int64_t Best(const std::vector<int64_t>& lengths) const {
    return *std::max_element(lengths.begin(), lengths.end(),
                             [&](int64_t a, int64_t b) { return Rate(a) < Rate(b); });
  }

 private:
  const std::vector<int64_t>& drafts_;
  const RoundCosts& costs_;
  const bool uniform_rows_;
  std::vector<double> tokens_;  // [d]: expected of a sequence with d drafts
  int64_t drafting_ = 0;
};

// The length that was measured longest ago, if it is time and the time is there.
std::optional<int64_t> Probe(const Rates& rates, const std::vector<int64_t>& lengths, int64_t chosen,
                             int64_t sequences, const BlockStatistics& statistics) {
  if (statistics.rounds_since_probe < kRoundsBetweenProbes) return std::nullopt;
  std::optional<int64_t> oldest;
  for (int64_t rows : lengths) {
    // What it costs beyond the time that its tokens would take otherwise.
    const double extra = rates.Seconds(rows) - rates.Tokens(rows) / rates.Rate(chosen);
    if (rows == chosen || extra > kProbeShare * statistics.seconds_since_probe) continue;
    const auto last = [&](int64_t length) {
      return statistics.costs.LastObserved(rates.MeanRows(length), sequences);
    };
    if (!oldest || last(rows) < last(*oldest)) oldest = rows;
  }
  return oldest;
}

}  // namespace

const char* Name(BlockReason reason) {
  switch (reason) {
    case BlockReason::kWhole:
      return "whole";
    case BlockReason::kRowLimit:
      return "row_limit";
    case BlockReason::kNoDrafts:
      return "no_drafts";
    case BlockReason::kAsked:
      return "asked";
    case BlockReason::kBest:
      return "best";
    case BlockReason::kProbe:
      return "probe";
  }
  return "";
}

void DraftSurvival::Observe(int64_t drafted, int64_t accepted) {
  const int64_t known = std::min(accepted + 1, drafted);
  if (known > static_cast<int64_t>(depths_.size())) depths_.resize(static_cast<size_t>(known));
  for (int64_t d = 0; d < known; ++d) {
    Depth& depth = depths_[static_cast<size_t>(d)];
    constexpr double kKeep = 1 - 1 / kMemory;
    depth.reached = kKeep * depth.reached + 1;
    depth.accepted = kKeep * depth.accepted + (d < accepted ? 1 : 0);
  }
}

void DraftSurvival::Fade() {
  constexpr double kLeast = 4;  // rounds that a depth keeps the weight of: one probe alone decides nothing
  for (Depth& depth : depths_) {
    const double keep = std::max(1 - 1 / kMemory, std::min(1.0, kLeast / depth.reached));
    depth.reached *= keep;
    depth.accepted *= keep;
  }
}

std::vector<double> DraftSurvival::Probabilities(int64_t depths) const {
  std::vector<double> probabilities;
  double all = 1;
  for (int64_t d = 0; d < depths; ++d) {
    const Depth depth = d < static_cast<int64_t>(depths_.size()) ? depths_[static_cast<size_t>(d)] : Depth();
    all *= depth.accepted / depth.reached;
    probabilities.push_back(all);
  }
  return probabilities;
}

std::vector<int64_t> BlockLengths(int64_t block_rows) {
  std::vector<int64_t> lengths = {1};
  for (int64_t rows : {(block_rows + 3) / 4, (block_rows + 1) / 2, block_rows}) {
    if (rows > lengths.back()) lengths.push_back(rows);
  }
  return lengths;
}

BlockChoice ChooseBlock(const std::vector<int64_t>& drafts, int64_t block_rows, int64_t most_rows,
                        const BlockStatistics& statistics) {
  if (std::all_of(drafts.begin(), drafts.end(), [](int64_t most) { return most == 0; }))
    return {.rows = 1, .reason = BlockReason::kNoDrafts};
  std::vector<int64_t> lengths = BlockLengths(block_rows);
  std::erase_if(lengths, [&](int64_t rows) { return rows > most_rows; });
  if (lengths.back() < most_rows) lengths.push_back(most_rows);
  const auto sequences = static_cast<int64_t>(drafts.size());
  if (lengths.size() == 1) return {.rows = 1, .reason = BlockReason::kRowLimit};
  if (statistics.costs.Estimate(block_rows, sequences) == 0)  // nothing is known yet
    return {.rows = lengths.back(), .reason = BlockReason::kBest};

  const Rates rates(drafts, block_rows, statistics);
  BlockChoice choice = {.rows = rates.Best(lengths), .reason = BlockReason::kBest};
  const bool could_stay = std::find(lengths.begin(), lengths.end(), statistics.rows) != lengths.end();
  if (could_stay && rates.Rate(choice.rows) <= kMargin * rates.Rate(statistics.rows))
    choice.rows = statistics.rows;
  if (choice.rows == 1) {
    const std::vector<int64_t> one = {block_rows - 1};
    choice.low_acceptance = Rates(one, block_rows, statistics).Best(lengths) == 1;
  }
  if (const auto probe = Probe(rates, lengths, choice.rows, sequences, statistics))
    choice = {.rows = *probe, .reason = BlockReason::kProbe};
  return choice;
}

}  // namespace dflash
