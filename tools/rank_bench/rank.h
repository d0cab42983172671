// One rank of the group that is measured.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "worker/comm/forwarding_communicator.h"
#include "worker/comm/peer_communicator.h"
#include "worker/load_group.h"
#include "worker/membership.h"

namespace dflash::bench {

// The communicator of the group, with or without its peer memory: what is measured beside each other.
class SwitchedCommunicator final : public ForwardingCommunicator {
 public:
  // Not owned; peer may be null: there is none.
  SwitchedCommunicator(Communicator* base, PeerCommunicator* peer)
      : ForwardingCommunicator(base), base_(base), peer_(peer) {
    UsePeer(true);
  }
  bool has_peer() const { return peer_ != nullptr; }
  void UsePeer(bool use) { set_inner(use && has_peer() ? peer_ : base_); }

  absl::Status AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                   NormWeight weight, float eps, MatrixView y,
                                   const Stream& stream) override {
    return inner()->AllReduceAddRmsNorm(product, residual, w, weight, eps, y, stream);
  }
  int64_t OneStepRows(int64_t cols) const override { return inner()->OneStepRows(cols); }

 private:
  Communicator* const base_;
  PeerCommunicator* const peer_;
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
