#include "tools/dflashctl/connection.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace dflash::ctl {
namespace {

sigset_t InterruptSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGUSR1);  // our own: ends the watcher
  return signals;
}

std::chrono::system_clock::time_point DeadlineAfter(absl::Duration timeout) {
  return absl::ToChronoTime(absl::Now() + timeout);
}

constexpr absl::Duration kUnaryTimeout = absl::Seconds(10);
constexpr int kMaxMessageBytes = 8 << 20;
constexpr int64_t kMaxCredentialBytes = 1 << 20;  // of a file

}  // namespace

Interrupt::Interrupt() {
  const sigset_t signals = InterruptSignals();
  DFLASH_CHECK(pthread_sigmask(SIG_BLOCK, &signals, nullptr) == 0);
  watcher_ = std::thread([this] { Watch(); });
}

Interrupt::~Interrupt() {
  stopping_ = true;
  pthread_kill(watcher_.native_handle(), SIGUSR1);
  watcher_.join();
}

void Interrupt::Watch() {
  const sigset_t signals = InterruptSignals();
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    if (stopping_) return;
    if (signal == SIGUSR1) continue;
    std::lock_guard lock(mutex_);
    if (running_.empty() || raised_) {
      (void)!write(STDERR_FILENO, "\n", 1);
      _exit(kInterrupted);
    }
    raised_ = true;
    for (grpc::ClientContext* context : running_) context->TryCancel();
  }
}

Interrupt::Scope::Scope(Interrupt* interrupt, grpc::ClientContext* context)
    : interrupt_(interrupt), context_(context) {
  std::lock_guard lock(interrupt_->mutex_);
  interrupt_->running_.insert(context_);
  if (interrupt_->raised_) context_->TryCancel();
}

Interrupt::Scope::~Scope() {
  std::lock_guard lock(interrupt_->mutex_);
  interrupt_->running_.erase(context_);
}

std::optional<std::string> StreamChecker::See(const v1::GenerateResponse& response) {
  if (response.seq() != next_seq_) {
    return absl::StrCat("message ", response.seq(), " came where ", next_seq_, " was due");
  }
  ++next_seq_;
  if (!choices_.empty() && !AtEnd()) return "a message after Finished";
  switch (response.event_case()) {
    case v1::GenerateResponse::kStarted:
      if (started_) return "Started came twice";
      started_ = true;
      choices_.resize(std::max(1u, response.started().effective_sampling().n()), {.tokens = first_token_});
      return std::nullopt;
    case v1::GenerateResponse::kChunk: {
      if (!started_) return "a chunk before Started";
      const v1::Chunk& chunk = response.chunk();
      if (chunk.index() >= choices_.size()) return "a chunk of a choice that was not asked for";
      Choice& choice = choices_[chunk.index()];
      if (choice.finished) return "a chunk after its Finished";
      if (chunk.token_ids_size() > 0 && chunk.first_token_offset() != choice.tokens) {
        return absl::StrCat("a chunk begins at token ", chunk.first_token_offset(), " where ", choice.tokens,
                            " was due");
      }
      if (chunk.prompt_logprobs_size() > 0) {
        if (chunk.index() != 0 || choice.tokens > 0 || chunk.token_ids_size() > 0)
          return "log probabilities of the prompt do not come first";
        if (chunk.first_prompt_position() != choice.prompt_places + 1)
          return "log probabilities of the prompt leave a gap";
        choice.prompt_places += static_cast<uint64_t>(chunk.prompt_logprobs_size());
      }
      for (const v1::StepInfo& round : chunk.steps()) {
        if (round.accepted() > round.drafted()) return "a round accepted more than was drafted";
        if (round.token_count() > round.accepted() + 1) return "a round gave more tokens than accepted + 1";
      }
      choice.tokens += static_cast<uint64_t>(chunk.token_ids_size());
      return std::nullopt;
    }
    case v1::GenerateResponse::kFinished: {
      if (!started_) return "Finished before Started";
      if (response.finished().index() >= choices_.size())
        return "Finished of a choice that was not asked for";
      Choice& choice = choices_[response.finished().index()];
      if (choice.finished) return "Finished came twice";
      if (choice.tokens > 0 && response.finished().usage().completion_tokens() != choice.tokens) {
        return absl::StrCat("usage counts ", response.finished().usage().completion_tokens(), " tokens, ",
                            choice.tokens, " came");
      }
      choice.finished = true;
      return std::nullopt;
    }
    case v1::GenerateResponse::EVENT_NOT_SET:
      return "a message without an event";
  }
  return std::nullopt;
}

std::optional<std::string> StreamChecker::AtEnd() const {
  const bool all =
      std::all_of(choices_.begin(), choices_.end(), [](const Choice& choice) { return choice.finished; });
  if (choices_.empty() || !all) return "the stream ended without Finished";
  return std::nullopt;
}

std::shared_ptr<grpc::Channel> Endpoint::Dial(bool own_connection) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  if (own_connection) arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (tls_ca.empty())
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  if (!tls_name.empty()) arguments.SetSslTargetNameOverride(tls_name);
  const grpc::SslCredentialsOptions options = {tls_ca, tls_key, tls_cert};
  return grpc::CreateCustomChannel(address, grpc::SslCredentials(options), arguments);
}

void Endpoint::Prepare(grpc::ClientContext* context) const {
  if (!token.empty()) context->AddMetadata("authorization", absl::StrCat("Bearer ", token));
}

void EndpointFlags::Register(FlagParser* parser, bool admin) {
  if (admin) {
    parser->Text("address", "ADDRESS", "the server's --admin-listen: HOST:PORT or unix:PATH; required",
                 &endpoint_.address);
  } else {
    endpoint_.address = kDefaultAddress;
    parser->Address("address", "where dflashd listens", 1, &endpoint_.address);
  }
  parser->Text("tls-ca", "FILE", "PEM certificates, of which the server must have one's; without: no TLS",
               &endpoint_.tls_ca);
  parser->Text("tls-cert", "FILE", "PEM certificate of this client", &endpoint_.tls_cert);
  parser->Text("tls-key", "FILE", "PEM key for it", &endpoint_.tls_key);
  parser->Text("tls-name", "NAME", "name in the server's certificate, when it is not the address's",
               &endpoint_.tls_name);
  parser->Text("token-file", "FILE", "holds the bearer token to send", &token_file_);
}

absl::StatusOr<Endpoint> EndpointFlags::Read() const {
  Endpoint endpoint = endpoint_;
  if (endpoint.address.empty()) return absl::InvalidArgumentError("--address is required");
  if (endpoint.tls_cert.empty() != endpoint.tls_key.empty() ||
      (endpoint.tls_ca.empty() && !endpoint.tls_cert.empty())) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key go together, and need --tls-ca");
  }
  endpoint.token = token_file_;
  for (std::string* file : {&endpoint.tls_ca, &endpoint.tls_cert, &endpoint.tls_key, &endpoint.token}) {
    if (file->empty()) continue;
    DFLASH_ASSIGN_OR_RETURN(*file, ReadFile(*file, kMaxCredentialBytes));
  }
  // One line, as an editor or echo writes it.
  endpoint.token.resize(std::min(endpoint.token.find_last_not_of(" \t\r\n") + 1, endpoint.token.size()));
  if (!token_file_.empty() && !std::all_of(endpoint.token.begin(), endpoint.token.end(),
                                           [](char c) { return c > ' ' && c <= '~'; })) {
    return absl::InvalidArgumentError(absl::StrCat(token_file_, ": must be one line of visible ASCII"));
  }
  return endpoint;
}

Connection::Connection(const Endpoint& endpoint, Interrupt* interrupt)
    : endpoint_(endpoint), stub_(v1::InferenceService::NewStub(endpoint.Dial())), interrupt_(interrupt) {}

grpc::Status ReadGeneration(v1::InferenceService::Stub& stub, grpc::ClientContext* context,
                            const v1::GenerateRequest& request,
                            const std::function<void(const v1::Chunk&)>& on_chunk, Generation* result) {
  const absl::Time begin = absl::Now();
  const std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> stream = stub.Generate(context, request);
  StreamChecker checker(static_cast<uint64_t>(request.resume().output_token_ids_size()));
  std::optional<std::string> broken;
  v1::GenerateResponse response;
  while (!broken && stream->Read(&response)) {
    broken = checker.See(response);
    if (broken) break;
    if (response.has_started()) result->started = response.started();
    result->others.resize(std::max(1u, result->started.effective_sampling().n()) - 1);
    const auto of = [&](uint32_t index) { return index == 0 ? result : &result->others[index - 1]; };
    if (response.has_finished()) of(response.finished().index())->finished = response.finished();
    if (response.has_chunk()) {
      const v1::Chunk& chunk = response.chunk();
      if (result->first_token_seconds == 0 && chunk.prompt_logprobs_size() == 0) {
        result->first_token_seconds = absl::ToDoubleSeconds(absl::Now() - begin);
      }
      Generation* to = of(chunk.index());
      to->token_ids.insert(to->token_ids.end(), chunk.token_ids().begin(), chunk.token_ids().end());
      to->text += chunk.text();
      to->reasoning += chunk.reasoning();
      to->tool_calls.insert(to->tool_calls.end(), chunk.tool_calls().begin(), chunk.tool_calls().end());
      to->rounds.insert(to->rounds.end(), chunk.steps().begin(), chunk.steps().end());
      to->logprobs.insert(to->logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
      to->prompt_logprobs.insert(to->prompt_logprobs.end(), chunk.prompt_logprobs().begin(),
                                 chunk.prompt_logprobs().end());
      if (on_chunk) on_chunk(chunk);
    }
  }
  if (broken) context->TryCancel();
  grpc::Status status = stream->Finish();
  result->total_seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  if (!broken && status.ok()) broken = checker.AtEnd();
  if (broken) return grpc::Status(grpc::StatusCode::DATA_LOSS, absl::StrCat("bad stream: ", *broken));
  return status;
}

grpc::Status Connection::Generate(const v1::GenerateRequest& request, absl::Duration timeout,
                                  const std::function<void(const v1::Chunk&)>& on_chunk, Generation* result) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  if (timeout != absl::InfiniteDuration()) context.set_deadline(DeadlineAfter(timeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return ReadGeneration(*stub_, &context, request, on_chunk, result);
}

grpc::Status Connection::GetModelInfo(v1::GetModelInfoResponse* response) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  context.set_deadline(DeadlineAfter(kUnaryTimeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return stub_->GetModelInfo(&context, v1::GetModelInfoRequest(), response);
}

grpc::Status Connection::GetLoad(v1::GetLoadResponse* response) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  context.set_deadline(DeadlineAfter(kUnaryTimeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return stub_->GetLoad(&context, v1::GetLoadRequest(), response);
}

grpc::Status Connection::Tokenize(const v1::TokenizeRequest& request, v1::TokenizeResponse* response) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  context.set_deadline(DeadlineAfter(kUnaryTimeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return stub_->Tokenize(&context, request, response);
}

grpc::Status Connection::Detokenize(const v1::DetokenizeRequest& request, v1::DetokenizeResponse* response) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  context.set_deadline(DeadlineAfter(kUnaryTimeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return stub_->Detokenize(&context, request, response);
}

grpc::Status Connection::RenderChat(const v1::RenderChatRequest& request, v1::RenderChatResponse* response) {
  grpc::ClientContext context;
  endpoint_.Prepare(&context);
  context.set_deadline(DeadlineAfter(kUnaryTimeout));
  const Interrupt::Scope scope(interrupt_, &context);
  return stub_->RenderChat(&context, request, response);
}

std::string Describe(const grpc::Status& status) {
  // absl's and gRPC's codes have equal numbers.
  std::string text = absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
  absl::StrAppend(&text, ": ", status.error_message());
  google::rpc::Status details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) return text;
  std::string extra;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) {
      absl::StrAppend(&extra, extra.empty() ? "" : ", ", info.reason());
    } else if (detail.Is<google::rpc::RetryInfo>() && detail.UnpackTo(&retry)) {
      const absl::Duration delay =
          absl::Seconds(retry.retry_delay().seconds()) + absl::Nanoseconds(retry.retry_delay().nanos());
      absl::StrAppend(&extra, extra.empty() ? "" : ", ", "retry in ", absl::FormatDuration(delay));
    }
  }
  if (!extra.empty()) absl::StrAppend(&text, " (", extra, ")");
  return text;
}

}  // namespace dflash::ctl
