#include "kernels/rope/rope_cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/rms_norm/rms_norm_cpu.h"
#include "kernels/rope/rope_backend.h"

namespace dflash::backend {
namespace {

constexpr int32_t kNoPosition = -1;
// What is worth a hand-over to another thread.
constexpr int64_t kAnglesPerPart = 64;
constexpr int64_t kPairsPerPart = 4096;

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

// Cosines and sines of rows. All layers of a step rotate the same positions, queries and keys, so the last
// few tables are kept; they depend on nothing but what they are asked for.
struct Rotations {
  double theta = 0;
  int64_t rotary_dim = 0;
  std::vector<int32_t> positions;     // of the rows
  std::vector<float> cosines, sines;  // [rows, rotary_dim / 2]
};

void Compute(Rotations& rotations, const Stream& stream) {
  const int64_t half = rotations.rotary_dim / 2, rows = static_cast<int64_t>(rotations.positions.size());
  std::vector<float> frequencies(static_cast<size_t>(half));
  for (int64_t j = 0; j < half; ++j) {
    frequencies[static_cast<size_t>(j)] = static_cast<float>(
        std::pow(rotations.theta, -2.0 * static_cast<double>(j) / static_cast<double>(rotations.rotary_dim)));
  }
  rotations.cosines.resize(static_cast<size_t>(rows * half));
  rotations.sines.resize(rotations.cosines.size());
  ParallelFor(stream, rows, std::max<int64_t>(1, kAnglesPerPart / half), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t position = rotations.positions[static_cast<size_t>(row)];
      if (position == kNoPosition) continue;
      float* cosines = rotations.cosines.data() + row * half;
      float* sines = rotations.sines.data() + row * half;
      for (int64_t j = 0; j < half; ++j) {
        // In double: float32 libraries differ in the last bit and in how they reduce large angles.
        const auto angle =
            static_cast<double>(static_cast<float>(position) * frequencies[static_cast<size_t>(j)]);
        cosines[j] = static_cast<float>(std::cos(angle));
        sines[j] = static_cast<float>(std::sin(angle));
      }
    }
  });
}

const Rotations& RotationsOf(const RopeShape& shape, std::vector<int32_t> positions, const Stream& stream) {
  thread_local std::array<Rotations, 4> kept;  // target and drafter, of prompts and of blocks
  thread_local size_t next = 0;
  for (const Rotations& rotations : kept) {
    if (rotations.theta == shape.theta && rotations.rotary_dim == shape.rotary_dim &&
        rotations.positions == positions) {
      return rotations;
    }
  }
  Rotations& rotations = kept[next++ % kept.size()];
  rotations.theta = shape.theta;
  rotations.rotary_dim = shape.rotary_dim;
  rotations.positions = std::move(positions);
  Compute(rotations, stream);
  return rotations;
}

}  // namespace

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  if (x.rows == 0) return absl::OkStatus();
  const RopeKernels& kernels = ForCurrentInstructionSet(kRopeScalar, kRopeAvx2, kRopeAvx512);
  const int64_t half = shape.rotary_dim / 2;
  const Rotations& rotations = RotationsOf(shape, PositionsOfRows(segments, x.rows), stream);
  const int64_t heads = x.cols / shape.head_dim;
  ParallelFor(stream, x.rows, std::max<int64_t>(1, kPairsPerPart / (heads * half)),
              [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                  if (rotations.positions[static_cast<size_t>(row)] == kNoPosition) continue;
                  kernels.rotate(rotations.cosines.data() + row * half, rotations.sines.data() + row * half,
                                 half, heads, shape.head_dim, x.Row<float>(row));
                }
              });
  return absl::OkStatus();
}

// Row by row: a row's heads are normed and turned while they are in the first-level cache.
absl::StatusOr<bool> NormAndRope(MatrixView q, ConstMatrixView q_weight, MatrixView k,
                                 ConstMatrixView k_weight, NormWeight weight, float eps,
                                 const RopeShape& shape, SegmentList segments, const Stream& stream) {
  const RopeKernels& kernels = ForCurrentInstructionSet(kRopeScalar, kRopeAvx2, kRopeAvx512);
  const RmsNormKernels& norms = CurrentRmsNormKernels();
  const int64_t half = shape.rotary_dim / 2, dim = shape.head_dim;
  const Rotations& rotations = RotationsOf(shape, PositionsOfRows(segments, k.rows), stream);
  const NormGroup groups[] = {NormGroupOf(q_weight, weight, eps), NormGroupOf(k_weight, weight, eps)};
  const int64_t elements = (q.cols + k.cols) / dim * (dim + kElementsWorthAGroup);
  ParallelFor(stream, k.rows, std::max<int64_t>(1, kNormElementsPerPart / elements),
              [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                  for (const bool is_key : {false, true}) {
                    const MatrixView& x = is_key ? k : q;
                    float* const heads = x.cols == 0 ? nullptr : x.Row<float>(row);
                    for (int64_t col = 0; col < x.cols; col += dim) {
                      norms.norm(groups[is_key], heads + col, NormGate::kNone, nullptr, heads + col);
                    }
                    if (x.cols == 0 || rotations.positions[static_cast<size_t>(row)] == kNoPosition) continue;
                    kernels.rotate(rotations.cosines.data() + row * half, rotations.sines.data() + row * half,
                                   half, x.cols / dim, dim, heads);
                  }
                }
              });
  return true;
}

}  // namespace dflash::backend
