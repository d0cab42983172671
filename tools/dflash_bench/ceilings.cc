#include "tools/dflash_bench/ceilings.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "tools/dflash_bench/peak.h"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {
namespace {

const PeakKernels& Kernels() { return ForCurrentInstructionSet(kPeakScalar, kPeakAvx2, kPeakAvx512); }

volatile float sink;  // keeps results alive

}  // namespace

Reading::Reading(int64_t bytes, int64_t loop_bytes, const Stream& stream) : stream_(&stream) {
  // The parts of a loop go to whichever thread is free, so they are small enough to share the work evenly and
  // large enough that a reader can run ahead.
  constexpr int64_t kPiece = 64 << 10;
  const int64_t threads = ThreadsOf(stream).threads();
  loops_ = bytes / loop_bytes;
  pieces_ = std::max<int64_t>(1, loop_bytes / kPiece / threads) * threads;
  piece_ = loop_bytes / pieces_ / 512 * 512;
  DFLASH_CHECK(loops_ > 0 && piece_ > 0);
  absl::StatusOr<Buffer> buffer = Buffer::Allocate(loops_ * pieces_ * piece_, stream);
  DFLASH_CHECK(buffer.ok());
  buffer_ = *std::move(buffer);
  std::fill_n(buffer_.As<int32_t>(), buffer_.bytes() / 4, 0x3f800001);
}

void Reading::Run() const {
  const int64_t grain = std::max<int64_t>(1, pieces_ / (4 * ThreadsOf(*stream_).threads()));
  for (int64_t loop = 0; loop < loops_; ++loop) {
    const char* data = buffer_.As<char>() + loop * pieces_ * piece_;
    ParallelFor(*stream_, pieces_, grain, [&](int64_t begin, int64_t end) {
      sink = static_cast<float>(Kernels().read(data + begin * piece_, (end - begin) * piece_));
    });
  }
}

double ReadRate(int64_t bytes, const Stream& stream, int repeats) {
  const Reading reading(bytes, bytes, stream);
  return 1 / TimeMedian([&] { reading.Run(); }, reading.bytes(), repeats);
}

double MultiplyAddRate(const Stream& stream, int repeats) {
  constexpr int64_t kSteps = 20000;
  const int64_t threads = ThreadsOf(stream).threads();
  const auto compute = [&] {
    ParallelFor(stream, 4 * threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sink = Kernels().multiply_add(kSteps, 0.75f);
    });
  };
  return 1 / TimeMedian(compute, static_cast<double>(8 * threads * kSteps * kMultiplyAddsPerStep), repeats);
}

double LoopSeconds(const Stream& stream, int repeats) {
  return TimeMedian([&] { ParallelFor(stream, ThreadsOf(stream).threads(), 1, [](int64_t, int64_t) {}); }, 1,
                    repeats);
}

}  // namespace dflash::bench
