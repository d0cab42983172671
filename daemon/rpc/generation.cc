#include "daemon/rpc/generation.h"

#include <grpc/grpc.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "daemon/frontend/prepare.h"
#include "daemon/request/request_error.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/message_bytes.h"
#include "daemon/rpc/request_spans.h"
#include "text/ordered_json.h"

namespace dflash {

namespace {

absl::Status NotTaken(absl::Duration limit) {
  return WithDetails(absl::ResourceExhaustedError(absl::StrCat(
                         "the client reads too slowly: it took nothing for ", absl::FormatDuration(limit))),
                     {.reason = "SLOW_CONSUMER", .field = "", .retry_after = {}, .metadata = {}});
}

}  // namespace

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

// Hears what becomes of one choice.
class Generation::ChoiceListener final : public OutputListener {
 public:
  ChoiceListener(std::shared_ptr<Generation> generation, size_t index)
      : generation_(std::move(generation)), index_(index) {}
  void OnStarted(const StartedOutput& started) override { generation_->OnStarted(started); }
  void OnTokens(StepOutput output) override { generation_->OnTokens(index_, std::move(output)); }
  void OnFinished(const FinishedOutput& finished) override { generation_->OnFinished(index_, finished); }
  void OnFailed(const absl::Status& status) override { generation_->Fail(status); }

 private:
  const std::shared_ptr<Generation> generation_;
  const size_t index_;
};

// A client counts its deadline from when it called, the server from when the call arrived, so the client's
// own expiry cancels the stream a little before the server's clock gets there.
constexpr absl::Duration kDeadlineSlack = absl::Milliseconds(100);

Generation::Generation(Dispatcher* dispatcher, RequestMetrics* metrics, TraceExporter* traces,
                       LineBudget* refusal_lines, StreamFacts facts, const StreamBuffer::Options& options,
                       absl::Time received, absl::Time deadline,
                       std::function<void(const Generation&, const absl::Status&)> ended,
                       std::function<void()> taken)
    : dispatcher_(dispatcher),
      traces_(traces),
      refusal_lines_(refusal_lines),
      facts_(std::move(facts)),
      deadline_(deadline),
      ended_callback_(std::move(ended)),
      taken_callback_(std::move(taken)),
      timeline_(metrics, received) {
  for (uint32_t index = 0; index < facts_.n; ++index) choices_.emplace_back(options);
}

std::string Generation::IdOfChoice(const std::string& id, uint32_t index) {
  return index == 0 ? id : absl::StrCat(id, "#", index);  // no id of a client has that character
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* Generation::NewReactor(grpc::CallbackServerContext* context) {
  absl::MutexLock lock(&mutex_);
  context_ = context;
  reactor_ = new Reactor(shared_from_this());
  return reactor_;
}

void Generation::Submit(const GroupRequest& request) {
  {
    absl::MutexLock lock(&mutex_);
    facts_.request = request;
    facts_.request.prompt_tokens.clear();
    prepared_ = absl::Now();
    if (facts_.parse) {
      ChatOutputParser::Options options = {.begins_in_reasoning = request.thinks, .tools = {}};
      for (const std::string& tool : facts_.tools_json) {
        absl::StatusOr<nlohmann::ordered_json> json = ParseOrderedJson(tool, "tool");
        if (json.ok()) options.tools.push_back(*std::move(json));  // rendering has found it sound
      }
      for (Choice& choice : choices_) choice.buffer.SetParser(std::make_unique<ChatOutputParser>(options));
    }
  }
  absl::Status refused;
  for (uint32_t index = 0; index < facts_.n; ++index) {
    const bool has_ended = HasEnded();  // the client left while its prompt was tokenized, or a choice failed
    const std::string choice_id = IdOfChoice(id(), index);
    if (has_ended || !refused.ok()) {
      dispatcher_->Release(choice_id);
      continue;
    }
    GroupRequest of_choice = request;
    of_choice.seed = SeedOfChoice(request.seed, index);
    if (index > 0) of_choice.prompt_log_probs = 0;  // they are the same for all
    absl::StatusOr<std::string> key = dispatcher_->Submit(
        choice_id, std::move(of_choice), std::make_shared<ChoiceListener>(shared_from_this(), index));
    if (!key.ok()) {
      refused = key.status();
      continue;
    }
    std::optional<absl::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      choices_[index].key = *key;
      end = end_;
    }
    if (end.has_value() && !end->ok())
      dispatcher_->Cancel(*key, absl::CancelledError("the generation has ended"));
  }
  if (!refused.ok()) Fail(refused);
}

void Generation::Fail(const absl::Status& status) {
  std::vector<std::string> keys;
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    end_ = status;
    for (const Choice& choice : choices_) {
      if (choice.key.has_value() && !choice.finished) keys.push_back(*choice.key);
    }
    timeline_.OnFailed(absl::Now(), status);
    LogEnd(status, nullptr);
    RecordTrace(status, nullptr);
    SendNext();
  }
  // The dispatcher lets go of what it still has.
  for (const std::string& key : keys) dispatcher_->Cancel(key, status);
  ended_callback_(*this, status);
}

void Generation::Cancel() { Fail(absl::CancelledError("cancelled by request")); }

bool Generation::HasEnded() {
  absl::MutexLock lock(&mutex_);
  return end_.has_value();
}

void Generation::OnClientGone() {
  {
    absl::MutexLock lock(&mutex_);
    client_gone_ = true;
  }
  const absl::Status reason = absl::Now() >= deadline_ - kDeadlineSlack
                                  ? absl::DeadlineExceededError("the call's deadline passed")
                                  : absl::CancelledError("the client went away");
  Fail(reason);
}

void Generation::OnStarted(const StartedOutput& started) {
  absl::MutexLock lock(&mutex_);
  if (end_ || timeline_.started()) return;  // the first choice starts all
  cached_tokens_ = started.cached_tokens;
  timeline_.OnStarted(absl::Now(), started);
  started_ = started;
  choices_[0].buffer.GoOnBehind(started_->sent_text);  // an output that goes on has one choice
  SendNext();
}

void Generation::OnTokens(size_t index, StepOutput output) {
  absl::Status taken;
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    timeline_.OnTokens(absl::Now(), static_cast<int64_t>(output.tokens.size()));
    taken = choices_[index].buffer.AddTokens(std::move(output));
    if (taken.ok()) SendNext();
  }
  if (!taken.ok()) Fail(taken);
}

void Generation::OnFinished(size_t index, const FinishedOutput& finished) {
  {
    absl::MutexLock lock(&mutex_);
    if (end_) return;
    Choice& choice = choices_[index];
    choice.finished = true;
    choice.buffer.AddFinished(finished);
    const FinishedOutput before = std::exchange(whole_, finished);
    whole_.rounds += before.rounds;
    whole_.drafted_tokens += before.drafted_tokens;
    whole_.accepted_tokens += before.accepted_tokens;
    whole_.prefill_time = std::max(whole_.prefill_time, before.prefill_time);
    whole_.decode_time = std::max(whole_.decode_time, before.decode_time);
    if (++finished_ < choices_.size()) return SendNext();
    end_ = absl::OkStatus();
    timeline_.OnFinished(absl::Now(), whole_);
    LogEnd(absl::OkStatus(), &whole_);
    RecordTrace(absl::OkStatus(), &whole_);
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
  {
    absl::MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }
  taken_callback_();
}

void Generation::LogEnd(const absl::Status& status, const FinishedOutput* finished) const {
  // Texts of clients, and errors that may quote them, stay out.
  std::vector<LogField> fields;
  if (CheckRequestId(facts_.request_id).ok()) fields.push_back({"request_id", facts_.request_id});
  fields.push_back({"client", facts_.client});
  fields.push_back({"trace_id", facts_.trace.trace_id});
  fields.push_back({"end", status.ok() ? std::string("OK") : absl::StatusCodeToString(status.code())});
  const ErrorDetails details = DetailsOf(status);
  if (!status.ok()) fields.push_back({"reason", details.reason});
  if (!timeline_.started()) {
    // An overloaded server must not write a line for each: what is too much for info is for debug. What
    // labels hold may not have been checked.
    const std::optional<int64_t> left_out = refusal_lines_->Take(timeline_.ended_at());
    if (!details.field.empty()) fields.push_back({"field", details.field});
    if (left_out.value_or(0) > 0) fields.push_back({"left_out", *left_out});
    return LogEvent(left_out.has_value() ? spdlog::level::info : spdlog::level::debug,
                    absl::IsCancelled(status) ? "request cancelled" : "request refused", fields);
  }
  if (!facts_.labels.empty()) {
    std::string labels;
    for (const RequestLabel& label : facts_.labels)
      absl::StrAppend(&labels, labels.empty() ? "" : " ", label.key, "=", label.value);
    fields.push_back({"labels", std::move(labels)});
  }
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

void Generation::RecordTrace(const absl::Status& status, const FinishedOutput* finished) const {
  if (traces_ == nullptr || (facts_.trace.flags & 1) == 0) return;
  traces_->Export(SpansOf(facts_, timeline_, prepared_, cached_tokens_, status, finished));
}

void Generation::CheckProgress(absl::Time now, absl::Duration limit) {
  {
    absl::MutexLock lock(&mutex_);
    const bool waits_for_client = writing_ || finish_called_;
    if (reactor_ == nullptr || !waits_for_client || now - last_call_ <= limit) return;
    if (finish_called_ || end_.has_value()) {
      // Nothing more will be said, but what has been said is not taken, and an error waits behind it: gRPC
      // sends that of a call which is taken away past it, though without details.
      const grpc::Status status = ToGrpcStatus(end_.has_value() && !end_->ok() ? *end_ : NotTaken(limit));
      grpc_call_cancel_with_status(context_->c_call(), static_cast<grpc_status_code>(status.error_code()),
                                   status.error_message().c_str(), nullptr);
      return;
    }
  }
  Fail(NotTaken(limit));
}

// Writes the next event, or ends the stream when the last one has been written (at once when it failed).
void Generation::SendNext() {
  if (reactor_ == nullptr || writing_ || finish_called_) return;
  if (!end_ || end_->ok()) {
    v1::GenerateResponse message;
    if (!client_gone_ && started_.has_value()) {
      *message.mutable_started() = ToMessage(*std::exchange(started_, std::nullopt), facts_);
    }
    for (uint32_t index = 0; index < choices_.size() && !client_gone_; ++index) {
      if (message.event_case() != v1::GenerateResponse::EVENT_NOT_SET) break;
      std::optional<StreamEvent> event = choices_[index].buffer.Next();
      if (!event) continue;
      if (const auto* chunk = std::get_if<OutputChunk>(&*event)) {
        *message.mutable_chunk() = ToMessage(*chunk, index);
      } else {
        *message.mutable_finished() =
            ToMessage(std::get<FinishedOutput>(*event), facts_, cached_tokens_, timeline_, index);
      }
    }
    if (message.event_case() != v1::GenerateResponse::EVENT_NOT_SET) {
      message.set_seq(next_seq_++);
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
