// Delta records in device memory.
#pragma once

#include "kernels/gated_delta_net/gated_delta_net_cuda.h"

namespace dflash {

// A record, field by field.
struct Record {
  float* k;  // [key_heads, key_dim]
  float* c;  // [value_heads, value_dim]
  float* g;  // [value_heads]
};

__device__ __forceinline__ Record RecordAt(const DeltaTask& task, int64_t slot, int64_t buffer, int64_t row) {
  float* base = task.records + ((slot * 2 + buffer) * task.max_rows + row) * task.record_floats;
  float* c = base + task.KeyCols();
  return {base, c, c + int64_t{task.value_heads} * task.value_dim};
}

}  // namespace dflash
