#include "tools/dflashctl/load_run.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <queue>
#include <utility>

#include "absl/strings/str_format.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tools/dflashctl/bench_report.h"

namespace dflash::ctl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kProgressSeconds = 1;
// A closed loop's client that is told to come back later than this comes back earlier.
constexpr double kMaxRetrySeconds = 10;

void ReadDetails(const grpc::Status& status, LoadSample* sample) {
  google::rpc::Status details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) return;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) sample->reason = info.reason();
    if (detail.Is<google::rpc::RetryInfo>() && detail.UnpackTo(&retry)) {
      sample->retry_after =
          static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() * 1e-9;
    }
  }
}

class Run {
 public:
  Run(const Endpoint& endpoint, const LoadPhase& phase, const RequestMaker& maker, Interrupt* interrupt)
      : endpoint_(endpoint), phase_(phase), maker_(maker), interrupt_(interrupt), begin_(Clock::now()) {
    for (int64_t i = 0; i < phase.clients; ++i) {
      stubs_.push_back(v1::InferenceService::NewStub(endpoint.Dial(/*own_connection=*/true)));
    }
  }

  LoadResult Do(const std::function<void(const LoadProgress&)>& progress) {
    if (!phase_.open()) {
      for (int64_t client = 0; client < phase_.clients; ++client) due_.push({0, client});
    }
    PoissonArrivals arrivals(phase_.open() ? phase_.rate : 1, phase_.seed);
    int64_t arrived = 0;
    double reported = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (phase_.open() && due_.empty()) due_.push({arrivals.Next(), arrived++ % phase_.clients});
      const bool stopped = interrupt_->raised() || sent_ >= phase_.max_requests || Now() >= phase_.seconds ||
                           (!due_.empty() && due_.top().at >= phase_.seconds);
      if (stopped && running_ == 0) break;
      const double now = Now();
      if (progress && now >= reported + kProgressSeconds) {
        const LoadProgress report = TakeProgress(now - reported);
        reported = now;
        lock.unlock();
        progress(report);
        lock.lock();
        continue;
      }
      if (!stopped && !due_.empty() && due_.top().at <= now) {
        const Due next = due_.top();
        due_.pop();
        const int64_t index = sent_++;
        ++running_;
        lock.unlock();
        Send(next, static_cast<uint64_t>(index));
        lock.lock();
        continue;
      }
      double until = reported + kProgressSeconds;
      if (!stopped && !due_.empty()) until = std::min(until, due_.top().at);
      changed_.wait_until(
          lock, begin_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(until)));
    }
    return {
        .phase = phase_, .wall_seconds = Now(), .requests = std::move(samples_), .steps = std::move(steps_)};
  }

 private:
  struct Due {
    double at = 0;
    int64_t client = 0;
    bool operator<(const Due& other) const { return at > other.at; }  // the earliest is on top
  };

  // One request on its way; deletes itself at its end.
  class Flight final : public grpc::ClientReadReactor<v1::GenerateResponse> {
   public:
    Flight(Run* run, const Due& due, uint64_t index) : run_(run), request_(run->maker_.Make(index)) {
      sample_.due = due.at;
      sample_.client = due.client;
      sample_.delay = run->Now() - due.at;
      context_.set_deadline(std::chrono::system_clock::now() +
                            std::chrono::microseconds(absl::ToInt64Microseconds(run->phase_.timeout)) -
                            std::chrono::microseconds(static_cast<int64_t>(sample_.delay * 1e6)));
      run->endpoint_.Prepare(&context_);
      scope_.emplace(run->interrupt_, &context_);
      run->stubs_[static_cast<size_t>(due.client)]->async()->Generate(&context_, &request_, this);
      StartRead(&response_);
      StartCall();
    }

    void OnReadDone(bool ok) override {
      if (!ok) return;
      if (!broken_) broken_ = checker_.See(response_);
      if (broken_) {
        context_.TryCancel();
      } else {
        See();
      }
      response_.Clear();
      StartRead(&response_);
    }

    void OnDone(const grpc::Status& status) override {
      sample_.end = run_->Now() - sample_.due;
      sample_.code = status.error_code();
      if (!broken_ && status.ok()) broken_ = checker_.AtEnd();
      if (broken_) {
        sample_.code = grpc::StatusCode::DATA_LOSS;
        sample_.reason = *broken_;
      } else if (!status.ok()) {
        ReadDetails(status, &sample_);
      }
      // The run's end may be the program's: by then the call and its hold on the channel are gone.
      Run* const run = run_;
      LoadSample sample = std::move(sample_);
      const std::vector<StepSample> steps = std::move(steps_);
      delete this;
      run->Ended(std::move(sample), steps);
    }

   private:
    void See() {
      if (response_.has_started()) {
        sample_.prompt_tokens = response_.started().prompt_tokens();
        sample_.cached_tokens = response_.started().cached_tokens();
      }
      if (response_.has_finished()) sample_.queue = response_.finished().timings().queue_seconds();
      const v1::Chunk& chunk = response_.chunk();
      sample_.rounds += chunk.steps_size();
      for (const v1::StepInfo& step : chunk.steps()) {
        sample_.drafted += step.drafted();
        sample_.accepted += step.accepted();
      }
      if (chunk.token_ids_size() == 0) return;
      const double now = run_->Now() - sample_.due;
      sample_.tokens += chunk.token_ids_size();
      run_->Count(chunk.token_ids_size());
      if (sample_.first_token < 0) {
        sample_.first_token = now;
      } else {
        steps_.push_back({sample_.due, now - sample_.last_token, chunk.token_ids_size()});
      }
      sample_.last_token = now;
    }

    Run* const run_;
    const v1::GenerateRequest request_;
    grpc::ClientContext context_;
    std::optional<Interrupt::Scope> scope_;
    v1::GenerateResponse response_;
    StreamChecker checker_;
    std::optional<std::string> broken_;
    LoadSample sample_;
    std::vector<StepSample> steps_;
  };

  double Now() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  void Send(const Due& due, uint64_t index) { new Flight(this, due, phase_.first_index + index); }
  void Count(int64_t tokens) {
    std::lock_guard lock(mutex_);
    tokens_since_ += tokens;
  }
  void Ended(LoadSample sample, const std::vector<StepSample>& steps) {
    std::lock_guard lock(mutex_);
    --running_;
    ++(sample.code == grpc::StatusCode::OK ? finished_ : sample.Refused() ? refused_ : failed_);
    if (sample.first_token >= 0) first_tokens_since_.push_back(sample.first_token);
    if (!phase_.open()) {
      // A client that fails for another reason than load does not come back at once either.
      const double pause = sample.code == grpc::StatusCode::OK ? 0
                           : sample.retry_after >= 0 ? std::min(sample.retry_after, kMaxRetrySeconds)
                                                     : 0.1;
      due_.push({Now() + pause, sample.client});
    }
    samples_.push_back(std::move(sample));
    steps_.insert(steps_.end(), steps.begin(), steps.end());
    changed_.notify_one();
  }
  LoadProgress TakeProgress(double seconds) {
    const LoadProgress report = {.seconds = Now(),
                                 .sent = sent_,
                                 .running = running_,
                                 .finished = finished_,
                                 .refused = refused_,
                                 .failed = failed_,
                                 .tokens_per_second = static_cast<double>(tokens_since_) / seconds,
                                 .first_token_p50 = Percentile(first_tokens_since_, 0.5),
                                 .first_token_p99 = Percentile(first_tokens_since_, 0.99)};
    tokens_since_ = 0;
    first_tokens_since_.clear();
    return report;
  }

  const Endpoint endpoint_;
  const LoadPhase phase_;
  const RequestMaker& maker_;
  Interrupt* const interrupt_;
  const Clock::time_point begin_;
  std::vector<std::unique_ptr<v1::InferenceService::Stub>> stubs_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::priority_queue<Due> due_;
  int64_t sent_ = 0, running_ = 0, finished_ = 0, refused_ = 0, failed_ = 0;
  int64_t tokens_since_ = 0;
  std::vector<double> first_tokens_since_;
  std::vector<LoadSample> samples_;
  std::vector<StepSample> steps_;
};

}  // namespace

std::string LoadPhase::Name() const {
  return open() ? absl::StrFormat("open %g/s", rate) : absl::StrFormat("closed %d", clients);
}

LoadResult RunLoad(const Endpoint& endpoint, const LoadPhase& phase, const RequestMaker& maker,
                   Interrupt* interrupt, const std::function<void(const LoadProgress&)>& progress) {
  return Run(endpoint, phase, maker, interrupt).Do(progress);
}

}  // namespace dflash::ctl
