// A communicator whose sums of few rows go through peer memory in one step, fused with the residual and the
// norm behind them (kernels/peer_sum): a call of its own costs more than the bytes of sixteen rows.
// Everything else, and sums of many rows, are another communicator's business.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/peer_sum/peer_sum.h"
#include "worker/comm/communicator.h"
#include "worker/comm/peer_memory.h"

namespace dflash {

class PeerCommunicator final : public Communicator {
 public:
  // Up to so many rows go through peer memory.
  static constexpr int64_t kMaxRows = 128;

  // Whoever waits in a sum for a rank whose object was destroyed, without Abort, waits until the deadline:
  // its area may be gone, so nothing is written there any more. `memory` is of the same group and without
  // problem; on CUDA `device` is this rank's. At most PeerAreas::kMaxRanks ranks.
  static absl::StatusOr<std::unique_ptr<PeerCommunicator>> Create(std::unique_ptr<Communicator> base,
                                                                  PeerMemory memory, int device);

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override;
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override;
  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override;
  // Rows of one width only, that of the first call: others go through the other communicator.
  absl::Status AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                   NormWeight weight, float eps, MatrixView y, const Stream& stream) override;
  absl::Status Barrier(const Stream& stream) override;
  void Abort(const absl::Status& reason) override;
  absl::Status Check() override;
  bool sums_in_rank_order() const override { return base_->sums_in_rank_order(); }
  bool capturable() const override { return base_->capturable(); }
  absl::Duration timeout() const override { return base_->timeout(); }
  const char* name() const override { return name_.c_str(); }

  int64_t peer_sums() const { return peer_sums_; }  // calls that went through peer memory

 private:
  PeerCommunicator(std::unique_ptr<Communicator> base, PeerMemory memory, Stream stop_stream,
                   PinnedBuffer late);

  const std::unique_ptr<Communicator> base_;
  const std::string name_;
  const PeerMemory memory_;
  const PinnedBuffer late_;  // int32: who did not come, as PeerSumAddRmsNorm says it
  PeerAreas areas_;          // cols 0 until the first call
  int64_t peer_sums_ = 0;
  absl::Mutex mutex_;
  const Stream stop_stream_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dflash
