// A generation request as a client wrote it: nothing is checked yet, unset values are unset.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "daemon/request/group_request.h"

namespace dflash {

struct ToolCall {
  std::string name;
  std::string arguments_json;
};

struct ChatMessage {
  std::string role;
  std::string content;
  std::optional<std::string> reasoning_content;
  std::vector<ToolCall> tool_calls;
};

struct ChatPrompt {
  std::vector<ChatMessage> messages;
  bool add_generation_prompt = true;
  std::optional<bool> enable_thinking;
  std::optional<bool> preserve_thinking;
  std::vector<std::string> tools_json;
};

struct TextPrompt {
  std::string text;
};

struct TokenPrompt {
  std::vector<uint32_t> ids;
};

using Prompt = std::variant<std::monostate, TextPrompt, TokenPrompt, ChatPrompt>;

enum class SpeculationChoice : uint8_t { kServerDefault, kOff, kDFlash };

// A client's own label.
struct RequestLabel {
  std::string key, value;
};

struct ClientRequest {
  std::string id;
  std::string model;
  Prompt prompt;
  // Sampling.
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<uint32_t> top_k;
  std::optional<float> min_p;
  std::optional<uint64_t> seed;
  std::optional<float> repetition_penalty;
  std::optional<float> frequency_penalty;
  std::optional<float> presence_penalty;
  struct Bias {
    uint32_t token = 0;
    float bias = 0;
  };
  std::vector<Bias> logit_bias;
  uint32_t n = 1;
  OutputLanguage language;
  // Stopping.
  std::optional<uint32_t> max_tokens;
  uint32_t min_tokens = 0;
  bool include_stop_in_text = false;
  std::vector<std::vector<uint32_t>> bad_words;
  std::optional<uint32_t> max_thinking_tokens;
  std::vector<std::string> stop_strings;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
  // Output.
  std::optional<bool> text;
  bool special_tokens_in_text = false;
  std::optional<uint32_t> top_logprobs;
  std::optional<uint32_t> prompt_logprobs;
  bool parse = false;
  // Speculation.
  SpeculationChoice speculation = SpeculationChoice::kServerDefault;
  std::optional<uint32_t> max_draft_tokens;
  bool strict_speculation = false;
  std::vector<RequestLabel> labels;
  // The beginning of an output that the client has.
  struct Resume {
    std::vector<uint32_t> output;
    std::string fingerprint;
  };
  std::optional<Resume> resume;
  // Scheduling.
  int32_t priority = 0;
  std::string client;  // who asks, as the transport tells; never from the message

  // Caches.
  bool use_prefix_cache = true;
  std::string cache_salt;

  absl::Time deadline = absl::InfiniteFuture();
};

}  // namespace dflash
