#include "kernels/rope/rope_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/rope/rope_backend.h"

namespace dflash::backend {
namespace {

constexpr int32_t kNoPosition = -1;

std::vector<int32_t> PositionsOfRows(SegmentList segments, int64_t rows) {
  std::vector<int32_t> positions(static_cast<size_t>(rows), kNoPosition);
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    DFLASH_CHECK(segment.first_row >= 0 && segment.row_count >= 0 && segment.start_position >= 0 &&
                     int64_t{segment.first_row} + segment.row_count <= rows,
                 "ApplyRope: segment outside the rows");
    for (int32_t row = 0; row < segment.row_count; ++row) {
      positions[static_cast<size_t>(segment.first_row + row)] = segment.start_position + row;
    }
  }
  return positions;
}

}  // namespace

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  const RopeKernels& kernels = ForCurrentInstructionSet(kRopeScalar, kRopeAvx2, kRopeAvx512);
  const int64_t half = shape.rotary_dim / 2;
  const std::vector<int32_t> positions = PositionsOfRows(segments, x.rows);
  std::vector<float> frequencies(static_cast<size_t>(half));
  for (int64_t j = 0; j < half; ++j) {
    frequencies[static_cast<size_t>(j)] = static_cast<float>(
        std::pow(shape.theta, -2.0 * static_cast<double>(j) / static_cast<double>(shape.rotary_dim)));
  }
  ParallelFor(stream, x.rows, /*grain=*/1, [&](int64_t begin, int64_t end) {
    std::vector<float> cosines(static_cast<size_t>(half)), sines(static_cast<size_t>(half));
    for (int64_t row = begin; row < end; ++row) {
      const int32_t position = positions[static_cast<size_t>(row)];
      if (position == kNoPosition) continue;
      for (size_t j = 0; j < static_cast<size_t>(half); ++j) {
        // In double: float32 libraries differ in the last bit and in how they reduce large angles.
        const double angle = static_cast<double>(static_cast<float>(position) * frequencies[j]);
        cosines[j] = static_cast<float>(std::cos(angle));
        sines[j] = static_cast<float>(std::sin(angle));
      }
      kernels.rotate(cosines.data(), sines.data(), half, x.cols / shape.head_dim, shape.head_dim,
                     x.Row<float>(row));
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
