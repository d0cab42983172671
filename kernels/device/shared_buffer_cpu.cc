#include <unistd.h>

#include <utility>

#include "base/shared_segment.h"
#include "base/status.h"
#include "kernels/device/shared_buffer.h"

namespace dflash {

struct SharedBuffer::Impl {
  SharedSegment segment;
  SharedBufferHandle handle;
};
struct MappedBuffer::Impl {
  SharedSegment segment;
};

absl::StatusOr<SharedBuffer> SharedBuffer::Allocate(int64_t bytes, const Stream&) {
  DFLASH_ASSIGN_OR_RETURN(SharedSegment segment, SharedSegment::Create(bytes));
  SharedBufferHandle handle;
  handle.bytes = bytes;
  handle.address = reinterpret_cast<uint64_t>(segment.data());
  handle.pid = getpid();
  handle.fd = segment.fd();
  return SharedBuffer(std::make_unique<Impl>(Impl{std::move(segment), handle}));
}

absl::StatusOr<MappedBuffer> MappedBuffer::Map(const SharedBufferHandle& handle, const Stream&) {
  DFLASH_ASSIGN_OR_RETURN(SharedSegment segment, SharedSegment::Open(handle.pid, handle.fd, handle.bytes));
  return MappedBuffer(std::make_unique<Impl>(Impl{std::move(segment)}));
}

bool ShareDevice(const SharedBufferHandle&, const SharedBufferHandle&) { return false; }

void* SharedBuffer::data() const { return impl_->segment.data(); }
const SharedBufferHandle& SharedBuffer::handle() const { return impl_->handle; }
void* MappedBuffer::data() const { return impl_->segment.data(); }

SharedBuffer::SharedBuffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedBuffer::SharedBuffer(SharedBuffer&&) noexcept = default;
SharedBuffer& SharedBuffer::operator=(SharedBuffer&&) noexcept = default;
SharedBuffer::~SharedBuffer() = default;
MappedBuffer::MappedBuffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MappedBuffer::MappedBuffer(MappedBuffer&&) noexcept = default;
MappedBuffer& MappedBuffer::operator=(MappedBuffer&&) noexcept = default;
MappedBuffer::~MappedBuffer() = default;

}  // namespace dflash
