#include "daemon/frontend/stream_buffer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"

namespace dflash {

absl::Status StreamBuffer::AddTokens(StepOutput output) {
  if (!output.prompt_log_probs.empty()) {
    prompt_places_.insert(prompt_places_.end(), std::make_move_iterator(output.prompt_log_probs.begin()),
                          std::make_move_iterator(output.prompt_log_probs.end()));
    if (output.tokens.empty()) return absl::OkStatus();
  }
  size_t bytes = 0;
  if (options_.tokens) bytes += output.tokens.size() * sizeof(int32_t);
  if (options_.text) bytes += output.text.size();  // may be held back yet
  if (options_.steps) bytes += output.rounds.size() * sizeof(ChunkStep);
  for (const PlaceLogProbs& place : output.log_probs)
    bytes += sizeof(place) + place.top.size() * sizeof(PlaceLogProbs::Top);
  if (unsent_bytes_ + bytes > options_.max_unsent_bytes) {
    return WithDetails(
        absl::ResourceExhaustedError(absl::StrCat("the client reads too slowly: over ",
                                                  options_.max_unsent_bytes, " bytes wait to be sent")),
        {.reason = "SLOW_CONSUMER", .field = "", .retry_after = {}, .metadata = {}});
  }
  if (unsent_bytes_ == 0) chunk_.first_token_offset = output_tokens_;
  if (options_.text) {
    bytes -= output.text.size();
    bytes += AddText(std::move(output.text));
  }
  unsent_bytes_ += bytes;
  if (options_.tokens) chunk_.tokens.insert(chunk_.tokens.end(), output.tokens.begin(), output.tokens.end());
  chunk_.log_probs.insert(chunk_.log_probs.end(), std::make_move_iterator(output.log_probs.begin()),
                          std::make_move_iterator(output.log_probs.end()));
  if (options_.steps) {
    for (const Round& round : output.rounds) {
      chunk_.steps.push_back(
          {round.drafted, round.accepted, output_tokens_, static_cast<int64_t>(output.tokens.size())});
    }
  }
  output_tokens_ += static_cast<int64_t>(output.tokens.size());
  return absl::OkStatus();
}

// Bytes that can be sent now.
size_t StreamBuffer::AddText(std::string text) {
  if (parser_ != nullptr) return AddParts(parser_->Feed(text));
  chunk_.text += text;
  return text.size();
}

size_t StreamBuffer::AddParts(ChatOutputParser::Part part) {
  size_t bytes = part.content.size() + part.reasoning.size();
  chunk_.text += part.content;
  chunk_.reasoning += part.reasoning;
  for (ChatOutputParser::Call& call : part.calls) {
    bytes += call.name.size() + call.arguments_json.size();
    chunk_.calls.push_back({.name = std::move(call.name), .arguments_json = std::move(call.arguments_json)});
  }
  return bytes;
}

void StreamBuffer::AddFinished(const FinishedOutput& finished) {
  if (parser_ != nullptr) {
    const size_t bytes = AddParts(parser_->Finish());
    if (unsent_bytes_ == 0) chunk_.first_token_offset = output_tokens_;
    unsent_bytes_ += bytes;
  }
  finished_ = finished;
}

std::optional<StreamEvent> StreamBuffer::Next() {
  if (sent_places_ < prompt_places_.size()) {
    OutputChunk chunk;
    chunk.first_token_offset = options_.first_token;
    chunk.first_prompt_position = prompt_position_;
    const size_t count = std::min(kMaxPromptPlaces, prompt_places_.size() - sent_places_);
    const auto begin = prompt_places_.begin() + static_cast<int64_t>(sent_places_);
    chunk.prompt_log_probs.assign(std::make_move_iterator(begin),
                                  std::make_move_iterator(begin + static_cast<int64_t>(count)));
    prompt_position_ += static_cast<int64_t>(count);
    sent_places_ += count;
    if (sent_places_ == prompt_places_.size()) {
      prompt_places_ = {};
      sent_places_ = 0;
    }
    return chunk;
  }
  if (unsent_bytes_ > 0) {
    unsent_bytes_ = 0;
    return std::exchange(chunk_, OutputChunk());
  }
  if (finished_.has_value()) return *std::exchange(finished_, std::nullopt);
  return std::nullopt;
}

}  // namespace dflash
