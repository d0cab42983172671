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

double ReadRate(int64_t bytes, const Stream& stream, int repeats) {
  // The parts of a loop go to whichever thread is free, so they are small enough to share the work evenly and
  // large enough that a reader can run ahead.
  constexpr int64_t kPiece = 64 << 10;
  const int64_t pieces = std::max<int64_t>(ThreadsOf(stream).threads(), bytes / kPiece);
  const int64_t piece = bytes / pieces / 512 * 512;
  DFLASH_CHECK(piece > 0);
  absl::StatusOr<Buffer> buffer = Buffer::Allocate(pieces * piece, stream);
  DFLASH_CHECK(buffer.ok());
  std::fill_n(buffer->As<int32_t>(), buffer->bytes() / 4, 0x3f800001);
  const auto read = [&] {
    ParallelFor(stream, pieces, std::max<int64_t>(1, pieces / (4 * ThreadsOf(stream).threads())),
                [&](int64_t begin, int64_t end) {
                  sink = static_cast<float>(
                      Kernels().read(buffer->As<char>() + begin * piece, (end - begin) * piece));
                });
  };
  return 1 / TimeMedian(read, static_cast<double>(buffer->bytes()), repeats);
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
