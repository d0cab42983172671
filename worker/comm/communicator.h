// How the ranks of a worker group exchange data: one object per rank, all of one group made together. Only
// data moves here; who does what next is said on the rank channel.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/dtype.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

// Collectives: every rank calls the same ones in the same order with the same sizes, from one thread at a
// time (Abort: any thread). Pointers are device memory of the linked backend. Operations are enqueued on
// `stream`, after what it was given before; results may be used by work given to it afterwards. The host
// implementation has waited for the peers when a call returns.
//
// Sums: element i of the result is ((x_0[i] + x_1[i]) + x_2[i]) + ... in float32 in the order of ranks,
// rounded once to the dtype, so every rank gets the same bits and they do not depend on timing. An
// implementation that cannot promise this says so (sums_in_rank_order).
//
// Deadline: a call that has not got what it needs from its peers within timeout() fails with DeadlineExceeded
// (for operations that only enqueue: the next call that waits or Check() says so). It never hangs.
// Errors of all: Unavailable ("a peer died" or "aborted", naming rank and reason), DeadlineExceeded, Internal
// (our bug: ranks called different things), InvalidArgument (negative size, root out of range). After any
// error but InvalidArgument the group is dead: the failing rank aborts it, every later call on every rank
// fails at once with Unavailable, and the contents of the buffers are undefined.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // [0, size())
  virtual int size() const = 0;

  // data[0, count) = sum over the ranks' data[0, count), in place.
  virtual absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) = 0;

  // receive[r * bytes, (r + 1) * bytes) = rank r's send[0, bytes). send may be receive + rank() * bytes.
  virtual absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) = 0;

  // receive[0, count) = sum over the ranks' send[rank() * count, (rank() + 1) * count). send: size() * count
  // elements. receive may be send + rank() * count elements.
  virtual absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                                     const Stream& stream) = 0;

  // data[0, bytes) = rank root's data[0, bytes).
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) = 0;

  // residual += sum over the ranks of product, then y = RmsNorm(residual): the same bits as AllReduce of
  // product and then AddRmsNorm, whose arguments these are; product [T, D] is dense and may be overwritten.
  // One step where an implementation has one.
  virtual absl::Status AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                           NormWeight weight, float eps, MatrixView y, const Stream& stream);
  // Up to so many rows of `cols` columns that is one step.
  virtual int64_t OneStepRows(int64_t /*cols*/) const { return 0; }

  // Returns when every rank has called it and the work that each stream had been given before is done.
  virtual absl::Status Barrier(const Stream& stream) = 0;

  // Ends the group: calls under way on any rank return, later ones fail with Unavailable("... reason"). The
  // first reason stays. Any thread; does not wait.
  virtual void Abort(const absl::Status& reason) = 0;

  // What has gone wrong so far, without waiting: OK, or what every call would return now. Any thread.
  virtual absl::Status Check() = 0;

  // False: sums may differ in their last bits between sizes or algorithms (NCCL above two ranks), so there is
  // no "same text" across batch sizes (same_text_rows is 0).
  virtual bool sums_in_rank_order() const = 0;
  // True: calls may be captured into a graph. Their deadline is then that of the step.
  virtual bool capturable() const = 0;
  virtual absl::Duration timeout() const = 0;

  // Name for logs and metrics: "solo", "host", "nccl", "host+peer", "nccl+peer".
  virtual const char* name() const = 0;
};

}  // namespace dflash
