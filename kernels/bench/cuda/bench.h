// Measuring: captured launches, replayed; medians. Every figure stands beside a ceiling of the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"

namespace dflash::bench {

// Ends the program with the message of a failed call.
void Require(const absl::Status& status);
template <typename T>
T Value(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

struct Microseconds {
  double median = 0, low = 0, high = 0;  // of one replay
};
// Captures `body` once and replays it; the first replays are not counted.
Microseconds TimeReplays(const Stream& stream, const std::function<absl::Status()>& body, int replays = 9);

// Keeps a figure for --json: `time` of `calls` equal calls.
void Record(const std::string& name, const Microseconds& time, double calls = 1);
struct Figure {
  std::string name;
  Microseconds time;  // of one call
};
const std::vector<Figure>& Figures();

// What the memory can do, in bytes per second: copying (read and written counted) and reading alone.
double CopyCeiling(const Stream& stream);
double ReadCeiling(const Stream& stream);
double GemmCeiling(const Stream& stream);
// Enqueues copies of `bytes` (a multiple of 16 KiB) into shared memory, by the copy engine of each
// multiprocessor: what a kernel that streams weights does, without anybody looking at them.
absl::Status BulkCopy(const void* from, int64_t bytes, const Stream& stream);

// Fills with bf16 numbers, normally distributed: a product of zeros draws less power and runs faster.
absl::Status FillNormal(void* data, int64_t bytes, float deviation, uint64_t seed, const Stream& stream);

// Values on the device.
template <typename T>
Buffer OnDevice(const std::vector<T>& values, const Stream& stream) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Buffer buffer = Value(Buffer::Allocate(bytes, stream));
  Require(CopyToDevice(buffer.data(), values.data(), bytes, stream));
  Require(stream.Synchronize());
  return buffer;
}
Matrix Noise(int64_t rows, int64_t cols, const Stream& stream);
// Consecutive segments of equal size, one a slot, all at the same position.
Buffer EqualSegments(int64_t sequences, int64_t rows, int64_t position, const Stream& stream);

struct Ceilings {
  double copy, read;  // bytes per second
  double gemm;        // multiplications and additions per second of cuBLASLt's largest product, bfloat16
};
void RunLinear(const Stream& stream, const Ceilings& ceilings);
void RunEnergy(const Stream& stream);
void RunOperations(const Stream& stream, const Ceilings& ceilings);
void RunStep(const Stream& stream);
void RunSequences(const Stream& stream, const Ceilings& ceilings);

}  // namespace dflash::bench
