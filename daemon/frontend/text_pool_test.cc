#include "daemon/frontend/text_pool.h"

#include <atomic>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

constexpr size_t kLarge = TextPool::kLargeBytes + 1;

// Keeps one thread busy until it is let go.
struct Blocker {
  std::function<void()> Job() {
    return [this] {
      begun.Notify();
      go_on.WaitForNotification();
    };
  }
  absl::Notification begun, go_on;
};

TEST(TextPool, SmallJobsDoNotWaitForLargeOnes) {
  Blocker large;
  absl::Notification second_ran;
  TextPool pool(2);
  ASSERT_TRUE(pool.Post("a", kLarge, large.Job()).ok());
  large.begun.WaitForNotification();
  ASSERT_TRUE(pool.Post("a", kLarge, [&] { second_ran.Notify(); }).ok());
  absl::BlockingCounter small(100);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(pool.Post("b", TextPool::kLargeBytes, [&] { small.DecrementCount(); }).ok());
  }
  small.Wait();
  EXPECT_FALSE(second_ran.HasBeenNotified()) << "one thread is for small jobs only";
  large.go_on.Notify();
  second_ran.WaitForNotification();
}

TEST(TextPool, LargeJobsGoBeforeSmallOnesOnOtherThreads) {
  Blocker small, other;
  absl::Mutex mutex;
  std::string order;
  absl::BlockingCounter done(3);
  const auto note = [&](char name) {
    return [&, name] {
      absl::MutexLock lock(&mutex);
      order += name;
      done.DecrementCount();
    };
  };
  TextPool pool(2);
  ASSERT_TRUE(pool.Post("b", kLarge, other.Job()).ok());  // the thread of all jobs
  other.begun.WaitForNotification();
  ASSERT_TRUE(pool.Post("b", 1, small.Job()).ok());  // that of small ones
  small.begun.WaitForNotification();
  ASSERT_TRUE(pool.Post("b", 1, note('s')).ok());
  ASSERT_TRUE(pool.Post("b", 1, note('t')).ok());
  ASSERT_TRUE(pool.Post("b", kLarge, note('L')).ok());
  other.go_on.Notify();
  done.Wait();
  EXPECT_EQ(order, "Lst");
  small.go_on.Notify();
}

TEST(TextPool, ClientsTakeTurns) {
  for (const size_t bytes : {size_t{1}, kLarge}) {
    SCOPED_TRACE(bytes);
    Blocker small, other;
    absl::Mutex mutex;
    std::string order;
    absl::BlockingCounter done(7);
    TextPool pool(2);
    ASSERT_TRUE(pool.Post("x", kLarge, other.Job()).ok());
    other.begun.WaitForNotification();
    ASSERT_TRUE(pool.Post("x", 1, small.Job()).ok());
    small.begun.WaitForNotification();
    for (const char* name : {"a1", "a2", "a3", "a4", "b1", "b2", "c1"}) {
      ASSERT_TRUE(pool.Post(std::string(name, 1), bytes,
                            [&, name] {
                              absl::MutexLock lock(&mutex);
                              absl::StrAppend(&order, name, " ");
                              done.DecrementCount();
                            })
                      .ok());
    }
    other.go_on.Notify();
    done.Wait();
    EXPECT_EQ(order, "a1 b1 c1 a2 b2 a3 a4 ");
    small.go_on.Notify();
  }
}

TEST(TextPool, BoundedInBytes) {
  constexpr size_t kHalf = TextPool::kMaxBytes / 2;
  Blocker first;
  absl::Notification second_ran;
  TextPool pool(2);
  ASSERT_TRUE(pool.Post("a", kHalf, first.Job()).ok());
  first.begun.WaitForNotification();
  ASSERT_TRUE(pool.Post("b", kHalf, [&] { second_ran.Notify(); }).ok());
  const absl::Status full = pool.Post("c", 1, [] { FAIL() << "was refused"; });
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(full).reason, "QUEUE_FULL");
  EXPECT_TRUE(DetailsOf(full).retry_after.has_value());
  first.go_on.Notify();
  second_ran.WaitForNotification();  // the first one is over, then
  EXPECT_TRUE(pool.Post("c", 1, [] {}).ok());
}

TEST(TextPool, RunsWhatWasPostedBeforeItEnds) {
  std::atomic<int> ran = 0;
  {
    TextPool pool(3);
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(pool.Post(absl::StrCat(i % 3), i % 2 == 0 ? 1 : kLarge, [&] { ++ran; }).ok());
    }
  }
  EXPECT_EQ(ran, 50);
}

}  // namespace
}  // namespace dflash
