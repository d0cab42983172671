#include "worker/rpc/worker_server.h"

#include <grpcpp/grpcpp.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/group_secret.h"
#include "base/log.h"
#include "dflash/worker/v1/worker.grpc.pb.h"
#include "worker/rpc/messages.h"

namespace dflash {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
// A coordinator that still sends heartbeats but reads nothing is as good as lost.
constexpr size_t kMaxQueuedBytes = 256 << 20;

}  // namespace

class WorkerServer::Impl final : public wire::WorkerService::CallbackService {
 public:
  Impl(const Options& options, GenerationBackend* backend, EngineMetrics* metrics,
       std::function<void(absl::Status)> on_end)
      : options_(options), backend_(backend), metrics_(metrics), on_end_(std::move(on_end)) {}

  ~Impl() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    if (control_.joinable()) control_.join();
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());  // cancels the stream and waits for its end
      server_->Wait();
    }
    {
      absl::MutexLock lock(&writer_mutex_);
      writer_stopping_ = true;
    }
    if (writer_.joinable()) writer_.join();  // after the stream, whose end may wait for a last write
  }

  absl::Status Listen() {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.SetMaxSendMessageSize(kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(this);
    int port = 0;
    const bool is_unix = options_.listen.rfind("unix:", 0) == 0;
    builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), is_unix ? nullptr : &port);
    const mode_t previous = umask(0177);
    server_ = builder.BuildAndStart();
    umask(previous);
    if (server_ == nullptr || (!is_unix && port == 0)) {
      return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", options_.listen));
    }
    control_ = std::thread([this] { Control(); });
    writer_ = std::thread([this] { Write(); });
    return absl::OkStatus();
  }

  grpc::ServerUnaryReactor* GetGroupInfo(grpc::CallbackServerContext* context,
                                         const wire::GetGroupInfoRequest* request,
                                         wire::GetGroupInfoResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (!Knows(*context)) {
      reactor->Finish(Stranger());
      return reactor;
    }
    Heard();
    if (request->build() != options_.identity.build) {
      reactor->Finish({grpc::StatusCode::FAILED_PRECONDITION,
                       absl::StrCat("the worker is build ", options_.identity.build, ", the coordinator ",
                                    request->build())});
      return reactor;
    }
    *response = ToMessage(options_.identity, getpid());
    metrics_->SetGauges(backend_->Gauges());
    *response->mutable_metrics() = ToMessage(metrics_->Collect());
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerBidiReactor<wire::ServeRequest, wire::ServeResponse>* Serve(
      grpc::CallbackServerContext* context) override;

 private:
  class Stream;
  class Sink;

  // Whether the caller knows the group's secret.
  bool Knows(const grpc::CallbackServerContext& context) const {
    if (options_.secret.empty()) return true;
    const auto [begin, end] = context.client_metadata().equal_range(kGroupProofMetadata);
    if (begin == end) return false;
    const std::string expected = CoordinatorProof(options_.secret);
    return begin->second.size() == expected.size() &&
           CRYPTO_memcmp(begin->second.data(), expected.data(), expected.size()) == 0;
  }
  static grpc::Status Stranger() {
    return {grpc::StatusCode::UNAUTHENTICATED, "the proof of the group secret is missing or wrong"};
  }

  void Heard() { last_heard_ns_.store(absl::ToUnixNanos(absl::Now()), std::memory_order_relaxed); }

  void End(absl::Status status) {
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || stopping_) return;
      ended_ = true;
    }
    on_end_(std::move(status));
  }

  void Control();
  // Starts a stream's claimed write on the writer's thread: gRPC sends in the thread that starts a write, and
  // the engine's thread has better things to do than to wait for sockets.
  void StartSoon(std::shared_ptr<Stream> stream) {
    absl::MutexLock lock(&writer_mutex_);
    claimed_.push_back(std::move(stream));
  }
  void Write();

  const Options options_;
  GenerationBackend* const backend_;
  EngineMetrics* const metrics_;
  const std::function<void(absl::Status)> on_end_;
  std::atomic<int64_t> last_heard_ns_{0};  // 0: never
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Stream> stream_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
  std::thread control_;

  absl::Mutex writer_mutex_;
  std::vector<std::shared_ptr<Stream>> claimed_ ABSL_GUARDED_BY(writer_mutex_);
  bool writer_stopping_ ABSL_GUARDED_BY(writer_mutex_) = false;
  std::thread writer_;
};

// The one Serve stream. gRPC's reactor and the sinks of running requests hold it; it dies with the last of
// them.
class WorkerServer::Impl::Stream final
    : public grpc::ServerBidiReactor<wire::ServeRequest, wire::ServeResponse>,
      public std::enable_shared_from_this<Stream> {
 public:
  Stream(Impl* impl, uint64_t credits) : impl_(impl), credits_(credits) {}

  void Begin(std::shared_ptr<Stream> self) {
    self_ = std::move(self);
    SendCredits(0);
    StartRead(&request_);
  }

  // Queues a message; any thread, without waiting for anything. Dropped once the stream has ended.
  void Send(wire::ServeResponse message) {
    {
      absl::MutexLock lock(&mutex_);
      if (ending_) return;
      queued_bytes_ += message.ByteSizeLong();
      queue_.push_back(std::move(message));
      if (queued_bytes_ > kMaxQueuedBytes) {
        EndLocked({grpc::StatusCode::RESOURCE_EXHAUSTED, "the coordinator does not read"});
        return;
      }
      if (!ClaimWriteLocked()) return;
    }
    impl_->StartSoon(shared_from_this());
  }

  // The caller has claimed the write, so no other is under way and the stream cannot end before it.
  void StartClaimedWrite() { StartWrite(&outgoing_); }

  // Grants `more` credits beyond those granted so far.
  void SendCredits(uint64_t more) {
    wire::ServeResponse message;
    message.mutable_credits()->set_granted_total(credits_.fetch_add(more) + more);
    Send(std::move(message));
  }

  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    EndLocked(status);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      impl_->End(absl::UnavailableError("the coordinator's stream ended"));
      End(grpc::Status(grpc::StatusCode::ABORTED, "the stream ended without a shutdown"));
      return;
    }
    impl_->Heard();
    switch (request_.message_case()) {
      case wire::ServeRequest::kSubmit:
        TakeSubmit(std::move(*request_.mutable_submit()));
        break;
      case wire::ServeRequest::kCancel:
        impl_->backend_->Cancel(request_.cancel().id(),
                                absl::Status(static_cast<absl::StatusCode>(request_.cancel().code()),
                                             request_.cancel().message()));
        break;
      case wire::ServeRequest::kHeartbeat:
        FollowLogLevel(request_.heartbeat().log_level());
        break;
      case wire::ServeRequest::kShutdown:
        impl_->End(absl::OkStatus());
        End(grpc::Status::OK);
        return;
      case wire::ServeRequest::MESSAGE_NOT_SET:
        impl_->End(absl::InternalError("the coordinator sent a message of an unknown kind"));
        End(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "message of an unknown kind"));
        return;
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (ending_) Finish(final_status_);
      // !ok without an end yet: the read fails too and ends the stream.
      if (!ok || ending_ || !ClaimWriteLocked()) return;
    }
    StartClaimedWrite();
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&impl_->mutex_);
      if (impl_->stream_.get() == this) impl_->stream_ = nullptr;
    }
    self_ = nullptr;
  }

 private:
  void TakeSubmit(wire::Submit&& submit);

  // Makes the next message the outgoing one, unless one is under way or there is none.
  bool ClaimWriteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || queue_.empty()) return false;
    outgoing_ = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= outgoing_.ByteSizeLong();
    writing_ = true;
    return true;
  }

  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ending_) return;
    ending_ = true;
    final_status_ = status;
    queue_.clear();
    if (!writing_) Finish(final_status_);
  }

  Impl* const impl_;
  std::shared_ptr<Stream> self_;  // until OnDone
  std::atomic<uint64_t> credits_;
  wire::ServeRequest request_;
  absl::Mutex mutex_;
  std::deque<wire::ServeResponse> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  wire::ServeResponse outgoing_;  // in the write that is claimed or under way
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status final_status_ ABSL_GUARDED_BY(mutex_);
};

class WorkerServer::Impl::Sink final : public RequestSink {
 public:
  Sink(std::string id, std::shared_ptr<Stream> stream) : id_(std::move(id)), stream_(std::move(stream)) {}

  void OnStarted(const StartedReport& report) override {
    wire::ServeResponse message;
    *message.mutable_started() = ToMessage(id_, report);
    stream_->Send(std::move(message));
  }
  void OnTokens(TokensReport report) override {
    wire::ServeResponse message;
    *message.mutable_tokens() = ToMessage(id_, std::move(report));
    stream_->Send(std::move(message));
  }
  void OnFinished(const FinishedReport& report) override {
    wire::ServeResponse message;
    *message.mutable_finished() = ToMessage(id_, report);
    stream_->Send(std::move(message));
    stream_->SendCredits(1);
  }
  void OnFailed(const absl::Status& status) override {
    wire::ServeResponse message;
    *message.mutable_failed() = ToMessage(id_, status);
    stream_->Send(std::move(message));
    stream_->SendCredits(1);
  }

 private:
  const std::string id_;
  const std::shared_ptr<Stream> stream_;
};

void WorkerServer::Impl::Stream::TakeSubmit(wire::Submit&& submit) {
  GenerationRequest request = FromMessage(std::move(submit), absl::Now());
  auto sink = std::make_unique<Sink>(request.id, self_);
  impl_->backend_->Submit(std::move(request), std::move(sink));
}

grpc::ServerBidiReactor<wire::ServeRequest, wire::ServeResponse>* WorkerServer::Impl::Serve(
    grpc::CallbackServerContext* context) {
  // Refuses with a status, without reading.
  class Refusal final : public grpc::ServerBidiReactor<wire::ServeRequest, wire::ServeResponse> {
   public:
    explicit Refusal(const grpc::Status& status) { Finish(status); }
    void OnDone() override { delete this; }
  };
  if (!Knows(*context)) return new Refusal(Stranger());
  Heard();
  auto stream = std::make_shared<Stream>(this, static_cast<uint64_t>(options_.identity.max_sequences));
  {
    absl::MutexLock lock(&mutex_);
    if (stream_ != nullptr || ended_ || stopping_) {
      return new Refusal({grpc::StatusCode::FAILED_PRECONDITION, "the group is served already"});
    }
    stream_ = stream;
  }
  stream->Begin(stream);
  return stream.get();
}

void WorkerServer::Impl::Control() {
  uint64_t heartbeats = 0;
  absl::Time next_heartbeat = absl::Now();
  absl::Time next_metrics = absl::Now();
  for (;;) {
    std::shared_ptr<Stream> stream;
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithDeadline(absl::Condition(&stopping_), std::min(next_heartbeat, next_metrics)))
        return;
      stream = stream_;
    }
    const absl::Time now = absl::Now();
    const int64_t heard = last_heard_ns_.load(std::memory_order_relaxed);
    if (heard != 0 && now - absl::FromUnixNanos(heard) > options_.silence_limit) {
      End(absl::UnavailableError(absl::StrCat("nothing heard from the coordinator for ",
                                              absl::FormatDuration(options_.silence_limit))));
    }
    if (now >= next_heartbeat) {
      next_heartbeat = now + options_.heartbeat_period;
      wire::ServeResponse message;
      message.mutable_heartbeat()->set_seq(++heartbeats);
      if (stream != nullptr) stream->Send(std::move(message));
    }
    if (now >= next_metrics) {
      next_metrics = now + options_.metrics_period;
      metrics_->SetGauges(backend_->Gauges());
      wire::ServeResponse message;
      *message.mutable_metrics() = ToMessage(metrics_->Collect());
      if (stream != nullptr) stream->Send(std::move(message));
    }
  }
}

void WorkerServer::Impl::Write() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(writer_mutex_) {
    return !claimed_.empty() || writer_stopping_;
  };
  for (;;) {
    std::vector<std::shared_ptr<Stream>> claimed;
    {
      absl::MutexLock lock(&writer_mutex_);
      writer_mutex_.Await(absl::Condition(&has_work));
      if (claimed_.empty()) return;
      claimed.swap(claimed_);
    }
    for (const std::shared_ptr<Stream>& stream : claimed) stream->StartClaimedWrite();
  }
}

WorkerServer::WorkerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerServer::~WorkerServer() = default;

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Start(const Options& options,
                                                                  GenerationBackend* backend,
                                                                  EngineMetrics* metrics,
                                                                  std::function<void(absl::Status)> on_end) {
  auto impl = std::make_unique<Impl>(options, backend, metrics, std::move(on_end));
  if (absl::Status status = impl->Listen(); !status.ok()) return status;
  return std::unique_ptr<WorkerServer>(new WorkerServer(std::move(impl)));
}

}  // namespace dflash
