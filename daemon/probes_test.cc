#include "daemon/probes.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using State = Dispatcher::GroupState;

ProbeFacts Serving() {
  ProbeFacts facts;
  facts.stats.serving = true;
  facts.stats.running = 2;
  facts.stats.waiting = 3;
  facts.stats.limits.max_requests = 256;
  facts.stats.stage_age = absl::Seconds(90);
  facts.stats.groups.push_back({"0", State::kReady, "", 2, {}, absl::Seconds(80)});
  facts.lives["0"] = {.epoch = 4, .reforms = {}, .heartbeat_age = absl::Milliseconds(250)};
  facts.has_been_ready = true;
  facts.tick_age = absl::Milliseconds(40);
  return facts;
}

int StatusOf(const char* path, const ProbeFacts& facts) {
  return AnswerProbe({.path = path, .query = "", .authorization = ""}, facts)->status;
}
std::string BodyOf(const char* path, const ProbeFacts& facts, const char* query = "") {
  return AnswerProbe({.path = path, .query = query, .authorization = ""}, facts)->body;
}

TEST(Probes, SayYesInOneWord) {
  for (const char* path : {"/livez", "/readyz", "/startupz"}) {
    EXPECT_EQ(StatusOf(path, Serving()), 200);
    EXPECT_EQ(BodyOf(path, Serving()), "ok\n");
    EXPECT_EQ(BodyOf(path, Serving(), "verbos"), "ok\n");
  }
  EXPECT_FALSE(AnswerProbe({.path = "/metrics", .query = "", .authorization = ""}, Serving()).has_value());
}

TEST(Probes, ListEveryConditionWithItsAge) {
  EXPECT_EQ(BodyOf("/readyz", Serving(), "x=1&verbose"),
            "[+]timer: ran 0 ago\n"
            "[+]admission: open for 1m30s, 2 run, 3 of 256 wait\n"
            "[+]group 0: ready for 1m20s, life 4, heard 200ms ago\n"
            "ok\n");
  ProbeFacts facts = Serving();
  facts.stats.serving = false;
  facts.stats.draining = true;
  facts.stats.detail = "the server is going down";
  facts.stats.groups.push_back({"1", State::kLost, "rank 1 ended with signal 9", 0, {}, absl::Seconds(1)});
  facts.stats.groups.push_back({"2", State::kLoading, "", 0, {}, absl::Seconds(2)});
  facts.lives["1"] = {.epoch = 9, .reforms = {}, .heartbeat_age = absl::Seconds(1), .given_up = true};
  facts.tick_age = absl::Seconds(11);
  EXPECT_EQ(BodyOf("/readyz", facts, "verbose=1"),
            "[-]timer: ran 11s ago\n"
            "[-]admission: draining for 1m30s, 2 run, 3 of 256 wait\n"
            "[+]group 0: ready for 1m20s, life 4, heard 200ms ago\n"
            "[-]group 1: lost for 1s, life 9, given up: rank 1 ended with signal 9\n"
            "[-]group 2: loading for 2s\n"
            "the server is going down\n");
}

TEST(Probes, TellLivesFromReadiness) {
  ProbeFacts facts = Serving();
  facts.stats.serving = false;
  facts.stats.groups[0].state = State::kLoading;
  facts.has_been_ready = false;
  EXPECT_EQ(StatusOf("/livez", facts), 200);
  EXPECT_EQ(StatusOf("/readyz", facts), 503);
  EXPECT_EQ(BodyOf("/startupz", facts), "the model is being loaded\n");
  facts.lives["0"].given_up = true;
  EXPECT_EQ(StatusOf("/livez", facts), 503);
  facts.stats.draining = true;  // it ends by itself
  EXPECT_EQ(StatusOf("/livez", facts), 200);
  facts = Serving();
  facts.tick_age = absl::Seconds(11);
  EXPECT_EQ(StatusOf("/livez", facts), 503);
  EXPECT_EQ(StatusOf("/readyz", facts), 200);
}

// Without "verbose", for which a token may be asked, nothing is told that others need not know.
TEST(Probes, SayWhyInAFewWords) {
  ProbeFacts facts = Serving();
  facts.stats.serving = facts.has_been_ready = false;
  facts.stats.groups[0].state = State::kLost;
  facts.stats.groups[0].why_lost =
      "refused, it has another model: tokenizer (0123456789ab, not ba9876543210)";
  facts.stats.detail = "the worker group is gone: " + facts.stats.groups[0].why_lost;
  facts.lives["0"].given_up = true;
  for (const char* path : {"/livez", "/readyz", "/startupz"}) {
    EXPECT_EQ(BodyOf(path, facts), "no worker group serves\n");
    EXPECT_THAT(BodyOf(path, facts, "verbose"), ::testing::HasSubstr("0123456789ab"));
  }
}

}  // namespace
}  // namespace dflash
