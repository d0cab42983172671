// A generation request as the group's leader runs it, and what it reports back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/sampling/sampling.h"
#include "worker/model/row_processing.h"

namespace dflash {

enum class SpeculationMode : uint8_t { kOff, kDFlash };

struct LogitBias {
  int32_t token = 0;
  float bias = 0;
};

// Most tokens of thinking: between the tokens `open` and `close`, opened by prompt or output.
struct ThinkingBudget {
  int64_t max_tokens = -1;  // -1: no bound
  int32_t open = -1, close = -1;
};

// The language that an output belongs to; at most one of them.
struct OutputConstraint {
  bool json_object = false;
  std::string json_schema;
  std::vector<std::string> choices;
  // Inside these the constraint does not hold yet; -1: there are none.
  int32_t thinking_open = -1, thinking_close = -1;

  bool any() const { return json_object || !json_schema.empty() || !choices.empty(); }
};

struct GenerationRequest {
  std::string id;
  std::string client;                  // whose it is; shares slots with the others of its priority
  int32_t priority = 0;                // higher ones get slots and pages first
  std::vector<int32_t> prompt_tokens;  // at least one; every id < vocabulary
  SamplingParams sampling;
  float repetition_penalty = 1;  // > 0; of tokens in prompt or output
  float frequency_penalty = 0;   // of tokens in the output, each time
  float presence_penalty = 0;    // of tokens in the output, once
  std::vector<LogitBias> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;  // none of these sequences in the output
  ThinkingBudget thinking;
  OutputConstraint constraint;
  int64_t max_tokens = 0;               // >= 1; prompt_tokens + max_tokens <= context limit
  std::vector<int32_t> stop_token_ids;  // end the output when emitted (they are its last token)
  std::vector<std::string>
      stop_strings;  // end the output when the text contains one; text from there on is never sent
  bool include_stop_in_text = false;  // but for the stop string itself
  int64_t min_tokens = 0;             // no stop tokens among so many first ones, no stop string in their text
  SpeculationMode speculation = SpeculationMode::kDFlash;
  // Verified drafts of a round. 0: as many as the drafter's block gives, or fewer under load; else at most so
  // many, and all of a block or more mean whole blocks whatever the load.
  int32_t max_draft_tokens = 0;
  int32_t log_probs = 0;  // 0: none; else one and the number of best tokens beside each of the output
  // The same of the prompt's tokens but the first, which nothing precedes. Such a request runs all of its
  // prompt, whatever is cached.
  int32_t prompt_log_probs = 0;
  int64_t prompt_log_probs_done = 0;  // so many first ones were reported in an earlier life of the request
  // Of an earlier life of the request: the output goes on behind them. They were reported then.
  std::vector<int32_t> output_tokens;
  bool report_sent_text = false;     // tell in StartedReport what text was sent with them
  bool return_text = true;           // detokenize in the leader
  bool keep_special_tokens = false;  // in the text
  bool use_prefix_cache = true;      // to begin with what is there, and to leave something
  std::string cache_salt;            // of whose requests prefixes are shared
  absl::Time deadline = absl::InfiniteFuture();
};

// One draft-verify round of a request.
struct RoundReport {
  int32_t drafted = 0;   // drafts sent to verification
  int32_t accepted = 0;  // of them, equal to the target's token; the correction or bonus token is not counted
};

// What the tokens around a place of an output are; of thinking that holds code, thinking.
enum class ContentClass : uint8_t { kText, kCode, kThinking, kToolCall };
inline constexpr int kContentClasses = 4;

// Where the stores of a decoding sequence got their contents.
enum class ContextOrigin : uint8_t {
  kCold,     // from its own prompt alone
  kPrefix,   // its beginning from the prefix cache
  kResumed,  // computed again after a preemption
};
inline constexpr int kContextOrigins = 3;

enum class FinishReason : uint8_t { kStopToken, kStopString, kLength, kConstraint };

struct StartedReport {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  // If report_sent_text: the text of output_tokens, as far as TokensReports had it then.
  std::string sent_text = {};
};

// New output of one step. Concatenated over a request, `tokens` are the output and `text` its detokenization
// (valid UTF-8; may lag behind the tokens).
struct TokensReport {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<RoundReport> rounds;  // empty for the first token, which comes from prefill; else one entry
  std::vector<TokenLogProbs> log_probs = {};  // one per token, if the request wants them
  // Of the prompt's next tokens, at most kMaxPromptPlaces; all of them before the output, in reports of their
  // own.
  std::vector<TokenLogProbs> prompt_log_probs = {};
};
inline constexpr size_t kMaxPromptPlaces = 256;

struct FinishedReport {
  FinishReason reason = FinishReason::kLength;
  int32_t matched_stop_token = -1;  // kStopToken
  std::string matched_stop_string;  // kStopString
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // up to and including the token that completed the stop
  // Speculation, over all rounds with at least one drafted token.
  int64_t rounds = 0;
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;
  std::vector<int64_t> drafted_per_position;   // [d]: rounds that verified a draft at depth d + 1
  std::vector<int64_t> accepted_per_position;  // [d]: rounds that accepted at least d + 1 drafts
  absl::Duration prefill_time;                 // first prefill step to first token
  absl::Duration decode_time;                  // first token to last
  absl::Duration draft_time;   // share of the group's draft passes while this request took part
  absl::Duration verify_time;  // likewise, target forward of verify rows
};

// Receives what happens to one request. Calls come from the engine's thread, in order: OnStarted,
// OnTokens..., then exactly one of OnFinished or OnFailed, after which the sink is destroyed. A request that
// fails before it starts gets OnFailed only. Implementations must not block and must not call back into the
// engine.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  virtual void OnStarted(const StartedReport& report) = 0;
  virtual void OnTokens(TokensReport report) = 0;
  virtual void OnFinished(const FinishedReport& report) = 0;
  // Cancelled, DeadlineExceeded, InvalidArgument (bad request), Internal (NaN logits, broken invariant of one
  // request).
  virtual void OnFailed(const absl::Status& status) = 0;
};

}  // namespace dflash
