// One Generate call: the client's stream on one side, the dispatcher's reports on the other.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "daemon/frontend/stream_buffer.h"
#include "daemon/log/line_budget.h"
#include "daemon/metrics/request_metrics.h"
#include "daemon/request/group_request.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/rpc/convert.h"
#include "daemon/traces/trace_exporter.h"

namespace dflash {

// Lives until the client's stream and the dispatcher have both let go of it. At most one write is in flight;
// what comes meanwhile is merged by StreamBuffer. Each choice is a request of its own to the dispatcher; they
// fail together.
class Generation final : public std::enable_shared_from_this<Generation> {
 public:
  // `ended` is called once, with the status that the client gets; `taken` once, when gRPC is done with the
  // stream. `traces` may be null; `refusal_lines` bounds what the log gets of refused requests.
  Generation(Dispatcher* dispatcher, RequestMetrics* metrics, TraceExporter* traces,
             LineBudget* refusal_lines, StreamFacts facts, const StreamBuffer::Options& options,
             absl::Time received, absl::Time deadline,
             std::function<void(const Generation&, const absl::Status&)> ended, std::function<void()> taken);

  // The gRPC side of the call of `context`, to which nothing was sent yet. It deletes itself when gRPC is
  // done with it; call once.
  grpc::ServerWriteReactor<grpc::ByteBuffer>* NewReactor(grpc::CallbackServerContext* context);

  // What the choices are called in the dispatcher: the first one as the generation.
  static std::string IdOfChoice(const std::string& id, uint32_t index);
  // Queues the prepared request, whose choices' ids are reserved. Ends the stream with the error when it is
  // not taken.
  void Submit(const GroupRequest& request);
  // Ends the stream; nothing when it has ended already.
  void Fail(const absl::Status& status);
  // The client asked, on another call.
  void Cancel();
  // The client has ended the call, or its deadline has.
  void OnClientGone();
  // Is nothing left to do but to tell the client?
  bool HasEnded();
  // Cuts off a client that has taken nothing for `limit` although something is there; call it now and then.
  void CheckProgress(absl::Time now, absl::Duration limit);

  const std::string& id() const { return facts_.request_id; }
  const std::string& client() const { return facts_.client; }

 private:
  class Reactor;
  class ChoiceListener;
  struct Choice {
    explicit Choice(const StreamBuffer::Options& options) : buffer(options) {}
    StreamBuffer buffer;
    std::optional<std::string> key;
    bool finished = false;
  };

  void OnStarted(const StartedOutput& started);
  void OnTokens(size_t index, StepOutput output);
  void OnFinished(size_t index, const FinishedOutput& finished);
  void OnWritten(bool ok);
  void OnReactorDone();
  // One line for the whole request; `finished` when it has an output's summary.
  void LogEnd(const absl::Status& status, const FinishedOutput* finished) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for who watches traces.
  void RecordTrace(const absl::Status& status, const FinishedOutput* finished) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Dispatcher* const dispatcher_;
  TraceExporter* const traces_;
  LineBudget* const refusal_lines_;
  StreamFacts facts_;
  const absl::Time deadline_;
  const std::function<void(const Generation&, const absl::Status&)> ended_callback_;
  const std::function<void()> taken_callback_;

  absl::Mutex mutex_;
  std::vector<Choice> choices_ ABSL_GUARDED_BY(mutex_);
  std::optional<StartedOutput> started_ ABSL_GUARDED_BY(mutex_);  // not sent yet
  FinishedOutput whole_ ABSL_GUARDED_BY(mutex_);                  // of all choices that have finished
  size_t finished_ ABSL_GUARDED_BY(mutex_) = 0;
  RequestTimeline timeline_ ABSL_GUARDED_BY(mutex_);
  Reactor* reactor_ ABSL_GUARDED_BY(mutex_) = nullptr;                      // null once gRPC is done
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // valid while reactor_ is
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);  // how the stream ends, once that is known
  int64_t cached_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time prepared_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // handed to the dispatcher
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finish_called_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_call_ ABSL_GUARDED_BY(mutex_);  // of StartWrite or Finish
  bool client_gone_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_seq_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);  // in the write that is under way while writing_
};

}  // namespace dflash
