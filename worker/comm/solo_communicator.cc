#include "worker/comm/solo_communicator.h"

#include "absl/strings/str_cat.h"
#include "base/matrix_view.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

absl::Status CheckSize(int64_t size) {
  return size < 0 ? absl::InvalidArgumentError(absl::StrCat("a collective of size ", size))
                  : absl::OkStatus();
}

// Elements are moved, not read: any bits survive.
absl::Status Copy(const void* from, void* to, int64_t bytes, const Stream& stream) {
  if (from == to || bytes == 0) return absl::OkStatus();
  constexpr DType kUnit = DType::kBf16;
  if (bytes % SizeOf(kUnit) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a collective of ", bytes, " bytes: an odd number"));
  }
  const int64_t units = bytes / SizeOf(kUnit);
  return CopyRows(ConstMatrixView(from, kUnit, 1, units, units), MatrixView(to, kUnit, 1, units, units),
                  stream);
}

}  // namespace

absl::Status SoloCommunicator::AllReduce(void*, int64_t count, DType, const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckSize(count));
  return Check();
}

absl::Status SoloCommunicator::AllGather(const void* send, void* receive, int64_t bytes,
                                         const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize(bytes));
  DFLASH_RETURN_IF_ERROR(Check());
  return Copy(send, receive, bytes, stream);
}

absl::Status SoloCommunicator::ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                                             const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize(count));
  DFLASH_RETURN_IF_ERROR(Check());
  return Copy(send, receive, count * SizeOf(dtype), stream);
}

absl::Status SoloCommunicator::Broadcast(void*, int64_t bytes, int root, const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckSize(bytes));
  if (root != 0) return absl::InvalidArgumentError(absl::StrCat("root ", root, " in a group of 1"));
  return Check();
}

absl::Status SoloCommunicator::Barrier(const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check());
  return stream.Synchronize();
}

void SoloCommunicator::Abort(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (aborted_.ok()) aborted_ = absl::UnavailableError(absl::StrCat("aborted: ", reason.message()));
}

absl::Status SoloCommunicator::Check() {
  absl::MutexLock lock(&mutex_);
  return aborted_;
}

}  // namespace dflash
