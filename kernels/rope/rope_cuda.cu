#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/segment_of_row.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/rope/rope_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 256;

struct Frequencies {
  float of_pair[kMaxPairs];
};

// Block = row: the row's cosines and sines once, then all its heads.
__global__ void RopeKernel(Bf16Rows x, int64_t heads, int64_t head_dim, int pairs, Frequencies frequencies,
                           const Segment* segments, int64_t segment_count) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int32_t index = SegmentOfRow(segments, segment_count, blockIdx.x);
  if (index < 0) return;
  const int32_t position =
      segments[index].start_position + (static_cast<int32_t>(blockIdx.x) - segments[index].first_row);
  __shared__ float cosines[kMaxPairs], sines[kMaxPairs];
  for (int j = static_cast<int>(threadIdx.x); j < pairs; j += kThreads) {
    // The float32 product's cosine and sine, in double, rounded once: as on the CPU.
    const double angle = static_cast<double>(static_cast<float>(position) * frequencies.of_pair[j]);
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    cosines[j] = static_cast<float>(cosine);
    sines[j] = static_cast<float>(sine);
  }
  __syncthreads();
  __nv_bfloat16* row = x.Row(blockIdx.x);
  for (int64_t i = threadIdx.x; i < heads * pairs; i += kThreads) {
    const auto j = static_cast<int>(i % pairs);
    __nv_bfloat16* head = row + i / pairs * head_dim;
    const float first = __bfloat162float(head[j]), second = __bfloat162float(head[j + pairs]);
    head[j] = __float2bfloat16_rn(fmaf(first, cosines[j], -second * sines[j]));
    head[j + pairs] = __float2bfloat16_rn(fmaf(second, cosines[j], first * sines[j]));
  }
}

}  // namespace

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  const int64_t pairs = shape.rotary_dim / 2;
  if (pairs > kMaxPairs) {
    return absl::UnimplementedError(
        absl::StrCat("ApplyRope: rotary_dim ", shape.rotary_dim, " is above ", 2 * kMaxPairs));
  }
  Frequencies frequencies = {};
  for (int64_t j = 0; j < pairs; ++j) {
    frequencies.of_pair[j] = static_cast<float>(
        std::pow(shape.theta, -2.0 * static_cast<double>(j) / static_cast<double>(shape.rotary_dim)));
  }
  const LaunchShape launch = {.grid = Grid(x.rows), .block = dim3(kThreads)};
  return CudaStatus(
      Launch(CudaOf(stream), launch, RopeKernel, Bf16RowsOf(x), x.cols / shape.head_dim, shape.head_dim,
             static_cast<int>(pairs), frequencies, segments.data, segments.count),
      "ApplyRope");
}

}  // namespace dflash::backend
