#pragma once

#include "kernels/batch/segments.h"

namespace dflash {

// The segment that holds `row`, or -1; called by all threads of a block, which all get the answer. At most
// one segment holds a row.
__device__ __forceinline__ int32_t SegmentOfRow(const Segment* segments, int64_t count, int64_t row) {
  __shared__ int32_t found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const Segment segment = segments[i];
    if (row >= segment.first_row && row - segment.first_row < segment.row_count) {
      found = static_cast<int32_t>(i);
    }
  }
  __syncthreads();
  return found;
}

}  // namespace dflash
