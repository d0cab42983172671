#include "daemon/rpc/generation.h"

#include <grpcpp/server_context.h>

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/log/log.h"
#include "daemon/request/request_error.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/message_bytes.h"

namespace dflash {

// Forwards gRPC's reactions and keeps the generation alive as long as gRPC may call.
class Generation::Reactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit Reactor(std::shared_ptr<Generation> generation) : generation_(std::move(generation)) {}
  void OnWriteDone(bool ok) override { generation_->OnWritten(ok); }
  void OnCancel() override { generation_->OnClientGone(); }
  void OnDone() override {
    generation_->OnReactorDone();
    delete this;
  }

 private:
  const std::shared_ptr<Generation> generation_;
};

// A client counts its deadline from when it called, the server from when the call arrived, so the client's
// own expiry cancels the stream a little before the server's clock gets there.
constexpr absl::Duration kDeadlineSlack = absl::Milliseconds(100);

Generation::Generation(Dispatcher* dispatcher, RequestMetrics* metrics, StreamFacts facts,
                       const StreamBuffer::Options& options, absl::Time received, absl::Time deadline,
                       std::function<void(const Generation&, const absl::Status&)> ended)
    : dispatcher_(dispatcher),
      facts_(std::move(facts)),
      deadline_(deadline),
      ended_callback_(std::move(ended)),
      buffer_(options),
      timeline_(metrics, received) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* Generation::NewReactor(grpc::CallbackServerContext* context) {
  absl::MutexLock lock(&mutex_);
  context_ = context;
  reactor_ = new Reactor(shared_from_this());
  return reactor_;
}

void Generation::Submit(const GroupRequest& request) {
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return dispatcher_->Release(id());  // the client left while its prompt was tokenized
    facts_.request = request;
    facts_.request.prompt_tokens.clear();
  }
  absl::StatusOr<std::string> key = dispatcher_->Submit(id(), request, shared_from_this());
  if (!key.ok()) return Fail(key.status());
  bool left = false;
  {
    absl::MutexLock lock(&mutex_);
    key_ = *key;
    left = end_.has_value();
  }
  if (left) dispatcher_->Cancel(*key, absl::CancelledError("the client went away"));
}

void Generation::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    end_ = status;
    timeline_.OnFailed(absl::Now(), status);
    LogEnd(status, nullptr);
    SendNext();
  }
  ended_callback_(*this, status);
}

void Generation::LetGo(const absl::Status& reason) {
  std::string key;
  {
    absl::MutexLock lock(&mutex_);
    if (!key_ || end_) return;
    key = *key_;
  }
  dispatcher_->Cancel(key, reason);  // calls OnFailed(reason)
}

void Generation::Cancel() {
  const absl::Status reason = absl::CancelledError("cancelled by request");
  LetGo(reason);
  Fail(reason);
}

void Generation::OnClientGone() {
  {
    absl::MutexLock lock(&mutex_);
    client_gone_ = true;
  }
  const absl::Status reason = absl::Now() >= deadline_ - kDeadlineSlack
                                  ? absl::DeadlineExceededError("the call's deadline passed")
                                  : absl::CancelledError("the client went away");
  LetGo(reason);
  Fail(reason);
}

void Generation::OnStarted(const StartedOutput& started) {
  absl::MutexLock lock(&mutex_);
  if (end_) return;
  cached_tokens_ = started.cached_tokens;
  timeline_.OnStarted(absl::Now(), started);
  buffer_.AddStarted(started);
  SendNext();
}

void Generation::OnTokens(StepOutput output) {
  absl::Status taken;
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    timeline_.OnTokens(absl::Now(), static_cast<int64_t>(output.tokens.size()));
    taken = buffer_.AddTokens(std::move(output));
    if (taken.ok()) SendNext();
  }
  if (!taken.ok()) {
    LetGo(taken);
    Fail(taken);
  }
}

void Generation::OnFinished(const FinishedOutput& finished) {
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    end_ = absl::OkStatus();
    timeline_.OnFinished(absl::Now(), finished);
    LogEnd(absl::OkStatus(), &finished);
    buffer_.AddFinished(finished);
    SendNext();
  }
  ended_callback_(*this, absl::OkStatus());
}

void Generation::OnWritten(bool) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;  // a failed write means that the client is gone: OnCancel says so
  SendNext();
}

void Generation::OnReactorDone() {
  absl::MutexLock lock(&mutex_);
  reactor_ = nullptr;
}

void Generation::LogEnd(const absl::Status& status, const FinishedOutput* finished) const {
  // Refusals are left to the metrics: an overloaded server must not write a line for each. Texts of clients,
  // and errors that may quote them, stay out.
  const bool refused = !timeline_.started();
  std::vector<LogField> fields = {
      {"request_id", facts_.request_id},
      {"client", facts_.client},
      {"trace_id", facts_.trace_id},
      {"end", status.ok() ? std::string("OK") : absl::StatusCodeToString(status.code())}};
  if (!status.ok()) fields.push_back({"reason", DetailsOf(status).reason});
  if (refused) return LogEvent(spdlog::level::debug, "request refused", fields);
  fields.push_back({"cached_tokens", cached_tokens_});
  fields.push_back({"output_tokens", timeline_.output_tokens()});
  fields.push_back({"queue_s", absl::ToDoubleSeconds(timeline_.queue_time())});
  if (timeline_.output_tokens() > 0) {
    fields.push_back({"first_token_s", absl::ToDoubleSeconds(timeline_.time_to_first_token())});
  }
  fields.push_back({"total_s", absl::ToDoubleSeconds(timeline_.total_time())});
  if (finished != nullptr) {
    fields.push_back({"prompt_tokens", finished->prompt_tokens});
    fields.push_back({"rounds", finished->rounds});
    fields.push_back({"drafted", finished->drafted_tokens});
    fields.push_back({"accepted", finished->accepted_tokens});
  }
  LogEvent(spdlog::level::info, "request ended", fields);
}

void Generation::CheckProgress(absl::Time now, absl::Duration limit) {
  {
    absl::MutexLock lock(&mutex_);
    const bool waits_for_client = writing_ || finish_called_;
    if (reactor_ == nullptr || !waits_for_client || now - last_call_ <= limit) return;
    if (finish_called_ || end_.has_value()) {
      // Nothing more will be said, but what has been said is not taken.
      context_->TryCancel();
      return;
    }
  }
  const absl::Status reason =
      WithDetails(absl::ResourceExhaustedError(absl::StrCat(
                      "the client reads too slowly: it took nothing for ", absl::FormatDuration(limit))),
                  {.reason = "SLOW_CONSUMER", .field = "", .retry_after = {}, .metadata = {}});
  LetGo(reason);
  Fail(reason);
}

// Writes the next event, or ends the stream when the last one has been written (at once when it failed).
void Generation::SendNext() {
  if (reactor_ == nullptr || writing_ || finish_called_) return;
  if (!end_ || end_->ok()) {
    std::optional<StreamEvent> event = client_gone_ ? std::nullopt : buffer_.Next();
    if (event) {
      v1::GenerateResponse message;
      message.set_seq(next_seq_++);
      if (const auto* started = std::get_if<StartedOutput>(&*event)) {
        *message.mutable_started() = ToMessage(*started, facts_);
      } else if (const auto* chunk = std::get_if<OutputChunk>(&*event)) {
        *message.mutable_chunk() = ToMessage(*chunk);
      } else {
        *message.mutable_finished() =
            ToMessage(std::get<FinishedOutput>(*event), facts_, cached_tokens_, timeline_);
      }
      writing_ = true;
      last_call_ = absl::Now();
      written_ = ToByteBuffer(message);
      reactor_->StartWrite(&written_);
      return;
    }
  }
  if (!end_) return;
  finish_called_ = true;
  last_call_ = absl::Now();
  reactor_->Finish(ToGrpcStatus(*end_));
}

}  // namespace dflash
