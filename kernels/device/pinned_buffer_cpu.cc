#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/device/pinned_buffer.h"

namespace dflash {

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes, const Stream&) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return PinnedBuffer();
  constexpr size_t kAlignment = 64;
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
  std::memset(data, 0, size);
  return PinnedBuffer(data, bytes);
}

PinnedBuffer::~PinnedBuffer() { std::free(data_); }

absl::Status CopyToPinned(const PinnedBuffer& to, const void* device, int64_t bytes, const Stream&) {
  if (bytes < 0 || bytes > to.bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot copy ", bytes, " bytes to a pinned buffer of ", to.bytes()));
  }
  if (bytes > 0) std::memcpy(to.data(), device, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

}  // namespace dflash
