// How large amounts of data get from files to the device: host buffers that are filled by some threads while
// the device copies from others.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// A ring of host buffers (page-locked where the device copies by itself). The use of one buffer:
//   WaitUntilFree(b)                              any thread; then host(b) may be written
//   Stage(b, ...) or CopyToDevice from host(b)    the stream's thread
//   Release(b)                                    the stream's thread
// Movable, not copyable. The stream must outlive it.
class UploadRing {
 public:
  // ResourceExhausted, with the number of bytes, when there is no memory; InvalidArgument for sizes below 1.
  static absl::StatusOr<UploadRing> Create(int64_t buffers, int64_t buffer_bytes, const Stream& stream);
  UploadRing(UploadRing&&) noexcept;
  UploadRing& operator=(UploadRing&&) noexcept;
  ~UploadRing();

  int64_t buffers() const;
  int64_t buffer_bytes() const;
  void* host(int64_t buffer) const;

  // Blocks until the device has done everything that was enqueued before the buffer's last Release.
  absl::Status WaitUntilFree(int64_t buffer) const;
  // Enqueues a copy of the buffer's first `bytes` bytes to the device and returns where they lie there: valid
  // for work enqueued before the next Stage of any buffer. On the CPU this is the buffer itself.
  absl::StatusOr<const void*> Stage(int64_t buffer, int64_t bytes) const;
  // The work that reads the buffer has been enqueued.
  absl::Status Release(int64_t buffer) const;

 private:
  struct Impl;
  explicit UploadRing(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
