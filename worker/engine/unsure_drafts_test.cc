// Drafts that their own drafter thinks little of are not verified: fewer rows, nearly as many tokens, the
// same text.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/testing/company.h"
#include "worker/testing/rank_threads.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::LoadTinyPair;
using testing::TinyPair;

class Rounds final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges&) override {
    for (const DecodedRound& decoded : report.rounds) {
      rounds += decoded.round.drafted > 0;
      drafted += decoded.round.drafted;
      accepted += decoded.round.accepted;
      cut += decoded.cut_drafts;
      whole += decoded.round.drafted + decoded.cut_drafts == 15;
      EXPECT_LE(decoded.round.drafted + decoded.cut_drafts, 15);
      if (decoded.cut_drafts > 0) {
        EXPECT_GE(decoded.round.drafted, 1) << "a round says something about its drafter";
      }
      EXPECT_EQ(decoded.confidences.size(), static_cast<size_t>(decoded.round.drafted));
    }
  }
  double TokensPerRound() const { return 1 + static_cast<double>(accepted) / static_cast<double>(rounds); }
  int64_t rounds = 0, drafted = 0, accepted = 0, cut = 0, whole = 0;
};

std::unique_ptr<Engine> EngineOf(TinyPair& pair, double least_survival, StepObserver* observer = nullptr,
                                 bool captured = false) {
  EngineOptions options;
  options.vocabulary = pair.vocabulary;
  options.captured_rounds = captured;
  options.rounds_ahead = captured ? 1 : 0;
  options.least_survival = least_survival;
  options.observer = observer;
  auto engine = Engine::Create(options, pair.target.get(), pair.rank_drafter(), pair.table.get(),
                               pair.tokenizer.get(), *pair.stream);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

std::vector<GenerationRequest> ChatRequests() {
  std::vector<GenerationRequest> requests;
  const std::vector<testing::GoldenPrompt> prompts = testing::LoadGoldenPrompts().value();
  for (const testing::GoldenPrompt& prompt : prompts) {
    if (prompt.kind == "chat") requests.push_back(testing::GoldenRequest(prompt));
  }
  return requests;
}

void ExpectSameText(const std::vector<GenerationOutcome>& actual,
                    const std::vector<GenerationOutcome>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(actual[i].text, expected[i].text) << i;
    EXPECT_EQ(actual[i].finished.reason, expected[i].finished.reason) << i;
  }
}

TEST(UnsureDraftsTest, CostNoRows) {
  TinyPair pair = LoadTinyPair().value();
  Rounds all, sure;
  const auto expected = testing::RunOneByOne(*EngineOf(pair, 0, &all), ChatRequests());
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto actual = testing::RunOneByOne(*EngineOf(pair, 0.5, &sure), ChatRequests());
  ASSERT_TRUE(actual.ok()) << actual.status();
  ExpectSameText(*actual, *expected);
  EXPECT_EQ(all.cut, 0);
  EXPECT_NEAR(all.TokensPerRound(), testing::kGoldenChatMean, 0.05 * testing::kGoldenChatMean);
  EXPECT_GT(sure.TokensPerRound(), 0.9 * all.TokensPerRound());
  EXPECT_LT(static_cast<double>(sure.drafted) / static_cast<double>(sure.rounds),
            0.7 * static_cast<double>(all.drafted) / static_cast<double>(all.rounds));
  EXPECT_GT(static_cast<double>(sure.accepted), 0.9 * static_cast<double>(sure.drafted));
  EXPECT_GT(sure.whole, sure.rounds * 3 / 4)
      << "what was not cut and not at the end of its text was verified";
}

// However little is verified, and however many are in a round: prompts, sampling, stops and cancellations of
// all kinds.
TEST(UnsureDraftsTest, ChangeNoText) {
  testing::TinyPairOptions pools;
  pools.slots = 6;
  pools.pages = 24;
  TinyPair pair = LoadTinyPair(pools).value();
  const std::vector<GenerationRequest> requests =
      testing::MixedRequests(24, 21, {.longest_prompt = 100, .most_tokens = 96});
  const auto expected = testing::RunOneByOne(*EngineOf(pair, 0), requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const double least : {0.5, 0.95, 2.0}) {
    SCOPED_TRACE(least);
    Rounds rounds;
    const auto actual =
        testing::RunInCompany(*EngineOf(pair, least, &rounds), requests, {.seed = 4, .most_arrivals = 6});
    ASSERT_TRUE(actual.ok()) << actual.status();
    ExpectSameText(*actual, *expected);
    EXPECT_GT(rounds.cut, 0);
    EXPECT_GT(rounds.accepted, 0);
  }
}

TEST(UnsureDraftsTest, AreVerifiedWhereWholeBlocksAreAsked) {
  TinyPair pair = LoadTinyPair().value();
  std::vector<GenerationRequest> requests = ChatRequests();
  requests.resize(4);
  for (GenerationRequest& request : requests) request.max_draft_tokens = 15;
  const auto expected = testing::RunOneByOne(*EngineOf(pair, 0), requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  Rounds rounds;
  const auto actual = testing::RunOneByOne(*EngineOf(pair, 0.5, &rounds), requests);
  ASSERT_TRUE(actual.ok()) << actual.status();
  EXPECT_EQ(rounds.cut, 0);
  EXPECT_GT(rounds.accepted, 0);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ((*actual)[i].rounds.size(), (*expected)[i].rounds.size());
    for (size_t r = 0; r < (*expected)[i].rounds.size(); ++r) {
      EXPECT_EQ((*actual)[i].rounds[r].drafted, (*expected)[i].rounds[r].drafted);
      EXPECT_EQ((*actual)[i].rounds[r].accepted, (*expected)[i].rounds[r].accepted);
    }
  }
}

// A graph has one shape, whatever the drafter thinks.
TEST(UnsureDraftsTest, AreVerifiedInCapturedRounds) {
  TinyPair pair = LoadTinyPair().value();
  std::vector<GenerationRequest> requests = ChatRequests();
  requests.resize(2);
  Rounds rounds;
  const auto actual = testing::RunOneByOne(*EngineOf(pair, 0.5, &rounds, /*captured=*/true), requests);
  ASSERT_TRUE(actual.ok()) << actual.status();
  EXPECT_EQ(rounds.cut, 0);
  EXPECT_GT(rounds.accepted, 0);
}

// Rank 0 decides: what another rank would do does not matter, wherever the drafter runs.
TEST(UnsureDraftsTest, AreCutByRankZeroForAll) {
  std::vector<GenerationRequest> requests = ChatRequests();
  requests.resize(4);
  for (const DraftPlacement placement : {DraftPlacement::kRankZero, DraftPlacement::kSharded}) {
    testing::TinyPairOptions options;
    options.draft_placement = placement;
    const std::unique_ptr<testing::RankThreads> ranks = testing::RankThreads::Load(2, options).value();
    const auto run = [&](double least_survival, Rounds* rounds) {
      std::vector<std::vector<GenerationOutcome>> outcomes(2);
      const absl::Status ran = ranks->Run([&](int rank, TinyPair& pair) -> absl::Status {
        const std::unique_ptr<Engine> engine =
            EngineOf(pair, rank == 0 ? least_survival : 0, rank == 0 ? rounds : nullptr);
        absl::StatusOr<std::vector<GenerationOutcome>> done = testing::RunOneByOne(*engine, requests);
        if (done.ok()) outcomes[static_cast<size_t>(rank)] = *std::move(done);
        return done.status();
      });
      EXPECT_TRUE(ran.ok()) << ran;
      return outcomes;
    };
    Rounds whole, cut;
    const std::vector<GenerationOutcome> expected = run(0, &whole)[0];
    EXPECT_EQ(whole.cut, 0);
    for (const std::vector<GenerationOutcome>& of_rank : run(0.5, &cut)) ExpectSameText(of_rank, expected);
    EXPECT_GT(cut.cut, 0);
    EXPECT_LT(cut.drafted, whole.drafted);
    EXPECT_GT(cut.accepted, 0);
  }
}

}  // namespace
}  // namespace dflash
