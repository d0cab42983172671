// A file in memory, for readers that take a path.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "base/check.h"

namespace dflash::fuzz {

class FileOfBytes {
 public:
  FileOfBytes() : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) { DFLASH_CHECK(descriptor_ >= 0); }
  FileOfBytes(const FileOfBytes&) = delete;
  FileOfBytes& operator=(const FileOfBytes&) = delete;
  ~FileOfBytes() { close(descriptor_); }

  void Set(std::string_view bytes) {
    DFLASH_CHECK(ftruncate(descriptor_, 0) == 0);
    DFLASH_CHECK(pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  const int descriptor_;
};

}  // namespace dflash::fuzz
