// A communicator that exchanges little through memory which the ranks reach of each other (kernels/peer_sum),
// in one step where a call of its own costs more than what it carries: sums of rows, fused with the residual
// and the norm behind them, and small messages. Everything else is another communicator's business.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/peer_sum/peer_sum.h"
#include "worker/comm/forwarding_communicator.h"
#include "worker/comm/peer_memory.h"

namespace dflash {

class PeerCommunicator final : public ForwardingCommunicator {
 public:
  // Every rank calls it, like a collective. Whoever waits in a sum for a rank whose object was destroyed,
  // without Abort, waits until the deadline: its area may be gone, so nothing is written there any more.
  // `memory` is of the same group and without problem; on CUDA `device` is this rank's. At most
  // PeerAreas::kMaxRanks ranks.
  static absl::StatusOr<std::unique_ptr<PeerCommunicator>> Create(std::unique_ptr<Communicator> base,
                                                                  PeerMemory memory, int device);

  // Of whole rows as wide as those of the first AllReduceAddRmsNorm.
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override;
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override;
  // Rows of one width only, that of the first call: others go through the other communicator.
  absl::Status AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                   NormWeight weight, float eps, MatrixView y, const Stream& stream) override;
  int64_t OneStepRows(int64_t cols) const override;
  void Abort(const absl::Status& reason) override;
  absl::Status Check() override;
  const char* name() const override { return name_.c_str(); }

  // Calls that went through peer memory.
  int64_t peer_sums() const { return peer_sums_; }
  int64_t peer_messages() const { return peer_messages_; }

 private:
  PeerCommunicator(std::unique_ptr<Communicator> base, PeerMemory memory, Stream stop_stream,
                   PinnedBuffer late);
  PeerPatience patience() const { return {.timeout = inner()->timeout(), .late = late_.As<int32_t>()}; }
  // What the device has said so far is asked for before and after what `enqueue` gives it.
  template <typename Enqueue>
  absl::Status Through(int64_t& counter, const Enqueue& enqueue);

  const std::unique_ptr<Communicator> base_;
  const std::string name_;
  const PeerMemory memory_;
  const PinnedBuffer late_;  // int32: who did not come, as PeerPatience says it
  PeerAreas areas_;          // cols 0 until the first sum
  int64_t peer_sums_ = 0, peer_messages_ = 0;
  absl::Mutex mutex_;
  const Stream stop_stream_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dflash
