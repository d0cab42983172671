// How every kernel of this backend is launched, and the two calls that go with it.
//
// Kernels are launched with programmatic stream serialization (compute capability 9.0 and later): a kernel
// may start while the one before it in the stream still runs. So every kernel
//   - calls LetNextKernelStart() early, and
//   - calls WaitForPreviousKernel() in every thread before the thread's first access to memory that another
//     kernel of the stream writes or reads (activations, states, the workspace). Weights are constants of
//     the whole run and may be read before.
// A kernel that calls LetNextKernelStart() after its wait, in all threads, makes a promise to the next one:
// when that starts, everything before the promising kernel is complete and visible. The two kernels of one
// operation use this to load old state early.
// Pointers to such memory are never `const __restrict__`: nvcc would read them through the non-coherent path
// and may move the load above the wait.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/cuda/context.h"

namespace dflash {

__device__ __forceinline__ void WaitForPreviousKernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void LetNextKernelStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;
  unsigned cluster = 1;  // blocks along x that run together
};

// Arguments are converted to the kernel's parameter types. The caller has raised the kernel's limit of
// dynamic shared memory where shared_bytes needs it.
template <typename... Params, typename... Args>
cudaError_t Launch(const CudaContext& context, const LaunchShape& shape, void (*kernel)(Params...),
                   const Args&... args) {
  if (const cudaError_t error = cudaSetDevice(context.device); error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = context.stream;
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  // One division of the cache for all kernels: a multiprocessor must run empty to change it, and kernels
  // could not overlap.
  cudaLaunchAttribute& carveout = attributes[config.numAttrs++];
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  if (context.compute_capability >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape.cluster, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// How many clusters of a kernel run at once on an idle device, the current one.
template <typename... Params>
cudaError_t MostClusters(const LaunchShape& shape, void (*kernel)(Params...), int* count) {
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CUDA bounds x by 2^31 - 1 and the others by 65535; a launch beyond that fails with an error.
inline dim3 Grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

}  // namespace dflash
