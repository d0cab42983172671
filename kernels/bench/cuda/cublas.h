// The linear layers by cuBLASLt, to stand beside ours in the same run.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"

namespace dflash::bench {

// y[rows, N] = x[rows, K] · w[N, K]ᵀ; all bfloat16 in rows without gaps, sums in float32.
class CublasLinear {
 public:
  static absl::StatusOr<CublasLinear> Create(const Stream& stream);
  CublasLinear(CublasLinear&& other) noexcept;
  CublasLinear(const CublasLinear&) = delete;
  ~CublasLinear();

  // What cuBLASLt's heuristic offers for a shape, best first by its own estimate; at most 8.
  struct Algorithm {
    alignas(8) unsigned char bytes[64];  // a cublasLtMatmulAlgo_t
  };
  absl::StatusOr<std::vector<Algorithm>> Algorithms(int64_t rows, int64_t N, int64_t K) const;

  // Enqueues one product on the stream.
  absl::Status Launch(const void* x, const void* w, void* y, int64_t rows, int64_t N, int64_t K,
                      const Algorithm& algorithm) const;

 private:
  CublasLinear(void* handle, Buffer workspace, const Stream& stream)
      : handle_(handle), workspace_(std::move(workspace)), stream_(&stream) {}

  void* handle_;  // a cublasLtHandle_t, owned
  Buffer workspace_;
  const Stream* stream_;
};

}  // namespace dflash::bench
