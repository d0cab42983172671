#include "daemon/local_group.h"

#include <signal.h>
#include <unistd.h>

#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/child_process.h"
#include "base/exit_codes.h"
#include "base/status.h"
#include "daemon/lasting_group.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

// A stream that ends because its process ends: so long until the process has ended too.
constexpr absl::Duration kExitGrace = absl::Seconds(2);
// A rank that ends because another has: so long until that one's end is known.
constexpr absl::Duration kCauseGrace = absl::Milliseconds(500);

bool IsPermanent(const ExitReport& report) { return !report.by_signal && IsPermanentExit(report.code); }

bool FollowsAnother(const ExitReport& report) { return !report.by_signal && report.code == kExitRankLost; }

}  // namespace

// The dispatcher sees one group through all its lives: this object. One thread supervises it and is the
// parent of all its processes.
class LocalGroup::Impl final : public LastingGroup {
 public:
  Impl(PrivateDirectory directory, const Options& options, ModelAgreement* agreement, Dispatcher* dispatcher,
       Exporter* exporter, std::function<void(int)> on_give_up)
      : LastingGroup(options.name, GroupPlace::kLocal, agreement, dispatcher, exporter),
        directory_(std::move(directory)),
        options_(options),
        on_give_up_(std::move(on_give_up)),
        decider_(options.restart) {}
  ~Impl() override { Shutdown(absl::ZeroDuration()); }

  // The error of the first start.
  absl::Status Start() {
    dispatcher_->AddGroup(this);
    supervisor_ = std::thread([this] { Supervise(); });
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](Impl* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) { return self->started_.has_value(); },
        this));
    return *started_;
  }

  void Shutdown(absl::Duration timeout) {
    {
      absl::MutexLock lock(&mutex_);
      if (!shutdown_.has_value()) shutdown_ = absl::Now() + timeout;
    }
    if (supervisor_.joinable()) supervisor_.join();
    directory_.reset();
  }

  GroupLives Lives() const {
    absl::MutexLock lock(&mutex_);
    return {.epoch = epoch_,
            .reforms = reforms_,
            .heartbeat_age = client_ == nullptr ? absl::ZeroDuration() : client_->HeartbeatAge(),
            .given_up = given_up_};
  }

  void OnLost(Group*, const std::string& why) override {
    dispatcher_->OnLost(this, why);  // its clients hear at once
    absl::MutexLock lock(&mutex_);
    connection_lost_ = connection_ended_ = true;
    connection_why_ = why;
  }

 private:
  struct Exit {
    size_t rank;
    ExitReport report;
  };

  void Supervise() {
    for (uint64_t epoch = 1;; ++epoch) {
      if (epoch > 1) dispatcher_->Revive(this);
      const absl::Status started = StartLife(epoch);
      if (epoch == 1) {
        {
          absl::MutexLock lock(&mutex_);
          started_ = started;
        }
        if (!started.ok()) return EndLife();
      } else if (!started.ok()) {
        spdlog::error("group {}: {}", options_.name, std::string(started.message()));
      }
      if (!AwaitLoss(started)) return EndOrderly();
      const Exit cause = AwaitCause();
      EndLife();
      if (!Continue(cause)) return;
    }
  }

  // Starts all ranks and dials the leader.
  absl::Status StartLife(uint64_t epoch) {
    const std::string leader = absl::StrCat("unix:", directory_->path(), "/leader.", epoch, ".sock");
    const std::string ranks = absl::StrCat("unix:", directory_->path(), "/ranks.", epoch, ".sock");
    auto client = MakeClient({.name = options_.name,
                              .address = leader,
                              .build = options_.build,
                              .silence_limit = options_.silence_limit,
                              .on_silence = [this] {
                                absl::MutexLock lock(&mutex_);
                                lost_as_ = "heartbeat";
                              }});
    {
      absl::MutexLock lock(&mutex_);
      epoch_ = epoch;
      connection_lost_ = connection_ended_ = false;
      lost_as_ = "stream";
      exits_.clear();
      ready_since_.reset();
      client_ = std::move(client);
      client_->Start();
    }
    for (size_t rank = 0; rank < options_.commands.size(); ++rank) {
      std::vector<std::string> command = options_.commands[rank];
      if (rank == 0) command.insert(command.end(), {"--listen", leader});
      if (options_.commands.size() > 1) {
        command.insert(command.end(), {"--tp", absl::StrCat(options_.commands.size()), "--rank",
                                       absl::StrCat(rank), "--group-socket", ranks, "--group-id",
                                       options_.name, "--epoch", absl::StrCat(epoch)});
      }
      DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child,
                              ChildProcess::Start(command, [this, rank](const ExitReport& report) {
                                LogExit(rank, report);
                                absl::MutexLock lock(&mutex_);
                                exits_.push_back({rank, report});
                              }));
      spdlog::info("group {}: epoch {}: started {} as process {}{}", options_.name, epoch, command[0],
                   child->pid(), options_.commands.size() > 1 ? absl::StrCat(", rank ", rank) : "");
      children_.push_back(std::move(child));
    }
    return absl::OkStatus();
  }

  // Every end of every process, also of one that we killed: what "lost" means is told from these lines.
  void LogExit(size_t rank, const ExitReport& report) const {
    const bool orderly = !report.by_signal && report.code == 0;
    spdlog::log(orderly ? spdlog::level::info : spdlog::level::warn, "group {}: process {}{} {}",
                options_.name, report.pid,
                options_.commands.size() > 1 ? absl::StrCat(", rank ", rank, ",") : "", report.ToString());
  }

  // Waits for the end of this life; false when it was asked for. A life that could not begin has ended.
  bool AwaitLoss(const absl::Status& started) {
    absl::MutexLock lock(&mutex_);
    if (!started.ok()) {
      connection_lost_ = true;
      connection_why_ = std::string(started.message());
    }
    const auto is_over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return shutdown_.has_value() || connection_lost_ || !exits_.empty();
    };
    const auto is_loaded = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return ready_since_.has_value() || is_over();
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&is_loaded), options_.load_timeout)) {
      connection_lost_ = true;
      connection_why_ = absl::StrCat("it was not ready within ", absl::FormatDuration(options_.load_timeout));
      lost_as_ = "load_timeout";
    }
    mutex_.Await(absl::Condition(&is_over));
    return !shutdown_.has_value();
  }

  // Finds out why, tells the dispatcher, and counts it. The exit is the one that explains the loss; one of no
  // rank's when none did before we killed them.
  Exit AwaitCause() {
    Exit cause = {.rank = options_.commands.size(), .report = {}};
    std::string why, label;
    bool explained = false;
    {
      absl::MutexLock lock(&mutex_);
      const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !exits_.empty(); };
      // Of a silent or hanging group nothing more is to be expected.
      if (lost_as_ == "stream") mutex_.AwaitWithTimeout(absl::Condition(&any), kExitGrace);
      const auto first = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> const Exit* {
        for (const Exit& exit : exits_) {
          if (!FollowsAnother(exit.report)) return &exit;
        }
        return nullptr;
      };
      const auto known = [&]() { return first() != nullptr; };
      if (!exits_.empty() && options_.commands.size() > 1)
        mutex_.AwaitWithTimeout(absl::Condition(&known), kCauseGrace);
      explained = !exits_.empty();
      if (explained) {
        const Exit* found = first();
        cause = found != nullptr ? *found : exits_.front();
        why =
            options_.commands.size() == 1
                ? absl::StrCat("its worker process ", cause.report.ToString())
                : absl::StrCat("its rank ", cause.rank, " ",
                               FollowsAnother(cause.report) ? "lost another rank" : cause.report.ToString());
        label = FollowsAnother(cause.report) ? "rank_lost" : "worker_exit";
      } else {
        why = connection_why_;
        label = lost_as_;
      }
      ++reforms_[label];
    }
    spdlog::error("group {} is lost: {}", options_.name, why);
    AwaitConnectionEnd(why);
    if (explained) dispatcher_->ExplainLoss(this, why);
    return cause;
  }

  // The dispatcher hears of a loss from the connection (OnLost) and from nobody else: the group's requests go
  // on elsewhere from then on, and what this connection says of them must not come after what is said there.
  void AwaitConnectionEnd(const std::string& why) {
    GroupClient* connection;
    {
      absl::MutexLock lock(&mutex_);
      connection = client_.get();  // this thread alone makes and ends it
    }
    connection->Disconnect(why);
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&connection_ended_));
  }

  // Kills what is left of this life, and forgets it.
  void EndLife() {
    for (const auto& child : children_) child->Signal(SIGKILL);
    children_.clear();  // waits for each
    std::unique_ptr<GroupClient> client;
    std::string sockets[2];
    {
      absl::MutexLock lock(&mutex_);
      client = std::move(client_);
      sockets[0] = absl::StrCat(directory_->path(), "/leader.", epoch_, ".sock");
      sockets[1] = absl::StrCat(directory_->path(), "/ranks.", epoch_, ".sock");
    }
    client.reset();  // waits for its last report
    for (const std::string& path : sockets) unlink(path.c_str());
  }

  // Waits before the next life; false when there is none.
  bool Continue(const Exit& cause) {
    std::optional<absl::Duration> delay;
    int code = cause.report.by_signal ? 128 + cause.report.code : cause.report.code;
    absl::MutexLock lock(&mutex_);
    bool permanent = false;
    for (const Exit& exit : exits_) {
      if (!IsPermanent(exit.report)) continue;
      permanent = true;
      code = exit.report.code;
    }
    delay = decider_.OnEnd(ReadyFor(), permanent);
    if (!delay.has_value()) {
      given_up_ = true;
      mutex_.Unlock();
      on_give_up_(code);
      mutex_.Lock();
    } else {
      spdlog::info("group {}: starts again in {}", options_.name, absl::FormatDuration(*delay));
    }
    const auto shutdown = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return shutdown_.has_value(); };
    mutex_.AwaitWithTimeout(absl::Condition(&shutdown), delay.value_or(absl::InfiniteDuration()));
    return !shutdown_.has_value();
  }

  void EndOrderly() {
    {
      absl::MutexLock lock(&mutex_);
      if (client_ != nullptr) client_->Shutdown();
      // One that still loads hears nothing yet, and has nothing to end.
      const bool hears = ready_since_.has_value();
      const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return exits_.size() == children_.size();
      };
      if (hears && absl::Now() < *shutdown_ && !mutex_.AwaitWithDeadline(absl::Condition(&ended), *shutdown_))
        spdlog::warn("group {}: it does not end; killed", options_.name);
    }
    EndLife();
  }

  std::optional<PrivateDirectory> directory_;  // until the group has ended for good
  const Options options_;
  const std::function<void(int)> on_give_up_;
  std::thread supervisor_;
  RestartDecider decider_;                                       // supervisor only
  std::vector<std::unique_ptr<ChildProcess>> children_;          // supervisor only
  std::optional<absl::Status> started_ ABSL_GUARDED_BY(mutex_);  // the first life
  std::optional<absl::Time> shutdown_ ABSL_GUARDED_BY(mutex_);   // asked for, with this deadline
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  // With every cause from the start: a rate needs the zero before the first loss.
  std::map<std::string, int64_t> reforms_ ABSL_GUARDED_BY(mutex_) = {
      {"heartbeat", 0}, {"load_timeout", 0}, {"rank_lost", 0}, {"stream", 0}, {"worker_exit", 0}};
  bool given_up_ ABSL_GUARDED_BY(mutex_) = false;
  // This life.
  bool connection_lost_ ABSL_GUARDED_BY(mutex_) = false;   // or given up
  bool connection_ended_ ABSL_GUARDED_BY(mutex_) = false;  // it has said its last
  std::string connection_why_ ABSL_GUARDED_BY(mutex_);
  std::string lost_as_ ABSL_GUARDED_BY(mutex_);      // label of the loss when no exit explains it
  std::vector<Exit> exits_ ABSL_GUARDED_BY(mutex_);  // in order
};

LocalGroup::LocalGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LocalGroup::~LocalGroup() = default;
void LocalGroup::Shutdown(absl::Duration timeout) { impl_->Shutdown(timeout); }
GroupLives LocalGroup::Lives() const { return impl_->Lives(); }

absl::StatusOr<std::unique_ptr<LocalGroup>> LocalGroup::Start(const Options& options,
                                                              ModelAgreement* agreement,
                                                              Dispatcher* dispatcher, Exporter* exporter,
                                                              std::function<void(int)> on_give_up) {
  DFLASH_ASSIGN_OR_RETURN(PrivateDirectory directory, PrivateDirectory::Create());
  auto impl = std::make_unique<Impl>(std::move(directory), options, agreement, dispatcher, exporter,
                                     std::move(on_give_up));
  DFLASH_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<LocalGroup>(new LocalGroup(std::move(impl)));
}

}  // namespace dflash
