// All state of a sequence moves together: after random acceptance patterns every store equals, bit for bit,
// that of the same tokens decoded one by one, and that of a fresh prefill up to rounding. And a row's
// logits do not depend on how many rows share its step.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/state_export.h"
#include "worker/rank/open_slot.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::RelativeError;
using testing::TinyPair;

using Stores = std::vector<std::vector<float>>;

// A sequence driven by hand: its tokens are given, not sampled.
class Sequence {
 public:
  Sequence(TinyPair& pair, const std::vector<int32_t>& tokens) : pair_(pair), tokens_(tokens) {
    absl::StatusOr<int32_t> slot = pair.table->Open();
    EXPECT_TRUE(slot.ok()) << slot.status();
    slot_ = *slot;
    EXPECT_TRUE(pair.table->Reserve(slot_, static_cast<int64_t>(tokens.size())).ok());
    EXPECT_TRUE(pair.target->Open(slot_).ok() && pair.drafter->Open(slot_, 0).ok());
  }
  // Begins with the pages of `source` and a checkpoint, as a request that hits the prefix cache does.
  Sequence(TinyPair& pair, const std::vector<int32_t>& tokens, const Sequence& source,
           const StateCheckpoint& checkpoint)
      : pair_(pair), tokens_(tokens), slot_(pair.table->Open().value()) {
    const std::vector<int32_t>& pages = pair.table->pages_of(source.slot_);
    EXPECT_EQ(pair.table->Append(slot_, {pages.begin(), pages.begin() + checkpoint.position / kPageTokens}),
              absl::OkStatus());
    EXPECT_EQ(pair.table->Reserve(slot_, static_cast<int64_t>(tokens.size())), absl::OkStatus());
    EXPECT_EQ(OpenSlot(slot_, checkpoint, pair.target.get(), pair.drafter.get(), pair.table.get()),
              absl::OkStatus());
    length_ = checkpoint.position;
  }
  ~Sequence() { EXPECT_TRUE(pair_.table->Close(slot_).ok()); }

  void Prefill(int64_t count, int64_t chunk) {
    while (length_ < count) {
      const int64_t rows = std::min(chunk, count - length_);
      Forward(Phase::kPrefill, Next(rows));
      Ingest(Phase::kPrefill, rows);
    }
  }

  // Verifies `rows` and commits the first `accepted` of them, which must be the sequence's own next tokens.
  void Round(const std::vector<int32_t>& rows, int64_t accepted) {
    Forward(Phase::kVerify, rows);
    absl::Status status = pair_.target->Commit({{.slot = slot_, .rows = accepted}});
    ASSERT_TRUE(status.ok()) << status;
    Ingest(Phase::kVerify, accepted);
    status = pair_.table->CheckLengths(slot_, length_, /*has_drafter=*/true);
    ASSERT_TRUE(status.ok()) << status;
  }

  std::vector<int32_t> Next(int64_t count) const {
    return {tokens_.begin() + length_, tokens_.begin() + length_ + count};
  }

  Stores Export() {
    absl::StatusOr<Stores> stores = pair_.target->ExportState(slot_);
    EXPECT_TRUE(stores.ok()) << stores.status();
    absl::StatusOr<Stores> context = pair_.drafter->ExportContext(slot_);
    EXPECT_TRUE(context.ok()) << context.status();
    stores->insert(stores->end(), context->begin(), context->end());
    return *stores;
  }

  int32_t slot() const { return slot_; }
  int64_t length() const { return length_; }
  const ForwardResult& last() const { return last_; }

 private:
  void Forward(Phase phase, const std::vector<int32_t>& rows) {
    absl::StatusOr<ForwardResult> result = pair_.target->Forward({.sequences = {{.slot = slot_,
                                                                                 .phase = phase,
                                                                                 .start_position = length_,
                                                                                 .tokens = rows,
                                                                                 .parents = {},
                                                                                 .last_logits = true}}});
    ASSERT_TRUE(result.ok()) << result.status();
    last_ = *result;
  }
  void Ingest(Phase phase, int64_t rows) {
    absl::Status status = pair_.drafter->Ingest(
        last_.taps,
        {{.slot = slot_, .phase = phase, .first_row = 0, .row_count = rows, .start_position = length_}});
    ASSERT_TRUE(status.ok()) << status;
    length_ += rows;
  }

  TinyPair& pair_;
  const std::vector<int32_t>& tokens_;
  int32_t slot_ = -1;
  int64_t length_ = 0;
  ForwardResult last_;
};

std::vector<int32_t> SomeTokens(size_t count) {
  std::vector<int32_t> tokens;
  const std::vector<testing::GoldenPrompt> prompts = *LoadGoldenPrompts();
  for (const testing::GoldenPrompt& prompt : prompts) {
    if (prompt.kind == "chat") continue;
    tokens.insert(tokens.end(), prompt.prompt_ids.begin(), prompt.prompt_ids.end());
  }
  tokens.resize(count);
  return tokens;
}

TEST(StateTest, RandomAcceptanceLeavesWhatTokenByTokenDecodingLeaves) {
  constexpr int64_t kPrompt = 100;
  constexpr int kRounds = 200;
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(1000);
  std::mt19937 random(20);
  Sequence speculative(*pair, tokens);
  speculative.Prefill(kPrompt, 64);
  for (int round = 0; round < kRounds; ++round) {
    // Mostly short runs, some full blocks; the rejected rows hold garbage.
    const int64_t rows = 1 + static_cast<int64_t>(random() % 16);
    const int64_t accepted =
        random() % 8 == 0
            ? rows
            : 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(std::min<int64_t>(rows, 4)));
    std::vector<int32_t> block = speculative.Next(accepted);
    while (static_cast<int64_t>(block.size()) < rows) block.push_back(static_cast<int32_t>(random() % 4096));
    speculative.Round(block, accepted);
    ASSERT_FALSE(HasFatalFailure());
  }
  Sequence single(*pair, tokens);
  single.Prefill(kPrompt, 128);  // other chunks, same bits
  while (single.length() < speculative.length()) {
    single.Round(single.Next(1), 1);
    ASSERT_FALSE(HasFatalFailure());
  }
  const Stores actual = speculative.Export();
  const Stores expected = single.Export();
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t store = 0; store < actual.size(); ++store)
    EXPECT_EQ(actual[store], expected[store]) << "store " << store;

  Sequence fresh(*pair, tokens);
  fresh.Prefill(speculative.length(), 256);
  const Stores prefilled = fresh.Export();
  double worst = 0;
  for (size_t store = 0; store < actual.size(); ++store) {
    const double error = RelativeError(actual[store], prefilled[store]);
    EXPECT_LE(error, testing::BackendDemands().prefilled_state) << "store " << store;
    worst = std::max(worst, error);
  }
  std::printf("decoded against prefilled state: max |error| / rms = %.2e\n", worst);
}

// Checkpoints made on the way change nothing; a sequence that begins with one, and with the pages before it,
// ends in the same bits as one that ran everything. Two at a time, with cuts at different places.
TEST(StateTest, CheckpointsContinueWithTheBitsOfTheWhole) {
  testing::TinyPairOptions options;
  options.checkpoints = 5;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(700);
  const std::vector<int32_t> others(tokens.rbegin(), tokens.rend());
  const auto rows_of = [](const Sequence& sequence, const std::vector<int32_t>& text, int64_t count) {
    return SequenceRows{.slot = sequence.slot(),
                        .phase = Phase::kPrefill,
                        .start_position = 0,
                        .tokens = {text.begin(), text.begin() + count},
                        .parents = {},
                        .last_logits = false};
  };
  Sequence whole(*pair, tokens), other(*pair, others);
  StepBatch batch = {.sequences = {rows_of(whole, tokens, 500), rows_of(other, others, 192)}};
  batch.sequences[0].checkpoints = {
      {.position = 64, .index = 3}, {.position = 320, .index = 0}, {.position = 448, .index = 4}};
  batch.sequences[1].checkpoints = {{.position = 128, .index = 1}, {.position = 192, .index = 2}};
  absl::StatusOr<ForwardResult> forward = pair->target->Forward(batch);
  ASSERT_TRUE(forward.ok()) << forward.status();
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(pair->drafter
                    ->Ingest(forward->taps, {{.slot = batch.sequences[i].slot,
                                              .phase = Phase::kPrefill,
                                              .first_row = forward->rows[i].first,
                                              .row_count = forward->rows[i].count,
                                              .start_position = 0}})
                    .ok());
  }
  Sequence* sources[] = {&whole, &other};
  const std::vector<int32_t>* texts[] = {&tokens, &others};
  for (size_t i = 0; i < 2; ++i) {
    const auto length = static_cast<int64_t>(batch.sequences[i].tokens.size());
    const Stores expected = sources[i]->Export();
    Sequence plain(*pair, *texts[i]);
    plain.Prefill(length, 512);
    EXPECT_EQ(plain.Export(), expected) << "checkpoints change nothing";
    for (const StateCheckpoint& checkpoint : batch.sequences[i].checkpoints) {
      SCOPED_TRACE(checkpoint.position);
      Sequence warm(*pair, *texts[i], *sources[i], checkpoint);
      EXPECT_EQ(warm.length(), checkpoint.position);
      warm.Prefill(length, 64);
      EXPECT_EQ(warm.Export(), expected);
    }
  }
}

TEST(StateTest, RefusesCheckpointsThatRowsCannotLeave) {
  testing::TinyPairOptions options;
  options.checkpoints = 2;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(200);
  const Sequence sequence(*pair, tokens);
  const std::vector<std::vector<StateCheckpoint>> bad = {
      {{.position = 63, .index = 0}},                                 // off the grid
      {{.position = 256, .index = 0}},                                // behind the rows
      {{.position = 0, .index = 0}},                                  // before them
      {{.position = 64, .index = 2}},                                 // no such checkpoint
      {{.position = 64, .index = -1}},                                // likewise
      {{.position = 128, .index = 0}, {.position = 64, .index = 1}},  // descending
  };
  for (const auto& checkpoints : bad) {
    const auto forward = pair->target->Forward({.sequences = {{.slot = sequence.slot(),
                                                               .phase = Phase::kPrefill,
                                                               .start_position = 0,
                                                               .tokens = tokens,
                                                               .parents = {},
                                                               .last_logits = false,
                                                               .checkpoints = checkpoints}}});
    EXPECT_EQ(forward.status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(pair->target->Restore(sequence.slot(), 2).code(), absl::StatusCode::kInvalidArgument);
}

TEST(StateTest, LogitRowsAreBitEqualForAnyNumberOfRows) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(300);
  const int64_t vocabulary = pair->target->config().vocab_size;
  std::vector<std::vector<float>> single;
  {
    Sequence sequence(*pair, tokens);
    sequence.Prefill(120, 64);
    for (int row = 0; row < 16; ++row) {
      sequence.Round(sequence.Next(1), 1);
      single.push_back(*ActivationsToHost(sequence.last().logits, *pair->stream));
    }
  }
  for (int64_t rows = 1; rows <= 16; ++rows) {
    Sequence sequence(*pair, tokens);
    sequence.Prefill(120, 64);
    sequence.Round(sequence.Next(rows), 1);
    const std::vector<float> logits = *ActivationsToHost(sequence.last().logits, *pair->stream);
    for (int64_t row = 0; row < rows; ++row) {
      EXPECT_TRUE(std::equal(single[static_cast<size_t>(row)].begin(), single[static_cast<size_t>(row)].end(),
                             logits.begin() + row * vocabulary))
          << rows << " rows, row " << row;
    }
  }
}

// As many rows as a full group verifies, at other positions each: 64 rows (the least that every backend
// promises) and 320 (more than the CUDA backend's linear layers take at a time).
TEST(StateTest, LogitRowsAreBitEqualInFullBatches) {
  constexpr int64_t kBlock = 16;
  constexpr int64_t kSequences = 20;
  testing::TinyPairOptions options;
  options.slots = kSequences;
  options.max_tokens = 512;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(1000);
  const int64_t vocabulary = pair->target->config().vocab_size;
  std::vector<std::vector<int32_t>> texts;
  std::vector<int64_t> prompts;
  std::vector<std::vector<float>> alone;
  for (int64_t i = 0; i < kSequences; ++i) {
    texts.emplace_back(tokens.begin() + 17 * i, tokens.begin() + 17 * i + 400);
    prompts.push_back(30 + 15 * i);
  }
  for (int64_t i = 0; i < kSequences; ++i) {
    Sequence sequence(*pair, texts[static_cast<size_t>(i)]);
    sequence.Prefill(prompts[static_cast<size_t>(i)], 64);
    sequence.Round(sequence.Next(kBlock), 1);
    alone.push_back(*ActivationsToHost(sequence.last().logits, *pair->stream));
  }
  for (int64_t count : {4, 20}) {
    std::vector<std::unique_ptr<Sequence>> sequences;
    StepBatch batch;
    std::vector<Target::Accepted> accepted;
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      sequences.push_back(std::make_unique<Sequence>(*pair, texts[at]));
      sequences.back()->Prefill(prompts[at], 64);
      batch.sequences.push_back({.slot = sequences.back()->slot(),
                                 .phase = Phase::kVerify,
                                 .start_position = prompts[at],
                                 .tokens = sequences.back()->Next(kBlock),
                                 .parents = {},
                                 .last_logits = false});
      accepted.push_back({.slot = sequences.back()->slot(), .rows = 1});
    }
    absl::StatusOr<ForwardResult> result = pair->target->Forward(batch);
    ASSERT_TRUE(result.ok()) << result.status();
    const std::vector<float> logits = *ActivationsToHost(result->logits, *pair->stream);
    ASSERT_EQ(static_cast<int64_t>(logits.size()), count * kBlock * vocabulary);
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<float>& expected = alone[static_cast<size_t>(i)];
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), logits.begin() + i * kBlock * vocabulary))
          << count << " sequences, sequence " << i;
    }
    ASSERT_TRUE(pair->target->Commit(accepted).ok());
  }
}

TEST(StateTest, CompanyChangesNoBit) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(400);
  const std::vector<int32_t> others(tokens.begin() + 130, tokens.end());
  std::vector<float> alone;
  {
    Sequence sequence(*pair, tokens);
    sequence.Prefill(90, 64);
    sequence.Round(sequence.Next(7), 1);
    alone = *ActivationsToHost(sequence.last().logits, *pair->stream);
  }
  Sequence sequence(*pair, tokens);
  Sequence decoding(*pair, others);
  Sequence prefilling(*pair, others);
  sequence.Prefill(90, 64);
  decoding.Prefill(70, 64);
  // A mixed step: prefill rows of one sequence, verify rows of two others, ours last.
  absl::StatusOr<ForwardResult> mixed = pair->target->Forward({.sequences = {{.slot = decoding.slot(),
                                                                              .phase = Phase::kVerify,
                                                                              .start_position = 70,
                                                                              .tokens = decoding.Next(3),
                                                                              .parents = {},
                                                                              .last_logits = false},
                                                                             {.slot = prefilling.slot(),
                                                                              .phase = Phase::kPrefill,
                                                                              .start_position = 0,
                                                                              .tokens = prefilling.Next(64),
                                                                              .parents = {},
                                                                              .last_logits = true},
                                                                             {.slot = sequence.slot(),
                                                                              .phase = Phase::kVerify,
                                                                              .start_position = 90,
                                                                              .tokens = sequence.Next(7),
                                                                              .parents = {},
                                                                              .last_logits = false}}});
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  const RowRange& rows = mixed->logits_rows[2];
  EXPECT_EQ(*ActivationsToHost(mixed->logits.Rows(rows.first, rows.count), *pair->stream), alone);
  ASSERT_TRUE(
      pair->target->Commit({{.slot = decoding.slot(), .rows = 3}, {.slot = sequence.slot(), .rows = 7}})
          .ok());
}

TEST(TargetTest, RefusesBatchesThatBreakItsRules) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<int32_t> tokens = SomeTokens(200);
  Sequence sequence(*pair, tokens);
  sequence.Prefill(10, 64);
  const auto code = [&](SequenceRows rows) {
    return pair->target->Forward({.sequences = {std::move(rows)}}).status().code();
  };
  const SequenceRows good = {.slot = sequence.slot(),
                             .phase = Phase::kVerify,
                             .start_position = 10,
                             .tokens = {1, 2},
                             .parents = {-1, 0},
                             .last_logits = false};
  SequenceRows rows = good;
  rows.start_position = 11;
  EXPECT_EQ(code(rows), absl::StatusCode::kInvalidArgument);
  rows = good;
  rows.tokens = {1, 4096};
  EXPECT_EQ(code(rows), absl::StatusCode::kInvalidArgument);
  rows = good;
  rows.tokens.assign(17, 1);
  rows.parents.clear();
  EXPECT_EQ(code(rows), absl::StatusCode::kInvalidArgument);
  rows = good;
  rows.tokens = {1, 2, 3};
  rows.parents = {-1, 0, 0};
  EXPECT_EQ(code(rows), absl::StatusCode::kUnimplemented);
  rows = good;
  rows.slot = 99;
  EXPECT_EQ(code(rows), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(good), absl::StatusCode::kOk);
  EXPECT_EQ(code(good), absl::StatusCode::kFailedPrecondition);  // not committed
  EXPECT_FALSE(pair->target->Commit({{.slot = sequence.slot(), .rows = 3}}).ok());
  EXPECT_TRUE(pair->target->Commit({{.slot = sequence.slot(), .rows = 1}}).ok());
}

}  // namespace
}  // namespace dflash
