#include <atomic>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

std::atomic<int64_t> allocated_bytes{0};

}  // namespace

absl::StatusOr<Buffer> Buffer::Allocate(int64_t bytes, const Stream&) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return Buffer();
  // calloc leaves large blocks to be zeroed by the kernel page by page, so unused pages cost nothing.
  constexpr size_t kAlignment = 256;
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  auto* raw = static_cast<char*>(std::calloc(size, 1));
  if (raw == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
  // The distance to the raw block is kept just before the aligned address.
  const size_t shift = kAlignment - reinterpret_cast<uintptr_t>(raw) % kAlignment;
  char* aligned = raw + shift;
  std::memcpy(aligned - sizeof(shift), &shift, sizeof(shift));
  allocated_bytes += bytes;
  return Buffer(aligned, bytes);
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  allocated_bytes -= bytes_;
  size_t shift = 0;
  std::memcpy(&shift, static_cast<char*>(data_) - sizeof(shift), sizeof(shift));
  std::free(static_cast<char*>(data_) - shift);
}

absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, const Stream&) {
  if (bytes > 0) std::memcpy(device, host, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CopyToHost(void* host, const void* device, int64_t bytes, const Stream&) {
  if (bytes > 0) std::memcpy(host, device, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CopyRows(ConstMatrixView from, MatrixView to, const Stream&) {
  if (from.rows != to.rows || from.cols != to.cols || from.dtype != to.dtype) {
    return absl::InvalidArgumentError(absl::StrCat("CopyRows: ", from.rows, "x", from.cols, " ",
                                                   Name(from.dtype), " into ", to.rows, "x", to.cols, " ",
                                                   Name(to.dtype)));
  }
  const int64_t width = SizeOf(from.dtype);
  for (int64_t row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(to.data) + row * to.row_stride * width,
                static_cast<const char*>(from.data) + row * from.row_stride * width,
                static_cast<size_t>(from.cols * width));
  }
  return absl::OkStatus();
}

absl::Status ZeroFill(void* device, int64_t bytes, const Stream&) {
  if (bytes > 0) std::memset(device, 0, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

int64_t AllocatedDeviceBytes() { return allocated_bytes; }

absl::StatusOr<int64_t> FreeDeviceBytes(const Stream&) { return INT64_MAX; }

DType ActivationDType() { return DType::kF32; }

}  // namespace dflash
