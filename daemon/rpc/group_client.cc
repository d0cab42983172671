#include "daemon/rpc/group_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/group_secret.h"
#include "base/log.h"
#include "daemon/rpc/worker_messages.h"
#include "dflash/worker/v1/worker.grpc.pb.h"

namespace dflash {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;

std::shared_ptr<grpc::Channel> Connect(const std::string& address, absl::Duration silence_limit) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A worker that loads its model does not listen yet: look again often, so that "ready" is seen at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  // Finds a host that is gone before there are heartbeats, and is no more impatient than they are.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(std::max(absl::Seconds(5), silence_limit))));
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

// Destroyed only after its last call has ended (AwaitEnd). All reports come from reactions of gRPC, which are
// one at a time.
class GroupClient::Impl final : public grpc::ClientBidiReactor<wire::ServeRequest, wire::ServeResponse> {
 public:
  Impl(GroupClient* group, Options options, GroupEvents* events,
       std::function<void(std::vector<prometheus::MetricFamily>)> on_metrics)
      : group_(group),
        options_(std::move(options)),
        events_(events),
        on_metrics_(std::move(on_metrics)),
        stub_(wire::WorkerService::NewStub(Connect(options_.address, options_.silence_limit))) {}

  void Start() {
    info_request_.set_build(options_.build);
    info_context_.set_wait_for_ready(true);
    if (!options_.secret.empty()) {
      for (grpc::ClientContext* context : {&info_context_, &serve_context_})
        context->AddMetadata(kGroupProofMetadata, CoordinatorProof(options_.secret));
    }
    stub_->async()->GetGroupInfo(&info_context_, &info_request_, &info_, [this](const grpc::Status& status) {
      if (!status.ok()) return End(absl::StrCat("cannot reach the worker: ", status.error_message()));
      absl::StatusOr<GroupInfo> info = FromMessage(info_, options_.build);
      if (!info.ok()) return End(std::string(info.status().message()));
      if (const absl::Status admitted = options_.admit(*info); !admitted.ok())
        return End(std::string(admitted.message()));
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_) return EndLocked(why_stopping_);
        last_heard_ = absl::Now();
        stub_->async()->Serve(&serve_context_, this);
        serving_ = true;
      }
      if (info_.has_metrics()) on_metrics_(FromMessage(info_.metrics()));
      events_->OnReady(group_, *info);
      heartbeats_ = std::thread([this] { Heartbeats(); });
      AddHold();  // writes start outside of reactions; given back when the stream has broken
      StartRead(&incoming_);
      StartCall();
    });
  }

  void Send(wire::ServeRequest message) {
    absl::MutexLock lock(&mutex_);
    if (!serving_ || ended_ || broken_) return;  // requests of a lost group go nowhere
    outgoing_.push_back(std::move(message));
    WriteNext();
  }

  void Disconnect(const std::string& why) {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    why_stopping_ = why;
    info_context_.TryCancel();
    if (serving_) serve_context_.TryCancel();
  }

  void AwaitEnd() {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ended_));
    }
    if (heartbeats_.joinable()) heartbeats_.join();
  }

  absl::Duration HeartbeatAge() const {
    absl::MutexLock lock(&mutex_);
    return last_heard_ == absl::InfinitePast() ? absl::ZeroDuration() : absl::Now() - last_heard_;
  }

  const std::string& name() const { return options_.name; }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      {
        absl::MutexLock lock(&mutex_);
        broken_ = true;
      }
      RemoveHold();  // OnDone follows when the last write has
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      last_heard_ = absl::Now();
    }
    Dispatch(std::move(incoming_));
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    outgoing_.pop_front();
    // A write that fails means a broken stream, and so does the read under way.
    if (ok && !broken_) WriteNext();
  }

  void OnDone(const grpc::Status& status) override {
    bool silent;
    {
      absl::MutexLock lock(&mutex_);
      silent = silent_;
    }
    if (silent) {
      options_.on_silence();
      return End(absl::StrCat("the worker said nothing for ", absl::FormatDuration(options_.silence_limit)));
    }
    End(status.ok() ? "the worker ended the stream"
                    : absl::StrCat("the stream to the worker broke: ", status.error_message()));
  }

  void Dispatch(wire::ServeResponse message) {
    switch (message.message_case()) {
      case wire::ServeResponse::kCredits:
        return events_->OnCredits(group_, message.credits().granted_total());
      case wire::ServeResponse::kStarted:
        return events_->OnStarted(group_, message.started().id(),
                                  {.prompt_tokens = message.started().prompt_tokens(),
                                   .cached_tokens = message.started().cached_tokens(),
                                   .sent_text = message.started().sent_text()});
      case wire::ServeResponse::kTokens: {
        const std::string key = message.tokens().id();
        return events_->OnTokens(group_, key, FromMessage(std::move(*message.mutable_tokens())));
      }
      case wire::ServeResponse::kFinished:
        return events_->OnFinished(group_, message.finished().id(), FromMessage(message.finished()));
      case wire::ServeResponse::kFailed:
        return events_->OnFailed(group_, message.failed().id(), FromMessage(message.failed()));
      case wire::ServeResponse::kMetrics:
        return on_metrics_(FromMessage(message.metrics()));
      case wire::ServeResponse::kHeartbeat:
      case wire::ServeResponse::MESSAGE_NOT_SET:
        return;
    }
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  // Sends heartbeats and watches for silence until the stream has ended.
  void Heartbeats() {
    uint64_t seq = 0;
    absl::MutexLock lock(&mutex_);
    while (!mutex_.AwaitWithTimeout(absl::Condition(&ended_), options_.heartbeat_period)) {
      if (absl::Now() - last_heard_ > options_.silence_limit) {
        silent_ = true;
        serve_context_.TryCancel();
        continue;
      }
      if (broken_) continue;
      wire::ServeRequest message;
      message.mutable_heartbeat()->set_seq(++seq);
      message.mutable_heartbeat()->set_log_level(ChangedLogLevel());
      outgoing_.push_back(std::move(message));
      WriteNext();
    }
  }

  void End(const std::string& why) {
    absl::MutexLock lock(&mutex_);
    EndLocked(stopping_ ? why_stopping_ : why);
  }
  // The last thing that happens: nothing of this object is used by gRPC afterwards.
  void EndLocked(std::string why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mutex_.Unlock();
    events_->OnLost(group_, why);
    mutex_.Lock();
    ended_ = true;
  }

  GroupClient* const group_;
  const Options options_;
  GroupEvents* const events_;
  const std::function<void(std::vector<prometheus::MetricFamily>)> on_metrics_;
  const std::unique_ptr<wire::WorkerService::Stub> stub_;

  grpc::ClientContext info_context_, serve_context_;
  wire::GetGroupInfoRequest info_request_;
  wire::GetGroupInfoResponse info_;
  wire::ServeResponse incoming_;
  std::thread heartbeats_;

  mutable absl::Mutex mutex_;
  std::deque<wire::ServeRequest> outgoing_
      ABSL_GUARDED_BY(mutex_);  // the front is being written while writing_
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string why_stopping_ ABSL_GUARDED_BY(mutex_);
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more may be written
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

GroupClient::GroupClient(Options options, GroupEvents* events,
                         std::function<void(std::vector<prometheus::MetricFamily>)> on_metrics)
    : impl_(std::make_unique<Impl>(this, std::move(options), events, std::move(on_metrics))) {}

void GroupClient::Start() {
  started_ = true;
  impl_->Start();
}

GroupClient::~GroupClient() {
  if (!started_) return;
  impl_->Disconnect("shut down");
  impl_->AwaitEnd();
}

const std::string& GroupClient::name() const { return impl_->name(); }

void GroupClient::Submit(const std::string& key, const GroupRequest& request) {
  wire::ServeRequest message;
  *message.mutable_submit() = ToMessage(key, request, absl::Now());
  impl_->Send(std::move(message));
}

void GroupClient::Cancel(const std::string& key, const absl::Status& reason) {
  wire::ServeRequest message;
  message.mutable_cancel()->set_id(key);
  message.mutable_cancel()->set_code(static_cast<int32_t>(reason.code()));
  message.mutable_cancel()->set_message(std::string(reason.message()));
  impl_->Send(std::move(message));
}

void GroupClient::Shutdown() {
  wire::ServeRequest message;
  message.mutable_shutdown();
  impl_->Send(std::move(message));
}

void GroupClient::Disconnect(const std::string& why) { impl_->Disconnect(why); }
absl::Duration GroupClient::HeartbeatAge() const { return impl_->HeartbeatAge(); }

}  // namespace dflash
