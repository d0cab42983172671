#include "tools/dflashctl/round_view.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "text/utf8.h"

namespace dflash::ctl {
namespace {

std::string LowerSuffix(const std::string& name, size_t prefix) {
  std::string suffix = name.size() > prefix ? name.substr(prefix) : name;
  std::transform(suffix.begin(), suffix.end(), suffix.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return suffix;
}

}  // namespace

std::vector<Piece> SplitByOrigin(const v1::Chunk& chunk) {
  const uint64_t begin = chunk.first_token_offset();
  const uint64_t end = begin + static_cast<uint64_t>(chunk.token_ids_size());
  std::vector<Piece> pieces;
  uint64_t next = begin;
  const auto take = [&](Origin origin, uint64_t until) {
    until = std::min(until, end);
    if (next >= until) return;
    Piece piece{origin, {}};
    for (; next < until; ++next) piece.token_ids.push_back(chunk.token_ids(static_cast<int>(next - begin)));
    pieces.push_back(std::move(piece));
  };
  for (const v1::StepInfo& round : chunk.steps()) {
    const uint64_t first = round.first_token_offset();
    take(Origin::kPrefill, first);
    take(Origin::kDraft, first + std::min(round.accepted(), round.token_count()));
    take(Origin::kCorrection, first + round.token_count());
  }
  take(Origin::kPrefill, end);
  return pieces;
}

std::string RoundPainter::Switch(Origin origin) {
  if (origin == shown_) return "";
  const Origin before = shown_;
  shown_ = origin;
  if (colors_) {
    switch (origin) {
      case Origin::kPrefill:
        return "\x1b[0m";
      case Origin::kDraft:
        return "\x1b[32m";
      case Origin::kCorrection:
        return "\x1b[33m";
    }
  }
  return before == Origin::kDraft ? "»" : origin == Origin::kDraft ? "«" : "";
}

std::string RoundPainter::Paint(Origin origin, std::string_view bytes) {
  held_ += bytes;
  std::string text;
  const size_t incomplete = AppendWellFormed(held_, text);
  held_.erase(0, held_.size() - incomplete);
  return text.empty() ? "" : Switch(origin) + text;
}

std::string RoundPainter::Finish() {
  const std::string text = ReplaceIllFormed(held_);
  held_.clear();
  return text + Switch(Origin::kPrefill);
}

std::string Name(v1::SpeculationMode mode) {
  return LowerSuffix(v1::SpeculationMode_Name(mode), std::string_view("SPECULATION_MODE_").size());
}

std::string Name(v1::FinishReason reason) {
  return LowerSuffix(v1::FinishReason_Name(reason), std::string_view("FINISH_REASON_").size());
}

std::string AnswerSummary(const v1::Finished& finished) {
  const v1::SpeculationSummary& speculation = finished.speculation();
  const v1::Timings& timings = finished.timings();
  const uint32_t tokens = finished.usage().completion_tokens();
  std::string text = absl::StrCat(tokens, tokens == 1 ? " token" : " tokens");
  if (speculation.rounds() > 0) {
    absl::StrAppend(&text, absl::StrFormat(", %d rounds, %.2f tokens per round, %d of %d drafts accepted",
                                           speculation.rounds(), speculation.mean_acceptance_length(),
                                           speculation.accepted_tokens(), speculation.drafted_tokens()));
  } else {
    absl::StrAppend(&text, ", without speculation");
  }
  // The first token comes out of prefill, so it is not in the decode time.
  if (tokens > 1 && timings.decode_seconds() > 0) {
    absl::StrAppend(&text, absl::StrFormat(", %.1f tokens/s", (tokens - 1) / timings.decode_seconds()));
  }
  absl::StrAppend(&text,
                  absl::StrFormat(", first token after %.0f ms, ended by %s",
                                  timings.time_to_first_token_seconds() * 1e3, Name(finished.reason())));
  return text;
}

std::string AcceptanceByDepth(const v1::SpeculationSummary& speculation) {
  std::string text;
  for (int i = 0; i < speculation.drafted_per_position_size(); ++i) {
    const uint32_t drafted = speculation.drafted_per_position(i);
    const uint32_t accepted =
        i < speculation.accepted_per_position_size() ? speculation.accepted_per_position(i) : 0;
    if (drafted == 0) break;
    absl::StrAppend(&text, text.empty() ? "accepted by depth:" : "",
                    absl::StrFormat(" %.2f", static_cast<double>(accepted) / drafted));
  }
  return text;
}

}  // namespace dflash::ctl
