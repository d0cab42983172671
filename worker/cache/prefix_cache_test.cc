#include "worker/cache/prefix_cache.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Tokens = std::vector<int32_t>;

constexpr int32_t kEnd = 999;  // ends a turn

Tokens Some(int64_t count, int32_t from = 0) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(from + static_cast<int32_t>(i % 500));
  return tokens;
}

Tokens Join(std::initializer_list<Tokens> parts) {
  Tokens tokens;
  for (const Tokens& part : parts) tokens.insert(tokens.end(), part.begin(), part.end());
  return tokens;
}

TEST(CheckpointPositions, AreEndsOfTurnsAndOfThePromptOnTheGrid) {
  const Tokens prompt = Join({Some(199), {kEnd}, Some(300), {kEnd}, Some(400), {kEnd}, Some(70)});
  EXPECT_THAT(CheckpointPositions(prompt, {kEnd}), ElementsAre(192, 896, 960));
  EXPECT_THAT(CheckpointPositions(prompt, {}), ElementsAre(960));
  EXPECT_THAT(CheckpointPositions(Some(128), {kEnd}), ElementsAre(64, 128))
      << "for itself, and for longer ones";
  EXPECT_THAT(CheckpointPositions(Some(63), {kEnd}), IsEmpty());
  EXPECT_THAT(CheckpointPositions(Some(64), {kEnd}), ElementsAre(64));
  EXPECT_THAT(CheckpointPositions({}, {kEnd}), IsEmpty());
}

class PrefixCacheTest : public ::testing::Test {
 protected:
  void Make(int64_t slots, int64_t pages, int64_t checkpoints) {
    stream_ = Stream::Create({.threads = 1}).value();
    table_ =
        SequenceTable::Create({.slots = slots, .pages = pages, .max_tokens = 64 * pages}, *stream_).value();
    cache_ = std::make_unique<PrefixCache>(
        PrefixCache::Options{.checkpoints = checkpoints, .turn_end_tokens = {kEnd}}, &*table_);
  }
  // A request's prompt from its hit to its end in pieces of `piece` tokens.
  struct Started {
    int32_t slot = -1;
    PrefixCache::Hit hit;
    std::vector<StateCheckpoint> made;
  };
  Started Start(const Tokens& prompt, const std::string& salt = "", int64_t piece = 512) {
    Started started;
    started.slot = table_->Open().value();
    started.hit = cache_->Open(started.slot, salt, prompt).value();
    const auto size = static_cast<int64_t>(prompt.size());
    const int64_t pages = (size + 63) / 64 - started.hit.tokens / 64;
    cache_->MakeRoom(pages);
    EXPECT_EQ(table_->Reserve(started.slot, size), absl::OkStatus());
    for (int64_t from = started.hit.tokens; from < size; from += piece) {
      const int64_t to = std::min(from + piece, size);
      const auto made = cache_->PlanCheckpoints(started.slot, from, to);
      cache_->OnPrefilled(started.slot, to, made);
      started.made.insert(started.made.end(), made.begin(), made.end());
    }
    return started;
  }
  void End(const Started& started) { Close(started.slot); }
  void Close(int32_t slot) {
    const int64_t before = table_->free_pages() + cache_->evictable_pages();
    const int64_t more = cache_->PagesAfter(slot);
    cache_->Close(slot);
    ASSERT_EQ(table_->Close(slot), absl::OkStatus());
    ASSERT_EQ(table_->free_pages() + cache_->evictable_pages(), before + more);
  }
  int64_t RunToEnd(const Tokens& prompt, const std::string& salt = "") {
    const Started started = Start(prompt, salt);
    End(started);
    return started.hit.tokens;
  }

  std::optional<Stream> stream_;
  std::optional<SequenceTable> table_;
  std::unique_ptr<PrefixCache> cache_;
};

TEST_F(PrefixCacheTest, TheSamePromptRunsItsLastTokensOnly) {
  Make(2, 32, 8);
  const Tokens prompt = Some(300);
  EXPECT_EQ(RunToEnd(prompt), 0);
  EXPECT_EQ(RunToEnd(prompt), 256);
  EXPECT_EQ(RunToEnd(Some(320)), 256);
  EXPECT_EQ(RunToEnd(Some(320)), 256) << "at least one token runs";
  EXPECT_EQ(RunToEnd(Some(321)), 320);
  EXPECT_EQ(RunToEnd(Some(300, 1)), 0);
}

TEST_F(PrefixCacheTest, SharedPagesAreTheSamePages) {
  Make(2, 32, 8);
  const Started first = Start(Some(200));
  const Started second = Start(Join({Some(200), Some(50, 400)}));
  EXPECT_EQ(second.hit.tokens, 192) << "while the first one still runs";
  EXPECT_EQ(second.hit.checkpoint, first.made.back().index);
  const auto& a = table_->pages_of(first.slot);
  const auto& b = table_->pages_of(second.slot);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 3, b.begin()));
  EXPECT_NE(a[3], b[3]);
  EXPECT_EQ(table_->free_pages(), 32 - 5);
  EXPECT_EQ(cache_->evictable_pages(), 0);
  End(first);
  EXPECT_EQ(cache_->evictable_pages(), 0) << "the second one has them still";
  End(second);
  EXPECT_EQ(cache_->evictable_pages(), cache_->pages());
  EXPECT_EQ(table_->free_pages() + cache_->pages(), 32);
}

// The first prompt leaves states at its own end only. The second one shares 256 tokens of it, has no state
// there and computes all; the third one finds the state that the second one left at the junction.
TEST_F(PrefixCacheTest, AStateIsKeptWherePromptsBranch) {
  Make(1, 64, 8);
  EXPECT_EQ(RunToEnd(Some(700)), 0);
  const Tokens second = Join({Some(300), Some(200, 100)});
  PrefixCache::Hit hit = cache_->Find("", second);
  EXPECT_EQ(hit.page_tokens, 256);
  EXPECT_EQ(hit.state_tokens, 0) << "what limits it is the states";
  EXPECT_EQ(RunToEnd(second), 0);
  hit = cache_->Find("", Join({Some(300), Some(200, 50)}));
  EXPECT_EQ(hit.page_tokens, 256);
  EXPECT_EQ(hit.tokens, 256);
}

TEST_F(PrefixCacheTest, TurnsAreReusedAtOnce) {
  Make(1, 64, 8);
  const Tokens system = Join({Some(400), {kEnd}});
  EXPECT_EQ(RunToEnd(Join({system, Some(80), {kEnd}, Some(5)})), 0);
  EXPECT_EQ(RunToEnd(Join({system, Some(90, 300), {kEnd}, Some(5)})), 384);
}

TEST_F(PrefixCacheTest, TheNextTurnBeginsWithTheWholeLastPrompt) {
  Make(1, 64, 8);
  Tokens prompt = Join({Some(100), {kEnd}, Some(90, 7), {kEnd}, Some(4, 490)});
  for (int turn = 0; turn < 4; ++turn) {
    const auto last = static_cast<int64_t>(prompt.size());
    RunToEnd(prompt);
    prompt = Join({prompt, Some(70, 11 * turn), {kEnd}, Some(60, 13 * turn), {kEnd}, Some(4, 490)});
    EXPECT_EQ(cache_->Find("", prompt).tokens, last / 64 * 64) << "turn " << turn;
  }
}

TEST_F(PrefixCacheTest, SaltsAreTenants) {
  Make(1, 32, 8);
  EXPECT_EQ(RunToEnd(Some(300), "a"), 0);
  EXPECT_EQ(RunToEnd(Some(300), "b"), 0);
  EXPECT_EQ(RunToEnd(Some(300)), 0);
  EXPECT_EQ(RunToEnd(Some(300), "a"), 256);
}

TEST_F(PrefixCacheTest, PagesAndCheckpointsAreEvictedByLastUse) {
  Make(1, 16, 3);
  RunToEnd(Some(300, 0));  // 4 cells
  RunToEnd(Some(300, 1));  // 4
  RunToEnd(Some(300, 0));  // the first is used again
  RunToEnd(Some(400, 2));  // 6: all 14 are there
  EXPECT_EQ(cache_->pages(), 14);
  RunToEnd(Some(300, 3));  // needs 5, 2 are free: takes the tail of the second prompt, with its state
  EXPECT_EQ(cache_->Find("", Some(300, 0)).tokens, 256);
  EXPECT_EQ(cache_->Find("", Some(300, 1)).page_tokens, 64);
  EXPECT_EQ(cache_->Find("", Some(300, 1)).tokens, 0);
  RunToEnd(Some(100, 4));  // a fourth state for three checkpoints: the one that was used longest ago goes
  EXPECT_EQ(cache_->Find("", Some(300, 0)).page_tokens, 256);
  EXPECT_EQ(cache_->Find("", Some(300, 0)).tokens, 0);
  EXPECT_EQ(cache_->Find("", Some(400, 2)).tokens, 384);
  EXPECT_EQ(cache_->used_checkpoints(), 3);
}

// A prompt that finds its pages but no states computes them again; what it found takes no room any more.
TEST_F(PrefixCacheTest, WhatWasComputedAgainIsNotHeldTwice) {
  Make(1, 9, 1);
  RunToEnd(Some(300, 0));
  RunToEnd(Some(70, 1));  // takes the only checkpoint
  EXPECT_EQ(cache_->Find("", Some(300, 0)).page_tokens, 256);
  const Started again = Start(Some(300, 0));
  EXPECT_EQ(again.hit.tokens, 0);
  EXPECT_EQ(table_->free_pages() + cache_->evictable_pages(), 9 - 5);
  cache_->MakeRoom(4);
  ASSERT_EQ(table_->Reserve(again.slot, 9 * 64), absl::OkStatus()) << "it may have all that there is";
  End(again);
}

TEST_F(PrefixCacheTest, TwoMakeTheSameStatesInOneStep) {
  Make(2, 32, 4);
  const Tokens prompt = Some(200);
  const int32_t a = table_->Open().value(), b = table_->Open().value();
  for (int32_t slot : {a, b}) {
    ASSERT_EQ(cache_->Open(slot, "", prompt).value().tokens, 0);
    ASSERT_EQ(table_->Reserve(slot, 200), absl::OkStatus());
  }
  const auto made_a = cache_->PlanCheckpoints(a, 0, 200), made_b = cache_->PlanCheckpoints(b, 0, 200);
  ASSERT_EQ(made_a.size(), 1u);
  ASSERT_EQ(made_b.size(), 1u);
  EXPECT_NE(made_a[0].index, made_b[0].index);
  cache_->OnPrefilled(a, 200, made_a);
  cache_->OnPrefilled(b, 200, made_b);
  EXPECT_EQ(cache_->used_checkpoints(), 1);
  EXPECT_EQ(cache_->pages(), 3);
  Close(a);
  EXPECT_EQ(table_->free_pages() + cache_->evictable_pages(), 32 - 4)
      << "the other one's pages are the cache's now";
  Close(b);
  EXPECT_EQ(table_->free_pages(), 29) << "the second one's copies are free again";
  EXPECT_EQ(cache_->evictable_pages(), 3);
}

// Prompts from a small family, in and out in any order, with too few pages and checkpoints for all of them.
// Every state and page is labelled with the prefix that it was made for; a hit must find its own.
TEST_F(PrefixCacheTest, RandomUseNeverMixesPrefixesUpAndLosesNothing) {
  constexpr int64_t kPages = 60, kCheckpoints = 6;
  Make(4, kPages, kCheckpoints);
  std::mt19937 random(5);
  std::map<int32_t, Tokens> page_holds;
  std::map<int32_t, Tokens> checkpoint_holds;
  struct Running {
    Started started;
    std::unique_ptr<Tokens> prompt;
    std::string salt;
    int64_t done = 0;
  };
  std::vector<Running> running;
  int64_t hits = 0;
  for (int step = 0; step < 4000; ++step) {
    SCOPED_TRACE(step);
    const auto labelled = [&](const Running& r, int64_t tokens) {
      Tokens label(r.prompt->begin(), r.prompt->begin() + tokens);
      label.push_back(r.salt.empty() ? -1 : -2);
      return label;
    };
    if (running.size() < 4 && random() % 2 == 0) {
      Running r;
      Tokens prompt;
      while (random() % 5 != 0 && prompt.size() < 800) {
        // One after the other: the order of arguments is the compiler's.
        const auto seed = static_cast<int32_t>(random() % 3);
        const auto length = static_cast<int64_t>(30 + random() % 3 * 61);
        prompt = Join({prompt, Some(length, seed), {kEnd}});
      }
      prompt.push_back(1);
      r.prompt = std::make_unique<Tokens>(std::move(prompt));
      if (random() % 3 == 0) r.salt = "t";
      const auto size = static_cast<int64_t>(r.prompt->size());
      const PrefixCache::Hit hit = cache_->Find(r.salt, *r.prompt);
      if ((size + 63) / 64 - hit.pinned_pages > table_->free_pages() + cache_->evictable_pages()) continue;
      r.started.slot = table_->Open().value();
      r.started.hit = cache_->Open(r.started.slot, r.salt, *r.prompt).value();
      ASSERT_EQ(r.started.hit.tokens, hit.tokens);
      r.done = hit.tokens;
      hits += hit.tokens > 0;
      for (int64_t cell = 0; cell < hit.tokens / 64; ++cell) {
        const int32_t page = table_->pages_of(r.started.slot)[static_cast<size_t>(cell)];
        ASSERT_EQ(page_holds[page], labelled(r, 64 * (cell + 1)));
      }
      if (hit.tokens > 0) {
        ASSERT_EQ(checkpoint_holds[hit.checkpoint], labelled(r, hit.tokens));
      }
      cache_->MakeRoom((size + 63) / 64 - hit.tokens / 64);
      ASSERT_EQ(table_->Reserve(r.started.slot, size), absl::OkStatus()) << "what admission counted on";
      running.push_back(std::move(r));
    } else if (!running.empty()) {
      std::swap(running[random() % running.size()], running.back());
      Running& r = running.back();
      const auto size = static_cast<int64_t>(r.prompt->size());
      if (r.done == size || random() % 8 == 0) {
        End(r.started);
        running.pop_back();
        continue;
      }
      const int64_t to = std::min(size, r.done + 64 * static_cast<int64_t>(1 + random() % 4));
      const auto made = cache_->PlanCheckpoints(r.started.slot, r.done, to);
      for (int64_t cell = r.done / 64; cell < to / 64; ++cell) {
        page_holds[table_->pages_of(r.started.slot)[static_cast<size_t>(cell)]] =
            labelled(r, 64 * (cell + 1));
      }
      for (const StateCheckpoint& checkpoint : made) {
        ASSERT_GT(checkpoint.position, r.done);
        ASSERT_LE(checkpoint.position, to);
        checkpoint_holds[checkpoint.index] = labelled(r, checkpoint.position);
      }
      cache_->OnPrefilled(r.started.slot, to, made);
      r.done = to;
    }
    ASSERT_LE(cache_->used_checkpoints(), kCheckpoints);
    std::set<int32_t> held;
    for (const Running& r : running) {
      const std::vector<int32_t>& pages = table_->pages_of(r.started.slot);
      held.insert(pages.begin(), pages.end());
    }
    ASSERT_EQ(table_->free_pages() + cache_->evictable_pages() + static_cast<int64_t>(held.size()), kPages)
        << "nothing is kept but for those who run";
  }
  EXPECT_GT(hits, 200);
  for (const Running& r : running) End(r.started);
  EXPECT_EQ(table_->free_pages() + cache_->pages(), kPages);
  EXPECT_EQ(cache_->evictable_pages(), cache_->pages());
  cache_->Clear();
  EXPECT_EQ(table_->free_pages(), kPages);
  EXPECT_EQ(cache_->used_checkpoints(), 0);
}

}  // namespace
}  // namespace dflash
