#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// Owns a captured sequence of operations that can be launched again and again. The addresses and shapes of
// the capture are baked in; what lies in device memory may change between launches. Movable.
class Graph {
 public:
  // Runs `body`, which gives work to `stream` and to nothing else, without executing any of it. Returns
  // body's error, or the capture's (Internal: an operation that cannot be captured, such as an allocation).
  static absl::StatusOr<Graph> Capture(const Stream& stream, const std::function<absl::Status()>& body);
  Graph(Graph&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Graph();

  absl::Status Launch(const Stream& stream) const;

 private:
  explicit Graph(cudaGraphExec_t raw) : raw_(raw) {}
  cudaGraphExec_t raw_ = nullptr;
};

}  // namespace dflash
