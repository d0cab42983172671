#include "tools/dflashctl/status_view.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(StatusText, ServingWithSpeculation) {
  v1::GetModelInfoResponse model;
  model.set_model("tiny");
  model.set_backend("cpu");
  model.set_tensor_parallel_size(1);
  model.set_feature_contract("taps=1,3,5");
  model.set_same_text_rows(256);
  model.mutable_drafter()->set_name("tiny-dflash");
  model.mutable_drafter()->set_mode(v1::SPECULATION_MODE_DFLASH);
  model.mutable_drafter()->set_block_size(16);
  v1::GetLoadResponse load;
  load.set_serving(true);
  load.set_running(2);
  v1::GroupLoad* group = load.add_groups();
  group->set_name("0");
  group->set_state(v1::GROUP_STATE_READY);
  group->set_cache_pages_total(10);
  group->set_cache_pages_free(7);
  group->set_speculation_rounds(10);
  group->set_drafted_tokens(150);
  group->set_accepted_tokens(90);
  const std::string text = StatusText(model, load);
  EXPECT_THAT(text, HasSubstr("model             tiny (cpu, 1 rank,"));
  EXPECT_THAT(text, HasSubstr("serving           yes\n"));
  EXPECT_THAT(text, HasSubstr("drafter           tiny-dflash (dflash, block of 16)\n"));
  EXPECT_THAT(text, HasSubstr("feature contract  taps=1,3,5\n"));
  EXPECT_THAT(text, HasSubstr("bit-equal up to 256 verify rows"));
  EXPECT_THAT(text, HasSubstr("READY"));
  EXPECT_THAT(text, HasSubstr("3 of 10 pages, 10 rounds of 10.00 tokens, 60.0% of 150 drafts accepted"));
}

TEST(StatusText, TheVerdictOnTheDrafterIsNamed) {
  v1::GetLoadResponse load;
  v1::GroupLoad* group = load.add_groups();
  group->set_name("0");
  EXPECT_THAT(StatusText({}, load), Not(HasSubstr("speculation 0"))) << "nothing is known yet";
  v1::SpeculationHealth* health = group->mutable_speculation_health();
  health->set_verdict("broken");
  health->set_reason("confident_and_rejected");
  health->set_rounds(600);
  health->set_first_draft_confidence(0.9);
  health->set_first_draft_acceptance(0.33);
  health->set_self_test("overridden");
  health->set_self_test_detail("drafts change the text");
  EXPECT_THAT(
      StatusText({}, load),
      HasSubstr("speculation 0     BROKEN: confident_and_rejected; first drafts: 33% accepted where the "
                "drafter expected 90%, last 600 rounds; self-test overridden: drafts change the text; what "
                "to do: dflashctl doctor\n"));
  health->set_verdict("healthy");
  health->set_reason("none");
  EXPECT_THAT(StatusText({}, load), HasSubstr("speculation 0     healthy; first drafts: 33%"));
}

TEST(StatusText, NotServingSaysWhy) {
  v1::GetLoadResponse load;
  load.set_detail("worker group 0: killed by signal 9");
  load.add_groups()->set_state(v1::GROUP_STATE_FAILED);
  const std::string text = StatusText({}, load);
  EXPECT_THAT(text, HasSubstr("serving           NO: worker group 0: killed by signal 9\n"));
  EXPECT_THAT(text, HasSubstr("drafter           none\n"));
  EXPECT_THAT(text, HasSubstr("not promised"));
  EXPECT_THAT(text, Not(HasSubstr("rounds of")));
  EXPECT_THAT(text, Not(HasSubstr("pages")));  // nobody knows how many
}

}  // namespace
}  // namespace dflash::ctl
