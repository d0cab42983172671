// From what a client asks for to what a group runs: every field is checked, defaults are filled in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/request/client_request.h"
#include "daemon/request/group_request.h"

namespace dflash {

struct RequestLimits {
  static constexpr size_t kMaxIdBytes = 128;
  static constexpr size_t kMaxStopStrings = 16;
  static constexpr size_t kMaxStopStringBytes = 256;
  static constexpr size_t kMaxStopTokens = 64;
  static constexpr size_t kMaxChatMessages = 4096;
  static constexpr size_t kMaxTools = 4096;
  static constexpr size_t kMaxToolCalls = 4096;  // of all messages together
  // Of Tokenize: its text, or what its chat renders to.
  static constexpr size_t kMaxTokenizeBytes = 2 << 20;
  // Below the least ones logits and probabilities would leave the numbers that float32 has; nobody means such
  // values: 0 is the temperature that always takes the best token.
  static constexpr float kMinTemperature = 1e-6f, kMaxTemperature = 100;
  static constexpr float kMinShare = 1e-6f;  // of top_p and min_p
  static constexpr size_t kMaxCacheSaltBytes = 256;
  static constexpr float kMinRepetitionPenalty = 0.01f, kMaxRepetitionPenalty = 10;
  static constexpr float kMaxPenalty = 2;  // frequency and presence, of either sign
  static constexpr size_t kMaxBiases = 1024;
  static constexpr float kMaxBias = 100;  // of either sign
  static constexpr size_t kMaxBadWords = 64;
  static constexpr size_t kMaxBadWordTokens = 32;
  static constexpr uint32_t kMaxTopLogProbs = 20;
  // What a server may have to keep for a client that reads slowly: prompt tokens times (1 + prompt_logprobs).
  static constexpr int64_t kMaxPromptLogProbs = 262144;
  static constexpr uint32_t kMaxN = 16;
  static constexpr size_t kMaxLabels = 16;
  static constexpr size_t kMaxLabelKeyBytes = 64, kMaxLabelValueBytes = 256;
  static constexpr size_t kMaxChoices = 1024;
  static constexpr size_t kMaxChoiceBytes = 64 << 10;  // together
};

// Turns prompts into token ids.
class PromptEncoder {
 public:
  virtual ~PromptEncoder() = default;
  // InvalidArgument, naming the field `text`: the tokenizer cannot encode it.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const = 0;
  // InvalidArgument, naming the field `chat` or one in it: the template refuses the messages, or would do
  // more for them than it may (reason TEMPLATE_ERROR); as EncodeText. Unimplemented: the template uses what
  // is not built. OutOfRange, before it is tokenized: the rendered prompt has more than `max_bytes`.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeChat(const ChatPrompt& chat, size_t max_bytes) const = 0;
  // The most bytes that a text of so many tokens can have.
  virtual size_t MaxBytes(int64_t tokens) const = 0;
  // The added token with this content ("<think>"), if there is one.
  virtual std::optional<int32_t> FindToken(const std::string& content) const = 0;
};

// What an output depends on besides the request; servers with the same one give the same text.
std::string FingerprintOf(const GroupInfo& info);
// The seed of choice `index` of a request.
uint64_t SeedOfChoice(uint64_t seed, uint32_t index);

// What an operator has chosen for requests that come.
struct SpeculationPolicy {
  std::optional<bool> speculate;  // those that do not choose; unset: as the group does by default
  uint32_t max_draft_tokens = 0;  // for all; 0: no bound
  bool off_for_all = false;       // also for those that choose otherwise
};
// Changes request and group defaults accordingly. FailedPrecondition: a strict request for what is off.
absl::Status Apply(const SpeculationPolicy& policy, ClientRequest* request, GroupInfo* info);

// InvalidArgument unless the id is empty or 1 to 128 characters of [A-Za-z0-9._:-].
absl::Status CheckRequestId(const std::string& id);
// NotFound unless `model` is empty or the served one's name.
absl::Status CheckModel(const std::string& model, const std::string& served);
// Whether there are messages, and their roles; InvalidArgument naming the field below `field`.
absl::Status CheckChat(const ChatPrompt& chat, const std::string& field);

// Everything that can be checked without tokenizing, so that a bad request costs nothing and keeps no place
// in the queue. Errors: InvalidArgument naming the field; FailedPrecondition: strict speculation with a
// method that is not loaded; Aborted: an output goes on that another model or backend has begun.
absl::Status CheckRequest(const ClientRequest& request, const GroupInfo& info);

// InvalidArgument, reason CONTEXT_TOO_LONG: the prompt is a text with more bytes than fit in the context
// limit, whatever they are. Tells without tokenizing.
absl::Status CheckTextFits(const Prompt& prompt, const GroupInfo& info, const PromptEncoder& encoder);

// Tokenizes the prompt and fills in defaults. Call it after CheckRequest and CheckTextFits. `random_seed` is
// used when the request has no seed. InvalidArgument: an empty prompt; a token id out of range; too many log
// probabilities of the prompt; reason CONTEXT_TOO_LONG: prompt and max_tokens together are over the context
// limit, or a rendered chat has more bytes than fit in it. FailedPrecondition: a limit of thinking where the
// tokenizer has no marks of it. Unimplemented: a schema with a keyword that is not built.
absl::StatusOr<GroupRequest> Prepare(const ClientRequest& request, const GroupInfo& info,
                                     const PromptEncoder& encoder, uint64_t random_seed);

}  // namespace dflash
