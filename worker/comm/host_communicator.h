// Collectives through shared memory of one host: ranks are threads of one process or processes, on the CPU or
// with device buffers (then every call copies through the host and waits for its stream, so that several CUDA
// ranks can share one GPU in tests).
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "base/shared_segment.h"
#include "worker/comm/communicator.h"

namespace dflash {

// How the exchange works. Every rank has two slots of kSlotBytes and a counter in the segment. A rank copies
// its part into a slot, adds one to its counter, waits for the counters of all others and reads their slots.
// It writes a slot again two exchanges later: that all counters have passed the exchange in between means
// that all have read it. Longer messages take several exchanges. Counters are futex words; a waiting rank
// looks every 50 ms whether the process that it waits for is still there.
class HostCommunicator final : public Communicator {
 public:
  static constexpr int kMaxRanks = 64;
  static constexpr int64_t kSlotBytes = int64_t{1} << 20;

  struct Options {
    int size = 1;  // [1, kMaxRanks]
    // Of one exchange. Ranks need not be equally fast: it has to cover what one computes between two.
    absl::Duration timeout = absl::Seconds(30);
  };

  // All ranks of a group of threads; element r is rank r.
  static absl::StatusOr<std::vector<std::unique_ptr<HostCommunicator>>> CreateGroup(const Options& options);

  // The same across processes: one of them creates the segment, all (it too) join with it.
  static absl::StatusOr<SharedSegment> CreateSegment(const Options& options);
  static int64_t SegmentBytes(int size);
  // InvalidArgument: rank, size or segment do not fit. AlreadyExists: somebody has joined as this rank.
  static absl::StatusOr<std::unique_ptr<HostCommunicator>> Join(std::shared_ptr<SharedSegment> segment,
                                                                int rank, const Options& options);
  ~HostCommunicator() override;

  int rank() const override;
  int size() const override;
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override;
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override;
  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override;
  absl::Status Barrier(const Stream& stream) override;
  void Abort(const absl::Status& reason) override;
  absl::Status Check() override;
  bool sums_in_rank_order() const override { return true; }
  bool capturable() const override { return false; }
  absl::Duration timeout() const override;
  const char* name() const override { return "host"; }

 private:
  class Impl;
  explicit HostCommunicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
