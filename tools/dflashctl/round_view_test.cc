#include "tools/dflashctl/round_view.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::Chunk MakeChunk(uint32_t offset, std::vector<uint32_t> ids) {
  v1::Chunk chunk;
  chunk.set_first_token_offset(offset);
  for (uint32_t id : ids) chunk.add_token_ids(id);
  return chunk;
}

void AddRound(v1::Chunk* chunk, uint32_t offset, uint32_t drafted, uint32_t accepted, uint32_t count) {
  v1::StepInfo* round = chunk->add_steps();
  round->set_first_token_offset(offset);
  round->set_drafted(drafted);
  round->set_accepted(accepted);
  round->set_token_count(count);
}

std::vector<std::string> Words(const v1::Chunk& chunk) {
  std::vector<std::string> words;
  for (const Piece& piece : SplitByOrigin(chunk)) {
    std::string word = piece.origin == Origin::kPrefill ? "p" : piece.origin == Origin::kDraft ? "d" : "c";
    for (uint32_t id : piece.token_ids) word += " " + std::to_string(id);
    words.push_back(word);
  }
  return words;
}

TEST(SplitByOrigin, FirstTokenBelongsToNoRound) { EXPECT_THAT(Words(MakeChunk(0, {7})), ElementsAre("p 7")); }

TEST(SplitByOrigin, MergedRoundsStayApart) {
  v1::Chunk chunk = MakeChunk(0, {1, 2, 3, 4, 5, 6});
  AddRound(&chunk, 1, 15, 2, 3);  // 2 3 | 4
  AddRound(&chunk, 4, 15, 0, 1);  // 5
  AddRound(&chunk, 5, 15, 1, 1);  // the draft was the stop token: no correction follows
  EXPECT_THAT(Words(chunk), ElementsAre("p 1", "d 2 3", "c 4", "c 5", "d 6"));
}

TEST(SplitByOrigin, OutputThatEndsInsideARound) {
  v1::Chunk chunk = MakeChunk(10, {1, 2});
  AddRound(&chunk, 10, 15, 5, 2);
  EXPECT_THAT(Words(chunk), ElementsAre("d 1 2"));
}

TEST(SplitByOrigin, RoundsBeyondTheTokensAreCut) {
  v1::Chunk chunk = MakeChunk(0, {1});
  AddRound(&chunk, 0, 4000000000u, 4000000000u, 4000000000u);
  EXPECT_THAT(Words(chunk), ElementsAre("d 1"));
  EXPECT_THAT(SplitByOrigin(v1::Chunk()), IsEmpty());
}

TEST(RoundPainter, Colors) {
  RoundPainter painter(true);
  EXPECT_EQ(painter.Paint(Origin::kPrefill, "a"), "a");
  EXPECT_EQ(painter.Paint(Origin::kDraft, "b"), "\x1b[32mb");
  EXPECT_EQ(painter.Paint(Origin::kDraft, "c"), "c");
  EXPECT_EQ(painter.Paint(Origin::kCorrection, "d"), "\x1b[33md");
  EXPECT_EQ(painter.Finish(), "\x1b[0m");
  EXPECT_EQ(painter.Finish(), "");
}

TEST(RoundPainter, WithoutColorsDraftsStandBetweenMarks) {
  RoundPainter painter(false);
  std::string text = painter.Paint(Origin::kPrefill, "a");
  text += painter.Paint(Origin::kDraft, "bc");
  text += painter.Paint(Origin::kCorrection, "d");
  text += painter.Paint(Origin::kCorrection, "e");
  text += painter.Paint(Origin::kDraft, "f");
  text += painter.Finish();
  EXPECT_EQ(text, "a«bc»de«f»");
}

TEST(RoundPainter, NeverSplitsACharacter) {
  RoundPainter painter(true);
  EXPECT_EQ(painter.Paint(Origin::kDraft, "x\xF0\x9F"), "\x1b[32mx");  // first half of U+1F600
  EXPECT_EQ(painter.Paint(Origin::kCorrection, "\x98"), "");
  EXPECT_EQ(painter.Paint(Origin::kCorrection, "\x80y"), "\x1b[33m\xF0\x9F\x98\x80y");
  EXPECT_EQ(painter.Paint(Origin::kCorrection, "\xC3"), "");
  EXPECT_EQ(painter.Finish(), "\xEF\xBF\xBD\x1b[0m");  // what never became whole still shows
}

v1::Finished MakeFinished() {
  v1::Finished finished;
  finished.set_reason(v1::FINISH_REASON_EOS);
  finished.mutable_usage()->set_completion_tokens(46);
  v1::SpeculationSummary* speculation = finished.mutable_speculation();
  speculation->set_rounds(9);
  speculation->set_drafted_tokens(135);
  speculation->set_accepted_tokens(37);
  speculation->set_mean_acceptance_length(46.0 / 9);
  for (uint32_t drafted : {9, 9, 4, 0}) speculation->add_drafted_per_position(drafted);
  for (uint32_t accepted : {8, 3, 1}) speculation->add_accepted_per_position(accepted);
  finished.mutable_timings()->set_decode_seconds(0.5);
  finished.mutable_timings()->set_time_to_first_token_seconds(0.0354);
  return finished;
}

TEST(AnswerSummary, WithSpeculation) {
  EXPECT_EQ(
      AnswerSummary(MakeFinished()),
      "46 tokens, 9 rounds, 5.11 tokens per round, 37 of 135 drafts accepted, 90.0 tokens/s, first token "
      "after 35 ms, ended by eos");
}

TEST(AnswerSummary, WithoutSpeculationAndWithOneToken) {
  v1::Finished finished;
  finished.set_reason(v1::FINISH_REASON_LENGTH);
  finished.mutable_usage()->set_completion_tokens(1);
  EXPECT_EQ(AnswerSummary(finished), "1 token, without speculation, first token after 0 ms, ended by length");
}

TEST(AcceptanceByDepth, DividesByTheDraftsOfThatDepth) {
  EXPECT_EQ(AcceptanceByDepth(MakeFinished().speculation()), "accepted by depth: 0.89 0.33 0.25");
  EXPECT_EQ(AcceptanceByDepth(v1::SpeculationSummary()), "");
}

}  // namespace
}  // namespace dflash::ctl
