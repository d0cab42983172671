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
  return {id, tokens, kStart, deadline};
}

TEST(WaitingQueue, FirstInFirstOut) {
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
  EXPECT_TRUE(queue.TakeExpired(kStart).empty());
  const auto expired = queue.TakeExpired(kStart + absl::Seconds(1));
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].id, "c");
  EXPECT_EQ(queue.prompt_tokens(), 3);
  EXPECT_EQ(queue.OldestAge(kStart + absl::Seconds(2)), absl::Seconds(2));
  EXPECT_EQ(queue.TakeAll().size(), 2u);
  EXPECT_EQ(queue.OldestAge(kStart + absl::Seconds(2)), absl::ZeroDuration());
}

TEST(WaitingQueue, RetryHintFollowsHowFastItDrains) {
  WaitingQueue queue({.max_requests = 1, .max_prompt_tokens = 100});
  absl::Time now = kStart;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(queue.Push(Entry("x", 1)).ok());
    ASSERT_TRUE(queue.Pop(now).has_value());
    now += absl::Seconds(10);
  }
  ASSERT_TRUE(queue.Push(Entry("x", 1)).ok());
  const absl::Duration hint = DetailsOf(queue.Push(Entry("y", 1))).retry_after.value();
  EXPECT_GT(hint, absl::Seconds(9));
  EXPECT_LT(hint, absl::Seconds(11));
}

}  // namespace
}  // namespace dflash
