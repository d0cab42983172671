// The communicator of a group of one rank: every collective is the identity, or a copy inside the device.
#pragma once

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"

namespace dflash {

class SoloCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override;
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override;
  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override;
  absl::Status Barrier(const Stream& stream) override;
  void Abort(const absl::Status& reason) override;
  absl::Status Check() override;
  bool sums_in_rank_order() const override { return true; }
  bool capturable() const override { return true; }
  absl::Duration timeout() const override { return absl::InfiniteDuration(); }
  const char* name() const override { return "solo"; }

 private:
  absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dflash
