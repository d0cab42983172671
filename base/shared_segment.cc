#include "base/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace dflash {
namespace {

void* Map(int fd, int64_t bytes) {
  return mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

}  // namespace

absl::StatusOr<SharedSegment> SharedSegment::Create(int64_t bytes) {
  const int fd = memfd_create("dflash-ranks", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, bytes) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return absl::ResourceExhaustedError(
        absl::StrCat("no shared memory of ", bytes, " bytes: ", strerror(error)));
  }
  void* data = Map(fd, bytes);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of shared memory: ", strerror(error)));
  }
  return SharedSegment(data, bytes, fd);
}

absl::StatusOr<SharedSegment> SharedSegment::Open(int pid, int fd, int64_t bytes) {
  const std::string path = absl::StrCat("/proc/", pid, "/fd/", fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    const std::string text =
        absl::StrCat("cannot open the group's shared memory ", path, ": ", strerror(errno));
    return errno == ENOENT || errno == ESRCH ? absl::UnavailableError(text)
                                             : absl::FailedPreconditionError(text);
  }
  struct stat status = {};
  if (fstat(opened, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != bytes) {
    close(opened);
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is no shared memory of ", bytes, " bytes, but of ", status.st_size));
  }
  void* data = Map(opened, bytes);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(opened);
    return absl::FailedPreconditionError(absl::StrCat("cannot map ", path, ": ", strerror(error)));
  }
  return SharedSegment(data, bytes, opened);
}

SharedSegment::~SharedSegment() {
  if (data_ == nullptr) return;
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
}

}  // namespace dflash
