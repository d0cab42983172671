#include <atomic>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/device/event.h"
#include "kernels/device/graph.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/device/stream.h"
#include "kernels/device/timestamp.h"

namespace dflash {
namespace {

TEST(StreamTest, RefusesImpossibleThreadCounts) {
  EXPECT_EQ(Stream::Create({.threads = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Stream::Create({.threads = 257}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ThreadPoolTest, CoversEveryItemOnceManyTimes) {
  for (int threads : {1, 2, 3, 8}) {
    SCOPED_TRACE(threads);
    auto stream = Stream::Create({.threads = threads});
    ASSERT_TRUE(stream.ok());
    for (int round = 0; round < 2000; ++round) {
      const int64_t items = round % 37;
      std::vector<std::atomic<int>> hits(static_cast<size_t>(items));
      ParallelFor(*stream, items, 1 + round % 5, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          hits[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
      });
      for (auto& hit : hits) ASSERT_EQ(hit.load(), 1);
    }
  }
}

TEST(BufferTest, IsAlignedZeroedAndMovable) {
  auto stream = Stream::Create({.threads = 1});
  ASSERT_TRUE(stream.ok());
  auto buffer = Buffer::Allocate(1000, *stream);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(buffer->As<char>()[i], 0);
  Buffer moved = std::move(*buffer);
  EXPECT_EQ(moved.bytes(), 1000);
  EXPECT_EQ(Buffer::Allocate(-1, *stream).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(MatrixTest, RefusesShapesThatOverflow) {
  auto stream = Stream::Create({.threads = 1});
  ASSERT_TRUE(stream.ok());
  EXPECT_FALSE(Matrix::Allocate(INT64_MAX / 2, 16, DType::kF32, *stream).ok());
  auto matrix = Matrix::Allocate(3, 5, DType::kF32, *stream);
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(matrix->Rows(2).rows, 2);
}

// The stand-ins of what a GPU needs: the same calls, run at once.
TEST(GraphTest, RunsItsBodyAtEveryLaunch) {
  auto stream = Stream::Create({.threads = 1});
  ASSERT_TRUE(stream.ok());
  int runs = 0;
  auto graph = Graph::Capture(*stream, [&] {
    ++runs;
    return runs < 3 ? absl::OkStatus() : absl::InternalError("third");
  });
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(runs, 0);
  EXPECT_TRUE(graph->Launch(*stream).ok());
  EXPECT_TRUE(graph->Launch(*stream).ok());
  EXPECT_EQ(graph->Launch(*stream).message(), "third");
  EXPECT_EQ(runs, 3);
}

TEST(PinnedBufferTest, TakesWhatTheDeviceHolds) {
  auto stream = Stream::Create({.threads = 1});
  ASSERT_TRUE(stream.ok());
  auto pinned = PinnedBuffer::Allocate(8, *stream);
  ASSERT_TRUE(pinned.ok());
  const int64_t value = 123;
  EXPECT_EQ(*pinned->As<int64_t>(), 0);
  ASSERT_TRUE(CopyToPinned(*pinned, &value, 8, *stream).ok());
  EXPECT_EQ(*pinned->As<int64_t>(), 123);
  EXPECT_FALSE(CopyToPinned(*pinned, &value, 9, *stream).ok());
  EXPECT_FALSE(PinnedBuffer::Allocate(-1, *stream).ok());
}

TEST(EventTest, TimeGoesForward) {
  auto stream = Stream::Create({.threads = 1});
  ASSERT_TRUE(stream.ok());
  auto first = Event::Create(Event::Timing::kOn, *stream),
       second = Event::Create(Event::Timing::kOn, *stream);
  ASSERT_TRUE(first.ok() && second.ok());
  int64_t times[2] = {};
  ASSERT_TRUE(first->Record(*stream).ok() && RecordTime(&times[0], *stream).ok());
  ASSERT_TRUE(RecordTime(&times[1], *stream).ok() && second->Record(*stream).ok());
  EXPECT_TRUE(second->IsReached().value() && second->Synchronize().ok());
  EXPECT_GE(Event::MillisecondsBetween(*first, *second).value(), 0.0f);
  EXPECT_GE(times[1], times[0]);
}

}  // namespace
}  // namespace dflash
