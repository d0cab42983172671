// What this machine can do right now, for the figures beside it.
#pragma once

#include <cstdint>

#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"

namespace dflash::bench {

// The stream's threads together reading `bytes`, each its own part, again and again: from whichever cache
// holds them, or from memory. In one parallel loop, or in loops of `loop_bytes` each, one after the other:
// what handing them over to the threads, and beginning anew in each, leaves.
class Reading {
 public:
  Reading(int64_t bytes, int64_t loop_bytes, const Stream& stream);

  void Run() const;
  double bytes() const { return static_cast<double>(buffer_.bytes()); }

 private:
  const Stream* stream_;
  int64_t loops_, pieces_, piece_;  // pieces of a loop; bytes of a piece
  Buffer buffer_;
};

// Bytes per second of Reading in one loop. Median of `repeats` passes.
double ReadRate(int64_t bytes, const Stream& stream, int repeats);

// Float32 operations per second (a fused multiply-add is two) of the stream's threads together.
double MultiplyAddRate(const Stream& stream, int repeats);

// Seconds that a parallel loop over nothing takes.
double LoopSeconds(const Stream& stream, int repeats);

}  // namespace dflash::bench
