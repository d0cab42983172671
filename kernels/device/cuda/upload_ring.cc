#include "kernels/device/upload_ring.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/event.h"
#include "kernels/device/pinned_buffer.h"

namespace dflash {

struct UploadRing::Impl {
  struct Slot {
    PinnedBuffer host;
    Event released;
  };
  const Stream* stream = nullptr;
  int64_t buffer_bytes = 0;
  std::vector<Slot> slots;
  Buffer staging;  // one is enough: copies and the work on them take turns on the stream
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
  impl->stream = &stream;
  impl->buffer_bytes = buffer_bytes;
  DFLASH_ASSIGN_OR_RETURN(impl->staging, Buffer::Allocate(buffer_bytes, stream));
  for (int64_t i = 0; i < buffers; ++i) {
    DFLASH_ASSIGN_OR_RETURN(PinnedBuffer host, PinnedBuffer::Allocate(buffer_bytes, stream));
    DFLASH_ASSIGN_OR_RETURN(Event released, Event::Create(Event::Timing::kOff, stream));
    impl->slots.push_back({std::move(host), std::move(released)});
  }
  return UploadRing(std::move(impl));
}

int64_t UploadRing::buffers() const { return static_cast<int64_t>(impl_->slots.size()); }
int64_t UploadRing::buffer_bytes() const { return impl_->buffer_bytes; }
void* UploadRing::host(int64_t buffer) const { return impl_->slots[static_cast<size_t>(buffer)].host.data(); }

absl::Status UploadRing::WaitUntilFree(int64_t buffer) const {
  return impl_->slots[static_cast<size_t>(buffer)].released.Synchronize();
}

absl::StatusOr<const void*> UploadRing::Stage(int64_t buffer, int64_t bytes) const {
  DFLASH_RETURN_IF_ERROR(CopyToDevice(impl_->staging.data(), host(buffer), bytes, *impl_->stream));
  return impl_->staging.data();
}

absl::Status UploadRing::Release(int64_t buffer) const {
  return impl_->slots[static_cast<size_t>(buffer)].released.Record(*impl_->stream);
}

}  // namespace dflash
