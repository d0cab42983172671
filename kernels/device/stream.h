// The place where operations run: on the CPU a pool of threads, on a GPU a CUDA stream. One backend is linked
// into a program (library kernels_cpu or kernels_cuda); this header names no type of either.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dflash {

// Owns one ordered queue of work. Movable, not copyable; a moved-from Stream is empty.
// CPU: operations run before the call returns, split over `threads` threads; results do not depend on their
// number. CUDA: operations are enqueued; Synchronize() waits for them and reports what went wrong.
class Stream {
 public:
  struct Options {
    int threads = 0;  // CPU: 0 = one per core that the process may use; 1..256
    int device = 0;   // CUDA: device ordinal
  };
  // InvalidArgument: threads outside [0, 256]. Unavailable: the backend finds no such device.
  static absl::StatusOr<Stream> Create(const Options& options);

  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  absl::Status Synchronize() const;

  // CUDA: the cudaStream_t, for libraries that enqueue by themselves. CPU: null.
  void* native_handle() const;

  struct Impl;  // defined by the backend
  Impl& impl() const { return *impl_; }

 private:
  explicit Stream(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Name of the linked backend: "cpu" or "cuda".
const char* BackendName();

// Chooses the instructions of the CPU backend's kernels for the whole process: "auto" (the best that this
// machine has), "scalar", "avx2" or "avx512". All of them compute the same bits. Call it before any operation
// runs. InvalidArgument: an unknown name, or instructions that this machine lacks; CUDA knows "auto" only.
absl::Status SelectInstructionSet(const std::string& name);

}  // namespace dflash
