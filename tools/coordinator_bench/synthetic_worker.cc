// A worker that speaks the real protocol (worker/rpc/worker_server.h) and computes nothing: every request
// gets its first token at once and another one every SYNTHETIC_STEP_US microseconds, all requests in one step
// like an engine's. Takes the flags of dflash-worker and looks at --listen only.
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "worker/rpc/worker_server.h"

namespace dflash {
namespace {

constexpr int64_t kSequences = 1024;

class SyntheticEngine final : public GenerationBackend {
 public:
  explicit SyntheticEngine(absl::Duration step) : step_(step), thread_([this] { Run(); }) {}
  ~SyntheticEngine() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) override {
    absl::MutexLock lock(&mutex_);
    inbox_.push_back({std::move(request), std::move(sink)});
  }
  void Cancel(const std::string& id, absl::Status reason) override {
    absl::MutexLock lock(&mutex_);
    cancelled_.emplace_back(id, std::move(reason));
  }
  EngineGauges Gauges() const override { return EngineGauges(); }

 private:
  struct Running {
    GenerationRequest request;
    std::unique_ptr<RequestSink> sink;
    int64_t tokens = 0;
  };

  void Run() {
    const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !inbox_.empty() || !cancelled_.empty();
    };
    for (absl::Time next = absl::Now();;) {
      std::vector<Running> arrived;
      std::vector<std::pair<std::string, absl::Status>> cancelled;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.AwaitWithDeadline(absl::Condition(&has_work),
                                 running_.empty() ? absl::InfiniteFuture() : next);
        if (stopping_) return;
        arrived.swap(inbox_);
        cancelled.swap(cancelled_);
      }
      for (Running& one : arrived) {
        one.sink->OnStarted({static_cast<int64_t>(one.request.prompt_tokens.size()), 0});
        if (!Emit(one, {})) running_.push_back(std::move(one));
      }
      for (auto& [id, reason] : cancelled) {
        std::erase_if(running_, [&](Running& one) {
          if (one.request.id != id) return false;
          one.sink->OnFailed(reason);
          return true;
        });
      }
      const absl::Time now = absl::Now();
      if (running_.empty() || now < next) {
        if (next < now) next = now + step_;
        continue;
      }
      next = std::max(next + step_, now);  // a late step does not make the next ones early
      std::erase_if(running_, [this](Running& one) { return Emit(one, {RoundReport{}}); });
    }
  }

  // One token; whether it was the last.
  static bool Emit(Running& one, std::vector<RoundReport> rounds) {
    TokensReport output;
    output.tokens = {100};
    output.text = " word";
    output.rounds = std::move(rounds);
    one.sink->OnTokens(std::move(output));
    if (++one.tokens < one.request.max_tokens) return false;
    FinishedReport report;
    report.prompt_tokens = static_cast<int64_t>(one.request.prompt_tokens.size());
    report.completion_tokens = one.tokens;
    one.sink->OnFinished(report);
    return true;
  }

  const absl::Duration step_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Running> inbox_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, absl::Status>> cancelled_ ABSL_GUARDED_BY(mutex_);
  std::vector<Running> running_;  // thread only
  std::thread thread_;
};

int Main(int argc, char** argv) {
  WorkerServer::Options options;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--listen") options.listen = argv[i + 1];
  }
  int64_t step_us = 1000;
  if (const char* text = std::getenv("SYNTHETIC_STEP_US")) (void)absl::SimpleAtoi(text, &step_us);
  options.identity.build = DFLASHD_VERSION;
  options.identity.backend = "synthetic";
  options.identity.vocabulary_size = 4096;
  options.identity.max_context_tokens = 1 << 20;
  options.identity.max_sequences = kSequences;
  options.identity.eos_token_ids = {1};
  EngineMetrics::Options counted;
  counted.backend = "cpu";
  EngineMetrics metrics(counted);
  SyntheticEngine engine(absl::Microseconds(step_us));
  absl::Notification ended;
  auto server = WorkerServer::Start(options, &engine, &metrics, [&](const absl::Status&) { ended.Notify(); });
  if (!server.ok()) return 1;
  ended.WaitForNotification();
  return 0;
}

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) { return dflash::Main(argc, argv); }
