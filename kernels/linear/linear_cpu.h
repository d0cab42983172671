// The CPU layout of a linear weight and the kernels over it.
//
// W [N, K] is cut into blocks of 32 outputs (the last one padded with zeros), each block stored with k
// outermost, so that one output is one vector lane and a block is one stream of memory:
//   f32:  block[k][0..31]
//   bf16: block[k][i], 16 words of 32 bits: low half = output i, high half = output i + 16. Widening a word
//   to
//         two float32 lanes is then one shift and one mask.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace dflash {

inline constexpr int64_t kLinearBlock = 32;

// y[t, n] for t in [0, rows) and the outputs n of blocks [first_block, first_block + block_count), n < N.
struct LinearTask {
  const float* x = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0;
  const void* packed = nullptr;
  int64_t in_features = 0;   // K
  int64_t out_features = 0;  // N
  float* y = nullptr;
  int64_t y_stride = 0;
  int64_t first_block = 0;
  int64_t block_count = 0;
};

struct LinearKernels {
  void (*bf16_weights)(const LinearTask& task);
  void (*f32_weights)(const LinearTask& task);
};

extern const LinearKernels kLinearScalar;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;

}  // namespace dflash
