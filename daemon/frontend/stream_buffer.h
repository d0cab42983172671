// What a generation's client has not been sent yet. A slow reader gets several steps merged into one chunk;
// nothing is lost and the order stays. Pure: no stream, no threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/request/client_request.h"
#include "daemon/request/group_request.h"
#include "text/chat_output.h"

namespace dflash {

// One draft-verify round in a chunk.
struct ChunkStep {
  int32_t drafted = 0;
  int32_t accepted = 0;
  int64_t first_token_offset = 0;  // in the output
  int64_t token_count = 0;
};

struct OutputChunk {
  int64_t first_token_offset = 0;  // of the first token behind this chunk, also when the ids are not wanted
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<ChunkStep> steps;
  // Of output that is taken apart.
  std::string reasoning = {};
  std::vector<ToolCall> calls = {};
  std::vector<PlaceLogProbs> log_probs = {};
  // Of the prompt; then there is nothing else in the chunk.
  int64_t first_prompt_position = 0;
  std::vector<PlaceLogProbs> prompt_log_probs = {};
};

using StreamEvent = std::variant<OutputChunk, FinishedOutput>;

class StreamBuffer {
 public:
  struct Options {
    bool text = true;
    bool tokens = true;
    bool steps = true;
    size_t max_unsent_bytes = 256 << 10;
    int64_t first_token = 0;  // place in the output of what comes first
  };
  explicit StreamBuffer(const Options& options) : options_(options), output_tokens_(options.first_token) {}

  // Takes the text apart from now on.
  void SetParser(std::unique_ptr<ChatOutputParser> parser) { parser_ = std::move(parser); }
  // Text that the client got of an earlier stream: what comes is taken apart as its continuation.
  void GoOnBehind(std::string_view sent) {
    if (parser_ != nullptr) parser_->Feed(sent);
  }

  // In the order of OutputListener.
  // ResourceExhausted (reason SLOW_CONSUMER): more than max_unsent_bytes would wait; the output is not taken.
  // Log probabilities of the prompt do not count: they come faster than many a client reads, and the request
  // bounds them (RequestLimits::kMaxPromptLogProbs).
  absl::Status AddTokens(StepOutput output);
  void AddFinished(const FinishedOutput& finished);

  // The next event to send: everything that is here of its kind, but of the prompt's log probabilities at
  // most kMaxPromptPlaces; nullopt when there is nothing to send.
  std::optional<StreamEvent> Next();

  static constexpr size_t kMaxPromptPlaces = 256;

  size_t unsent_bytes() const { return unsent_bytes_; }

 private:
  size_t AddText(std::string text);
  size_t AddParts(ChatOutputParser::Part part);

  const Options options_;
  std::unique_ptr<ChatOutputParser> parser_;  // null: text is content
  OutputChunk chunk_;
  std::vector<PlaceLogProbs> prompt_places_;  // of the prompt's tokens behind the first
  size_t sent_places_ = 0;                    // of those of this vector
  int64_t prompt_position_ = 1;               // of the next one to be sent
  size_t unsent_bytes_ = 0;
  int64_t output_tokens_;
  std::optional<FinishedOutput> finished_;
};

}  // namespace dflash
