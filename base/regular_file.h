// Reading regular files: whole (configurations, indexes, templates) or by ranges (weights).
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dflash {

class RegularFile {
 public:
  // Opens for reading; symbolic links are followed. Errors, each naming the path: NotFound, PermissionDenied,
  // InvalidArgument when it is no regular file or a link that leads nowhere, Unavailable for other failures
  // of the system call.
  static absl::StatusOr<RegularFile> Open(const std::string& path);

  RegularFile(RegularFile&& other) noexcept
      : path_(std::move(other.path_)),
        descriptor_(std::exchange(other.descriptor_, -1)),
        size_(other.size_) {}
  RegularFile& operator=(RegularFile other) noexcept {
    std::swap(path_, other.path_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~RegularFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // in bytes, when it was opened

  // Reads exactly [offset, offset + bytes) into `to`; any thread. DataLoss when the file ends before that (it
  // was truncated since it was opened, or the range was never inside), Unavailable when the system call
  // fails.
  absl::Status ReadAt(int64_t offset, int64_t bytes, void* to) const;

 private:
  RegularFile(std::string path, int descriptor, int64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

// Returns all bytes of a file. Errors as above, and InvalidArgument when it has more than `max_bytes` bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes);

}  // namespace dflash
