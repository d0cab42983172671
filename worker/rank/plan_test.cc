#include "worker/rank/plan.h"

#include <functional>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace dflash {
namespace {

RankPlan Example() {
  RankPlan plan;
  plan.number = 7;
  using Kind = RankPlan::SlotChange::Kind;
  plan.slots = {
      {.kind = Kind::kClose, .slot = 1, .pages = {}, .sampling = {}},
      {.kind = Kind::kOpen, .slot = 1, .pages = {}, .sampling = {.temperature = 0.5f}},
      {.kind = Kind::kGrow, .slot = 1, .pages = {4, 9}, .sampling = {}},
  };
  plan.draft_sequences = 1;
  plan.rows = {{.slot = 1,
                .phase = Phase::kPrefill,
                .start_position = 0,
                .count = 3,
                .tokens = {5, 6, 7},
                .last_logits = true,
                .checkpoints = {{.position = 64, .index = 2}}},
               {.slot = 0,
                .phase = Phase::kVerify,
                .start_position = 40,
                .count = 16,
                .tokens = {},
                .last_logits = false}};
  return plan;
}

// Every field, and the order of everything that has one, is in the hash.
TEST(RankPlan, HashSeesEveryChange) {
  const std::vector<std::function<void(RankPlan&)>> changes = {
      [](RankPlan&) {},
      [](RankPlan& p) { p.number = 8; },
      [](RankPlan& p) { p.draft_sequences = 2; },
      [](RankPlan& p) { p.block_rows = 4; },
      [](RankPlan& p) { std::swap(p.slots[0], p.slots[1]); },
      [](RankPlan& p) { p.slots.pop_back(); },
      [](RankPlan& p) { p.slots[0].slot = 2; },
      [](RankPlan& p) { p.slots[0].kind = RankPlan::SlotChange::Kind::kOpen; },
      [](RankPlan& p) { p.slots[0].kind = RankPlan::SlotChange::Kind::kGrow; },
      [](RankPlan& p) { p.slots[2].pages[1] = 8; },
      [](RankPlan& p) { std::swap(p.slots[2].pages[0], p.slots[2].pages[1]); },
      [](RankPlan& p) { p.slots[2].pages.push_back(0); },
      [](RankPlan& p) { p.slots[2].pages.clear(); },
      [](RankPlan& p) { p.slots[1].sampling.temperature = 0.25f; },
      [](RankPlan& p) { p.slots[1].sampling.top_k = 1; },
      [](RankPlan& p) { p.slots[1].sampling.top_p = 0.5f; },
      [](RankPlan& p) { p.slots[1].sampling.min_p = 0.5f; },
      [](RankPlan& p) { p.slots[1].sampling.seed = 1; },
      [](RankPlan& p) { p.slots[1].begin.position = 64; },
      [](RankPlan& p) { p.slots[1].begin.index = 0; },
      [](RankPlan& p) { p.rows[0].checkpoints[0].position = 128; },
      [](RankPlan& p) { p.rows[0].checkpoints[0].index = 3; },
      [](RankPlan& p) { p.rows[0].checkpoints.clear(); },
      [](RankPlan& p) { p.rows[1].has_rules = true; },
      [](RankPlan& p) { p.rows[1].log_probs = 3; },
      [](RankPlan& p) { p.rows[0].prompt_log_probs = 3; },
      [](RankPlan& p) { p.rows[0].next_token = 3; },
      [](RankPlan& p) { std::swap(p.rows[0], p.rows[1]); },
      [](RankPlan& p) { p.rows.pop_back(); },
      [](RankPlan& p) { p.rows[0].slot = 3; },
      [](RankPlan& p) { p.rows[0].phase = Phase::kVerify; },
      [](RankPlan& p) { p.rows[0].start_position = 64; },
      [](RankPlan& p) { p.rows[0].count = 2; },
      [](RankPlan& p) { p.rows[0].last_logits = false; },
      [](RankPlan& p) { p.rows[0].tokens[1] = 8; },
      [](RankPlan& p) { std::swap(p.rows[0].tokens[0], p.rows[0].tokens[2]); },
      [](RankPlan& p) { p.rows[0].tokens.push_back(0); },
      [](RankPlan& p) { p.rows[1].count = 15; },
  };
  std::set<uint64_t> hashes;
  for (const auto& change : changes) {
    RankPlan plan = Example();
    change(plan);
    EXPECT_TRUE(hashes.insert(ChainHash(0, plan)).second) << "change " << hashes.size();
  }
  EXPECT_TRUE(hashes.insert(ChainHash(1, Example())).second) << "what came before counts";
  EXPECT_EQ(ChainHash(0, Example()), ChainHash(0, Example()));
}

}  // namespace
}  // namespace dflash
