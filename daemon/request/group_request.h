// A checked request as a worker group gets it, and what comes back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dflash {

inline constexpr int32_t kMinPriority = -10, kMaxPriority = 10;

struct GroupRequest {
  std::string client;    // whose it is, for fairness and limits
  int32_t priority = 0;  // the higher, the sooner; kMinPriority to kMaxPriority
  std::vector<int32_t> prompt_tokens;
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  uint64_t seed = 0;
  int64_t max_tokens = 0;
  std::vector<int32_t>
      stop_token_ids;  // the model's own end tokens among them, unless the client ignores those
  std::vector<std::string> stop_strings;
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
};

struct StartedOutput {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
};

struct Round {
  int32_t drafted = 0;
  int32_t accepted = 0;
};

// Output of one step.
struct StepOutput {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<Round> rounds;  // at most one entry; none for the first token
};

enum class StopCause : uint8_t { kStopToken, kStopString, kLength };

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
