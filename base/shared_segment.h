// Memory that the ranks of one host share: threads through one mapping, processes through a memory file that
// has no name anywhere and vanishes with the last of them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"

namespace dflash {

// Owns one mapping. Zeroed when created. Movable.
class SharedSegment {
 public:
  // ResourceExhausted when the system has no room.
  static absl::StatusOr<SharedSegment> Create(int64_t bytes);
  // Maps the segment that process `pid` of this user and host created, whose descriptor there is `fd`.
  // Unavailable: it is gone. FailedPrecondition: it has another size, or may not be opened.
  static absl::StatusOr<SharedSegment> Open(int pid, int fd, int64_t bytes);

  SharedSegment(SharedSegment&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), fd_(std::exchange(other.fd_, -1)) {}
  SharedSegment& operator=(SharedSegment&&) = delete;
  ~SharedSegment();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }  // for Open in another process

 private:
  SharedSegment(void* data, int64_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}
  void* data_;
  int64_t bytes_;
  int fd_;
};

}  // namespace dflash
