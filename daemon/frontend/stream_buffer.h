// What a generation's client has not been sent yet. A slow reader gets several steps merged into one chunk;
// nothing is lost and the order stays. Pure: no stream, no threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/request/group_request.h"

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
};

using StreamEvent = std::variant<StartedOutput, OutputChunk, FinishedOutput>;

class StreamBuffer {
 public:
  struct Options {
    bool text = true;
    bool tokens = true;
    bool steps = true;
    size_t max_unsent_bytes = 256 << 10;
  };
  explicit StreamBuffer(const Options& options) : options_(options) {}

  // In the order of OutputListener.
  void AddStarted(const StartedOutput& started) { started_ = started; }
  // ResourceExhausted (reason SLOW_CONSUMER): more than max_unsent_bytes would wait; the output is not taken.
  absl::Status AddTokens(StepOutput output);
  void AddFinished(const FinishedOutput& finished) { finished_ = finished; }

  // The next event to send: everything that is here of its kind; nullopt when there is nothing to send.
  std::optional<StreamEvent> Next();

  size_t unsent_bytes() const { return unsent_bytes_; }

 private:
  const Options options_;
  std::optional<StartedOutput> started_;
  OutputChunk chunk_;
  size_t unsent_bytes_ = 0;
  int64_t output_tokens_ = 0;
  std::optional<FinishedOutput> finished_;
};

}  // namespace dflash
