#include "tests/service/scripted_service.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace dflash {
namespace {

constexpr char kBuild[] = "test";
constexpr char kGroup[] = "0";

std::string NewSocket() {
  static std::atomic<int> number = 0;
  return absl::StrCat("/tmp/dflashd_service_test.", getpid(), ".", number++);
}

EngineMetrics::Options MetricsOptions() {
  EngineMetrics::Options options;
  options.backend = "cpu";
  options.max_drafts = 15;
  for (std::string_view label : metrics::kSpecConfig.labels) options.config[std::string(label)] = "x";
  return options;
}

GroupIdentity Identity(int64_t max_sequences) {
  GroupIdentity identity;
  identity.build = kBuild;
  identity.backend = "cpu";
  identity.vocabulary_size = 4096;
  identity.max_context_tokens = 1 << 20;
  identity.max_sequences = max_sequences;
  identity.dflash_block_size = 16;
  identity.speculate_by_default = true;
  identity.eos_token_ids = {4090};
  return identity;
}

}  // namespace

void ScriptedEngine::Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) {
  absl::MutexLock lock(&mutex_);
  last_ = request.id;
  ++count_;
  sinks_[last_] = std::move(sink);
  requests_[last_] = std::move(request);
}

void ScriptedEngine::Cancel(const std::string& id, absl::Status reason) {
  std::unique_ptr<RequestSink> sink;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = sinks_.find(id);
    if (it == sinks_.end()) return;
    sink = std::move(it->second);
    sinks_.erase(it);
    cancelled_[id] = reason;
  }
  sink->OnFailed(reason);
}

EngineGauges ScriptedEngine::Gauges() const {
  return {.running = 0, .waiting = 0, .state_slots = 2, .pages_total = 10, .pages_free = 10};
}

std::string ScriptedEngine::Await(size_t count) {
  absl::MutexLock lock(&mutex_);
  const auto arrived = [&] { return count_ >= count; };
  mutex_.Await(absl::Condition(&arrived));
  return last_;
}

GenerationRequest ScriptedEngine::request(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  return requests_.at(id);
}

bool ScriptedEngine::Start(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  const auto it = sinks_.find(id);
  if (it == sinks_.end()) return false;
  it->second->OnStarted({.prompt_tokens = 1, .cached_tokens = 0});
  return true;
}

bool ScriptedEngine::Emit(const std::string& id, TokensReport report) {
  absl::MutexLock lock(&mutex_);
  const auto it = sinks_.find(id);
  if (it == sinks_.end()) return false;
  it->second->OnTokens(std::move(report));
  return true;
}

void ScriptedEngine::Finish(const std::string& id, const FinishedReport& report) {
  std::unique_ptr<RequestSink> sink;
  {
    absl::MutexLock lock(&mutex_);
    sink = std::move(sinks_.at(id));
    sinks_.erase(id);
  }
  sink->OnFinished(report);
}

absl::Status ScriptedEngine::AwaitCancel(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  const auto cancelled = [&] { return cancelled_.count(id) != 0; };
  mutex_.Await(absl::Condition(&cancelled));
  return cancelled_.at(id);
}

ScriptedService::ScriptedService(const Options& options)
    : socket_(NewSocket()),
      engine_metrics_(MetricsOptions()),
      prompts_(*CheckpointPrompts::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6")),
      exporter_("tiny"),
      dispatcher_(options.admission, &absl::Now),
      service_({.model = "tiny",
                .drafter_name = "drafter",
                .version = kBuild,
                .max_unsent_bytes = options.max_unsent_bytes,
                .stall_limit = options.stall_limit},
               &dispatcher_, &prompts_, &exporter_) {
  auto worker = WorkerServer::Start({.listen = "unix:" + socket_,
                                     .identity = Identity(options.max_sequences),
                                     .heartbeat_period = absl::Milliseconds(50),
                                     .metrics_period = absl::Milliseconds(50),
                                     .silence_limit = absl::Seconds(60)},
                                    &engine_, &engine_metrics_, [](const absl::Status&) {});
  DFLASH_CHECK(worker.ok(), worker.status().ToString().c_str());
  worker_ = *std::move(worker);
  auto server = PublicServer::Start("127.0.0.1:0", &service_);
  DFLASH_CHECK(server.ok(), server.status().ToString().c_str());
  server_ = *std::move(server);
  client_ = std::make_unique<GroupClient>(
      GroupClient::Options{
          .name = kGroup, .address = "unix:" + socket_, .build = kBuild, .silence_limit = absl::Seconds(60)},
      &dispatcher_, [this](std::vector<prometheus::MetricFamily> families) {
        const std::string dropped = exporter_.SetSnapshot(kGroup, std::move(families));
        DFLASH_CHECK(dropped.empty(), dropped.c_str());
        absl::MutexLock lock(&mutex_);
        ++snapshots_;
      });
  dispatcher_.AddGroup(client_.get());
  client_->Start();
  // A connection that takes little ahead of its reader, and always the same.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  stub_ = v1::InferenceService::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials(), arguments));
  AwaitSnapshot();
}

ScriptedService::~ScriptedService() {
  dispatcher_.ShutDown();
  server_.reset();
  client_.reset();
  worker_.reset();
  unlink(socket_.c_str());
}

void ScriptedService::AwaitSnapshot() {
  absl::MutexLock lock(&mutex_);
  const int64_t wanted = snapshots_ + 2;  // the next may have begun already
  const auto come = [&] { return snapshots_ >= wanted; };
  mutex_.Await(absl::Condition(&come));
}

}  // namespace dflash
