// The tokenizer of a checkpoint: text to token ids and back, exactly as the model was trained
// (docs/spec/tokenizer.md). Encoding, in this order: ill-formed UTF-8 becomes U+FFFD (text/utf8.h); added
// tokens are split off the raw text (leftmost first, longest match); what lies between is brought to NFC, cut
// by the Split pattern, and each piece is byte-pair encoded. No token is added in front or behind.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "text/added_tokens.h"
#include "text/byte_pair_encoder.h"
#include "text/split_pattern.h"

namespace dflash {

// What an added token written out in the text, such as "<|im_end|>", is.
enum class AddedTokens : uint8_t {
  kParse,  // that token: in raw prompts and in what a chat template itself writes
  kAsText  // letters: in what users write, so that it cannot close their turn
};

// What decoding does with control tokens ("special": true in the checkpoint).
enum class SpecialTokens : uint8_t { kKeep, kDrop };

// A part of a text with its own meaning of added tokens.
struct TextSegment {
  std::string_view text;
  AddedTokens added_tokens;
};

// Immutable after Load, usable from many threads at once. Movable.
class Tokenizer {
 public:
  // Bytes of one text to encode.
  static constexpr size_t kMaxTextBytes = 16u << 20;

  // Reads tokenizer.json and tokenizer_config.json of a checkpoint folder. Errors: text/tokenizer_file.h, and
  // InvalidArgument for a Split pattern that does not compile or a merge that occurs twice.
  static absl::StatusOr<Tokenizer> Load(const std::string& folder);

  // Encodes `text` in time O(n log n) whatever it contains. Errors: InvalidArgument above kMaxTextBytes;
  // ResourceExhausted when the checkpoint's pattern backtracks without bound.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, AddedTokens added_tokens) const;

  // Encodes the concatenation of `segments`. The borders do not cut: the ids are those of the whole text, but
  // an added token is one only where all of its bytes lie in neighbouring segments that say kParse.
  // Ill-formed UTF-8 is replaced in each segment by itself. Errors as above.
  absl::StatusOr<std::vector<int32_t>> Encode(std::span<const TextSegment> segments) const;

  // The most bytes that a text of so many ids can have: no id stands for more than the longest token, and NFC
  // shrinks no text further than kMaxNfcShrink. Saturates.
  size_t MaxBytes(int64_t ids) const;

  // The text of `ids` as well-formed UTF-8; added tokens are their contents. Error: InvalidArgument for an id
  // without token. Text that arrives in parts: text/detokenizer.h.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids, SpecialTokens special_tokens) const;

  // Largest id + 1. The model may have more rows (padding): those must never be sampled.
  int32_t vocabulary_size() const { return static_cast<int32_t>(tokens_.size()); }

  struct Token {
    std::string_view bytes;  // may be a part of a character; lives as long as the tokenizer
    bool special;
  };
  // Error: InvalidArgument when no token has this id (negative, padding row, gap in the vocabulary).
  absl::StatusOr<Token> Find(int32_t id) const;

  // The id of the added token with this content, such as "<|im_end|>".
  std::optional<int32_t> FindAddedToken(std::string_view content) const;

 private:
  Tokenizer(std::vector<std::string> tokens, bool nfc, const std::vector<AddedToken>& added_tokens,
            SplitPattern split, BytePairEncoder encoder);
  absl::Status AppendIds(std::string_view text, BytePairEncoder::Workspace& workspace,
                         std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;  // by id; empty where there is none
  std::vector<bool> special_;        // by id
  size_t longest_token_bytes_ = 0;
  bool nfc_;
  AddedTokenMatcher added_tokens_;
  SplitPattern split_;
  BytePairEncoder encoder_;
};

}  // namespace dflash
