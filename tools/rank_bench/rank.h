// One rank of the group that is measured.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "worker/comm/peer_communicator.h"
#include "worker/load_group.h"
#include "worker/membership.h"

namespace dflash::bench {

// The communicator of the group, with or without its peer memory: what is measured beside each other.
class SwitchedCommunicator final : public Communicator {
 public:
  // Not owned; peer may be null: there is none.
  SwitchedCommunicator(Communicator* base, PeerCommunicator* peer) : base_(base), peer_(peer) {}
  bool has_peer() const { return peer_ != nullptr; }
  void UsePeer(bool use) { use_peer_ = use; }

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override {
    return base_->AllReduce(data, count, dtype, stream);
  }
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override {
    return base_->AllGather(send, receive, bytes, stream);
  }
  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override {
    return base_->ReduceScatter(send, receive, count, dtype, stream);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override {
    return base_->Broadcast(data, bytes, root, stream);
  }
  absl::Status AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                   NormWeight weight, float eps, MatrixView y,
                                   const Stream& stream) override {
    if (use_peer_ && peer_ != nullptr)
      return peer_->AllReduceAddRmsNorm(product, residual, w, weight, eps, y, stream);
    return Communicator::AllReduceAddRmsNorm(product, residual, w, weight, eps, y, stream);
  }
  absl::Status Barrier(const Stream& stream) override { return base_->Barrier(stream); }
  void Abort(const absl::Status& reason) override { base_->Abort(reason); }
  absl::Status Check() override { return peer_ != nullptr ? peer_->Check() : base_->Check(); }
  bool sums_in_rank_order() const override { return base_->sums_in_rank_order(); }
  bool capturable() const override { return base_->capturable(); }
  absl::Duration timeout() const override { return base_->timeout(); }
  const char* name() const override { return base_->name(); }

 private:
  Communicator* const base_;
  PeerCommunicator* const peer_;
  bool use_peer_ = true;
};

struct RankOptions {
  GroupOptions group;
  int64_t seed = 1;        // of prompts
  int64_t context = 1024;  // tokens before what is measured
  int64_t repeats = 20;
  int64_t tokens = 128;  // that the engine generates
  std::string write_states, read_states;
  double tolerance = 0.02;
};

// Every rank calls all of these in the same order; rank 0 adds to the report.

// All-reduces of 1 to 2048 rows: by the communicator, with residual and norm behind it, and in one step
// through peer memory.
absl::Status MeasureSums(SwitchedCommunicator& communicator, int64_t cols, int64_t repeats,
                         const Stream& stream, Report& report);

// Hidden states of all layers for a prompt and a verification, written or compared with those of another
// group: DataLoss when a layer's relative error exceeds the tolerance times the square root of its number,
// since errors of bfloat16 add up on the way. Then the same prompt in pieces below and above the size from
// which the residual is sharded: taps must have equal bits.
absl::Status CheckStates(const RankOptions& options, SwitchedCommunicator& communicator, const Group& group,
                         Report& report);

// A verification of 1 and of 16 rows behind `context` tokens, as one graph where that can be.
absl::Status MeasureForward(const RankOptions& options, SwitchedCommunicator& communicator,
                            const Group& group, Report& report);

// Plain steps and whole rounds of the engine with one request.
absl::Status MeasureEngine(const RankOptions& options, Membership& membership, const Group& group,
                           Report& report);

}  // namespace dflash::bench
