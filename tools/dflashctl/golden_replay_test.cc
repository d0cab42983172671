#include "tools/dflashctl/golden_replay.h"

#include <fstream>
#include <iterator>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string GoldenText() {
  std::ifstream file(DFLASHD_SOURCE_DIR "/tests/golden/golden.json");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<Replayed> Perfect(const std::vector<GoldenPrompt>& golden) {
  std::vector<Replayed> replayed;
  for (const GoldenPrompt& prompt : golden)
    replayed.push_back({prompt.output_ids, prompt.acceptance_lengths});
  return replayed;
}

TEST(GoldenReplay, ReadsTheGoldenDataAndItsPublishedMeans) {
  const auto golden = ParseGolden(GoldenText());
  ASSERT_TRUE(golden.ok()) << golden.status();
  const ReplayReport report = Report(*golden, Perfect(*golden), true);
  EXPECT_TRUE(report.Passed());
  ASSERT_EQ(report.kinds.size(), 3u);
  // The figures of tests/golden/README.md.
  EXPECT_EQ(report.kinds[0].kind, "chat");
  EXPECT_EQ(report.kinds[0].prompts, 16);
  EXPECT_NEAR(report.kinds[0].mean_length, 10.147, 5e-4);
  EXPECT_EQ(report.kinds[1].kind, "code");
  EXPECT_EQ(report.kinds[1].prompts, 3);
  EXPECT_NEAR(report.kinds[1].mean_length, 1.458, 5e-4);
  EXPECT_EQ(report.kinds[2].kind, "long-code");
  EXPECT_EQ(report.kinds[2].prompts, 2);
  EXPECT_NEAR(report.kinds[2].mean_length, 1.521, 5e-4);
  EXPECT_THAT(Format(report),
              HasSubstr("21/21 outputs identical, 21/21 prompts with all acceptance lengths"));
}

const GoldenPrompt kPrompt = {"chat", {1, 2}, {10, 11, 12, 13, 14}, {1, 2, 3}};

TEST(GoldenReplay, FindsTheFirstDifference) {
  EXPECT_EQ(Compare(kPrompt, {{10, 11, 12, 13, 14}, {1, 2, 3}}).first_different_token, -1);
  EXPECT_EQ(Compare(kPrompt, {{10, 11, 99, 13, 14}, {1, 2, 3}}).first_different_token, 2);
  EXPECT_EQ(Compare(kPrompt, {{10, 11}, {1, 2, 3}}).first_different_token, 2);
  EXPECT_EQ(Compare(kPrompt, {{10, 11, 12, 13, 14, 15}, {1, 2, 3}}).first_different_token, 5);
  EXPECT_EQ(Compare(kPrompt, {{}, {}}).first_different_token, 0);
}

TEST(GoldenReplay, ComparesAllRoundsButTheLast) {
  const std::vector<uint32_t> output = kPrompt.output_ids;
  EXPECT_EQ(Compare(kPrompt, {output, {1, 2, 3}}).first_different_round, -1);
  EXPECT_EQ(Compare(kPrompt, {output, {1, 2, 1}}).first_different_round, -1);  // the last one may differ
  EXPECT_EQ(Compare(kPrompt, {output, {1, 3, 3}}).first_different_round, 1);
  EXPECT_EQ(Compare(kPrompt, {output, {1, 2}}).first_different_round, 2);
  EXPECT_EQ(Compare(kPrompt, {output, {1, 2, 3, 1}}).first_different_round, 3);
  EXPECT_EQ(Compare(kPrompt, {output, {}}).first_different_round, 0);
}

TEST(GoldenReplay, EveryDifferenceFailsTheReport) {
  const auto golden = ParseGolden(GoldenText());
  ASSERT_TRUE(golden.ok());
  std::vector<Replayed> replayed = Perfect(*golden);
  replayed[4].output_ids[7] += 1;
  replayed[17].acceptance_lengths[0] += 1;
  const ReplayReport report = Report(*golden, replayed, true);
  EXPECT_FALSE(report.Passed());
  EXPECT_EQ(report.kinds[0].identical_outputs, 15);
  EXPECT_EQ(report.kinds[0].identical_lengths, 16);
  EXPECT_EQ(report.kinds[1].identical_lengths, 2);
  ASSERT_EQ(report.differences.size(), 2u);
  EXPECT_THAT(report.differences[0], HasSubstr("prompt 4 (chat): token 7 is"));
  EXPECT_THAT(report.differences[1],
              HasSubstr("prompt 17 (code): acceptance length of round 0 is 2, golden 1"));
  EXPECT_THAT(Format(report), HasSubstr("20/21 outputs identical"));
  EXPECT_THAT(Format(report), HasSubstr("DIFFERENT"));
}

// Last rounds are not compared one by one, but they count in the mean.
TEST(GoldenReplay, TheMeanHasATolerance) {
  const std::vector<GoldenPrompt> golden(10, {"chat", {1}, {1, 2}, {10, 10, 10, 10}});
  std::vector<Replayed> replayed = Perfect(golden);
  replayed[0].acceptance_lengths[3] = 9;  // mean 9.975
  EXPECT_THAT(Report(golden, replayed, true).differences, IsEmpty());
  replayed[1].acceptance_lengths[3] = 9;
  replayed[2].acceptance_lengths[3] = 9;  // mean 9.925
  EXPECT_THAT(Report(golden, replayed, true).differences,
              ElementsAre("chat: 9.925 tokens per round, golden 10.000"));
}

// Of cut blocks outputs count, lengths do not.
TEST(GoldenReplay, CutBlocksAreLeftOutAloud) {
  const std::vector<GoldenPrompt> golden = {kPrompt, kPrompt, {"code", {1}, {1, 2}, {2, 2}}};
  const std::vector<uint32_t> output = kPrompt.output_ids;
  std::vector<Replayed> replayed = {
      {output, {1, 2, 3}}, {output, {1, 1, 1, 1}, true}, {{1, 2}, {1, 1}, true}};
  ReplayReport report = Report(golden, replayed, true);
  EXPECT_THAT(report.differences, IsEmpty());
  EXPECT_EQ(report.kinds[0].mean_length, 2);
  EXPECT_EQ(report.kinds[1].cut, 1);
  report.cuts = "blocks were cut to 8 of 16 rows";
  EXPECT_THAT(
      Format(report),
      HasSubstr("3/3 outputs identical, 1/1 prompts with all acceptance lengths identical (last rounds "
                "are not compared), 2 left out: blocks were cut to 8 of 16 rows: as golden"));
  replayed[1].cut = false;
  EXPECT_THAT(Report(golden, replayed, true).differences.front(), HasSubstr("round 1 is 1, golden 2"));
  replayed[2].output_ids = {1, 3};
  EXPECT_THAT(Report(golden, replayed, true).differences.back(), HasSubstr("tokens per round"));
}

TEST(GoldenReplay, WithoutSpeculationOnlyOutputsCount) {
  const std::vector<GoldenPrompt> golden = {kPrompt};
  const std::vector<Replayed> replayed = {{kPrompt.output_ids, {1, 1, 1, 1}}};
  EXPECT_FALSE(Report(golden, replayed, true).Passed());
  EXPECT_TRUE(Report(golden, replayed, false).Passed());
  EXPECT_FALSE(Report(golden, {{{1}, {1}}}, false).Passed());
}

TEST(GoldenReplay, RefusesBadFiles) {
  const auto error = [](const char* text) { return std::string(ParseGolden(text).status().message()); };
  EXPECT_EQ(error(""), "not JSON");
  EXPECT_EQ(error("{}"), "not a list of prompts");
  EXPECT_EQ(error("[]"), "not a list of prompts");
  EXPECT_EQ(error("[1]"), "prompt 0: not an object");
  EXPECT_EQ(error(R"([{"prompt_ids":[1]}])"), "prompt 0: kind: no such string");
  EXPECT_EQ(error(R"([{"kind":"a","output_ids":[1]}])"), "prompt 0: prompt_ids: no such list");
  EXPECT_EQ(error(R"([{"kind":"a","prompt_ids":[]}])"), "prompt 0: prompt_ids: empty");
  EXPECT_EQ(error(R"([{"kind":"a","prompt_ids":[-1]}])"), "prompt 0: prompt_ids: -1 is out of range");
  EXPECT_EQ(error(R"([{"kind":"a","prompt_ids":[4294967296]}])"),
            "prompt 0: prompt_ids: 4294967296 is out of range");
  EXPECT_EQ(error(R"([{"kind":"a","prompt_ids":[1],"output_ids":[1],"acceptance_lengths":[0]}])"),
            "prompt 0: acceptance_lengths: 0 is out of range");
}

}  // namespace
}  // namespace dflash::ctl
