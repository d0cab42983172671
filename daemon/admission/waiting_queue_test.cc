#include "daemon/admission/waiting_queue.h"

#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

WaitingQueue::Entry Entry(const std::string& id, int64_t tokens,
                          absl::Time deadline = absl::InfiniteFuture()) {
  return {.id = id, .prompt_tokens = tokens, .since = kStart, .deadline = deadline, .client = ""};
}

TEST(WaitingQueue, InOrderOfArrival) {
  WaitingQueue queue({.max_requests = 3, .max_prompt_tokens = 100});
  ASSERT_TRUE(queue.Push(Entry("a", 10)).ok());
  ASSERT_TRUE(queue.Push(Entry("b", 20)).ok());
  ASSERT_TRUE(queue.Push(Entry("c", 30)).ok());
  EXPECT_EQ(queue.prompt_tokens(), 60);
  EXPECT_TRUE(queue.Remove("b"));
  EXPECT_FALSE(queue.Remove("b"));
  EXPECT_EQ(queue.prompt_tokens(), 40);
  EXPECT_EQ(queue.Pop(kStart)->id, "a");
  EXPECT_EQ(queue.Pop(kStart)->id, "c");
  EXPECT_FALSE(queue.Pop(kStart).has_value());
  EXPECT_EQ(queue.prompt_tokens(), 0);
  EXPECT_EQ(queue.size(), 0);
}

TEST(WaitingQueue, BoundedByRequests) {
  WaitingQueue queue({.max_requests = 2, .max_prompt_tokens = 100});
  EXPECT_TRUE(queue.CheckRoom(1).ok());
  EXPECT_FALSE(queue.CheckRoom(2).ok());
  ASSERT_TRUE(queue.Push(Entry("a", 1)).ok());
  EXPECT_FALSE(queue.CheckRoom(1).ok());
  ASSERT_TRUE(queue.Push(Entry("b", 1)).ok());
  const absl::Status full = queue.Push(Entry("c", 1));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("at most 2 requests"));
  EXPECT_EQ(DetailsOf(full).reason, "QUEUE_FULL");
  EXPECT_GT(DetailsOf(full).retry_after.value(), absl::ZeroDuration());
  EXPECT_EQ(queue.size(), 2);
  ASSERT_TRUE(queue.Pop(kStart).has_value());
  EXPECT_TRUE(queue.Push(Entry("c", 1)).ok());
}

TEST(WaitingQueue, BoundedByTokens) {
  WaitingQueue queue({.max_requests = 10, .max_prompt_tokens = 100});
  ASSERT_TRUE(queue.Push(Entry("a", 60)).ok());
  const absl::Status full = queue.Push(Entry("b", 41));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("prompt tokens"));
  EXPECT_TRUE(queue.Push(Entry("c", 40)).ok());
  EXPECT_FALSE(queue.CheckRoom(0).ok());
}

TEST(WaitingQueue, EmptyQueueTakesWhatWouldNeverFit) {
  WaitingQueue queue({.max_requests = 10, .max_prompt_tokens = 100});
  EXPECT_TRUE(queue.Push(Entry("long", 1000)).ok());
  EXPECT_FALSE(queue.Push(Entry("next", 1)).ok());
}

TEST(WaitingQueue, DeadlinesExpire) {
  WaitingQueue queue({});
  ASSERT_TRUE(queue.Push(Entry("a", 1, kStart + absl::Seconds(5))).ok());
  ASSERT_TRUE(queue.Push(Entry("b", 2)).ok());
  ASSERT_TRUE(queue.Push(Entry("c", 4, kStart + absl::Seconds(1))).ok());
  EXPECT_TRUE(queue.TakeExpired(kStart).deadline.empty());
  const auto expired = queue.TakeExpired(kStart + absl::Seconds(1));
  ASSERT_EQ(expired.deadline.size(), 1u);
  EXPECT_EQ(expired.deadline[0].id, "c");
  EXPECT_TRUE(expired.too_long.empty());
  EXPECT_EQ(queue.prompt_tokens(), 3);
  EXPECT_EQ(queue.OldestAge(kStart + absl::Seconds(2)), absl::Seconds(2));
  EXPECT_EQ(queue.TakeAll().size(), 2u);
  EXPECT_EQ(queue.OldestAge(kStart + absl::Seconds(2)), absl::ZeroDuration());
}

TEST(WaitingQueue, NobodyWaitsLongerThanAllowed) {
  WaitingQueue queue({.max_requests = 10, .max_prompt_tokens = 100, .max_wait = absl::Seconds(3)});
  ASSERT_TRUE(queue.Push(Entry("a", 1, kStart + absl::Seconds(2))).ok());
  ASSERT_TRUE(queue.Push(Entry("b", 1)).ok());
  WaitingQueue::Entry later = Entry("c", 1);
  later.since = kStart + absl::Seconds(1);
  ASSERT_TRUE(queue.Push(later).ok());
  const auto expired = queue.TakeExpired(kStart + absl::Seconds(3));
  ASSERT_EQ(expired.deadline.size(), 1u);
  EXPECT_EQ(expired.deadline[0].id, "a");
  ASSERT_EQ(expired.too_long.size(), 1u);
  EXPECT_EQ(expired.too_long[0].id, "b");
  EXPECT_EQ(queue.Front()->id, "c");
}

std::string Drain(WaitingQueue& queue) {
  std::string order;
  while (const auto entry = queue.Pop(kStart)) order += entry->id;
  return order;
}

TEST(WaitingQueue, PriorityIsWorthTenSecondsAStep) {
  WaitingQueue queue({});
  const auto push = [&](const char* id, int64_t second, int32_t priority) {
    WaitingQueue::Entry entry = Entry(id, 1);
    entry.client = id;
    entry.since = kStart + absl::Seconds(second);
    entry.priority = priority;
    ASSERT_TRUE(queue.Push(entry).ok());
  };
  push("a", 0, 0);
  push("b", 5, 1);     // counts as come at -5
  push("c", 6, -1);    // 16
  push("d", 15, 0);    // 15
  push("e", 100, 10);  // 0, behind the older one
  push("f", 100, 9);   // 10
  EXPECT_EQ(queue.Front()->id, "b");
  EXPECT_EQ(Drain(queue), "baefdc");
  EXPECT_EQ(queue.Front(), nullptr);
}

TEST(WaitingQueue, AClientWithManyDoesNotKeepOthersOut) {
  WaitingQueue queue({});
  const auto push = [&](const char* id, const char* client, int64_t ms) {
    WaitingQueue::Entry entry = Entry(id, 1);
    entry.client = client;
    entry.since = kStart + absl::Milliseconds(ms);
    ASSERT_TRUE(queue.Push(entry).ok());
  };
  push("1", "many", 0);      // 0
  push("2", "many", 1);      // 1000
  push("3", "many", 2);      // 2000
  push("4", "many", 3);      // 3000
  push("a", "one", 500);     // 500
  push("b", "other", 2500);  // 2500
  push("5", "many", 9000);   // 9000: no debt from long ago
  EXPECT_EQ(Drain(queue), "1a23b45");
  // Only what waits counts: with an empty queue a client begins anew.
  push("6", "many", 9000);
  push("c", "one", 9001);
  EXPECT_EQ(Drain(queue), "6c");
}

// `seconds` between two Pops, with requests left behind.
void MoveEvery(WaitingQueue& queue, double seconds) {
  absl::Time now = kStart;
  for (int i = 0; i < 50; ++i) {
    while (queue.size() < 2)
      ASSERT_TRUE(queue.Push(Entry(std::to_string(i) + "/" + std::to_string(queue.size()), 1)).ok());
    ASSERT_TRUE(queue.Pop(now).has_value());
    now += absl::Seconds(seconds);
  }
  queue.TakeAll();
}

TEST(WaitingQueue, RetryHintFollowsHowFastItMoves) {
  WaitingQueue queue({.max_requests = 4, .max_prompt_tokens = 100});
  EXPECT_EQ(queue.RetryHint(), absl::Seconds(1)) << "nothing is known yet";
  MoveEvery(queue, 10);
  for (const char* id : {"a", "b", "c", "d"}) ASSERT_TRUE(queue.Push(Entry(id, 1)).ok());
  const absl::Duration hint = DetailsOf(queue.Push(Entry("y", 1))).retry_after.value();
  EXPECT_GT(hint, absl::Seconds(19)) << "until half of them are gone";
  EXPECT_LT(hint, absl::Seconds(21));
}

TEST(WaitingQueue, IdleTimeIsNotItsSpeed) {
  WaitingQueue queue({.max_requests = 4, .max_prompt_tokens = 100, .max_wait = absl::Seconds(5)});
  MoveEvery(queue, 1);
  absl::Time now = kStart + absl::Hours(1);
  for (int i = 0; i < 20; ++i, now += absl::Hours(1)) {
    ASSERT_TRUE(queue.Push(Entry("x", 1)).ok());
    ASSERT_TRUE(queue.Pop(now).has_value());
  }
  EXPECT_LE(queue.RetryHint(), absl::Seconds(1.1));
}

TEST(WaitingQueue, SpeedOfLongAgoIsForgotten) {
  WaitingQueue queue({.max_requests = 100, .max_prompt_tokens = 100, .max_wait = absl::Seconds(5)});
  MoveEvery(queue, 10);
  EXPECT_FALSE(queue.CheckRoom(60).ok());
  EXPECT_GT(queue.RetryHint(), absl::Seconds(9));
  queue.ForgetSpeed();
  EXPECT_TRUE(queue.CheckRoom(60).ok());
  EXPECT_EQ(queue.RetryHint(), absl::Seconds(1));
  // A new measure counts by itself, not as a part of the old one.
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(queue.Push(Entry(id, 1)).ok());
  ASSERT_TRUE(queue.Pop(kStart).has_value());
  ASSERT_TRUE(queue.Pop(kStart + absl::Seconds(0.5)).has_value());
  EXPECT_TRUE(queue.CheckRoom(9).ok());
  EXPECT_FALSE(queue.CheckRoom(10).ok());
}

TEST(WaitingQueue, RefusesWhatWouldWaitTooLong) {
  WaitingQueue queue({.max_requests = 100, .max_prompt_tokens = 100, .max_wait = absl::Seconds(3.5)});
  EXPECT_TRUE(queue.CheckRoom(99).ok()) << "nothing is known yet";
  MoveEvery(queue, 1);
  EXPECT_TRUE(queue.CheckRoom(3).ok());
  const absl::Status full = queue.CheckRoom(4);
  EXPECT_EQ(DetailsOf(full).reason, "QUEUE_FULL");
  EXPECT_THAT(std::string(full.message()), HasSubstr("which takes about 4s, over 3.5s"));
  ASSERT_TRUE(queue.Push(Entry("a", 1)).ok());
  EXPECT_TRUE(queue.CheckRoom(2).ok());
  EXPECT_FALSE(queue.CheckRoom(3).ok());
  // Slower than the bound by itself: an empty queue takes one all the same, or nothing would come any more.
  queue.TakeAll();
  MoveEvery(queue, 100);
  EXPECT_TRUE(queue.CheckRoom(0).ok());
  EXPECT_THAT(std::string(queue.CheckRoom(1).message()), ::testing::ContainsRegex("about 1m[0-9]+s, over"));
}

}  // namespace
}  // namespace dflash
