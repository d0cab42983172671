// Streams, memory, events and graphs of the CUDA backend.
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/event.h"
#include "kernels/device/graph.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/device/stream.h"
#include "kernels/device/timestamp.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

class DeviceCudaTest : public ::testing::Test {
 protected:
  Stream stream_ = *Stream::Create({});
};

TEST_F(DeviceCudaTest, NamesTheMissingDevice) {
  const absl::Status status = Stream::Create({.device = 4096}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("4096"), std::string::npos);
  EXPECT_EQ(Stream::Create({.device = -1}).status().code(), absl::StatusCode::kUnavailable);
}

TEST(CudaStatusTest, SaysWhoseFaultItIs) {
  EXPECT_TRUE(CudaStatus(cudaSuccess, "x").ok());
  EXPECT_EQ(CudaStatus(cudaErrorNoDevice, "x").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CudaStatus(cudaErrorInsufficientDriver, "x").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CudaStatus(cudaErrorNvlinkUncorrectable, "x").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CudaStatus(cudaErrorMemoryAllocation, "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CudaStatus(cudaErrorIllegalAddress, "x").code(), absl::StatusCode::kInternal);
  EXPECT_EQ(CudaAllocationStatus(cudaErrorMemoryAllocation, "x", 123).message(), "x: no room for 123 bytes");
}

TEST_F(DeviceCudaTest, BuffersAreZeroedAlignedAndBounded) {
  auto buffer = Buffer::Allocate(1001, stream_);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
  std::vector<uint8_t> host(1001, 1);
  ASSERT_TRUE(CopyToHost(host.data(), buffer->data(), 1001, stream_).ok());
  EXPECT_EQ(host, std::vector<uint8_t>(1001, 0));
  EXPECT_EQ(Buffer::Allocate(-1, stream_).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status full = Buffer::Allocate(int64_t{1} << 46, stream_).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("70368744177664"), std::string::npos) << full;
  EXPECT_TRUE(Buffer::Allocate(64, stream_).ok()) << "the error must not stick";
}

TEST_F(DeviceCudaTest, CopiesRowsBetweenStrides) {
  for (int64_t cols : {1, 7, 8, 64, 1000}) {
    for (int64_t extra : {0, 1, 8}) {
      const HostMatrix<float> host = RandomMatrix<float>(5, cols, 1);
      const DeviceMatrix from = DeviceMatrix::Input(host, stream_, extra);
      const DeviceMatrix to = DeviceMatrix::Output(5, cols, DType::kF32, stream_, 2 * extra);
      ASSERT_TRUE(CopyRows(from.view(), to.view(), stream_).ok());
      EXPECT_TRUE(BitEqual(to.ToHost(), host));
      EXPECT_TRUE(to.GuardsIntact());
      const DeviceMatrix narrow = DeviceMatrix::Input(Converted<bf16>(host), stream_, extra);
      const DeviceMatrix narrow_to = DeviceMatrix::Output(5, cols, DType::kBf16, stream_, 3 * extra);
      ASSERT_TRUE(CopyRows(narrow.view(), narrow_to.view(), stream_).ok());
      EXPECT_TRUE(BitEqual(narrow_to.ToHost(), narrow.ToHost()));
      EXPECT_TRUE(narrow_to.GuardsIntact());
    }
  }
}

TEST_F(DeviceCudaTest, EventsOrderStreams) {
  const Stream other = *Stream::Create({});
  constexpr int64_t kBytes = int64_t{64} << 20;
  auto source = Buffer::Allocate(kBytes, stream_), target = Buffer::Allocate(kBytes, stream_);
  ASSERT_TRUE(source.ok() && target.ok());
  ASSERT_TRUE(stream_.Synchronize().ok());
  auto event = Event::Create(Event::Timing::kOff, stream_);
  ASSERT_TRUE(event.ok());
  const std::vector<uint8_t> ones(kBytes, 1);
  ASSERT_TRUE(CopyToDevice(source->data(), ones.data(), kBytes, stream_).ok());
  ASSERT_TRUE(event->Record(stream_).ok());
  ASSERT_TRUE(event->Precede(other).ok());
  const ConstMatrixView from(source->data(), DType::kF32, 1024, kBytes / 4096, kBytes / 4096);
  ASSERT_TRUE(CopyRows(from, {target->data(), DType::kF32, 1024, kBytes / 4096, kBytes / 4096}, other).ok());
  std::vector<uint8_t> back(kBytes);
  ASSERT_TRUE(CopyToHost(back.data(), target->data(), kBytes, other).ok());
  EXPECT_EQ(back, ones);
  ASSERT_TRUE(event->Synchronize().ok());
  EXPECT_TRUE(event->IsReached().value());
}

TEST_F(DeviceCudaTest, GraphsReplayWithWhatMemoryHoldsThen) {
  const int64_t cols = 100;
  auto from = Matrix::Allocate(1, cols, DType::kF32, stream_),
       to = Matrix::Allocate(1, cols, DType::kF32, stream_);
  auto result = PinnedBuffer::Allocate(cols * 4, stream_);
  ASSERT_TRUE(from.ok() && to.ok() && result.ok());
  auto graph = Graph::Capture(stream_, [&] {
    const absl::Status status = CopyRows(from->view(), to->view(), stream_);
    return status.ok() ? CopyToPinned(*result, to->view().data, cols * 4, stream_) : status;
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(result->As<float>()[7], 0) << "capturing must not run anything";
  for (float start : {1.0f, 1000.0f}) {
    std::vector<float> host(static_cast<size_t>(cols));
    std::iota(host.begin(), host.end(), start);
    ASSERT_TRUE(CopyToDevice(from->view().data, host.data(), cols * 4, stream_).ok());
    ASSERT_TRUE(graph->Launch(stream_).ok());
    ASSERT_TRUE(stream_.Synchronize().ok());
    EXPECT_EQ(std::memcmp(result->data(), host.data(), static_cast<size_t>(cols * 4)), 0);
  }
  const auto failed = Graph::Capture(stream_, [] { return absl::InternalError("body"); });
  EXPECT_EQ(failed.status().message(), "body");
  EXPECT_EQ(CopyToPinned(*result, to->view().data, cols * 4 + 1, stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(ZeroFill(to->view().data, 4, stream_).ok())
      << "the stream must be usable after a failed capture";
  EXPECT_TRUE(stream_.Synchronize().ok());
}

TEST_F(DeviceCudaTest, TimestampsOfACapturedGraphMeasureItsWork) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  auto memory = Buffer::Allocate(kBytes, stream_), times = Buffer::Allocate(16, stream_);
  ASSERT_TRUE(memory.ok() && times.ok());
  auto graph = Graph::Capture(stream_, [&] {
    absl::Status status = RecordTime(times->As<int64_t>(), stream_);
    if (status.ok()) status = ZeroFill(memory->data(), kBytes, stream_);
    return status.ok() ? RecordTime(times->As<int64_t>() + 1, stream_) : status;
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (int launch = 0; launch < 2; ++launch) {
    ASSERT_TRUE(graph->Launch(stream_).ok());
    int64_t host[2];
    ASSERT_TRUE(CopyToHost(host, times->data(), 16, stream_).ok());
    EXPECT_GT(host[1] - host[0], 20'000) << "no GPU writes 256 MiB in 20 microseconds";
    EXPECT_LT(host[1] - host[0], 1'000'000'000);
  }
}

}  // namespace
}  // namespace dflash
