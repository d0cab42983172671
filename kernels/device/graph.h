// A sequence of operations that is put together once and run again and again.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// CUDA: a captured graph; a launch costs the host a few microseconds and does not run `body` again. The
// addresses and shapes of the capture are baked in; what lies in device memory may change between launches.
// CPU: keeps `body` and runs it at every launch. Movable.
class Graph {
 public:
  // `body` gives work to `stream` and to nothing else; nothing of it is executed here. What it refers to must
  // outlive the graph. Returns body's error, or the capture's (Internal: an operation that cannot be
  // captured, such as an allocation); on the CPU an error of the body shows at the launch.
  static absl::StatusOr<Graph> Capture(const Stream& stream, std::function<absl::Status()> body);
  // Whether a capture costs time and memory, so that few of them should be made.
  static bool IsCaptureCostly();

  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  ~Graph();

  absl::Status Launch(const Stream& stream) const;

 private:
  struct Impl;  // defined by the backend
  explicit Graph(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
