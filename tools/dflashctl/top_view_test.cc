#include "tools/dflashctl/top_view.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

using ::testing::HasSubstr;

v1::GetLoadResponse Load(uint64_t scale) {
  v1::GetLoadResponse load;
  load.set_serving(true);
  load.set_running(3);
  load.set_generated_tokens(1000 * scale);
  load.set_prompt_tokens(300 * scale);
  load.set_cached_tokens(64 * scale);
  (*load.mutable_requests())["stop"] = 7 * scale;
  v1::GroupLoad* group = load.add_groups();
  group->set_name("0");
  group->set_state(v1::GROUP_STATE_READY);
  group->set_running(3);
  group->set_state_slots(8);
  group->set_cache_pages_total(100);
  group->set_cache_pages_free(60);
  group->set_speculation_rounds(100 * scale);
  group->set_drafted_tokens(1500 * scale);
  group->set_accepted_tokens(300 * scale);
  for (uint64_t accepted : {80, 40}) {
    group->add_drafted_per_position(100 * scale);
    group->add_accepted_per_position(accepted * scale);
  }
  return load;
}

TEST(TopText, RatesBetweenTwoAnswers) {
  const std::string text = TopText(Load(1), Load(2), 2);
  EXPECT_THAT(text, HasSubstr("3 running"));
  EXPECT_THAT(text,
              HasSubstr("500.0 output tokens/s, 150.0 prompt tokens/s computed, 32.0/s from the cache\n"));
  EXPECT_THAT(text, HasSubstr("requests/s by end: stop 3.5 length 0.0"));
  EXPECT_THAT(text, HasSubstr("group 0    READY      3 of 8 slots, 40 of 100 pages in use\n"));
  EXPECT_THAT(text, HasSubstr("  50 rounds/s of 4.00 tokens, 20.0% of 750 drafts/s accepted\n"));
  EXPECT_THAT(text, HasSubstr("  accepted by depth, %: 80 40\n"));
}

TEST(TopText, CountersThatBeginAnewAreNoNonsense) {
  const std::string text = TopText(Load(2), Load(1), 1);
  EXPECT_THAT(text, HasSubstr("0.0 output tokens/s"));
  EXPECT_THAT(text, HasSubstr("no rounds with drafts"));
  EXPECT_EQ(TopText({}, {}, 1).find("nan"), std::string::npos);
}

}  // namespace
}  // namespace dflash::ctl
