#include "tests/integration/chaos_clients.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"

namespace dflash::integration {
namespace {

// Longer than anything may take; whoever waits for so long is stuck.
constexpr absl::Duration kStuck = absl::Seconds(180);
// A connection that was broken may be found to be so by the call after the next.
constexpr absl::Duration kAftermath = absl::Seconds(5);

struct Details {
  std::string reason;
  std::optional<absl::Duration> hint;
};
Details DetailsOf(const grpc::Status& status) {
  Details result;
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) result.reason = info.reason();
    google::rpc::RetryInfo retry;
    if (detail.Is<google::rpc::RetryInfo>() && detail.UnpackTo(&retry)) {
      result.hint =
          absl::Seconds(retry.retry_delay().seconds()) + absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  return result;
}

template <typename Sequence>
bool IsPrefix(const Sequence& part, const Sequence& whole) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

bool SameLogprobs(const std::vector<v1::TokenLogprobs>& a, const std::vector<v1::TokenLogprobs>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.logprob() == y.logprob() && x.top_size() == y.top_size() &&
           std::equal(x.top().begin(), x.top().end(), y.top().begin(), [](const auto& s, const auto& t) {
             return s.token_id() == t.token_id() && s.logprob() == t.logprob();
           });
  });
}

// What is wrong with a whole output.
std::string Compare(const ctl::Generation& got, const ctl::Generation& expected) {
  if (got.token_ids != expected.token_ids) return "other tokens";
  if (got.text != expected.text) return "another text";
  if (!SameLogprobs(got.logprobs, expected.logprobs)) return "other log probabilities";
  if (got.finished.reason() != expected.finished.reason()) return "another end";
  if (got.finished.usage().completion_tokens() != expected.token_ids.size()) return "another usage";
  if (got.others.size() != expected.others.size()) return "another number of choices";
  for (size_t i = 0; i < got.others.size(); ++i) {
    if (std::string wrong = Compare(got.others[i], expected.others[i]); !wrong.empty())
      return absl::StrCat("choice ", i + 1, ": ", wrong);
  }
  return "";
}

// Whether what was streamed about rounds adds up to the summary at the end.
std::string CheckRounds(const ctl::Generation& got) {
  uint64_t rounds = 0, drafted = 0, accepted = 0;
  for (const v1::StepInfo& round : got.rounds) {
    if (round.drafted() == 0) continue;
    ++rounds;
    drafted += round.drafted();
    accepted += round.accepted();
  }
  const v1::SpeculationSummary& sum = got.finished.speculation();
  if (sum.rounds() == rounds && sum.drafted_tokens() == drafted && sum.accepted_tokens() == accepted)
    return "";
  return absl::StrCat("the summary says ", sum.rounds(), " rounds, ", sum.drafted_tokens(), " drafted, ",
                      sum.accepted_tokens(), " accepted; streamed were ", rounds, ", ", drafted, ", ",
                      accepted);
}

}  // namespace

size_t Disturbances::Begin(Kind kind) {
  std::lock_guard lock(mutex_);
  all_.push_back({kind, absl::Now(), absl::InfiniteFuture()});
  return all_.size() - 1;
}

void Disturbances::End(size_t which) {
  std::lock_guard lock(mutex_);
  all_[which].end = absl::Now() + (all_[which].kind == kDropped ? kAftermath : absl::ZeroDuration());
}

bool Disturbances::Happened(Kind kind, absl::Time begin, absl::Time end) const {
  std::lock_guard lock(mutex_);
  return std::any_of(all_.begin(), all_.end(), [&](const Disturbance& one) {
    return one.kind == kind && one.begin <= end && begin <= one.end;
  });
}

std::vector<KnownText> LearnTexts(Server& quiet) {
  const std::vector<GoldenText> golden = GoldenTexts();
  constexpr uint32_t kLengths[] = {16, 40, 80, 120, 240};
  std::vector<KnownText> texts;
  for (uint32_t i = 0; i < 24; ++i) {
    v1::GenerateRequest request = TokenRequest(golden[i % golden.size()].prompt_ids, kLengths[i % 5]);
    request.mutable_output()->set_text(true);
    request.mutable_stopping()->set_ignore_eos(i % 2 == 0);
    if (i % 2 == 1 || i % 8 == 6) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(100 + i);
    }
    if (i % 3 == 1) request.mutable_sampling()->set_frequency_penalty(0.2f);
    if (i % 6 == 4) request.mutable_stopping()->add_strings(" the");
    if (i % 8 == 5) request.mutable_constraint()->set_json_object(true);
    if (i % 8 == 6) request.mutable_sampling()->set_n(2);
    if (i % 3 == 2 && i % 8 != 6) request.mutable_output()->set_top_logprobs(2);
    if (i % 4 == 3) request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
    if (i % 7 == 3) request.mutable_speculation()->set_max_draft_tokens(5);
    texts.push_back({.request = request, .expected = quiet.GenerateOk(request), .can_resume = i % 8 != 6});
  }
  // Its log probabilities fill every buffer on the way to a client that does not read.
  v1::GenerateRequest request = TokenRequest(golden[0].prompt_ids, 400);
  request.mutable_output()->set_text(true);
  request.mutable_output()->set_top_logprobs(20);
  request.mutable_stopping()->set_ignore_eos(true);
  texts.push_back({.request = request, .expected = quiet.GenerateOk(request), .can_resume = true});
  return texts;
}

// One client with a connection of its own.
class ChaosClients::Client {
 public:
  Client(ChaosClients* all, uint64_t stream) : all_(*all), random_(all->seed_ * 1'000'003 + stream) {}

  // Something else each time.
  void DoSomething(const std::function<void(const char*)>& says) {
    if (Below(8) == 0) Disconnect();  // the old connection ends with whatever it carries
    const uint32_t what = Below(40);
    if (what < 22) return says("reads"), ReadAll();
    if (what < 26) return says("cancels in the middle"), Cancel(false);
    if (what < 28) return says("cancels at once"), CancelAtOnce();
    if (what < 30) return says("cancels by id"), Cancel(true);
    if (what < 34) return says("has little time"), Deadline(absl::Milliseconds(1 + Below(300)));
    if (what < 36) return says("reads slowly"), ReadSlowly();
    if (what < 37) return says("is killed"), IsKilled();
    says("asks");
    Ask();
  }
  void Deadline(absl::Duration limit) {
    const KnownText& text = AnyText();
    Call call = Generate(text.request, limit, nullptr);
    Settle(call, text, {grpc::StatusCode::DEADLINE_EXCEEDED}, "deadline");
  }
  void CancelAtOnce() {
    Call call;
    grpc::ClientContext context;
    v1::GenerateRequest request = AnyText().request;
    Begin(&call, &request);
    const auto reader = Stub().Generate(&context, request);
    context.TryCancel();
    v1::GenerateResponse response;
    while (reader->Read(&response))
      call.attempt.tokens += static_cast<uint64_t>(response.chunk().token_ids_size());
    End(&call, reader->Finish());
    Settle(call, {grpc::StatusCode::CANCELLED}, "cancelled at once");
  }
  void Disconnect() {
    stub_.reset();
    channel_.reset();
  }

 private:
  uint32_t Below(uint32_t count) { return static_cast<uint32_t>(random_() % count); }
  const KnownText& AnyText() { return (*all_.texts_)[Below(static_cast<uint32_t>(all_.texts_->size()))]; }

  v1::InferenceService::Stub& Stub() {
    if (channel_ == nullptr) {
      grpc::ChannelArguments own;
      own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      channel_ = grpc::CreateCustomChannel(all_.address_, grpc::InsecureChannelCredentials(), own);
      stub_ = v1::InferenceService::NewStub(channel_);
    }
    return *stub_;
  }

  void Begin(Call* call, v1::GenerateRequest* request) {
    call->attempt.id = all_.NewId();
    call->attempt.first_life = all_.life_;
    request->set_request_id(call->attempt.id);
    call->begin = absl::Now();
  }
  void End(Call* call, const grpc::Status& status) {
    const Details details = DetailsOf(status);
    call->end = absl::Now();
    call->attempt.last_life = all_.life_;
    call->attempt.status = status;
    call->attempt.reason = details.reason;
    call->hint = details.hint;
    all_.replays_ += call->generation.finished.replays();
    std::lock_guard lock(all_.mutex_);
    all_.attempts_.push_back(call->attempt);
  }

  Call Generate(v1::GenerateRequest request, absl::Duration limit, const OnChunk& on_chunk) {
    Call call;
    Begin(&call, &request);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(call.begin + limit));
    const grpc::Status status = ctl::ReadGeneration(
        Stub(), &context, request,
        [&](const v1::Chunk& chunk) {
          call.attempt.tokens += static_cast<uint64_t>(chunk.token_ids_size());
          if (on_chunk) on_chunk(&context, call.attempt.id, call.generation);
        },
        &call.generation);
    End(&call, status);
    return call;
  }

  // The answer to a call that may have ended in its own ways.
  void Settle(const Call& call, const std::vector<grpc::StatusCode>& own_ends, const std::string& what) {
    const grpc::Status& status = call.attempt.status;
    all_.Count(absl::StrCat(what, ": ", status.ok() ? "OK" : NameOf(status), " ", call.attempt.reason));
    if (status.ok() || std::count(own_ends.begin(), own_ends.end(), status.error_code()) > 0) return;
    if (const std::string wrong = all_.Judge(call); !wrong.empty()) {
      all_.Complain(absl::StrCat(what, ", ", call.attempt.id, ": ", wrong, ": ", ctl::Describe(status)));
    }
    // A connection that is lost is dialled again without the library's back-off.
    if (call.attempt.reason.empty()) Disconnect();
  }
  // The same, and what came of the output must be the beginning of the right one.
  void Settle(const Call& call, const KnownText& text, const std::vector<grpc::StatusCode>& own_ends,
              const std::string& what) {
    Settle(call, own_ends, what);
    std::string wrong;
    const size_t choices = std::min(call.generation.others.size(), text.expected.others.size());
    const auto is_beginning = [](const ctl::Generation& got, const ctl::Generation& expected) {
      return IsPrefix(got.token_ids, expected.token_ids) && IsPrefix(got.text, expected.text);
    };
    if (!is_beginning(call.generation, text.expected)) wrong = "not the beginning of the right output";
    for (size_t i = 0; i < choices; ++i) {
      if (!is_beginning(call.generation.others[i], text.expected.others[i]))
        wrong = absl::StrCat("choice ", i + 1, ": not the beginning of the right output");
    }
    if (call.attempt.status.ok()) wrong = Compare(call.generation, text.expected);
    if (call.attempt.status.ok() && wrong.empty()) wrong = CheckRounds(call.generation);
    if (!wrong.empty()) all_.Complain(absl::StrCat(what, ", ", call.attempt.id, ": ", wrong));
  }
  static std::string NameOf(const grpc::Status& status) {
    return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
  }

  // Until the whole output is there, from as many lives of the coordinator as that takes.
  void ReadAll() {
    const KnownText& text = AnyText();
    ctl::Generation whole;
    bool resumed = false;
    for (const absl::Time begin = absl::Now();;) {
      v1::GenerateRequest request = text.request;
      if (!whole.token_ids.empty()) {
        resumed = true;
        request.mutable_resume()->mutable_output_token_ids()->Assign(whole.token_ids.begin(),
                                                                     whole.token_ids.end());
        request.mutable_resume()->set_model_fingerprint(whole.started.model_fingerprint());
      }
      Call call = Generate(request, kStuck, nullptr);
      Settle(call, {}, resumed ? "read on" : "read");
      Append(call.generation, &whole);
      if (call.attempt.status.ok()) {
        std::string wrong = Compare(whole, text.expected);
        if (wrong.empty() && !resumed) wrong = CheckRounds(whole);
        if (!wrong.empty())
          all_.Complain(absl::StrCat(resumed ? "read on, " : "read, ", call.attempt.id, ": ", wrong));
        return;
      }
      if (call.attempt.status.error_code() != grpc::StatusCode::UNAVAILABLE &&
          call.attempt.status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) {
        return;  // complained about
      }
      if (absl::Now() - begin > kStuck) return all_.Complain("a client is never served: " + call.attempt.id);
      // With all tokens but not the end there is nothing to go on with.
      if (!text.can_resume || whole.token_ids.size() >= text.expected.token_ids.size()) whole = {};
      if (whole.token_ids.empty()) resumed = false;
      // As it is told, within reason: there is much to see in little time.
      absl::SleepFor(std::clamp(call.hint.value_or(absl::ZeroDuration()), absl::Milliseconds(20 + Below(100)),
                                absl::Milliseconds(500)));
    }
  }
  static void Append(const ctl::Generation& part, ctl::Generation* whole) {
    if (part.started.model_fingerprint().empty()) return;
    whole->started = part.started;
    whole->finished = part.finished;
    whole->token_ids.insert(whole->token_ids.end(), part.token_ids.begin(), part.token_ids.end());
    whole->text += part.text;
    whole->logprobs.insert(whole->logprobs.end(), part.logprobs.begin(), part.logprobs.end());
    whole->rounds.insert(whole->rounds.end(), part.rounds.begin(), part.rounds.end());
    whole->others = part.others;
  }

  void Cancel(bool by_id) {
    const KnownText& text = AnyText();
    const uint32_t after = Below(100);
    bool done = false;
    Call call =
        Generate(text.request, kStuck,
                 [&](grpc::ClientContext* context, const std::string& id, const ctl::Generation& so_far) {
                   if (done || so_far.token_ids.size() < after) return;
                   done = true;
                   if (!by_id) return context->TryCancel();
                   grpc::ClientContext cancelling;
                   cancelling.set_deadline(absl::ToChronoTime(absl::Now() + kStuck));
                   v1::CancelRequest cancel;
                   cancel.set_request_id(id);
                   v1::CancelResponse response;
                   (void)Stub().Cancel(&cancelling, cancel, &response);
                 });
    Settle(call, text, {grpc::StatusCode::CANCELLED}, by_id ? "cancelled by id" : "cancelled");
  }

  void ReadSlowly() {
    const KnownText& text = all_.texts_->back();
    const absl::Duration stall =
        all_.long_stalls_ && Below(4) == 0 ? absl::Seconds(35) : absl::Milliseconds(100 + Below(1500));
    int chunks = 0;
    Call call =
        Generate(text.request, kStuck, [&](grpc::ClientContext*, const std::string&, const ctl::Generation&) {
          if (++chunks == 1) {
            absl::SleepFor(stall);
            all_.Count("stalled");
          }
          if (chunks < 10) absl::SleepFor(absl::Milliseconds(20));
        });
    if (call.attempt.reason == "SLOW_CONSUMER") {
      return Settle(call, text, {grpc::StatusCode::RESOURCE_EXHAUSTED}, "read slowly");
    }
    Settle(call, text, {}, "read slowly");
  }

  // A program that vanishes with its connection.
  void IsKilled() {
    Process client({DflashctlPath(), "--address", all_.address_, "generate", "--tokens", "4089,2341,198",
                    "--ignore-eos", "--max-tokens", "500"});
    absl::SleepFor(absl::Milliseconds(Below(400)));
    client.Signal(SIGKILL);
    all_.Count("killed");
  }

  // Calls that are answered at once.
  void Ask() {
    Call call;
    call.begin = absl::Now();
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(call.begin + kStuck));
    const KnownText& text = AnyText();
    grpc::Status status;
    v1::DetokenizeResponse detokenized;
    v1::GetLoadResponse load;
    const bool asks_text = Below(2) == 0;
    if (asks_text) {
      v1::DetokenizeRequest request;
      *request.mutable_token_ids() = text.request.tokens().ids();
      status = Stub().Detokenize(&context, request, &detokenized);
    } else {
      status = Stub().GetLoad(&context, {}, &load);
    }
    const Details details = DetailsOf(status);
    call.end = absl::Now();
    call.attempt.status = status;
    call.attempt.reason = details.reason;
    call.hint = details.hint;
    Settle(call, {}, "asked");
    if (status.ok() && asks_text && detokenized.text().empty()) all_.Complain("asked for text, got none");
    if (status.ok() && !asks_text && load.groups_size() == 0) all_.Complain("asked for groups, got none");
  }

  ChaosClients& all_;
  std::mt19937_64 random_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

ChaosClients::ChaosClients(uint64_t seed, std::string address, const std::vector<KnownText>* texts,
                           const Disturbances* disturbances, bool long_stalls)
    : seed_(seed),
      address_(std::move(address)),
      texts_(texts),
      disturbances_(disturbances),
      long_stalls_(long_stalls) {}

ChaosClients::~ChaosClients() { (void)Stop(); }

void ChaosClients::Start(int count) {
  for (int i = 0; i < count; ++i) threads_.emplace_back([this, i] { Run(static_cast<size_t>(i)); });
}

void ChaosClients::Run(size_t index) {
  Client client(this, index);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (paused_) {
        doing_.erase(index);
        client.Disconnect();
        ++parked_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !paused_ || stopped_; });
        --parked_;
      }
      if (stopped_) return;
    }
    client.DoSomething([this, index](const char* what) {
      std::lock_guard lock(mutex_);
      doing_[index] = what;
    });
  }
}

bool ChaosClients::Pause() {
  std::unique_lock lock(mutex_);
  paused_ = true;
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(2 * kStuck),
                           [this] { return parked_ == threads_.size(); });
}

void ChaosClients::Continue() {
  std::lock_guard lock(mutex_);
  paused_ = false;
  changed_.notify_all();
}

bool ChaosClients::Stop() {
  if (threads_.empty()) return true;
  const bool paused = Pause();
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return paused;
}

void ChaosClients::Storm(uint32_t pick, bool deadlines) {
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 10; ++i) {
    threads.emplace_back([this, pick, deadlines, i] {
      Client client(this, 1000 + pick * 10 + i);
      for (int k = 0; k < 10; ++k) {
        if (deadlines) {
          client.Deadline(absl::Milliseconds(1 + (pick + i * 7 + static_cast<uint32_t>(k) * 3) % 30));
        } else {
          client.CancelAtOnce();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ChaosClients::Count(const std::string& what) {
  std::lock_guard lock(mutex_);
  ++counts_[what];
}

void ChaosClients::Complain(const std::string& what) {
  std::lock_guard lock(mutex_);
  complaints_.push_back(
      absl::StrCat(absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::UTCTimeZone()), " ", what));
}

std::string ChaosClients::Judge(const Call& call) const {
  const auto happened = [&](Disturbances::Kind kind) {
    return disturbances_->Happened(kind, call.begin, call.end);
  };
  const std::string& reason = call.attempt.reason;
  const bool started = call.generation.started.has_effective_sampling();
  switch (call.attempt.status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      if (reason.empty()) {
        return happened(Disturbances::kCoordinatorDown) || happened(Disturbances::kDropped)
                   ? ""
                   : "the connection broke, and nobody did that";
      }
      if (!call.hint.has_value()) return "no hint when to come again";
      if (reason == "DRAINING") {
        return happened(Disturbances::kDraining) || happened(Disturbances::kCoordinatorDown)
                   ? ""
                   : "nobody drains the server";
      }
      if (reason == "NOT_READY" || reason == "WORKER_LOST")
        return started ? "it had started and should have gone on" : "";
      return "no reason to be unavailable";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      if (started) return "it had started and should have gone on";
      if (reason != "QUEUE_FULL" && reason != "QUEUE_TIMEOUT") return "no such limit";
      return call.hint.has_value() ? "" : "no hint when to come again";
    default:
      return "no right end";
  }
}

std::vector<Attempt> ChaosClients::attempts() const {
  std::lock_guard lock(mutex_);
  return attempts_;
}
std::map<std::string, int64_t> ChaosClients::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}
std::vector<std::string> ChaosClients::complaints() const {
  std::lock_guard lock(mutex_);
  return complaints_;
}
std::string ChaosClients::Doing() const {
  std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [index, what] : doing_) absl::StrAppend(&text, "client ", index, " ", what, "\n");
  return text;
}

}  // namespace dflash::integration
