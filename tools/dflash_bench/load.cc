#include "tools/dflash_bench/load.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {
namespace {

struct Answer {
  absl::Status status;
  double first_token = 0, last_token = 0;  // seconds after it was asked
  int64_t tokens = 0, first_tokens = 0;    // first_tokens: that came with the first one
  int64_t rounds = 0, accepted = 0;
};

class Clock {
 public:
  double Seconds() const { return absl::ToDoubleSeconds(absl::Now() - start_); }

 private:
  absl::Time start_ = absl::Now();
};

class AnswerSink final : public RequestSink {
 public:
  AnswerSink(Answer* answer, absl::Notification* done) : answer_(answer), done_(done) {}
  void OnStarted(const StartedReport&) override {}
  void OnTokens(TokensReport report) override {
    const auto tokens = static_cast<int64_t>(report.tokens.size());
    answer_->last_token = clock_.Seconds();
    if (answer_->tokens == 0) {
      answer_->first_token = answer_->last_token;
      answer_->first_tokens = tokens;
    }
    answer_->tokens += tokens;
  }
  void OnFinished(const FinishedReport& report) override {
    answer_->rounds = report.rounds;
    answer_->accepted = report.accepted_tokens;
    done_->Notify();
  }
  void OnFailed(const absl::Status& status) override {
    answer_->status = status;
    done_->Notify();
  }

 private:
  Answer* const answer_;
  absl::Notification* const done_;
  const Clock clock_;
};

Answer Ask(Engine& engine, GenerationRequest request) {
  Answer answer;
  absl::Notification done;
  engine.Submit(std::move(request), std::make_unique<AnswerSink>(&answer, &done));
  done.WaitForNotification();
  return answer;
}

// `clients` threads ask the requests one after the other until none is left.
std::vector<Answer> AskAll(Engine& engine, const std::vector<GenerationRequest>& requests, int64_t clients) {
  std::vector<Answer> answers(requests.size());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < clients; ++i) {
    threads.emplace_back([&] {
      for (size_t n = next++; n < requests.size(); n = next++) answers[n] = Ask(engine, requests[n]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answers;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> ReadChatPrompts(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, int64_t{16} << 20));
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  std::vector<std::vector<int32_t>> prompts;
  if (root.is_array()) {
    for (const nlohmann::json& entry : root) {
      if (!entry.is_object() || entry.value("kind", "") != "chat" || !entry.contains("prompt_ids")) continue;
      std::vector<int32_t>& prompt = prompts.emplace_back();
      for (const nlohmann::json& id : entry["prompt_ids"]) {
        if (!id.is_number_integer())
          return absl::InvalidArgumentError(absl::StrCat(path, ": prompt_ids hold something else than ids"));
        prompt.push_back(id.get<int32_t>());
      }
    }
  }
  if (prompts.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": no prompts of kind \"chat\""));
  return prompts;
}

// Runs an engine on a thread of its own as long as it lives.
class RunningEngine {
 public:
  explicit RunningEngine(Engine& engine) : engine_(engine), thread_([this] { status_ = engine_.Run(); }) {}
  ~RunningEngine() { (void)Stop(); }
  absl::Status Stop() {
    engine_.Stop();
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  Engine& engine_;
  absl::Status status_;
  std::thread thread_;
};

// Nearest rank.
double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

double ProcessorSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Adds up rows and times of steps; the engine's thread only, read when it has nothing to do.
class StepSums final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges&) override {
    ++steps;
    verify_rows += static_cast<double>(report.verify_rows);
    prefill_rows += static_cast<double>(report.prefill_rows);
    draft += absl::ToDoubleSeconds(report.draft_time);
    forward += absl::ToDoubleSeconds(report.forward_time);
    rest += absl::ToDoubleSeconds(report.total_time - report.draft_time - report.forward_time);
  }
  double steps = 0, verify_rows = 0, prefill_rows = 0, draft = 0, forward = 0, rest = 0;
};

struct Rates {
  std::vector<double> tokens_per_second, tokens_per_processor_second, tokens_per_round;
  std::vector<double> decoding;  // tokens per second of a request behind its first ones
  StepSums sums;

  absl::Status Add(const std::vector<Answer>& answers, double seconds, double processor_seconds,
                   const StepSums& steps) {
    sums = steps;
    int64_t tokens = 0, rounds = 0, accepted = 0, decoded = 0;
    double decoding_seconds = 0;
    for (const Answer& answer : answers) {
      DFLASH_RETURN_IF_ERROR(answer.status);
      decoded += answer.tokens - answer.first_tokens;
      decoding_seconds += answer.last_token - answer.first_token;
      tokens += answer.tokens;
      rounds += answer.rounds;
      accepted += answer.accepted;
    }
    tokens_per_second.push_back(static_cast<double>(tokens) / seconds);
    tokens_per_processor_second.push_back(static_cast<double>(tokens) / processor_seconds);
    decoding.push_back(static_cast<double>(decoded) / decoding_seconds);
    tokens_per_round.push_back(rounds == 0 ? 1
                                           : 1 + static_cast<double>(accepted) / static_cast<double>(rounds));
    return absl::OkStatus();
  }
  Row ToRow(const std::string& name) const {
    const double all = sums.draft + sums.forward + sums.rest;
    return {name,
            {{"tokens/s", Median(tokens_per_second)},
             {"per CPU s", Median(tokens_per_processor_second)},
             {"per round", Median(tokens_per_round)},
             {"verify rows/step", sums.verify_rows / sums.steps},
             {"prompt rows/step", sums.prefill_rows / sums.steps},
             {"target %", 100 * sums.forward / all},
             {"draft %", 100 * sums.draft / all},
             {"rest %", 100 * sums.rest / all}}};
  }
};

class LoadBench {
 public:
  LoadBench(const LoadOptions& options, const Group& group, Engine& engine,
            std::vector<std::vector<int32_t>> prompts, StepSums& sums)
      : options_(options), group_(group), engine_(engine), prompts_(std::move(prompts)), sums_(sums) {}

  absl::Status Throughput(Report& report) {
    Rates one, many;
    std::vector<double> ratios, processor_ratios;
    for (int pass = 0; pass < options_.passes; ++pass) {
      DFLASH_RETURN_IF_ERROR(Measure({.clients = 1}, one));
      DFLASH_RETURN_IF_ERROR(Measure({.clients = options_.clients, .repeats = 4}, many));
      ratios.push_back(many.tokens_per_second.back() / one.tokens_per_second.back());
      processor_ratios.push_back(many.tokens_per_processor_second.back() /
                                 one.tokens_per_processor_second.back());
    }
    report.Section(absl::StrCat("throughput of chat prompts: medians of ", options_.passes, " passes"));
    report.Add(one.ToRow("1 client"));
    report.Add(many.ToRow(absl::StrCat(options_.clients, " clients")));
    report.Add({"many / one", {{"tokens/s", Median(ratios)}, {"per CPU s", Median(processor_ratios)}}});
    return absl::OkStatus();
  }

  // One client with and without speculation, in turn.
  absl::Status Speculation(Report& report) {
    Rates plain, drafted;
    for (int pass = 0; pass < options_.passes; ++pass) {
      DFLASH_RETURN_IF_ERROR(Measure({.speculation = SpeculationMode::kOff}, plain));
      DFLASH_RETURN_IF_ERROR(Measure({.speculation = SpeculationMode::kDFlash}, drafted));
    }
    report.Section(absl::StrCat("chat prompts, one client: medians of ", options_.passes, " passes"));
    const auto row = [](const std::string& name, const Rates& rates) {
      return Row{name,
                 {{"tokens/s", Median(rates.tokens_per_second)},
                  {"decoding", Median(rates.decoding)},
                  {"per round", Median(rates.tokens_per_round)}}};
    };
    report.Add(row("without speculation", plain));
    report.Add(row("with speculation", drafted));
    report.Add({"with / without",
                {{"tokens/s", MedianRatio({drafted.tokens_per_second}, {plain.tokens_per_second})},
                 {"decoding", MedianRatio({drafted.decoding}, {plain.decoding})}}});
    return absl::OkStatus();
  }

  absl::Status FirstTokens(Report& report) {
    std::vector<double> alone, beside;
    for (int pass = 0; pass < options_.passes; ++pass) {
      DFLASH_RETURN_IF_ERROR(AskShort(alone));
      std::atomic<bool> enough = false;
      std::vector<absl::Status> failures(2);
      std::vector<std::thread> threads;
      for (size_t i = 0; i < failures.size(); ++i) {
        threads.emplace_back([&, i] {
          std::mt19937 random(static_cast<uint32_t>(pass * 2 + 1) * 31 + static_cast<uint32_t>(i));
          while (!enough && failures[i].ok()) failures[i] = Ask(engine_, LongRequest(random)).status;
        });
      }
      const absl::Status asked = AskShort(beside);
      enough = true;
      for (std::thread& thread : threads) thread.join();
      DFLASH_RETURN_IF_ERROR(asked);
      for (const absl::Status& failure : failures) DFLASH_RETURN_IF_ERROR(failure);
    }
    report.Section(absl::StrCat("time to first token of short prompts, ", alone.size(), " each, at most ",
                                PrefillRows(options_.group.max_prefill_tokens), " prompt rows in a step"));
    const auto row = [](const std::string& name, const std::vector<double>& seconds) {
      return Row{name,
                 {{"p50 ms", 1e3 * Percentile(seconds, .5)}, {"p99 ms", 1e3 * Percentile(seconds, .99)}}};
    };
    report.Add(row("alone", alone));
    report.Add(row(absl::StrCat("beside 2 clients with ", options_.long_prompt, " tokens"), beside));
    report.Add({"ratio",
                {{"p50", Percentile(beside, .5) / Percentile(alone, .5)},
                 {"p99", Percentile(beside, .99) / Percentile(alone, .99)}}});
    return absl::OkStatus();
  }

 private:
  struct Pass {
    int64_t clients = 1, repeats = 1;                           // repeats: of every prompt
    std::optional<SpeculationMode> speculation = std::nullopt;  // of the options where it is not given
  };
  absl::Status Measure(const Pass& pass, Rates& rates) {
    std::vector<GenerationRequest> requests;
    for (int64_t i = 0; i < pass.repeats; ++i) {
      for (const auto& prompt : prompts_) {
        GenerationRequest& request = requests.emplace_back(Request(prompt, options_.max_tokens));
        if (pass.speculation.has_value()) request.speculation = *pass.speculation;
      }
    }
    sums_ = StepSums();
    const double processor_before = ProcessorSeconds();
    const Clock clock;
    const std::vector<Answer> answers = AskAll(engine_, requests, pass.clients);
    return rates.Add(answers, clock.Seconds(), ProcessorSeconds() - processor_before, sums_);
  }
  GenerationRequest Request(const std::vector<int32_t>& prompt, int64_t max_tokens) const {
    GenerationRequest request;
    request.prompt_tokens = prompt;
    request.max_tokens = max_tokens;
    if (!options_.speculates) request.speculation = SpeculationMode::kOff;
    request.stop_token_ids = group_.generation.eos_token_ids;
    return request;
  }
  // Prompts in random order, one behind the other: no two begin alike.
  GenerationRequest LongRequest(std::mt19937& random) const {
    std::vector<int32_t> tokens;
    while (static_cast<int64_t>(tokens.size()) < options_.long_prompt) {
      const std::vector<int32_t>& more = prompts_[random() % prompts_.size()];
      tokens.insert(tokens.end(), more.begin() + random() % more.size(), more.end());
    }
    tokens.resize(static_cast<size_t>(options_.long_prompt));
    return Request(tokens, 8);
  }
  // Every prompt once, at a random moment after the last answer.
  absl::Status AskShort(std::vector<double>& seconds) {
    for (const auto& prompt : prompts_) {
      absl::SleepFor(absl::Microseconds(random_() % 40000));
      const Answer answer = Ask(engine_, Request(prompt, 16));
      DFLASH_RETURN_IF_ERROR(answer.status);
      seconds.push_back(answer.first_token);
    }
    return absl::OkStatus();
  }

  const LoadOptions& options_;
  const Group& group_;
  Engine& engine_;
  const std::vector<std::vector<int32_t>> prompts_;
  StepSums& sums_;
  std::mt19937 random_{1};
};

}  // namespace

absl::Status MeasureLoad(const LoadOptions& options, Report& report) {
  DFLASH_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> prompts, ReadChatPrompts(options.prompts));
  DFLASH_ASSIGN_OR_RETURN(const Group group, LoadGroup(options.group, [](const std::string&) {}));
  StepSums sums;
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          group.MakeEngine(options.group.max_prefill_tokens, &sums));
  RunningEngine running(*engine);
  LoadBench bench(options, group, *engine, std::move(prompts), sums);
  DFLASH_RETURN_IF_ERROR(bench.Throughput(report));
  if (options.speculates && !options.group.draft_model.empty())
    DFLASH_RETURN_IF_ERROR(bench.Speculation(report));
  DFLASH_RETURN_IF_ERROR(bench.FirstTokens(report));
  return running.Stop();
}

}  // namespace dflash::bench
