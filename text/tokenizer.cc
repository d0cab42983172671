#include "text/tokenizer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "text/normalizer.h"
#include "text/tokenizer_file.h"
#include "text/utf8.h"

namespace dflash {

Tokenizer::Tokenizer(std::vector<std::string> tokens, bool nfc, const std::vector<AddedToken>& added_tokens,
                     SplitPattern split, BytePairEncoder encoder)
    : tokens_(std::move(tokens)),
      special_(tokens_.size()),
      nfc_(nfc),
      added_tokens_(added_tokens),
      split_(std::move(split)),
      encoder_(std::move(encoder)) {
  for (const AddedToken& token : added_tokens) special_[static_cast<size_t>(token.id)] = token.special;
  for (const std::string& token : tokens_)
    longest_token_bytes_ = std::max(longest_token_bytes_, token.size());
}

absl::StatusOr<Tokenizer> Tokenizer::Load(const std::string& folder) {
  DFLASH_ASSIGN_OR_RETURN(TokenizerFile file, ReadTokenizerFile(folder));
  const std::string path = folder + "/tokenizer.json: ";
  absl::StatusOr<SplitPattern> split = SplitPattern::Compile(file.split_pattern);
  if (!split.ok()) {
    return Annotate(split.status(), path + "pre_tokenizer.pretokenizers[0].pattern.Regex");
  }
  absl::StatusOr<BytePairEncoder> encoder = BytePairEncoder::Create(file.byte_tokens, file.merges);
  if (!encoder.ok()) return Annotate(encoder.status(), path + "model");
  return Tokenizer(std::move(file.tokens), file.nfc, file.added_tokens, *std::move(split),
                   *std::move(encoder));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                       AddedTokens added_tokens) const {
  const TextSegment segment{text, added_tokens};
  return Encode(std::span(&segment, 1));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::span<const TextSegment> segments) const {
  size_t size = 0;
  for (const TextSegment& segment : segments) {
    size += segment.text.size();
    if (size > kMaxTextBytes) {
      return absl::InvalidArgumentError(absl::StrCat("text: more than ", kMaxTextBytes, " bytes"));
    }
  }
  std::string text;
  text.reserve(size);
  // Where kParse begins and ends, over neighbours: an even number of places in `text`.
  std::vector<size_t> bounds;
  for (const TextSegment& segment : segments) {
    if (segment.text.empty()) continue;
    const bool parsing = bounds.size() % 2 == 1;
    if (parsing != (segment.added_tokens == AddedTokens::kParse)) bounds.push_back(text.size());
    text.append(ReplaceIllFormed(segment.text));
  }
  if (bounds.size() % 2 == 1) bounds.push_back(text.size());

  const std::string_view whole = text;
  std::vector<int32_t> ids;
  BytePairEncoder::Workspace workspace;
  size_t encoded = 0;  // text before this is in `ids`
  for (size_t i = 0; i < bounds.size(); i += 2) {
    const std::string_view up_to_end = whole.substr(0, bounds[i + 1]);
    size_t from = bounds[i];
    while (const auto match = added_tokens_.Find(up_to_end, from)) {
      DFLASH_RETURN_IF_ERROR(AppendIds(whole.substr(encoded, match->begin - encoded), workspace, ids));
      ids.push_back(match->id);
      encoded = from = match->begin + match->length;
    }
  }
  DFLASH_RETURN_IF_ERROR(AppendIds(whole.substr(encoded), workspace, ids));
  return ids;
}

size_t Tokenizer::MaxBytes(int64_t ids) const {
  const size_t bytes_per_id = longest_token_bytes_ * (nfc_ ? kMaxNfcShrink : 1);
  const auto count = static_cast<size_t>(std::max<int64_t>(ids, 0));
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  return bytes_per_id > 0 && count > kMost / bytes_per_id ? kMost : count * bytes_per_id;
}

absl::Status Tokenizer::AppendIds(std::string_view text, BytePairEncoder::Workspace& workspace,
                                  std::vector<int32_t>& ids) const {
  const std::string normalized = nfc_ ? NormalizeNfc(text) : std::string(text);
  return split_.Split(normalized, [&](std::string_view piece) { encoder_.Encode(piece, workspace, ids); });
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> ids,
                                              SpecialTokens special_tokens) const {
  std::string bytes;
  for (const int32_t id : ids) {
    DFLASH_ASSIGN_OR_RETURN(const Token token, Find(id));
    if (token.special && special_tokens == SpecialTokens::kDrop) continue;
    bytes.append(token.bytes);
  }
  return ReplaceIllFormed(bytes);
}

absl::StatusOr<Tokenizer::Token> Tokenizer::Find(int32_t id) const {
  const auto slot = static_cast<size_t>(id);
  if (id < 0 || slot >= tokens_.size() || tokens_[slot].empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", id, ": the tokenizer has none (ids in [0, ", tokens_.size(), "))"));
  }
  return Token{tokens_[slot], special_[slot]};
}

std::optional<int32_t> Tokenizer::FindAddedToken(std::string_view content) const {
  const auto match = added_tokens_.Find(content, 0);
  if (!match || match->begin != 0 || match->length != content.size()) return std::nullopt;
  return match->id;
}

}  // namespace dflash
