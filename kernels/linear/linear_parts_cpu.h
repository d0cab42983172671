// How a linear call is cut into parts on the CPU, for Linear and for operations that do more with its
// outputs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/linear_cpu.h"

namespace dflash {

// Rows [first_row, first_row + rows) and blocks [first_block, first_block + blocks) of kLinearBlock outputs.
struct LinearPart {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_block = 0;
  int64_t blocks = 0;
};

// Rows of a part at most: beyond that a second-level cache no longer holds them.
inline constexpr int64_t kLinearRowsPerPart = 96;

// Blocks that a part should have at least, for rows of `depth` multiplications an output.
int64_t LinearGrain(int64_t blocks, int64_t rows, int64_t depth, int threads);

// Calls fn(const LinearPart&) on parts that cover `rows` x `blocks`, in parallel.
template <typename Fn>
void ForEachLinearPart(const Stream& stream, int64_t rows, int64_t blocks, int64_t depth, const Fn& fn) {
  const int64_t row_parts = (rows + kLinearRowsPerPart - 1) / kLinearRowsPerPart;
  const int64_t rows_per_part = (rows + row_parts - 1) / row_parts;
  const int64_t grain = LinearGrain(blocks * row_parts, rows_per_part, depth, ThreadsOf(stream).threads());
  // Items: the blocks of the first rows, then those of the next rows, ...
  ParallelFor(stream, blocks * row_parts, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      LinearPart part;
      part.first_row = begin / blocks * rows_per_part;
      part.rows = std::min(rows_per_part, rows - part.first_row);
      part.first_block = begin % blocks;
      part.blocks = std::min(end - begin, blocks - part.first_block);
      if (part.rows > 0) fn(part);
      begin += part.blocks;
    }
  });
}

// The part of Linear(x, w) -> y, by the calling thread.
void RunLinearPart(const ConstMatrixView& x, const LinearWeight& w, const LinearPart& part,
                   const MatrixView& y);

}  // namespace dflash
