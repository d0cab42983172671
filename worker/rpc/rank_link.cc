#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/rpc/rank_channel.h"
#include "worker/rpc/rank_connection.h"
#include "worker/rpc/rank_messages.h"

namespace dflash {
namespace {

namespace asio = boost::asio;
constexpr absl::Duration kTick = absl::Milliseconds(50);
constexpr absl::Duration kRetry = absl::Milliseconds(50);

}  // namespace

class RankLink::Impl {
 public:
  Impl(const RankChannelOptions& options, int rank, std::function<void(const absl::Status&)> on_fault)
      : options_(options),
        epoch_(options.epoch),
        rank_(rank),
        on_fault_(std::move(on_fault)),
        work_(asio::make_work_guard(io_)),
        tick_(io_) {}
  ~Impl() { Stop(); }

  absl::Status Join(const RankAddress& address) {
    const absl::Time deadline = absl::Now() + options_.formation_timeout;
    for (;;) {
      absl::StatusOr<RankSocket> socket = Connect(address, deadline);
      absl::Status status = socket.status();
      if (status.ok()) {
        connection_ = std::make_shared<RankConnection>(*std::move(socket), &io_);
        DFLASH_RETURN_IF_ERROR(connection_->CheckPeer());
        status = Converse(deadline);
        if (status.ok()) return absl::OkStatus();
        // The leader has answered, or the time is over: that is the result. Else it was not there yet, or
        // went away as we came.
        if (!absl::IsUnavailable(status)) return status;
      }
      if (absl::Now() + kRetry >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("the leader at ", options_.address, " could not be joined within ",
                         absl::FormatDuration(options_.formation_timeout), ": ", status.message()));
      }
      absl::SleepFor(kRetry);
    }
  }

  const RankTransport& transport() const { return transport_; }

  absl::Status SendReady(const RankReady& ready) {
    wire::RankFrame frame = NewFrame();
    frame.mutable_ready()->set_feature_contract(ready.feature_contract);
    frame.mutable_ready()->set_configuration(ready.configuration);
    frame.mutable_ready()->set_bytes_read(ready.bytes_read);
    return connection_->Send(frame);
  }

  bool AwaitPlan(absl::Duration patience) {
    absl::MutexLock lock(&mutex_);
    const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !plans_.empty() || over_; };
    return mutex_.AwaitWithTimeout(absl::Condition(&any), patience);
  }

  absl::StatusOr<std::optional<RankPlan>> NextPlan() {
    absl::MutexLock lock(&mutex_);
    const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !plans_.empty() || over_; };
    mutex_.Await(absl::Condition(&any));
    if (plans_.empty()) {
      DFLASH_RETURN_IF_ERROR(fault_);
      return std::optional<RankPlan>();
    }
    RankPlan plan = std::move(plans_.front());
    plans_.pop_front();
    return std::optional<RankPlan>(std::move(plan));
  }

  void SetFinished(uint64_t plan) { finished_ = plan; }

  void Abort(const absl::Status& reason) {
    wire::RankFrame frame = NewFrame();
    *frame.mutable_abort() = ToAbort(reason);
    (void)connection_->Send(frame);
  }

 private:
  wire::RankFrame NewFrame() const {
    wire::RankFrame frame;
    frame.set_epoch(epoch_);
    return frame;
  }

  absl::StatusOr<RankSocket> Connect(const RankAddress& address, absl::Time deadline) {
    boost::system::error_code error;
    RankSocket::endpoint_type endpoint;
    if (address.is_tcp()) {
      asio::ip::tcp::resolver resolver(io_);
      const auto found = resolver.resolve(address.host, address.port, error);
      if (error || found.empty())
        return absl::UnavailableError(absl::StrCat(address.host, ": ", error.message()));
      endpoint = found.begin()->endpoint();
    } else {
      endpoint = asio::local::stream_protocol::endpoint(address.unix_path);
    }
    // The thread of the channel does not run yet: this one drives the connection.
    RankSocket socket(io_);
    bool done = false;
    socket.async_connect(endpoint, [&](const boost::system::error_code& result) {
      error = result;
      done = true;
    });
    io_.restart();
    while (!done && absl::Now() < deadline) io_.run_one_for(std::chrono::milliseconds(50));
    if (!done) {
      boost::system::error_code ignored;
      socket.close(ignored);
      while (!done) io_.run_one();
      return absl::DeadlineExceededError("the connection takes too long");
    }
    if (error) return absl::UnavailableError(error.message());
    // Where nobody listens yet, a connection may get the very port that it dials, and meet itself.
    if (address.is_tcp() && socket.local_endpoint(error) == socket.remote_endpoint(error))
      return absl::UnavailableError("nobody listens there yet");
    if (address.is_tcp()) socket.set_option(asio::ip::tcp::no_delay(true), error);
    return socket;
  }

  // Challenge, Join, Welcome. Unavailable: the connection ended before the leader said anything.
  absl::Status Converse(absl::Time deadline) {
    {
      absl::MutexLock lock(&mutex_);
      over_ = false;
      fault_ = absl::OkStatus();
      answer_.reset();
      last_heard_ = absl::Now();
    }
    connection_->Start([this](wire::RankFrame frame) { OnFrame(std::move(frame)); },
                       [this](const absl::Status& why) {
                         Fault(absl::UnavailableError(absl::StrCat("the leader: ", why.message())));
                       });
    if (!thread_.joinable()) {
      io_.restart();
      {
        absl::MutexLock lock(&mutex_);
        running_ = true;
      }
      thread_ = std::thread([this] {
        io_.run();
        absl::MutexLock lock(&mutex_);
        running_ = false;
      });
    }
    absl::Status result;
    {
      absl::MutexLock lock(&mutex_);
      const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return answer_.has_value() || over_;
      };
      if (!mutex_.AwaitWithDeadline(absl::Condition(&answered), deadline)) {
        result =
            absl::DeadlineExceededError(absl::StrCat("the leader at ", options_.address, " does not answer"));
      } else {
        result = answer_.has_value() ? *answer_ : fault_;
      }
    }
    if (result.ok()) {
      asio::post(io_, [this] { Tick(); });
      return result;
    }
    // The thread ends, so that the next attempt may drive the connection itself.
    connection_->Close(true);
    work_.reset();
    thread_.join();
    work_.emplace(asio::make_work_guard(io_));
    return result;
  }

  void OnFrame(wire::RankFrame frame) {
    if (frame.has_challenge() && !joined_) {
      if (options_.epoch == 0) epoch_ = frame.epoch();
      nonce_ = RandomNonce();
      wire::RankFrame answer = NewFrame();
      wire::Join& join = *answer.mutable_join();
      join.set_group_id(options_.group_id);
      join.set_rank(static_cast<uint32_t>(rank_));
      join.set_size(static_cast<uint32_t>(options_.size));
      join.set_build(options_.build);
      join.set_options(options_.options);
      join.set_nonce(nonce_);
      join.set_proof(
          Proof(options_.secret, "join", frame.challenge().nonce(), options_.group_id, join.rank(), epoch_));
      (void)connection_->Send(answer);
      return;
    }
    if (frame.has_abort() && !joined_) {
      const absl::Status refusal = FromAbort(frame.abort());
      return Answer(refusal.ok() ? absl::FailedPreconditionError("the leader ended the group") : refusal);
    }
    if (frame.epoch() != epoch_) return;  // of a leader that is no longer ours
    if (frame.has_welcome() && !joined_) {
      if (!SameProof(frame.welcome().proof(), Proof(options_.secret, "welcome", nonce_, options_.group_id,
                                                    static_cast<uint32_t>(rank_), epoch_)))
        return Answer(absl::UnauthenticatedError("the leader does not know the group secret"));
      transport_ = {.host_pid = frame.welcome().host().pid(),
                    .host_fd = frame.welcome().host().fd(),
                    .host_bytes = frame.welcome().host().bytes(),
                    .nccl_id = frame.welcome().nccl().unique_id()};
      joined_ = true;
      return Answer(absl::OkStatus());
    }
    {
      absl::MutexLock lock(&mutex_);
      last_heard_ = absl::Now();
      if (frame.has_plan()) {
        plans_.push_back(FromMessage(frame.plan()));
        return;
      }
      if (frame.has_abort() && frame.abort().code() == 0) {
        over_ = true;
        return;
      }
    }
    if (frame.has_abort()) return Fault(FromAbort(frame.abort()));
    if (frame.has_heartbeat()) {
      FollowLogLevel(frame.heartbeat().log_level());
    } else {
      Fault(absl::InternalError(absl::StrCat("the leader sent a frame of kind ", frame.message_case())));
    }
  }

  void Answer(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    if (!answer_.has_value()) answer_ = std::move(status);
  }

  void Tick() {
    const absl::Time now = absl::Now();
    if (now >= next_heartbeat_) {
      next_heartbeat_ = now + options_.heartbeat_period;
      wire::RankFrame frame = NewFrame();
      frame.mutable_heartbeat()->set_seq(++heartbeats_);
      frame.mutable_heartbeat()->set_plan(finished_);
      (void)connection_->Send(frame);
    }
    bool silent;
    {
      absl::MutexLock lock(&mutex_);
      silent = now - last_heard_ > options_.silence_limit;
    }
    if (silent)
      Fault(absl::UnavailableError(
          absl::StrCat("the leader said nothing for ", absl::FormatDuration(options_.silence_limit))));
    tick_.expires_after(absl::ToChronoMilliseconds(kTick));
    tick_.async_wait([this](const boost::system::error_code& error) {
      if (!error) Tick();
    });
  }

  void Fault(const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      if (over_) return;
      over_ = true;
      fault_ = status;
    }
    if (joined_) on_fault_(status);
  }

  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      over_ = true;
    }
    if (!thread_.joinable()) return;
    asio::post(io_, [this] {
      boost::system::error_code ignored;
      tick_.cancel(ignored);
    });
    connection_->Close(false);
    work_.reset();
    {
      absl::MutexLock lock(&mutex_);
      const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !running_; };
      mutex_.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(1));
    }
    io_.stop();
    thread_.join();
  }

  const RankChannelOptions options_;
  std::atomic<uint64_t> epoch_;  // written before joined_
  const int rank_;
  const std::function<void(const absl::Status&)> on_fault_;
  asio::io_context io_{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_;
  asio::steady_timer tick_;
  std::shared_ptr<RankConnection> connection_;
  std::thread thread_;
  std::string nonce_;                                 // io thread
  absl::Time next_heartbeat_ = absl::InfinitePast();  // io thread
  uint64_t heartbeats_ = 0;                           // io thread
  std::atomic<bool> joined_ = false;
  RankTransport transport_;  // written before joined_
  std::atomic<uint64_t> finished_ = 0;
  absl::Mutex mutex_;
  std::optional<absl::Status> answer_ ABSL_GUARDED_BY(mutex_);  // to our Join
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_);
  std::deque<RankPlan> plans_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;  // the thread
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);
};

RankLink::RankLink(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankLink::~RankLink() = default;

absl::StatusOr<std::unique_ptr<RankLink>> RankLink::Join(const RankChannelOptions& options, int rank,
                                                         std::function<void(const absl::Status&)> on_fault) {
  DFLASH_ASSIGN_OR_RETURN(const RankAddress address, RankAddress::Parse(options.address));
  auto impl = std::make_shared<Impl>(options, rank, std::move(on_fault));
  DFLASH_RETURN_IF_ERROR(impl->Join(address));
  return std::unique_ptr<RankLink>(new RankLink(std::move(impl)));
}

const RankTransport& RankLink::transport() const { return impl_->transport(); }
absl::Status RankLink::SendReady(const RankReady& ready) { return impl_->SendReady(ready); }
bool RankLink::AwaitPlan(absl::Duration patience) { return impl_->AwaitPlan(patience); }
absl::StatusOr<std::optional<RankPlan>> RankLink::NextPlan() { return impl_->NextPlan(); }
void RankLink::SetFinished(uint64_t plan) { impl_->SetFinished(plan); }
void RankLink::Abort(const absl::Status& reason) { impl_->Abort(reason); }

}  // namespace dflash
