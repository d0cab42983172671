#include "daemon/frontend/stream_buffer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"

namespace dflash {

absl::Status StreamBuffer::AddTokens(StepOutput output) {
  size_t bytes = 0;
  if (options_.tokens) bytes += output.tokens.size() * sizeof(int32_t);
  if (options_.text) bytes += output.text.size();
  if (options_.steps) bytes += output.rounds.size() * sizeof(ChunkStep);
  if (unsent_bytes_ + bytes > options_.max_unsent_bytes) {
    return WithDetails(
        absl::ResourceExhaustedError(absl::StrCat("the client reads too slowly: over ",
                                                  options_.max_unsent_bytes, " bytes wait to be sent")),
        {.reason = "SLOW_CONSUMER", .field = "", .retry_after = {}, .metadata = {}});
  }
  if (unsent_bytes_ == 0) chunk_.first_token_offset = output_tokens_;
  unsent_bytes_ += bytes;
  if (options_.tokens) chunk_.tokens.insert(chunk_.tokens.end(), output.tokens.begin(), output.tokens.end());
  if (options_.text) chunk_.text += output.text;
  if (options_.steps) {
    for (const Round& round : output.rounds) {
      chunk_.steps.push_back(
          {round.drafted, round.accepted, output_tokens_, static_cast<int64_t>(output.tokens.size())});
    }
  }
  output_tokens_ += static_cast<int64_t>(output.tokens.size());
  return absl::OkStatus();
}

std::optional<StreamEvent> StreamBuffer::Next() {
  if (started_.has_value()) return *std::exchange(started_, std::nullopt);
  if (unsent_bytes_ > 0) {
    unsent_bytes_ = 0;
    return std::exchange(chunk_, OutputChunk());
  }
  if (finished_.has_value()) return *std::exchange(finished_, std::nullopt);
  return std::nullopt;
}

}  // namespace dflash
