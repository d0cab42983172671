#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <thread>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/group_secret.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/rpc/rank_channel.h"
#include "worker/rpc/rank_connection.h"
#include "worker/rpc/rank_messages.h"

namespace dflash {
namespace {

namespace asio = boost::asio;
using TcpAcceptor = asio::ip::tcp::acceptor;
using UnixAcceptor = asio::local::stream_protocol::acceptor;

constexpr absl::Duration kTick = absl::Milliseconds(50);
constexpr absl::Duration kJoinTime = absl::Seconds(5);  // from the connection to a valid Join
constexpr size_t kStrangers = 8;                        // connections at a time that have not joined
constexpr size_t kJoinFrameBytes = 64 << 10;
// In place of the rank of a connection.
constexpr int kNotJoined = 0, kRefused = -1;

absl::Status CheckOptions(const RankChannelOptions& options, const RankAddress& address) {
  if (options.size < 2)
    return absl::InvalidArgumentError("a group of fewer than two ranks has no rank channel");
  if (address.is_tcp() && options.secret.empty())
    return absl::InvalidArgumentError(absl::StrCat(options.address, ": ranks over TCP need a group secret"));
  if (!options.secret.empty() && options.secret.size() < static_cast<size_t>(kShortestGroupSecret))
    return absl::InvalidArgumentError(
        absl::StrCat("a group secret of fewer than ", kShortestGroupSecret, " bytes"));
  return absl::OkStatus();
}

}  // namespace

class RankHub::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const RankChannelOptions& options, const RankTransport& transport,
       std::function<void(const absl::Status&)> on_fault)
      : options_(options),
        transport_(transport),
        on_fault_(std::move(on_fault)),
        formation_deadline_(absl::Now() + options.formation_timeout),
        work_(asio::make_work_guard(io_)),
        tick_(io_),
        members_(static_cast<size_t>(options.size)) {}

  absl::Status Listen(const RankAddress& address) {
    boost::system::error_code error;
    if (address.is_tcp()) {
      asio::ip::tcp::resolver resolver(io_);
      const auto found =
          resolver.resolve(address.host, address.port, asio::ip::tcp::resolver::passive, error);
      if (error || found.empty())
        return absl::InvalidArgumentError(absl::StrCat(options_.address, ": ", error.message()));
      auto& acceptor = acceptor_.emplace<TcpAcceptor>(io_);
      const asio::ip::tcp::endpoint endpoint = found.begin()->endpoint();
      acceptor.open(endpoint.protocol(), error);
      if (!error) acceptor.set_option(TcpAcceptor::reuse_address(true), error);
      if (!error) acceptor.bind(endpoint, error);
      if (!error) acceptor.listen(TcpAcceptor::max_listen_connections, error);
      if (!error) port_ = acceptor.local_endpoint(error).port();
    } else {
      auto& acceptor = acceptor_.emplace<UnixAcceptor>(io_);
      const asio::local::stream_protocol::endpoint endpoint(address.unix_path);
      acceptor.open(endpoint.protocol(), error);
      const mode_t previous = umask(0177);
      if (!error) acceptor.bind(endpoint, error);
      umask(previous);
      if (!error) acceptor.listen(UnixAcceptor::max_listen_connections, error);
    }
    if (error)
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", options_.address, ": ", error.message()));
    Accept();
    Tick();
    thread_ = std::thread([this] {
      io_.run();
      thread_ended_.Notify();
    });
    return absl::OkStatus();
  }

  // Nothing of this object runs afterwards.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      ended_ = true;
    }
    asio::post(io_, [this] {
      boost::system::error_code ignored;
      tick_.cancel(ignored);
      std::visit(
          [&](auto& acceptor) {
            if constexpr (!std::is_same_v<std::decay_t<decltype(acceptor)>, std::monostate>)
              acceptor.close(ignored);
          },
          acceptor_);
      stopped_ = true;
      for (const auto& timer : timers_) timer->cancel(ignored);
      for (const auto& connection : strangers_) connection->Close(true);
      absl::MutexLock lock(&mutex_);
      for (const Member& member : members_) {
        if (member.connection != nullptr) member.connection->Close(false);
      }
    });
    work_.reset();
    // A member that does not read cannot hold us up: what is queued is dropped after a while.
    if (thread_.joinable()) {
      thread_ended_.WaitForNotificationWithTimeout(absl::Seconds(1));
      io_.stop();
      thread_.join();
    }
  }

  absl::Status AwaitJoined() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !fault_.ok() ||
             Missing([](const Member& member) { return member.connection != nullptr; }).empty();
    };
    mutex_.AwaitWithDeadline(absl::Condition(&done), formation_deadline_);
    DFLASH_RETURN_IF_ERROR(fault_);
    const std::vector<int> missing =
        Missing([](const Member& member) { return member.connection != nullptr; });
    if (missing.empty()) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "ranks that did not join within ", absl::FormatDuration(options_.formation_timeout), ": ",
        absl::StrJoin(missing, ", "), last_refusal_.empty() ? "" : "; last refusal: ", last_refusal_));
  }

  absl::Status AwaitReady(const RankReady& ours, absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const auto is_ready = [](const Member& member) { return member.ready.has_value(); };
    const auto done = [&, this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !fault_.ok() || Missing(is_ready).empty();
    };
    mutex_.AwaitWithDeadline(absl::Condition(&done), deadline);
    DFLASH_RETURN_IF_ERROR(fault_);
    if (const std::vector<int> missing = Missing(is_ready); !missing.empty()) {
      return absl::DeadlineExceededError(
          absl::StrCat("ranks that have not loaded in time: ", absl::StrJoin(missing, ", ")));
    }
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      const RankReady& theirs = *members_[rank].ready;
      for (const auto& [what, a, b] :
           {std::tuple("feature contract", &ours.feature_contract, &theirs.feature_contract),
            std::tuple("configuration", &ours.configuration, &theirs.configuration)}) {
        if (*a != *b) {
          return absl::FailedPreconditionError(
              absl::StrCat("rank ", rank, " has another ", what, ": '", *b, "', the leader '", *a, "'"));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Send(const RankPlan& plan) {
    wire::RankFrame frame = NewFrame();
    *frame.mutable_plan() = ToMessage(plan);
    const absl::Time now = absl::Now();
    absl::MutexLock lock(&mutex_);
    DFLASH_RETURN_IF_ERROR(fault_);
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      Member& member = members_[rank];
      if (member.connection == nullptr) return absl::FailedPreconditionError("the group is not complete");
      if (member.finished == last_plan_) member.waiting_since = now;
      DFLASH_RETURN_IF_ERROR(Annotate(member.connection->Send(frame), absl::StrCat("rank ", rank)));
    }
    last_plan_ = plan.number;
    return absl::OkStatus();
  }

  void End(const absl::Status& reason) {
    wire::RankFrame frame = NewFrame();
    *frame.mutable_abort() = ToAbort(reason);
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    for (const Member& member : members_) {
      if (member.connection != nullptr) (void)member.connection->Send(frame);  // gone already: as we want it
    }
  }

  std::vector<RankHub::Member> Members() const {
    const absl::Time now = absl::Now();
    absl::MutexLock lock(&mutex_);
    std::vector<RankHub::Member> members;
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      const Member& member = members_[rank];
      const bool joined = member.connection != nullptr;
      members.push_back({.joined = joined,
                         .heartbeat_age = joined ? now - member.last_heard : absl::ZeroDuration(),
                         .plan = member.finished,
                         .bytes_read = member.ready.has_value() ? member.ready->bytes_read : 0});
    }
    return members;
  }
  int64_t dropped_frames() const { return dropped_frames_; }
  int64_t refused_joins() const { return refused_joins_; }
  int port() const { return port_; }

 private:
  using Connection = std::shared_ptr<RankConnection>;
  struct Member {
    Connection connection;  // null until it has joined; stays when it is lost
    absl::Time last_heard;
    std::optional<RankReady> ready;
    uint64_t finished = 0;     // plan
    absl::Time waiting_since;  // when it last made progress, or got something to do
  };

  wire::RankFrame NewFrame() const {
    wire::RankFrame frame;
    frame.set_epoch(options_.epoch);
    return frame;
  }

  std::vector<int> Missing(const std::function<bool(const Member&)>& has) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<int> missing;
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      if (!has(members_[rank])) missing.push_back(static_cast<int>(rank));
    }
    return missing;
  }

  void Accept() {
    std::visit(
        [this](auto& acceptor) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(acceptor)>, std::monostate>) {
            auto socket = std::make_shared<RankSocket>(io_);
            acceptor.async_accept(*socket, [this, socket](const boost::system::error_code& error) {
              if (stopped_) return;
              if (!error) Welcome(std::move(*socket));
              Accept();
            });
          }
        },
        acceptor_);
  }

  // A connection that may become a member.
  void Welcome(RankSocket socket) {
    if (port_ != 0) {
      boost::system::error_code ignored;
      socket.set_option(asio::ip::tcp::no_delay(true), ignored);
    }
    auto connection = std::make_shared<RankConnection>(std::move(socket), &io_);
    if (!connection->CheckPeer().ok() || strangers_.size() >= kStrangers) {
      ++refused_joins_;
      return;  // destroying the socket closes it
    }
    strangers_.push_back(connection);
    connection->set_frame_limit(kJoinFrameBytes);
    const std::string nonce = RandomNonce();
    wire::RankFrame frame = NewFrame();
    frame.mutable_challenge()->set_nonce(nonce);
    (void)connection->Send(frame);
    auto rank = std::make_shared<int>(kNotJoined);
    RankConnection* raw = connection.get();
    connection->Start([this, raw, rank, nonce](
                          wire::RankFrame received) { OnFrame(raw, rank.get(), nonce, std::move(received)); },
                      [this, raw, rank](const absl::Status& why) {
                        Forget(raw);
                        if (*rank > 0)
                          Fault(absl::UnavailableError(absl::StrCat("rank ", *rank, ": ", why.message())));
                      });
    auto timer = std::make_shared<asio::steady_timer>(io_, absl::ToChronoSeconds(kJoinTime));
    timer->async_wait([weak = std::weak_ptr<RankConnection>(connection), rank, timer](const auto& error) {
      const Connection late = weak.lock();
      if (!error && late != nullptr && *rank == kNotJoined) late->Close(true);
    });
    timers_.push_back(timer);
  }

  void Forget(RankConnection* connection) {
    std::erase_if(strangers_, [&](const Connection& stranger) { return stranger.get() == connection; });
  }

  void OnFrame(RankConnection* connection, int* rank, const std::string& nonce, wire::RankFrame frame) {
    if (*rank == kRefused) return;
    if (*rank == kNotJoined) return TakeJoin(connection, rank, nonce, frame);
    if (frame.epoch() != options_.epoch) {
      ++dropped_frames_;
      return;
    }
    absl::Status fault;
    {
      absl::MutexLock lock(&mutex_);
      Member& member = members_[static_cast<size_t>(*rank)];
      member.last_heard = absl::Now();
      switch (frame.message_case()) {
        case wire::RankFrame::kReady:
          member.ready = {.feature_contract = frame.ready().feature_contract(),
                          .configuration = frame.ready().configuration(),
                          .bytes_read = frame.ready().bytes_read()};
          break;
        case wire::RankFrame::kHeartbeat:
          if (frame.heartbeat().plan() > member.finished) {
            member.finished = frame.heartbeat().plan();
            member.waiting_since = member.last_heard;
          }
          break;
        case wire::RankFrame::kAbort:
          fault = absl::UnavailableError(absl::StrCat("rank ", *rank, ": ", frame.abort().message()));
          break;
        default:
          fault = absl::InternalError(
              absl::StrCat("rank ", *rank, " sent a frame of kind ", frame.message_case()));
      }
    }
    if (!fault.ok()) Fault(fault);
  }

  void TakeJoin(RankConnection* connection, int* rank, const std::string& nonce,
                const wire::RankFrame& frame) {
    const wire::Join& join = frame.join();
    absl::Status refusal = CheckJoin(frame, nonce);
    Connection stranger;
    for (const Connection& candidate : strangers_) {
      if (candidate.get() == connection) stranger = candidate;
    }
    if (stranger == nullptr) return;
    wire::RankFrame answer = NewFrame();
    if (refusal.ok()) {
      absl::MutexLock lock(&mutex_);
      Member& member = members_[join.rank()];
      if (member.connection != nullptr) {
        refusal = absl::AlreadyExistsError(absl::StrCat("rank ", join.rank(), " has joined already"));
      } else {
        *rank = static_cast<int>(join.rank());
        member.connection = stranger;
        member.last_heard = member.waiting_since = absl::Now();
        wire::Welcome& welcome = *answer.mutable_welcome();
        if (transport_.nccl_id.empty()) {
          welcome.mutable_host()->set_pid(transport_.host_pid);
          welcome.mutable_host()->set_fd(transport_.host_fd);
          welcome.mutable_host()->set_bytes(transport_.host_bytes);
        } else {
          welcome.mutable_nccl()->set_unique_id(transport_.nccl_id);
        }
        welcome.set_proof(
            Proof(options_.secret, "welcome", join.nonce(), options_.group_id, join.rank(), options_.epoch));
        connection->set_frame_limit(kMaxFrameBytes);
      }
    }
    if (!refusal.ok()) {
      *rank = kRefused;  // what it sent behind its Join is not for us
      ++refused_joins_;
      {
        absl::MutexLock lock(&mutex_);
        last_refusal_ = std::string(refusal.message());
      }
      *answer.mutable_abort() = ToAbort(refusal);
      (void)connection->Send(answer);
      connection->Close(false);
      return;
    }
    Forget(connection);
    (void)connection->Send(answer);  // a broken connection is reported by its reader
  }

  absl::Status CheckJoin(const wire::RankFrame& frame, const std::string& nonce) const {
    if (!frame.has_join()) return absl::InvalidArgumentError("the first frame must be Join");
    const wire::Join& join = frame.join();
    // Who does not know the secret learns nothing else.
    if (!SameProof(join.proof(),
                   Proof(options_.secret, "join", nonce, options_.group_id, join.rank(), options_.epoch))) {
      if (frame.epoch() == options_.epoch && join.group_id() == options_.group_id)
        return absl::UnauthenticatedError("the proof of the group secret is wrong");
    }
    if (join.group_id() != options_.group_id)
      return absl::FailedPreconditionError(
          absl::StrCat("this is group '", options_.group_id, "', not '", join.group_id(), "'"));
    if (frame.epoch() != options_.epoch)
      return absl::FailedPreconditionError(
          absl::StrCat("this is epoch ", options_.epoch, ", not ", frame.epoch()));
    if (join.build() != options_.build)
      return absl::FailedPreconditionError(
          absl::StrCat("the leader is build ", options_.build, ", the rank ", join.build()));
    if (join.size() != static_cast<uint32_t>(options_.size) || join.rank() < 1 || join.rank() >= join.size())
      return absl::FailedPreconditionError(absl::StrCat("the group has ", options_.size, " ranks; rank ",
                                                        join.rank(), " of ", join.size(),
                                                        " is none of them"));
    if (join.options() != options_.options)
      return absl::FailedPreconditionError(absl::StrCat("rank ", join.rank(), " was started with '",
                                                        join.options(), "', the leader with '",
                                                        options_.options, "'"));
    return absl::OkStatus();
  }

  // Heartbeats out, silence and stalled plans noticed.
  void Tick() {
    const absl::Time now = absl::Now();
    absl::Status fault;
    {
      absl::MutexLock lock(&mutex_);
      const bool beat = now >= next_heartbeat_;
      if (beat) next_heartbeat_ = now + options_.heartbeat_period;
      wire::RankFrame frame = NewFrame();
      frame.mutable_heartbeat()->set_seq(heartbeats_ += beat);
      frame.mutable_heartbeat()->set_log_level(ChangedLogLevel());
      for (size_t rank = 1; rank < members_.size(); ++rank) {
        const Member& member = members_[rank];
        if (member.connection == nullptr) continue;
        if (beat) (void)member.connection->Send(frame);
        if (now - member.last_heard > options_.silence_limit) {
          fault = absl::UnavailableError(absl::StrCat("rank ", rank, " said nothing for ",
                                                      absl::FormatDuration(options_.silence_limit)));
        } else if (member.finished < last_plan_ && now - member.waiting_since > options_.plan_timeout) {
          fault = absl::DeadlineExceededError(absl::StrCat("rank ", rank, " has not finished plan ",
                                                           member.finished + 1, " within ",
                                                           absl::FormatDuration(options_.plan_timeout)));
        }
      }
    }
    if (!fault.ok()) Fault(fault);
    std::erase_if(timers_, [](const auto& timer) { return timer.use_count() == 1; });
    tick_.expires_after(absl::ToChronoMilliseconds(kTick));
    tick_.async_wait([this](const boost::system::error_code& error) {
      if (!error && !stopped_) Tick();
    });
  }

  void Fault(const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || !fault_.ok()) return;
      fault_ = status;
    }
    on_fault_(status);
  }

  const RankChannelOptions options_;
  const RankTransport transport_;
  const std::function<void(const absl::Status&)> on_fault_;
  const absl::Time formation_deadline_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::steady_timer tick_;
  std::variant<std::monostate, TcpAcceptor, UnixAcceptor> acceptor_;  // io thread
  std::vector<Connection> strangers_;                                 // io thread
  std::vector<std::shared_ptr<asio::steady_timer>> timers_;           // io thread
  bool stopped_ = false;                                              // io thread
  int port_ = 0;
  std::atomic<int64_t> dropped_frames_{0}, refused_joins_{0};
  std::thread thread_;
  absl::Notification thread_ended_;
  mutable absl::Mutex mutex_;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);  // [0] is not used
  absl::Time next_heartbeat_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  uint64_t heartbeats_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_plan_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string last_refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

RankHub::RankHub(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankHub::~RankHub() { impl_->Stop(); }

absl::StatusOr<std::unique_ptr<RankHub>> RankHub::Listen(const RankChannelOptions& options,
                                                         const RankTransport& transport,
                                                         std::function<void(const absl::Status&)> on_fault) {
  DFLASH_ASSIGN_OR_RETURN(const RankAddress address, RankAddress::Parse(options.address));
  DFLASH_RETURN_IF_ERROR(CheckOptions(options, address));
  auto impl = std::make_shared<Impl>(options, transport, std::move(on_fault));
  DFLASH_RETURN_IF_ERROR(impl->Listen(address));
  return std::unique_ptr<RankHub>(new RankHub(std::move(impl)));
}

absl::Status RankHub::AwaitJoined() { return impl_->AwaitJoined(); }
absl::Status RankHub::AwaitReady(const RankReady& ours, absl::Time deadline) {
  return impl_->AwaitReady(ours, deadline);
}
absl::Status RankHub::Send(const RankPlan& plan) { return impl_->Send(plan); }
void RankHub::End(const absl::Status& reason) { impl_->End(reason); }
std::vector<RankHub::Member> RankHub::Members() const { return impl_->Members(); }
int64_t RankHub::dropped_frames() const { return impl_->dropped_frames(); }
int64_t RankHub::refused_joins() const { return impl_->refused_joins(); }
int RankHub::port() const { return impl_->port(); }

}  // namespace dflash
