// A checked request as a worker group gets it, and what comes back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/model_identity.h"

namespace dflash {

inline constexpr int32_t kMinPriority = -10, kMaxPriority = 10;

// Added to the logit of one token.
struct TokenBias {
  int32_t token = 0;
  float bias = 0;
};

// Most tokens between the marks of thinking.
struct ThinkingLimit {
  int64_t max_tokens = -1;  // -1: no limit
  int32_t open = -1, close = -1;
};

// The language that an output belongs to; at most one of the first three.
struct OutputLanguage {
  bool json_object = false;
  std::string json_schema;
  std::vector<std::string> choices;
  int32_t thinking_open = -1, thinking_close = -1;  // it does not hold inside these; -1: there are none

  bool any() const { return json_object || !json_schema.empty() || !choices.empty(); }
};

struct GroupRequest {
  std::string client;    // whose it is, for fairness and limits
  int32_t priority = 0;  // the higher, the sooner; kMinPriority to kMaxPriority
  std::vector<int32_t> prompt_tokens;
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  uint64_t seed = 0;
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  std::vector<TokenBias> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;
  ThinkingLimit thinking;
  OutputLanguage language;
  int64_t max_tokens = 0;
  int64_t min_tokens = 0;
  std::vector<int32_t>
      stop_token_ids;  // the model's own end tokens among them, unless the client ignores those
  std::vector<std::string> stop_strings;
  bool include_stop_in_text = false;
  bool thinks = false;                 // the prompt has opened thinking
  int32_t log_probs = 0;               // 0: none; else one and the number of best tokens
  int32_t prompt_log_probs = 0;        // the same of the prompt's tokens but the first
  int64_t prompt_log_probs_done = 0;   // of them, so many first ones came in an earlier life of the request
  std::vector<int32_t> output_tokens;  // of an earlier life of the request; the output goes on behind them
  bool report_sent_text = false;       // tell in StartedOutput what text was sent with them
  bool speculate = true;
  int32_t max_draft_tokens = 0;  // 0: as many as the drafter gives
  bool return_text = true;
  bool keep_special_tokens = false;
  bool use_prefix_cache = true;
  std::string cache_salt;  // prefixes are shared among requests of the same one
  absl::Time deadline = absl::InfiniteFuture();
};

// What a group is; fixed while it lives.
struct GroupInfo {
  int32_t pid = 0;
  std::string backend;
  int64_t ranks = 1;
  std::string feature_contract;
  ModelIdentity model = {};
  int64_t vocabulary_size = 0;
  int64_t max_context_tokens = 0;
  int64_t max_sequences = 0;
  int64_t same_text_rows = 0;
  int64_t dflash_block_size = 0;  // 0: no drafter
  bool speculate_by_default = false;
  std::vector<int32_t> eos_token_ids;
  // Defaults of generation_config.json.
  float default_temperature = 0;
  int32_t default_top_k = 0;
  float default_top_p = 1;
  float default_min_p = 0;
  std::string self_test = {};  // how it ended, and what it found
  std::string self_test_detail = {};
  // Of stored tensors, by "target NAME", "drafter NAME" and "whole drafter NAME"; null: none. Shared: a large
  // model has a thousand, and every request gets a copy of this struct.
  std::shared_ptr<const std::map<std::string, std::string>> fingerprints = {};
};

struct StartedOutput {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  std::string sent_text = {};  // of output_tokens, if report_sent_text
};

struct Round {
  int32_t drafted = 0;
  int32_t accepted = 0;
};

// Natural logarithms of probabilities at one place of an output.
struct PlaceLogProbs {
  struct Top {
    int32_t token = 0;
    float log_prob = 0;
  };
  float log_prob = 0;    // of the token there
  std::vector<Top> top;  // the best tokens, best first
};

// Output of one step.
struct StepOutput {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<Round> rounds;                  // at most one entry; none for the first token
  std::vector<PlaceLogProbs> log_probs = {};  // one per token, if the request wants them
  // Of the prompt's next tokens; all of them before the first token, in reports of their own.
  std::vector<PlaceLogProbs> prompt_log_probs = {};
};

enum class StopCause : uint8_t { kStopToken, kStopString, kLength, kConstraint };

struct FinishedOutput {
  StopCause cause = StopCause::kLength;
  int32_t matched_stop_token = -1;
  std::string matched_stop_string;
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t rounds = 0;
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;
  std::vector<int64_t> drafted_per_position;
  std::vector<int64_t> accepted_per_position;
  int64_t replays = 0;  // how often its group was lost and it went on in another life of one
  absl::Duration prefill_time;
  absl::Duration decode_time;
  absl::Duration draft_time;
  absl::Duration verify_time;
};

// Receives what happens to one request, from any thread but one call at a time and in order: OnStarted,
// OnTokens..., then exactly one of OnFinished and OnFailed. OnFailed may come alone, and while another call
// is under way. Must not block.
class OutputListener {
 public:
  virtual ~OutputListener() = default;
  virtual void OnStarted(const StartedOutput& started) = 0;
  virtual void OnTokens(StepOutput output) = 0;
  virtual void OnFinished(const FinishedOutput& finished) = 0;
  virtual void OnFailed(const absl::Status& status) = 0;
};

}  // namespace dflash
