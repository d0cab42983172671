// A communicator that hands every call on to another one: the base of those that do one thing differently.
#pragma once

#include "worker/comm/communicator.h"

namespace dflash {

class ForwardingCommunicator : public Communicator {
 public:
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override {
    return inner_->AllReduce(data, count, dtype, stream);
  }
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override {
    return inner_->AllGather(send, receive, bytes, stream);
  }
  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override {
    return inner_->ReduceScatter(send, receive, count, dtype, stream);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override {
    return inner_->Broadcast(data, bytes, root, stream);
  }
  absl::Status Barrier(const Stream& stream) override { return inner_->Barrier(stream); }
  void Abort(const absl::Status& reason) override { inner_->Abort(reason); }
  absl::Status Check() override { return inner_->Check(); }
  bool sums_in_rank_order() const override { return inner_->sums_in_rank_order(); }
  bool capturable() const override { return inner_->capturable(); }
  absl::Duration timeout() const override { return inner_->timeout(); }
  const char* name() const override { return inner_->name(); }

 protected:
  // Not owned. AllReduceAddRmsNorm and OneStepRows are not handed on: they are made of this object's
  // AllReduce.
  explicit ForwardingCommunicator(Communicator* inner) : inner_(inner) {}
  Communicator* inner() const { return inner_; }
  void set_inner(Communicator* inner) { inner_ = inner; }

 private:
  Communicator* inner_;
};

}  // namespace dflash
