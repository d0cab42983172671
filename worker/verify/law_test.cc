// The law of speculative sampling, by exact enumeration: whatever the drafter proposes, Walk must give every
// output exactly the probability that token-by-token decoding gives it. Probabilities are integers over a
// power of 8, so equal means equal.
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "worker/verify/walk.h"

namespace dflash {
namespace {

using Tokens = std::vector<int32_t>;
using Law = std::map<Tokens, int64_t>;  // output -> probability times kUnit^length

constexpr int32_t kVocabulary = 3;
constexpr int64_t kUnit = 8;  // each conditional probability is k / 8
constexpr size_t kLength = 4;

// A random target: for every prefix a distribution over three tokens (some of them impossible).
class ToyTarget {
 public:
  explicit ToyTarget(uint32_t seed) : seed_(seed) {}
  std::vector<int64_t> Weights(const Tokens& prefix) const {
    uint32_t key = seed_;
    for (int32_t token : prefix) key = key * 31 + static_cast<uint32_t>(token) + 1;
    std::mt19937 random(key);
    const int64_t first = static_cast<int64_t>(random() % (kUnit + 1));
    const int64_t second = static_cast<int64_t>(random() % static_cast<uint32_t>(kUnit - first + 1));
    return {first, second, kUnit - first - second};
  }

 private:
  uint32_t seed_;
};

Law Autoregressive(const ToyTarget& target) {
  Law law = {{{}, 1}};
  for (size_t n = 0; n < kLength; ++n) {
    Law longer;
    for (const auto& [prefix, weight] : law) {
      const std::vector<int64_t> next = target.Weights(prefix);
      for (int32_t token = 0; token < kVocabulary; ++token) {
        if (next[static_cast<size_t>(token)] == 0) continue;
        Tokens output = prefix;
        output.push_back(token);
        longer[output] += weight * next[static_cast<size_t>(token)];
      }
    }
    law = longer;
  }
  return law;
}

// Drafts of a round after `prefix`: any function will do. Random plans: chains and trees.
VerifyPlan RandomPlan(const Tokens& prefix, uint32_t seed, bool chain) {
  uint32_t key = seed ^ 0x9e3779b9u;
  for (int32_t token : prefix) key = key * 131 + static_cast<uint32_t>(token) + 7;
  std::mt19937 random(key);
  VerifyPlan plan = MakeChain(prefix.empty() ? 0 : prefix.back(), {});
  for (int32_t row = 1; row < 4; ++row) {
    const int32_t parent = chain ? row - 1 : static_cast<int32_t>(random() % static_cast<uint32_t>(row));
    const auto token = static_cast<int32_t>(random() % kVocabulary);
    if (plan.Child(parent, token) >= 0) break;
    plan.tokens.push_back(token);
    plan.parents.push_back(parent);
    plan.depths.push_back(plan.depths[static_cast<size_t>(parent)] + 1);
  }
  return plan;
}

using WalkRule = WalkResult (*)(const ToyTarget&, const Tokens& prefix, const VerifyPlan&,
                                const Tokens& target_tokens, int64_t room);

WalkResult EqualityRule(const ToyTarget&, const Tokens&, const VerifyPlan& plan, const Tokens& target_tokens,
                        int64_t room) {
  return Walk(
      plan, target_tokens, [](int32_t) { return false; }, room);
}

// Wrong on purpose ("typical acceptance"): also keeps a draft that the target finds likely enough.
WalkResult KeepsLikelyDrafts(const ToyTarget& target, const Tokens& prefix, const VerifyPlan& plan,
                             const Tokens& target_tokens, int64_t room) {
  Tokens bent = target_tokens;
  Tokens context = prefix;
  for (size_t row = 0; row + 1 < bent.size() && plan.IsChain(); ++row) {
    const int32_t draft = plan.tokens[row + 1];
    if (target.Weights(context)[static_cast<size_t>(draft)] >= kUnit / 4) bent[row] = draft;
    context.push_back(draft);
  }
  return Walk(
      plan, bent, [](int32_t) { return false; }, room);
}

// Enumerates what every row of the plan may draw, walks, and goes on with the next round.
void Speculative(const ToyTarget& target, const Tokens& prefix, int64_t weight, uint32_t seed, bool chain,
                 WalkRule rule, Law& law) {
  if (prefix.size() == kLength) {
    law[prefix] += weight;
    return;
  }
  const VerifyPlan plan = RandomPlan(prefix, seed, chain);
  const auto rows = static_cast<size_t>(plan.rows());
  std::vector<Tokens> contexts(rows, prefix);  // of each row: the output so far and the drafts on its path
  for (size_t row = 1; row < rows; ++row) {
    contexts[row] = contexts[static_cast<size_t>(plan.parents[row])];
    contexts[row].push_back(plan.tokens[row]);
  }
  std::map<Tokens, int64_t> emissions;  // emitted tokens -> weight over kUnit^rows
  std::vector<int32_t> draw(rows, 0);
  while (true) {
    int64_t probability = 1;
    for (size_t row = 0; row < rows; ++row)
      probability *= target.Weights(contexts[row])[static_cast<size_t>(draw[row])];
    if (probability > 0) {
      const auto room = static_cast<int64_t>(kLength - prefix.size());
      emissions[rule(target, prefix, plan, draw, room).emitted] += probability;
    }
    size_t row = 0;
    while (row < rows && ++draw[row] == kVocabulary) draw[row++] = 0;
    if (row == rows) break;
  }
  for (const auto& [emitted, scaled] : emissions) {
    int64_t emission_weight = scaled;
    for (size_t unused = emitted.size(); unused < rows; ++unused) {
      ASSERT_EQ(emission_weight % kUnit, 0);  // rows that were not reached sum to one
      emission_weight /= kUnit;
    }
    Tokens longer = prefix;
    longer.insert(longer.end(), emitted.begin(), emitted.end());
    Speculative(target, longer, weight * emission_weight, seed, chain, rule, law);
  }
}

TEST(SpeculativeLawTest, EqualsAutoregressiveDecodingForChainsAndTrees) {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    for (bool chain : {true, false}) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << (chain ? " chain" : " tree"));
      const ToyTarget target(seed);
      Law law;
      Speculative(target, {}, 1, seed, chain, EqualityRule, law);
      EXPECT_EQ(law, Autoregressive(target));
    }
  }
}

TEST(SpeculativeLawTest, AWrongAcceptanceRuleIsSeen) {
  int wrong = 0;
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    const ToyTarget target(seed);
    Law law;
    Speculative(target, {}, 1, seed, /*chain=*/true, KeepsLikelyDrafts, law);
    wrong += law != Autoregressive(target);
  }
  EXPECT_GE(wrong, 25);
}

}  // namespace
}  // namespace dflash
