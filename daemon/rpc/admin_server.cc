#include "daemon/rpc/admin_server.h"

#include <grpcpp/grpcpp.h>
#include <sys/stat.h>

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "daemon/request/request_error.h"
#include "daemon/rpc/diagnosis.h"
#include "daemon/rpc/grpc_status.h"
#include "dflash/v1/admin.grpc.pb.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

constexpr int kMaxMessageBytes = 64 << 10;
constexpr int kMaxThreads = 16;  // of calls at a time; a Drain holds one
constexpr double kMaxDrainSeconds = 86400;
// After requests have been ended their group lets go within a step.
constexpr absl::Duration kEndGrace = absl::Seconds(5);

spdlog::level::level_enum LevelOf(v1::LogLevel level) {
  switch (level) {
    case v1::LOG_LEVEL_DEBUG:
      return spdlog::level::debug;
    case v1::LOG_LEVEL_INFO:
      return spdlog::level::info;
    case v1::LOG_LEVEL_WARN:
      return spdlog::level::warn;
    case v1::LOG_LEVEL_ERROR:
      return spdlog::level::err;
    default:
      return spdlog::level::off;
  }
}

v1::LogLevel LevelOf(spdlog::level::level_enum level) {
  if (level <= spdlog::level::debug) return v1::LOG_LEVEL_DEBUG;
  if (level == spdlog::level::info) return v1::LOG_LEVEL_INFO;
  return level == spdlog::level::warn ? v1::LOG_LEVEL_WARN : v1::LOG_LEVEL_ERROR;
}

}  // namespace

class AdminServer::Impl final : public v1::AdminService::Service {
 public:
  Impl(Options options, Dispatcher* dispatcher, InferenceService* service, const Exporter* exporter)
      : options_(std::move(options)),
        dispatcher_(dispatcher),
        service_(service),
        exporter_(exporter),
        address_(options_.address) {}
  ~Impl() override {
    stopping_ = true;
    // A Drain that has seen the end is about to say so.
    if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  }

  absl::Status Listen() {
    const bool is_socket = options_.address.rfind("unix:", 0) == 0;
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(options_.address,
                             is_socket || options_.access.credentials == nullptr
                                 ? grpc::InsecureServerCredentials()
                                 : options_.access.credentials,
                             &port);
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.SetResourceQuota(grpc::ResourceQuota("admin").SetMaxThreads(kMaxThreads));
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
    GuardReflection(&builder, options_.reflection, Role::kAdmin);
    SetMetadataLimits(&builder);
    builder.RegisterService(this);
    const mode_t mask = umask(0177);  // the socket is this user's alone from the first moment
    server_ = builder.BuildAndStart();
    umask(mask);
    if (server_ == nullptr)
      return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.address));
    if (!is_socket) address_ = absl::StrCat(address_.substr(0, address_.rfind(':')), ":", port);
    return absl::OkStatus();
  }

  const std::string& address() const { return address_; }

  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     grpc::ServerWriter<v1::DrainResponse>* stream) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    const double seconds = request->has_timeout_seconds() ? request->timeout_seconds()
                                                          : absl::ToDoubleSeconds(options_.drain_timeout);
    if (!(seconds >= 0 && seconds <= kMaxDrainSeconds)) {
      return ToGrpcStatus(
          BadParameter("timeout_seconds", absl::StrCat("must be from 0 to ", kMaxDrainSeconds)));
    }
    const absl::Duration timeout = absl::Seconds(seconds);
    Audit(*context, *caller,
          absl::StrCat("Drain, timeout ", absl::FormatDuration(timeout),
                       request->exit_when_done() ? ", then exit" : ""));
    // Once: a second signal would mean "at once".
    if (request->exit_when_done() && !exiting_.exchange(true)) options_.exit(timeout);
    dispatcher_->Leave();
    dispatcher_->Drain();
    absl::Time deadline = absl::Now() + timeout;
    bool ended = false;
    v1::DrainResponse progress;
    for (;;) {
      const Dispatcher::Stats stats = dispatcher_->GetStats();
      progress.set_running(static_cast<uint32_t>(stats.running));
      progress.set_waiting(static_cast<uint32_t>(stats.waiting));
      if (!stream->Write(progress) || stopping_ || context->IsCancelled()) return grpc::Status::CANCELLED;
      if (!stats.draining) {
        return ToGrpcStatus(absl::AbortedError("the server was told to resume"));
      }
      const absl::Time now = absl::Now();
      if (dispatcher_->AwaitEmpty(std::min(deadline, now + absl::Seconds(1)))) break;
      if (absl::Now() < deadline) continue;
      if (ended) return ToGrpcStatus(absl::DeadlineExceededError("requests were ended, but do not go"));
      ended = true;
      deadline = absl::Now() + kEndGrace;
      progress.set_cancelled(static_cast<uint32_t>(dispatcher_->EndAll()));
    }
    progress.set_running(0);
    progress.set_waiting(0);
    progress.set_done(true);
    stream->Write(progress);
    return grpc::Status::OK;
  }

  grpc::Status Resume(grpc::ServerContext* context, const v1::ResumeRequest*, v1::ResumeResponse*) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    Audit(*context, *caller, "Resume");
    return ToGrpcStatus(dispatcher_->Resume());
  }

  grpc::Status GetSpeculation(grpc::ServerContext* context, const v1::GetSpeculationRequest*,
                              v1::GetSpeculationResponse* response) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    absl::MutexLock lock(&mutex_);
    *response->mutable_settings() = speculation_;
    response->set_revision(revision_);
    return grpc::Status::OK;
  }

  grpc::Status SetSpeculation(grpc::ServerContext* context, const v1::SetSpeculationRequest* request,
                              v1::SetSpeculationResponse* response) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    const v1::SpeculationSettings& settings = request->settings();
    const bool off = settings.mode() == v1::SPECULATION_MODE_OFF;
    if (!off && settings.mode() != v1::SPECULATION_MODE_UNSPECIFIED &&
        settings.mode() != v1::SPECULATION_MODE_DFLASH) {
      return ToGrpcStatus(NotInThisBuild("settings.mode"));
    }
    if (settings.for_all() && !off) return ToGrpcStatus(BadParameter("settings.for_all", "is for mode OFF"));
    if (settings.mode() == v1::SPECULATION_MODE_DFLASH) {
      const absl::StatusOr<GroupInfo> info = dispatcher_->Info();
      if (!info.ok()) return ToGrpcStatus(info.status());
      if (info->dflash_block_size == 0) {
        return ToGrpcStatus(absl::FailedPreconditionError("settings.mode: no DFlash drafter is loaded"));
      }
    }
    absl::MutexLock lock(&mutex_);
    if (request->has_if_revision() && request->if_revision() != revision_) {
      return ToGrpcStatus(absl::AbortedError(absl::StrCat("if_revision: the revision in force is ", revision_,
                                                          ", not ", request->if_revision())));
    }
    SpeculationPolicy policy;
    if (settings.mode() != v1::SPECULATION_MODE_UNSPECIFIED) policy.speculate = !off;
    policy.max_draft_tokens = settings.max_draft_tokens();
    policy.off_for_all = settings.for_all();
    service_->SetSpeculation(policy);
    speculation_ = settings;
    ++revision_;
    Audit(*context, *caller,
          absl::StrCat("SetSpeculation ", v1::SpeculationMode_Name(settings.mode()), ", at most ",
                       settings.max_draft_tokens(), " drafts", settings.for_all() ? ", for all" : "",
                       ", revision ", revision_));
    *response->mutable_settings() = speculation_;
    response->set_revision(revision_);
    return grpc::Status::OK;
  }

  grpc::Status SetLogLevel(grpc::ServerContext* context, const v1::SetLogLevelRequest* request,
                           v1::SetLogLevelResponse* response) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    const spdlog::level::level_enum level = LevelOf(request->level());
    if (level == spdlog::level::off)
      return ToGrpcStatus(BadParameter("level", "must be one of debug, info, warn, error"));
    response->set_previous(LevelOf(spdlog::get_level()));
    Audit(*context, *caller, absl::StrCat("SetLogLevel ", v1::LogLevel_Name(request->level())));
    ChangeLogLevel(level);  // groups follow: their heartbeats say it
    return grpc::Status::OK;
  }

  grpc::Status GetDiagnosis(grpc::ServerContext* context, const v1::GetDiagnosisRequest*,
                            v1::GetDiagnosisResponse* response) override {
    const absl::StatusOr<std::string> caller = Caller(*context);
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    for (const Dispatcher::GroupStats& group : dispatcher_->GetStats().groups)
      *response->add_groups() = DiagnosisOf(*exporter_, group);
    return grpc::Status::OK;
  }

 private:
  // Always written, whatever the level: who changed it must not be hidden by changing it.
  static void Audit(const grpc::ServerContext& context, const std::string& caller, const std::string& what) {
    spdlog::default_logger()->log(spdlog::level::off, "admin: {} by {} from {}", what, caller,
                                  context.peer());
  }
  absl::StatusOr<std::string> Caller(const grpc::ServerContext& context) const {
    return Authorize(options_.access.tokens, context, Role::kAdmin);
  }

  const Options options_;
  Dispatcher* const dispatcher_;
  InferenceService* const service_;
  const Exporter* const exporter_;
  std::string address_;
  std::atomic<bool> stopping_ = false, exiting_ = false;
  absl::Mutex mutex_;
  v1::SpeculationSettings speculation_ ABSL_GUARDED_BY(mutex_);
  uint64_t revision_ ABSL_GUARDED_BY(mutex_) = 1;
  std::unique_ptr<grpc::Server> server_;
};

AdminServer::AdminServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AdminServer::~AdminServer() = default;
const std::string& AdminServer::address() const { return impl_->address(); }

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const Options& options,
                                                                Dispatcher* dispatcher,
                                                                InferenceService* service,
                                                                const Exporter* exporter) {
  auto impl = std::make_unique<Impl>(options, dispatcher, service, exporter);
  DFLASH_RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<AdminServer>(new AdminServer(std::move(impl)));
}

}  // namespace dflash
