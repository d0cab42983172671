// Reads tokenizer.json (the format of Hugging Face tokenizers 0.13 to 0.22) and, where there is one,
// tokenizer_config.json. Only what this engine can reproduce exactly is accepted:
//   normalizer     NFC, or null
//   pre_tokenizer  Sequence of Split (Regex, Isolated, not inverted) and ByteLevel (without prefix space and
//   regex) model          BPE over bytes, without unk_token, dropout, byte_fallback, ignore_merges, prefix
//   and suffix post_processor null, or ByteLevel (which moves offsets, not ids) decoder        ByteLevel
//   added tokens   matched literally in raw text: no lstrip, rstrip, single_word or normalized
// tokenizer_config.json adds tokens by `added_tokens_decoder`; where both files have a token they must agree.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "text/added_tokens.h"
#include "text/byte_pair_encoder.h"

namespace dflash {

struct TokenizerFile {
  bool nfc = false;
  std::string split_pattern;
  std::vector<std::string> tokens;         // bytes by id; empty where no token has the id
  std::array<int32_t, 256> byte_tokens{};  // by byte
  std::vector<BytePairMerge> merges;       // by rank
  std::vector<AddedToken> added_tokens;    // their contents are in `tokens` too
};

// Ids are below this.
inline constexpr int32_t kMaxVocabularySize = 1 << 22;
// Bytes of one added token's content.
inline constexpr size_t kMaxAddedTokenBytes = 256;

// `folder` is a checkpoint's. Errors name the file and the key: NotFound (no tokenizer.json), InvalidArgument
// (malformed, contradicting, out of bounds, a key that the format does not have), Unimplemented (a feature
// that the list above leaves out).
absl::StatusOr<TokenizerFile> ReadTokenizerFile(const std::string& folder);

// SHA-256, hexadecimal, of the bytes of these files: two tokenizers with one digest are the same. NotFound:
// no tokenizer.json.
absl::StatusOr<std::string> TokenizerDigest(const std::string& folder);

}  // namespace dflash
