#include "worker/engine/sequence_rules.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

absl::Status CheckToken(const char* what, int32_t token, int64_t vocabulary) {
  if (token >= 0 && token < vocabulary) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": token id ", token, " is outside the vocabulary"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SequenceRules>> SequenceRules::Create(
    const GenerationRequest& request, int64_t vocabulary, std::shared_ptr<TokenConstraint> constraint) {
  auto rules = std::make_unique<SequenceRules>();
  rules->repetition_penalty_ = request.repetition_penalty;
  rules->frequency_penalty_ = request.frequency_penalty;
  rules->presence_penalty_ = request.presence_penalty;
  rules->min_tokens_ = request.min_tokens;
  rules->budget_ = request.thinking;
  rules->vocabulary_ = vocabulary;
  if (constraint != nullptr) rules->place_.text.emplace(std::move(constraint));
  if (request.min_tokens > 0 || rules->place_.text) rules->stop_token_ids_ = request.stop_token_ids;
  for (const LogitBias& bias : request.logit_bias) {
    DFLASH_RETURN_IF_ERROR(CheckToken("logit_bias", bias.token, vocabulary));
    rules->bias_[bias.token] += bias.bias;
  }
  for (const std::vector<int32_t>& word : request.bad_words) {
    if (word.empty()) return absl::InvalidArgumentError("bad_words: an empty sequence");
    for (const int32_t token : word) DFLASH_RETURN_IF_ERROR(CheckToken("bad_words", token, vocabulary));
    rules->bad_words_.push_back(word);
  }
  rules->thinking_open_ = request.constraint.thinking_open;
  rules->thinking_close_ = request.constraint.thinking_close;
  if (rules->budget_.max_tokens >= 0) {
    DFLASH_RETURN_IF_ERROR(CheckToken("thinking", rules->budget_.open, vocabulary));
    DFLASH_RETURN_IF_ERROR(CheckToken("thinking", rules->budget_.close, vocabulary));
    rules->thinking_open_ = rules->budget_.open;
    rules->thinking_close_ = rules->budget_.close;
  }
  for (const int32_t token : request.prompt_tokens) {
    if (token == rules->thinking_open_ && token >= 0) rules->place_.thinks = true;
    if (token == rules->thinking_close_ && token >= 0) rules->place_.thinks = false;
  }
  const bool has_rules = rules->has_penalties() || !rules->bias_.empty() || !rules->bad_words_.empty() ||
                         rules->budget_.max_tokens >= 0 || !rules->stop_token_ids_.empty() ||
                         rules->place_.text.has_value();
  if (!has_rules) return nullptr;
  if (rules->repetition_penalty_ != 1)
    rules->prompt_.insert(request.prompt_tokens.begin(), request.prompt_tokens.end());
  return rules;
}

bool SequenceRules::ChangesLaw(int64_t rows) const {
  return has_penalties() || !bias_.empty() || !bad_words_.empty() || place_.text.has_value() ||
         static_cast<int64_t>(output_.size()) < min_tokens_ ||
         (budget_.max_tokens >= 0 && place_.thinks && place_.thought + rows >= budget_.max_tokens);
}

void SequenceRules::Advance(int32_t token, Place& place) const {
  if (token == thinking_open_ && token >= 0) {
    place.thinks = true;
    place.thought = 0;
  } else if (token == thinking_close_ && token >= 0) {
    place.thinks = false;
  } else if (place.thinks) {
    ++place.thought;
  } else if (place.text && !IsStop(token)) {
    place.text->Advance(token);
  }
}

bool SequenceRules::IsStop(int32_t token) const {
  return std::find(stop_token_ids_.begin(), stop_token_ids_.end(), token) != stop_token_ids_.end();
}

void SequenceRules::Append(int32_t token) {
  output_.push_back(token);
  if (has_penalties()) ++counts_[token];
  Advance(token, place_);
}

bool SequenceRules::IsComplete() const {
  if (!place_.text || place_.thinks || place_.text->IsLost()) return false;
  if (!place_.text->IsText() || place_.text->GoesOn()) return false;
  return stop_token_ids_.empty() || static_cast<int64_t>(output_.size()) < min_tokens_;
}

bool SequenceRules::IsTooLarge() const {
  if (!place_.text || place_.thinks) return false;
  return place_.text->IsLost() ? place_.text->IsTooLarge() : place_.text->Mask().empty();
}

bool SequenceRules::AllowsNothing() const {
  RuleBatch batch;
  batch.rows.resize(1);
  Describe({}, 0, batch);
  const RowRules& rules = batch.rows[0];
  std::unordered_set<int32_t> forbidden;
  for (int32_t i = rules.own_begin; i < rules.own_end; ++i) {
    const LogitEdit& edit = batch.edits[static_cast<size_t>(i)];
    if (edit.bias == kForbidden) forbidden.insert(edit.id);
  }
  for (int32_t token = 0; token < vocabulary_; ++token) {
    if (rules.only >= 0 && token != rules.only) continue;
    if (rules.mask >= 0) {
      const auto word = static_cast<size_t>(rules.mask * batch.mask_words + token / 32);
      if ((batch.masks[word] >> (token % 32) & 1) == 0) continue;
    }
    if (!forbidden.contains(token)) return false;
  }
  return true;
}

int32_t SequenceRules::AddMask(const ConstraintCursor& text, RuleBatch& batch) const {
  batch.mask_words = (vocabulary_ + 31) / 32;
  const size_t first = batch.masks.size();
  const std::span<const uint32_t> mask = text.Mask();
  batch.masks.resize(first + static_cast<size_t>(batch.mask_words), 0);
  std::copy_n(mask.begin(), std::min(mask.size(), static_cast<size_t>(batch.mask_words)),
              batch.masks.begin() + static_cast<int64_t>(first));
  if (text.IsText() && !mask.empty()) {
    for (const int32_t stop : stop_token_ids_) {
      if (stop >= 0 && stop < vocabulary_)
        batch.masks[first + static_cast<size_t>(stop / 32)] |= 1u << (stop % 32);
    }
  }
  return static_cast<int32_t>(static_cast<int64_t>(first) / batch.mask_words);
}

int64_t SequenceRules::CountOf(int32_t token) const {
  const auto found = counts_.find(token);
  return found == counts_.end() ? 0 : found->second;
}

LogitEdit SequenceRules::EditOf(int32_t token, int64_t count) const {
  LogitEdit edit = {.id = token};
  if (const auto bias = bias_.find(token); bias != bias_.end()) edit.bias = bias->second;
  if (repetition_penalty_ != 1 && (count > 0 || prompt_.contains(token)))
    edit.repetition = repetition_penalty_;
  if (count > 0) edit.penalty = frequency_penalty_ * static_cast<float>(count) + presence_penalty_;
  return edit;
}

template <typename Forbid>
void SequenceRules::ForEachForbidden(std::span<const int32_t> drafts, const Forbid& forbid) const {
  const auto emitted = static_cast<int64_t>(output_.size() + drafts.size());
  if (emitted < min_tokens_) {
    for (const int32_t token : stop_token_ids_) forbid(token);
  }
  const auto at = [&](size_t i) { return i < output_.size() ? output_[i] : drafts[i - output_.size()]; };
  for (const std::vector<int32_t>& word : bad_words_) {
    const size_t before = word.size() - 1;
    if (before > static_cast<size_t>(emitted)) continue;
    const size_t first = static_cast<size_t>(emitted) - before;
    bool matches = true;
    for (size_t i = 0; i < before && matches; ++i) matches = at(first + i) == word[i];
    if (matches) forbid(word.back());
  }
}

size_t SequenceRules::Describe(std::span<const int32_t> drafts, size_t first_row, RuleBatch& batch) const {
  const auto end = [&] { return static_cast<int32_t>(batch.edits.size()); };
  // What all rows share: committed history.
  const int32_t shared_begin = end();
  const auto share = [&](int32_t token) {
    const LogitEdit edit = EditOf(token, CountOf(token));
    if (edit.bias != 0 || edit.repetition != 1 || edit.penalty != 0) batch.edits.push_back(edit);
  };
  for (const auto& [token, bias] : bias_) share(token);
  for (const auto& [token, count] : counts_) {
    if (!bias_.contains(token)) share(token);
  }
  for (const int32_t token : prompt_) {
    if (!bias_.contains(token) && !counts_.contains(token)) share(token);
  }
  const int32_t shared_end = end();

  Place place = place_;
  int64_t work = 0;
  std::map<int32_t, int64_t> drafted;  // tokens before the row, with their counts
  for (size_t row = 0; row <= drafts.size(); ++row) {
    if (row > 0) {
      Advance(drafts[row - 1], place);
      if (has_penalties()) ++drafted[drafts[row - 1]];
    }
    RowRules& rules = batch.rows[first_row + row];
    rules = {.shared_begin = shared_begin, .shared_end = shared_end};
    std::map<int32_t, LogitEdit> own;
    for (const auto& [token, count] : drafted) own[token] = EditOf(token, CountOf(token) + count);
    ForEachForbidden(drafts.first(row), [&](int32_t token) {
      own.try_emplace(token, LogitEdit{.id = token}).first->second.bias = kForbidden;
    });
    rules.own_begin = end();
    for (const auto& [token, edit] : own) batch.edits.push_back(edit);
    rules.own_end = end();
    if (budget_.max_tokens >= 0 && place.thinks && place.thought >= budget_.max_tokens) {
      rules.only = budget_.close;
    } else if (place.text && !place.thinks && !place.text->IsLost()) {
      // Behind a draft that the constraint does not allow nothing matters: it is not accepted.
      rules.mask = AddMask(*place.text, batch);
      work += place.text->MaskWork();
      if (place.text->Mask().empty() || work >= kMaxBlockWork) return row + 1;
    }
  }
  return drafts.size() + 1;
}

}  // namespace dflash
