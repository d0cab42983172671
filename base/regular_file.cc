#include "base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace dflash {
namespace {

// Linux transfers at most 0x7ffff000 bytes in one call.
constexpr int64_t kMaxTransfer = int64_t{1} << 30;

absl::Status SystemError(const std::string& path, int error) {
  std::string text = absl::StrCat(path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  if (error == ELOOP || error == ENAMETOOLONG) return absl::InvalidArgumentError(text);
  return absl::UnavailableError(text);
}

}  // namespace

absl::StatusOr<RegularFile> RegularFile::Open(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return SystemError(path, errno);
  // Before it is opened: opening a FIFO by mistake would hang. (O_NONBLOCK is no way out: a file that another
  // host holds a lease on, through a file server, then cannot be opened at once.)
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return SystemError(path, errno);
  RegularFile file(path, descriptor, 0);
  if (fstat(descriptor, &info) != 0) return SystemError(path, errno);
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  file.size_ = info.st_size;
  return file;
}

absl::Status RegularFile::ReadAt(int64_t offset, int64_t bytes, void* to) const {
  auto* out = static_cast<char*>(to);
  int64_t done = 0;
  while (done < bytes) {
    const auto want = static_cast<size_t>(std::min(bytes - done, kMaxTransfer));
    const ssize_t got = pread(descriptor_, out + done, want, offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      return SystemError(path_, errno);
    }
    if (got == 0) {
      return absl::DataLossError(absl::StrCat(path_, ": expected ", bytes, " bytes at offset ", offset,
                                              ", the file ends after ", done, " of them"));
    }
    done += got;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  DFLASH_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  if (file.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", file.size(), " bytes; at most ", max_bytes, " are accepted"));
  }
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  DFLASH_RETURN_IF_ERROR(file.ReadAt(0, file.size(), bytes.data()));
  return bytes;
}

}  // namespace dflash
