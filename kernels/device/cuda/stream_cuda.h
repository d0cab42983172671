// The CUDA side of Stream.
#pragma once

#include "kernels/device/cuda/context.h"
#include "kernels/device/stream.h"

namespace dflash {

// Owns a non-blocking CUDA stream and its scratch memory.
struct Stream::Impl {
  CudaContext context;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();
};

inline const CudaContext& CudaOf(const Stream& stream) { return stream.impl().context; }

}  // namespace dflash
