#include "worker/engine/sequence.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

absl::Status ConstraintTooLarge() {
  return WithReason(absl::ResourceExhaustedError("constraint: it has become too large to be followed"),
                    "CONSTRAINT_TOO_LARGE");
}

}  // namespace

absl::Status Sequence::Prepare(const SequenceParts& parts) {
  DFLASH_ASSIGN_OR_RETURN(text, TextStream::Create(parts.tokenizer, request));
  DFLASH_ASSIGN_OR_RETURN(std::shared_ptr<TokenConstraint> constraint,
                          parts.constraints->Find(request.constraint));
  DFLASH_ASSIGN_OR_RETURN(rules, SequenceRules::Create(request, parts.vocabulary, std::move(constraint)));
  content = ContentTracker(parts.content_marks, request.prompt_tokens);
  report.prompt_tokens = prompt_size();
  scored = std::max<int64_t>(request.prompt_log_probs_done, 0);
  return absl::OkStatus();
}

bool Sequence::TakeEarlierOutput() {
  std::string sent;
  std::string& kept = request.report_sent_text ? sent_text : sent;
  for (const int32_t token : request.output_tokens) {
    const bool finished = Advance(token, kept);
    if (!finished && rules != nullptr && rules->HasLostTrack()) {
      Fail(rules->IsTooLarge() ? ConstraintTooLarge()
                               : absl::InvalidArgumentError(
                                     absl::StrCat("output to go on: its token ", emitted() - 1, ", id ",
                                                  token, ", is none that the constraint allows there")));
      return false;
    }
    if (!finished) continue;
    sink->OnStarted({.prompt_tokens = prompt_size(), .cached_tokens = 0, .sent_text = std::move(sent_text)});
    first_token = absl::Now();
    Finish();
    return false;
  }
  return true;
}

bool Sequence::IsStop(int32_t token) const {
  return std::find(request.stop_token_ids.begin(), request.stop_token_ids.end(), token) !=
         request.stop_token_ids.end();
}

bool Sequence::Advance(int32_t token, std::string& new_text) {
  output.push_back(token);
  if (rules != nullptr) rules->Append(token);
  ++report.completion_tokens;
  bool finished = false;
  if (IsStop(token)) {
    report.reason = FinishReason::kStopToken;
    report.matched_stop_token = token;
    finished = true;
  }
  new_text += text.Append(token);
  if (!finished && rules != nullptr && rules->IsComplete()) {
    report.reason = FinishReason::kConstraint;
    finished = true;
  }
  if (text.matched_stop() == nullptr && !finished && room() == 0) {
    report.reason = FinishReason::kLength;
    finished = true;
  }
  if (finished && text.matched_stop() == nullptr) new_text += text.Finish();
  if (text.matched_stop() != nullptr) {
    report.reason = FinishReason::kStopString;
    report.matched_stop_token = -1;
    report.matched_stop_string = *text.matched_stop();
    finished = true;
  }
  return finished;
}

void Sequence::CountDrafts(const RoundReport& round) {
  if (round.drafted == 0) return;
  ++report.rounds;
  report.drafted_tokens += round.drafted;
  report.accepted_tokens += round.accepted;
  report.drafted_per_position.resize(
      std::max(report.drafted_per_position.size(), static_cast<size_t>(round.drafted)));
  report.accepted_per_position.resize(report.drafted_per_position.size());
  for (int32_t d = 0; d < round.drafted; ++d) ++report.drafted_per_position[static_cast<size_t>(d)];
  for (int32_t d = 0; d < round.accepted; ++d) ++report.accepted_per_position[static_cast<size_t>(d)];
}

void Sequence::Emit(const std::vector<int32_t>& tokens, const std::vector<TokenLogProbs>& log_probs,
                    const RoundReport* round) {
  if (done) return;
  TokensReport chunk;
  if (round != nullptr) {
    CountDrafts(*round);
    chunk.rounds.push_back(*round);
  }
  // What came before a fault is the client's, as without drafts.
  const auto fail = [&](const absl::Status& status) {
    if (!chunk.tokens.empty()) sink->OnTokens(std::move(chunk));
    Fail(status);
  };
  bool finished = false;
  for (int32_t token : tokens) {
    if (token < 0 && rules != nullptr && rules->IsTooLarge()) {
      fail(ConstraintTooLarge());
      return;
    }
    if (token < 0 && rules != nullptr && rules->AllowsNothing()) {
      fail(
          absl::InvalidArgumentError(absl::StrCat("bad_words and min_tokens forbid all that constraint and "
                                                  "max_thinking_tokens allow at place ",
                                                  emitted())));
      return;
    }
    if (token < 0) {  // logits held a NaN: this request cannot go on, its neighbours can
      had_fault = true;
      fail(WithReason(absl::InternalError(absl::StrCat("the target's logits at position ",
                                                       prompt_size() + emitted(), " are not numbers")),
                      "NUMERIC_FAULT"));
      return;
    }
    if (request.log_probs > 0) {
      chunk.log_probs.push_back(log_probs[chunk.tokens.size()]);
      std::vector<TokenLogProbs::Top>& top = chunk.log_probs.back().top;  // of whoever wanted most
      top.resize(std::min(top.size(), static_cast<size_t>(request.log_probs - 1)));
    }
    chunk.tokens.push_back(token);
    finished = Advance(token, chunk.text);
    content.See(token);
    if (finished) break;
    if (rules != nullptr && rules->HasLostTrack()) {  // must not be, and is one request's harm
      fail(absl::InternalError(absl::StrCat("token ", token, " was chosen, which its constraint forbids")));
      return;
    }
  }
  sink->OnTokens(std::move(chunk));
  if (finished) Finish();
}

void Sequence::EmitPromptLogProbs(int64_t first, std::vector<TokenLogProbs> places) {
  if (places.empty()) return;
  const int64_t end = first + static_cast<int64_t>(places.size());
  while (!done && scored < end) {
    TokensReport chunk;
    const auto begin = places.begin() + (scored - first);
    const auto count = std::min<int64_t>(kMaxPromptPlaces, end - scored);
    chunk.prompt_log_probs.assign(std::make_move_iterator(begin), std::make_move_iterator(begin + count));
    scored += count;
    sink->OnTokens(std::move(chunk));
  }
}

void Sequence::Finish() {
  report.decode_time = absl::Now() - first_token;
  done = true;
  sink->OnFinished(report);
}

void Sequence::Fail(const absl::Status& status) {
  if (done) return;
  done = true;
  sink->OnFailed(status);
}

DecodeState Sequence::ToDecodeState() const {
  DecodeState state = {.anchor = output.back(),
                       .position = static_cast<int32_t>(stored),
                       .room = static_cast<int32_t>(room()),
                       .stop_count = static_cast<int32_t>(request.stop_token_ids.size()),
                       .sampling = request.sampling};
  std::copy(request.stop_token_ids.begin(), request.stop_token_ids.end(), state.stop_tokens);
  return state;
}

}  // namespace dflash
