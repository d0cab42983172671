// What a kernel launch needs to know about its stream, without Abseil, so that .cu files compile fast.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dflash {

// Scratch memory of one stream. An operation may use all of it; it holds nothing between operations. A launch
// must not touch it before its kernel has waited for the kernel before it (kernels/device/cuda/launch.cuh).
inline constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
// Signals between the blocks of one launch. Every launch finds them 0 and leaves them 0.
inline constexpr int64_t kWorkspaceFlags = 1024;

struct CudaContext {
  cudaStream_t stream = nullptr;
  int device = 0;
  int multiprocessors = 0;
  int compute_capability = 0;  // 10 * major + minor, e.g. 90
  void* workspace = nullptr;   // kWorkspaceBytes bytes, aligned to 256
  int32_t* flags = nullptr;    // kWorkspaceFlags
};

}  // namespace dflash
