#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/upload_ring.h"

namespace dflash {

// Operations are over when they return, so a buffer is always free.
struct UploadRing::Impl {
  int64_t buffer_bytes = 0;
  std::vector<Buffer> buffers;
};

UploadRing::UploadRing(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UploadRing::UploadRing(UploadRing&&) noexcept = default;
UploadRing& UploadRing::operator=(UploadRing&&) noexcept = default;
UploadRing::~UploadRing() = default;

absl::StatusOr<UploadRing> UploadRing::Create(int64_t buffers, int64_t buffer_bytes, const Stream& stream) {
  if (buffers < 1 || buffer_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ring of ", buffers, " buffers of ", buffer_bytes, " bytes"));
  }
  auto impl = std::make_unique<Impl>();
  impl->buffer_bytes = buffer_bytes;
  for (int64_t i = 0; i < buffers; ++i) {
    DFLASH_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(buffer_bytes, stream));
    impl->buffers.push_back(std::move(buffer));
  }
  return UploadRing(std::move(impl));
}

int64_t UploadRing::buffers() const { return static_cast<int64_t>(impl_->buffers.size()); }
int64_t UploadRing::buffer_bytes() const { return impl_->buffer_bytes; }
void* UploadRing::host(int64_t buffer) const { return impl_->buffers[static_cast<size_t>(buffer)].data(); }
absl::Status UploadRing::WaitUntilFree(int64_t) const { return absl::OkStatus(); }
absl::StatusOr<const void*> UploadRing::Stage(int64_t buffer, int64_t) const { return host(buffer); }
absl::Status UploadRing::Release(int64_t) const { return absl::OkStatus(); }

}  // namespace dflash
