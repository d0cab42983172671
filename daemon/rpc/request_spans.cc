#include "daemon/rpc/request_spans.h"

#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

std::string RandomSpanId() {
  thread_local std::random_device device;
  const uint64_t bits = static_cast<uint64_t>(device()) << 32 | device();
  return absl::StrCat(absl::Hex(bits == 0 ? 1 : bits, absl::kZeroPad16));
}

}  // namespace

std::vector<Span> SpansOf(const StreamFacts& facts, const RequestTimeline& timeline, absl::Time prepared,
                          int64_t cached_tokens, const absl::Status& status, const FinishedOutput* finished) {
  Span call = {.trace_id = facts.trace.trace_id,
               .span_id = facts.trace.span_id,
               .parent_span_id = facts.trace.parent_span_id,
               .name = "generate",
               .kind = Span::Kind::kServer,
               .start = timeline.received_at(),
               .end = timeline.ended_at(),
               .attributes = {{"rpc.system", std::string("grpc")},
                              {"rpc.service", std::string("dflash.v1.InferenceService")},
                              {"rpc.method", std::string("Generate")},
                              {"rpc.grpc.status_code", static_cast<int64_t>(status.code())},
                              {"gen_ai.request.model", facts.model},
                              {"gen_ai.usage.output_tokens", timeline.output_tokens()},
                              {"dflashd.request_id", facts.request_id}},
               .error = {}};
  const auto add = [&](const char* key, Span::Value value) {
    call.attributes.emplace_back(key, std::move(value));
  };
  if (!facts.client.empty()) add("dflashd.client", facts.client);
  if (prepared != absl::InfinitePast()) {
    add("gen_ai.request.max_tokens", facts.request.max_tokens);
    add("gen_ai.request.temperature", static_cast<double>(facts.request.temperature));
    add("gen_ai.request.top_p", static_cast<double>(facts.request.top_p));
    add("gen_ai.request.top_k", int64_t{facts.request.top_k});
    add("gen_ai.request.choice.count", int64_t{facts.n});
    add("dflashd.speculation", std::string(facts.request.speculate ? "dflash" : "off"));
  }
  if (timeline.started()) add("dflashd.cached_tokens", cached_tokens);
  if (finished != nullptr) {
    add("gen_ai.usage.input_tokens", finished->prompt_tokens);
    add("dflashd.rounds", finished->rounds);
    add("dflashd.drafted_tokens", finished->drafted_tokens);
    add("dflashd.accepted_tokens", finished->accepted_tokens);
    add("dflashd.replays", finished->replays);
    if (finished->rounds > 0) {
      add("dflashd.mean_acceptance_length",
          1 + static_cast<double>(finished->accepted_tokens) / static_cast<double>(finished->rounds));
    }
  }
  // The words of an error may quote the client.
  if (!status.ok())
    call.error = absl::StrCat(absl::StatusCodeToString(status.code()), " ", DetailsOf(status).reason);

  std::vector<Span> spans = {call};
  const auto part = [&](const char* name, absl::Time from, absl::Time to) {
    if (from == absl::InfinitePast()) return;
    spans.push_back({.trace_id = call.trace_id,
                     .span_id = RandomSpanId(),
                     .parent_span_id = call.span_id,
                     .name = name,
                     .kind = Span::Kind::kInternal,
                     .start = from,
                     .end = to == absl::InfinitePast() ? call.end : to,
                     .attributes = {},
                     .error = {}});
  };
  if (prepared != absl::InfinitePast()) part("prepare", timeline.received_at(), prepared);
  part("queue", prepared, timeline.started_at());
  part("prefill", timeline.started_at(), timeline.first_token_at());
  part("decode", timeline.first_token_at(), absl::InfinitePast());
  return spans;
}

}  // namespace dflash
