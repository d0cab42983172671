#include "worker/comm/peer_communicator.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

bool IsSmallMessage(const void* send, const void* receive, int64_t bytes) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 4 == 0; };
  return bytes > 0 && bytes <= PeerAreas::kMaxMessageBytes && bytes % 4 == 0 && aligned(send) &&
         aligned(receive);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCommunicator>> PeerCommunicator::Create(std::unique_ptr<Communicator> base,
                                                                           PeerMemory memory, int device) {
  if (!memory.problem().empty() || base->size() > PeerAreas::kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer memory of ", base->size(), " ranks: ", memory.problem()));
  }
  DFLASH_ASSIGN_OR_RETURN(Stream stream, Stream::Create({.threads = 1, .device = device}));
  DFLASH_ASSIGN_OR_RETURN(PinnedBuffer late, PinnedBuffer::Allocate(sizeof(int32_t), stream));
  DFLASH_RETURN_IF_ERROR(PreparePeerArea(memory.area(base->rank()), memory.bytes(), base->size(), stream));
  DFLASH_RETURN_IF_ERROR(base->Barrier(stream));
  return std::unique_ptr<PeerCommunicator>(
      new PeerCommunicator(std::move(base), std::move(memory), std::move(stream), std::move(late)));
}

PeerCommunicator::PeerCommunicator(std::unique_ptr<Communicator> base, PeerMemory memory, Stream stop_stream,
                                   PinnedBuffer late)
    : ForwardingCommunicator(base.get()),
      base_(std::move(base)),
      name_(absl::StrCat(base_->name(), "+peer")),
      memory_(std::move(memory)),
      late_(std::move(late)),
      stop_stream_(std::move(stop_stream)) {
  areas_.rank = base_->rank();
  areas_.size = base_->size();
  areas_.shares_device = memory_.shares_device();
  for (int rank = 0; rank < areas_.size; ++rank) areas_.area[rank] = memory_.area(rank);
}

template <typename Enqueue>
absl::Status PeerCommunicator::Through(int64_t& counter, const Enqueue& enqueue) {
  DFLASH_RETURN_IF_ERROR(Check());
  ++counter;
  DFLASH_RETURN_IF_ERROR(enqueue());
  return Check();
}

absl::Status PeerCommunicator::AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                                   NormWeight weight, float eps, MatrixView y,
                                                   const Stream& stream) {
  if (areas_.cols == 0 && product.cols > 0) {
    areas_.cols = product.cols;
    areas_.max_rows = OneStepRows(product.cols);
  }
  if (product.cols != areas_.cols || product.rows > areas_.max_rows)
    return base_->AllReduceAddRmsNorm(product, residual, w, weight, eps, y, stream);
  return Through(peer_sums_, [&] {
    return PeerSumAddRmsNorm(areas_, product, residual, w, weight, eps, y, patience(), stream);
  });
}

int64_t PeerCommunicator::OneStepRows(int64_t cols) const {
  const int64_t useful =
      areas_.shares_device ? PeerAreas::kRowsOnSharedDevice / areas_.size : UsefulPeerSumRows();
  return std::min(useful, PeerAreas::RowsThatFit(areas_.size, memory_.bytes(), cols));
}

absl::Status PeerCommunicator::AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) {
  const int64_t rows =
      areas_.cols > 0 && dtype == ActivationDType() && count % areas_.cols == 0 ? count / areas_.cols : 0;
  if (rows < 1 || rows > areas_.max_rows) return base_->AllReduce(data, count, dtype, stream);
  return Through(peer_sums_, [&] {
    return PeerSum(areas_, MatrixView(data, dtype, rows, areas_.cols, areas_.cols), patience(), stream);
  });
}

absl::Status PeerCommunicator::AllGather(const void* send, void* receive, int64_t bytes,
                                         const Stream& stream) {
  if (!IsSmallMessage(send, receive, bytes)) return base_->AllGather(send, receive, bytes, stream);
  return Through(peer_messages_,
                 [&] { return PeerGather(areas_, send, receive, bytes, patience(), stream); });
}

absl::Status PeerCommunicator::Broadcast(void* data, int64_t bytes, int root, const Stream& stream) {
  if (!IsSmallMessage(data, data, bytes) || root < 0 || root >= size())
    return base_->Broadcast(data, bytes, root, stream);
  return Through(peer_messages_,
                 [&] { return PeerBroadcast(areas_, data, bytes, root, patience(), stream); });
}

absl::Status PeerCommunicator::Check() {
  const int32_t late = std::atomic_ref<int32_t>(*late_.As<int32_t>()).load(std::memory_order_relaxed);
  if (late > 0) {
    Abort(absl::DeadlineExceededError(absl::StrCat("through peer memory: rank ", late - 1,
                                                   " did not come within ",
                                                   absl::FormatDuration(base_->timeout()))));
  }
  const absl::Status status = base_->Check();
  // Stopped by another rank, whose reason has not got here otherwise.
  if (status.ok() && late == kPeerSumStopped) {
    Abort(absl::UnavailableError("another rank has stopped the group"));
    return base_->Check();
  }
  return status;
}

void PeerCommunicator::Abort(const absl::Status& reason) {
  base_->Abort(reason);  // first: whoever is woken by the stop finds the reason
  absl::MutexLock lock(&mutex_);
  if (std::exchange(stopped_, true)) return;
  (void)StopPeerSums(areas_, stop_stream_);  // then deadlines end what goes on
}

}  // namespace dflash
