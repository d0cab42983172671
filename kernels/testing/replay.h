// Test support: operations as parts of captured graphs.
#pragma once

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "base/status.h"
#include "kernels/device/graph.h"
#include "kernels/device/stream.h"

namespace dflash {

// Captures `call` and launches it twice; `between` runs between the launches (for operations that work in
// place: it puts their input back).
inline absl::Status CaptureAndReplay(const Stream& stream, const std::function<absl::Status()>& call,
                                     const std::function<absl::Status()>& between = nullptr) {
  DFLASH_ASSIGN_OR_RETURN(const Graph graph, Graph::Capture(stream, call));
  DFLASH_RETURN_IF_ERROR(graph.Launch(stream));
  if (between != nullptr) DFLASH_RETURN_IF_ERROR(between());
  DFLASH_RETURN_IF_ERROR(graph.Launch(stream));
  return stream.Synchronize();
}

}  // namespace dflash
