#include "daemon/rpc/inference_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "daemon/frontend/prepare.h"
#include "daemon/frontend/text_pool.h"
#include "daemon/log/line_budget.h"
#include "daemon/log/trace_context.h"
#include "daemon/request/request_error.h"
#include "daemon/rpc/convert.h"
#include "daemon/rpc/credentials.h"
#include "daemon/rpc/diagnosis.h"
#include "daemon/rpc/generation.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/message_bytes.h"
#include "dflash/v1/inference.grpc.pb.h"

namespace dflash {
namespace {

constexpr char kServiceName[] = "dflash.v1.InferenceService";
// Unary calls that wait for the text pool; generations there are bounded by the queue.
constexpr int kMaxWaitingTexts = 256;
constexpr int64_t kRefusalLinesPerSecond = 10;  // of the log, at info

// gRPC hands over a call that ended before its message came, too.
bool EndedUnread(const grpc::ByteBuffer& bytes) { return !bytes.Valid(); }

// 64 random bits: seeds of requests that bring none, and ids. Never the same twice in practice; any thread.
uint64_t RandomBits() {
  thread_local std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// The caller's trace, or one of its own.
TraceContext TraceOf(const grpc::CallbackServerContext& context) {
  const auto found = context.client_metadata().find("traceparent");
  const auto caller = found == context.client_metadata().end()
                          ? std::nullopt
                          : ParseTraceparent({found->second.data(), found->second.size()});
  return ContinueTrace(caller, RandomBits(), RandomBits(), RandomBits());
}

const char* CodeName(absl::StatusCode code) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

absl::Status TooLongToTokenize(const std::string& field, const std::string& text) {
  return BadParameter(field,
                      absl::StrCat(text, ", at most ", RequestLimits::kMaxTokenizeBytes, " are allowed"));
}

v1::SpeculationMode ModeOf(bool speculates) {
  return speculates ? v1::SPECULATION_MODE_DFLASH : v1::SPECULATION_MODE_OFF;
}

v1::GroupState StateOf(Dispatcher::GroupState state) {
  switch (state) {
    case Dispatcher::GroupState::kLoading:
      return v1::GROUP_STATE_LOADING;
    case Dispatcher::GroupState::kReady:
      return v1::GROUP_STATE_READY;
    case Dispatcher::GroupState::kLost:
      return v1::GROUP_STATE_FAILED;
  }
  return v1::GROUP_STATE_UNSPECIFIED;
}

}  // namespace

// Takes bytes in every method (message_bytes.h says why).
using RawService = v1::InferenceService::WithRawCallbackMethod_Generate<
    v1::InferenceService::WithRawCallbackMethod_Cancel<v1::InferenceService::WithRawCallbackMethod_Tokenize<
        v1::InferenceService::WithRawCallbackMethod_Detokenize<
            v1::InferenceService::WithRawCallbackMethod_RenderChat<
                v1::InferenceService::WithRawCallbackMethod_GetModelInfo<
                    v1::InferenceService::WithRawCallbackMethod_GetLoad<v1::InferenceService::Service>>>>>>>;

class InferenceService::Impl final : public RawService {
 public:
  Impl(Options options, Dispatcher* dispatcher, const CheckpointPrompts* prompts, Exporter* exporter)
      : options_(std::move(options)),
        dispatcher_(dispatcher),
        prompts_(prompts),
        exporter_(exporter),
        metrics_(&exporter->server()),
        pool_(options_.text_threads) {}

  void SetSpeculation(const SpeculationPolicy& policy) {
    absl::MutexLock lock(&mutex_);
    speculation_ = policy;
  }
  SpeculationPolicy speculation() const {
    absl::MutexLock lock(&mutex_);
    return speculation_;
  }

  bool AwaitStreams(absl::Time deadline, const std::function<bool()>& give_up) {
    absl::MutexLock lock(&mutex_);
    const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_streams_ == 0 || give_up(); };
    mutex_.AwaitWithDeadline(absl::Condition(&over), deadline);
    return open_streams_ == 0;
  }
  void LookAgain() { absl::MutexLock lock(&mutex_); }  // letting go of it is what waiters look at

  void Tick(absl::Time now) {
    std::vector<std::shared_ptr<Generation>> generations;
    {
      absl::MutexLock lock(&mutex_);
      std::erase_if(streams_, [](const std::weak_ptr<Generation>& stream) { return stream.expired(); });
      for (const std::weak_ptr<Generation>& stream : streams_) {
        if (std::shared_ptr<Generation> generation = stream.lock())
          generations.push_back(std::move(generation));
      }
    }
    for (const auto& generation : generations) generation->CheckProgress(now, options_.stall_limit);
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* bytes) override;

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* answer) override {
    return Reply<v1::CancelRequest, v1::CancelResponse>(
        context, "Cancel", bytes, answer, [this, context](const auto& request, auto* response) {
          // Was allowed a moment ago; tokens may have changed since.
          const std::string client =
              Authorize(options_.tokens, *context, Role::kInference).value_or(std::string());
          std::shared_ptr<Generation> generation;
          {
            absl::MutexLock lock(&mutex_);
            const auto found = generations_.find(request.request_id());
            if (found != generations_.end()) generation = found->second.lock();
          }
          // With tokens nobody ends another's.
          if (generation != nullptr && options_.tokens != nullptr && generation->client() != client) {
            generation = nullptr;
          }
          response->set_found(generation != nullptr);
          if (generation != nullptr) generation->Cancel();
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* answer) override {
    return ReplyLater<v1::TokenizeRequest, v1::TokenizeResponse>(
        context, "Tokenize", bytes, answer,
        [this](const auto& request, auto* response) { return Tokenize(request, response); });
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                       grpc::ByteBuffer* answer) override {
    return ReplyLater<v1::DetokenizeRequest, v1::DetokenizeResponse>(
        context, "Detokenize", bytes, answer,
        [this](const auto& request, auto* response) { return Detokenize(request, response); });
  }

  grpc::ServerUnaryReactor* RenderChat(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                       grpc::ByteBuffer* answer) override {
    return ReplyLater<v1::RenderChatRequest, v1::RenderChatResponse>(
        context, "RenderChat", bytes, answer, [this](const auto& request, auto* response) -> absl::Status {
          DFLASH_ASSIGN_OR_RETURN(const ChatPrompt chat, FromMessage(request.chat()));
          DFLASH_RETURN_IF_ERROR(CheckChat(chat, "chat"));
          DFLASH_ASSIGN_OR_RETURN(*response->mutable_text(), prompts_->RenderChat(chat));
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* answer) override {
    return Reply<v1::GetModelInfoRequest, v1::GetModelInfoResponse>(
        context, "GetModelInfo", bytes, answer,
        [this](const auto&, auto* response) { return FillModelInfo(response); });
  }

  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                    grpc::ByteBuffer* answer) override {
    return Reply<v1::GetLoadRequest, v1::GetLoadResponse>(context, "GetLoad", bytes, answer,
                                                          [this](const auto&, auto* response) {
                                                            FillLoad(response);
                                                            return absl::OkStatus();
                                                          });
  }

 private:
  absl::Status Tokenize(const v1::TokenizeRequest& request, v1::TokenizeResponse* response) const;
  absl::Status Detokenize(const v1::DetokenizeRequest& request, v1::DetokenizeResponse* response) const;
  absl::Status FillModelInfo(v1::GetModelInfoResponse* response) const;
  void FillLoad(v1::GetLoadResponse* response) const;
  // Runs on the pool, since tokenizing a long prompt takes its time.
  void PrepareAndSubmit(const std::shared_ptr<Generation>& generation, const ClientRequest& request,
                        const GroupInfo& info);
  void ReleaseChoices(const std::string& id, uint32_t count);

  void CountCall(const char* method, const absl::Status& status) {
    exporter_->server()
        .Counter(metrics::kGrpcHandled,
                 {{"service", kServiceName}, {"method", method}, {"code", CodeName(status.code())}})
        .Increment();
  }
  // Bytes to request, `work`, response to bytes.
  template <typename Request, typename Response, typename Work>
  static absl::Status Handle(const grpc::ByteBuffer& bytes, grpc::ByteBuffer* answer, const Work& work) {
    if (EndedUnread(bytes)) return absl::CancelledError("the call ended before its request came");
    Request request;
    DFLASH_RETURN_IF_ERROR(ParseRequest(bytes, &request));
    Response response;
    DFLASH_RETURN_IF_ERROR(work(request, &response));
    *answer = ToByteBuffer(response);
    return absl::OkStatus();
  }
  grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor, const char* method,
                                   const absl::Status& status) {
    CountCall(method, status);
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }
  // Answers a unary call at once.
  template <typename Request, typename Response, typename Work>
  grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const char* method,
                                  const grpc::ByteBuffer* bytes, grpc::ByteBuffer* answer, const Work& work) {
    absl::Status status = Authorize(options_.tokens, *context, Role::kInference).status();
    if (status.ok()) status = Handle<Request, Response>(*bytes, answer, work);
    return Finish(context->DefaultReactor(), method, status);
  }
  // Answers it from the pool. gRPC keeps bytes and answer until Finish.
  template <typename Request, typename Response, typename Work>
  grpc::ServerUnaryReactor* ReplyLater(grpc::CallbackServerContext* context, const char* method,
                                       const grpc::ByteBuffer* bytes, grpc::ByteBuffer* answer, Work work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<std::string> client = Authorize(options_.tokens, *context, Role::kInference);
    if (!client.ok()) return Finish(reactor, method, client.status());
    if (const absl::Status entered = dispatcher_->EnterClient(*client); !entered.ok())
      return Finish(reactor, method, entered);
    const auto leave = [this, client = *client] {
      --waiting_texts_;
      dispatcher_->LeaveClient(client);
    };
    absl::Status taken;
    if (++waiting_texts_ > kMaxWaitingTexts) {
      taken =
          WithDetails(absl::ResourceExhaustedError(absl::StrCat("at most ", kMaxWaitingTexts, " texts wait")),
                      {.reason = "QUEUE_FULL", .field = "", .retry_after = absl::Seconds(1), .metadata = {}});
    } else {
      const size_t size = EndedUnread(*bytes) ? 0 : bytes->Length();
      taken = pool_.Post(*client, size,
                         [this, context, reactor, method, bytes, answer, leave, work = std::move(work)] {
                           const absl::Status status = context->IsCancelled()
                                                           ? absl::CancelledError("the client went away")
                                                           : Handle<Request, Response>(*bytes, answer, work);
                           leave();
                           Finish(reactor, method, status);
                         });
    }
    if (taken.ok()) return reactor;
    leave();
    return Finish(reactor, method, taken);
  }

  const Options options_;
  Dispatcher* const dispatcher_;
  const CheckpointPrompts* const prompts_;
  Exporter* const exporter_;
  RequestMetrics metrics_;
  const absl::Time started_ = absl::Now();
  mutable absl::Mutex mutex_;
  SpeculationPolicy speculation_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::weak_ptr<Generation>> generations_ ABSL_GUARDED_BY(mutex_);  // by request id
  std::vector<std::weak_ptr<Generation>> streams_ ABSL_GUARDED_BY(mutex_);  // until gRPC is done with them
  int64_t open_streams_ ABSL_GUARDED_BY(mutex_) = 0;                        // likewise
  std::atomic<int> waiting_texts_ = 0;
  LineBudget refusal_lines_{kRefusalLinesPerSecond};
  TextPool pool_;  // last: its jobs use all of the above
};

absl::Status InferenceService::Impl::Tokenize(const v1::TokenizeRequest& request,
                                              v1::TokenizeResponse* response) const {
  std::vector<int32_t> ids;
  switch (request.input_case()) {
    case v1::TokenizeRequest::kText: {
      if (request.text().size() > RequestLimits::kMaxTokenizeBytes)
        return TooLongToTokenize("text", absl::StrCat("it has ", request.text().size(), " bytes"));
      DFLASH_ASSIGN_OR_RETURN(ids, prompts_->EncodeText(request.text()));
      break;
    }
    case v1::TokenizeRequest::kChat: {
      DFLASH_ASSIGN_OR_RETURN(const ChatPrompt chat, FromMessage(request.chat()));
      DFLASH_RETURN_IF_ERROR(CheckChat(chat, "chat"));
      absl::StatusOr<std::vector<int32_t>> encoded =
          prompts_->EncodeChat(chat, RequestLimits::kMaxTokenizeBytes);
      if (absl::IsOutOfRange(encoded.status()))
        return TooLongToTokenize("chat", std::string(encoded.status().message()));
      DFLASH_ASSIGN_OR_RETURN(ids, std::move(encoded));
      break;
    }
    case v1::TokenizeRequest::INPUT_NOT_SET:
      return BadParameter("input", "one of text and chat must be set");
  }
  for (int32_t id : ids) {
    response->add_token_ids(static_cast<uint32_t>(id));
    if (!request.with_pieces()) continue;
    DFLASH_ASSIGN_OR_RETURN(const Tokenizer::Token token, prompts_->tokenizer().Find(id));
    response->add_pieces(std::string(token.bytes));
  }
  return absl::OkStatus();
}

absl::Status InferenceService::Impl::Detokenize(const v1::DetokenizeRequest& request,
                                                v1::DetokenizeResponse* response) const {
  for (int i = 0; i < request.token_ids_size(); ++i) {
    const uint32_t id = request.token_ids(i);
    const absl::StatusOr<Tokenizer::Token> token = id <= INT32_MAX
                                                       ? prompts_->tokenizer().Find(static_cast<int32_t>(id))
                                                       : absl::InvalidArgumentError("no such token");
    if (!token.ok()) {
      return BadParameter(absl::StrCat("token_ids[", i, "]"), absl::StrCat("no token has id ", id));
    }
    if (token->special && request.skip_special_tokens()) continue;
    response->mutable_text()->append(token->bytes);
  }
  return absl::OkStatus();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceService::Impl::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) {
  const absl::Time received = absl::Now();
  const absl::StatusOr<std::string> caller = Authorize(options_.tokens, *context, Role::kInference);
  v1::GenerateRequest message;  // what could be read of it, when it does not parse
  const absl::Status parsed = caller.ok() ? ParseRequest(*bytes, &message) : caller.status();
  absl::StatusOr<ClientRequest> request =
      parsed.ok() ? FromMessage(message) : absl::StatusOr<ClientRequest>(parsed);
  absl::Time deadline = absl::FromChrono(context->deadline());
  if (deadline > received + options_.max_deadline) {
    // No deadline at all looks like one in the far future.
    deadline = received + (deadline > received + absl::Hours(24 * 365) ? options_.default_deadline
                                                                       : options_.max_deadline);
  }
  StreamFacts facts;
  facts.request_id = message.request_id();
  if (facts.request_id.empty())
    facts.request_id = absl::StrCat("gen-", absl::Hex(RandomBits(), absl::kZeroPad16));
  facts.model = options_.model;
  facts.client = caller.value_or("");
  facts.trace = TraceOf(*context);
  // Whoever begins a trace decides whether it is recorded.
  if (options_.traces != nullptr && facts.trace.parent_span_id.empty() &&
      options_.traces->Samples(facts.trace.trace_id)) {
    facts.trace.flags |= 1;
  }
  context->AddInitialMetadata("traceparent", FormatTraceparent(facts.trace));
  if (request.ok()) {
    facts.labels = request->labels;
    facts.n = std::clamp(request->n, 1u, RequestLimits::kMaxN);
    facts.parse = request->parse;
    if (const auto* chat = std::get_if<ChatPrompt>(&request->prompt)) facts.tools_json = chat->tools_json;
    if (const absl::StatusOr<GroupInfo> info = dispatcher_->Info(); info.ok())
      facts.model_fingerprint = FingerprintOf(*info);
  }
  facts.client_stop_ids.assign(message.stopping().token_ids().begin(), message.stopping().token_ids().end());
  const std::string id = facts.request_id;
  StreamBuffer::Options output = OutputOptionsOf(message);
  output.max_unsent_bytes = options_.max_unsent_bytes;
  auto generation = std::make_shared<Generation>(
      dispatcher_, &metrics_, options_.traces, &refusal_lines_, std::move(facts), output, received, deadline,
      [this](const Generation& ended, const absl::Status& status) {
        CountCall("Generate", status);
        absl::MutexLock lock(&mutex_);
        // Another call may use the same id: refused, or by now its own.
        const auto found = generations_.find(ended.id());
        if (found != generations_.end() && found->second.lock().get() == &ended) {
          generations_.erase(found);
        }
      },
      [this] {
        absl::MutexLock lock(&mutex_);
        --open_streams_;
      });
  {
    absl::MutexLock lock(&mutex_);
    streams_.push_back(generation);
    ++open_streams_;
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* reactor = generation->NewReactor(context);
  if (caller.ok() && EndedUnread(*bytes)) {
    generation->OnClientGone();
    return reactor;
  }
  const auto accept = [&]() -> absl::StatusOr<GroupInfo> {
    if (!request.ok()) return request.status();
    request->id = id;
    request->deadline = deadline;
    request->client = *caller;
    DFLASH_RETURN_IF_ERROR(CheckRequestId(id));
    DFLASH_RETURN_IF_ERROR(CheckModel(request->model, options_.model));
    DFLASH_ASSIGN_OR_RETURN(GroupInfo info, dispatcher_->Info());
    DFLASH_RETURN_IF_ERROR(Apply(speculation(), &*request, &info));
    DFLASH_RETURN_IF_ERROR(CheckRequest(*request, info));
    DFLASH_RETURN_IF_ERROR(CheckTextFits(request->prompt, info, *prompts_));
    for (uint32_t index = 0; index < request->n; ++index) {
      const absl::Status reserved = dispatcher_->Reserve(Generation::IdOfChoice(id, index), request->client);
      if (reserved.ok()) continue;
      ReleaseChoices(id, index);
      return reserved;
    }
    return info;
  };
  absl::StatusOr<GroupInfo> info = accept();
  if (!info.ok()) {
    generation->Fail(info.status());
    return reactor;
  }
  {
    absl::MutexLock lock(&mutex_);
    generations_[id] = generation;
  }
  const uint32_t n = request->n;
  const absl::Status posted = pool_.Post(
      *caller, bytes->Length(), [this, generation, request = *std::move(request), info = *std::move(info)] {
        PrepareAndSubmit(generation, request, info);
      });
  if (!posted.ok()) {
    ReleaseChoices(id, n);
    generation->Fail(posted);
  }
  return reactor;
}

void InferenceService::Impl::ReleaseChoices(const std::string& id, uint32_t count) {
  for (uint32_t index = 0; index < count; ++index) dispatcher_->Release(Generation::IdOfChoice(id, index));
}

void InferenceService::Impl::PrepareAndSubmit(const std::shared_ptr<Generation>& generation,
                                              const ClientRequest& request, const GroupInfo& info) {
  if (generation->HasEnded()) return ReleaseChoices(generation->id(), request.n);
  absl::StatusOr<GroupRequest> prepared = Prepare(request, info, *prompts_, RandomBits());
  if (!prepared.ok()) {
    ReleaseChoices(generation->id(), request.n);
    return generation->Fail(prepared.status());
  }
  generation->Submit(*prepared);
}

absl::Status InferenceService::Impl::FillModelInfo(v1::GetModelInfoResponse* response) const {
  DFLASH_ASSIGN_OR_RETURN(GroupInfo info, dispatcher_->Info());
  ClientRequest any;
  DFLASH_RETURN_IF_ERROR(Apply(speculation(), &any, &info));
  response->set_model(options_.model);
  response->set_server_version(options_.version);
  response->set_backend(info.backend);
  response->set_tensor_parallel_size(static_cast<uint32_t>(info.ranks));
  response->set_max_context_tokens(static_cast<uint32_t>(info.max_context_tokens));
  response->set_vocabulary_size(static_cast<uint32_t>(info.vocabulary_size));
  for (int32_t id : info.eos_token_ids) response->add_eos_token_ids(static_cast<uint32_t>(id));
  v1::Sampling* sampling = response->mutable_default_sampling();
  sampling->set_temperature(info.default_temperature);
  sampling->set_top_k(static_cast<uint32_t>(info.default_top_k));
  sampling->set_top_p(info.default_top_p);
  sampling->set_min_p(info.default_min_p);
  if (info.dflash_block_size > 0) {
    response->mutable_drafter()->set_mode(v1::SPECULATION_MODE_DFLASH);
    response->mutable_drafter()->set_name(options_.drafter_name);
    response->mutable_drafter()->set_block_size(static_cast<uint32_t>(info.dflash_block_size));
  }
  response->set_default_speculation(ModeOf(info.speculate_by_default));
  response->set_max_sequences(static_cast<uint32_t>(info.max_sequences));
  response->set_same_text_rows(static_cast<uint32_t>(info.same_text_rows));
  response->set_feature_contract(info.feature_contract);
  response->set_model_fingerprint(FingerprintOf(info));
  return absl::OkStatus();
}

void InferenceService::Impl::FillLoad(v1::GetLoadResponse* response) const {
  const Dispatcher::Stats stats = dispatcher_->GetStats();
  response->set_serving(stats.serving);
  response->set_detail(stats.detail);
  response->set_running(static_cast<uint32_t>(stats.running));
  response->set_waiting(static_cast<uint32_t>(stats.waiting));
  response->set_waiting_prompt_tokens(static_cast<uint64_t>(stats.waiting_prompt_tokens));
  response->set_max_waiting(static_cast<uint32_t>(stats.limits.max_requests));
  response->set_max_waiting_prompt_tokens(static_cast<uint64_t>(stats.limits.max_prompt_tokens));
  response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - started_));
  const auto total = [&](const MetricInfo& info, const MetricLabels& labels = {}) {
    return static_cast<uint64_t>(exporter_->server().Counter(info, labels).Value());
  };
  response->set_generated_tokens(total(metrics::kGeneratedTokens));
  response->set_prompt_tokens(total(metrics::kPromptTokens, {{"source", "computed"}}));
  response->set_cached_tokens(total(metrics::kPromptTokens, {{"source", "cached"}}));
  for (const char* outcome : {"stop", "length", "cancelled", "deadline", "rejected", "error"}) {
    (*response->mutable_requests())[outcome] =
        total(metrics::kRequests, {{"api", "grpc"}, {"outcome", outcome}});
  }
  for (const Dispatcher::GroupStats& group : stats.groups) {
    v1::GroupLoad* load = response->add_groups();
    load->set_name(group.name);
    load->set_state(StateOf(group.state));
    load->set_detail(group.state == Dispatcher::GroupState::kLoading && !group.why_lost.empty()
                         ? absl::StrCat("last failure: ", group.why_lost)
                         : group.why_lost);
    load->set_leader_pid(group.info.pid);
    load->set_running(static_cast<uint32_t>(group.running));
    load->set_state_slots(static_cast<uint32_t>(group.info.max_sequences));
    const auto sum = [&](const MetricInfo& info, const MetricLabels& labels = {}) {
      return static_cast<uint64_t>(exporter_->Sum(group.name, info, labels));
    };
    load->set_cache_pages_total(sum(metrics::kCacheBlocks, {{"pool", "kv"}}));
    load->set_cache_pages_free(sum(metrics::kCacheBlocks, {{"pool", "kv"}, {"state", "free"}}) +
                               sum(metrics::kCacheBlocks, {{"pool", "kv"}, {"state", "evictable"}}));
    load->set_speculation_rounds(sum(metrics::kSpecDrafts));
    load->set_drafted_tokens(sum(metrics::kSpecDraftTokens));
    load->set_accepted_tokens(sum(metrics::kSpecAcceptedTokens));
    for (int64_t depth = 0; depth + 1 < group.info.dflash_block_size; ++depth) {
      const MetricLabels position = {{"position", absl::StrCat(depth)}};
      load->add_drafted_per_position(sum(metrics::kSpecDraftTokensPerPosition, position));
      load->add_accepted_per_position(sum(metrics::kSpecAcceptedTokensPerPosition, position));
    }
    *load->mutable_speculation_health() = HealthOf(*exporter_, group);
  }
}

InferenceService::InferenceService(Options options, Dispatcher* dispatcher, const CheckpointPrompts* prompts,
                                   Exporter* exporter)
    : impl_(std::make_unique<Impl>(std::move(options), dispatcher, prompts, exporter)) {}
InferenceService::~InferenceService() = default;
void InferenceService::SetSpeculation(const SpeculationPolicy& policy) { impl_->SetSpeculation(policy); }
SpeculationPolicy InferenceService::speculation() const { return impl_->speculation(); }
bool InferenceService::AwaitStreams(absl::Time deadline, const std::function<bool()>& give_up) {
  return impl_->AwaitStreams(deadline, give_up);
}
void InferenceService::LookAgain() { impl_->LookAgain(); }
void InferenceService::Tick(absl::Time now) { impl_->Tick(now); }
grpc::Service* InferenceService::service() { return impl_.get(); }

}  // namespace dflash
