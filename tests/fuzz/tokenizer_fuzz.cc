// tokenizer.json: edits of a small good one, or a whole file. What loads must be able to encode and decode.
// Input: 'e' or 'w', edits (json_edits.h) or file, then (after a zero byte) a text to encode.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "tests/fuzz/json_edits.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

// All bytes, a few merges, two added tokens.
Json SmallTokenizer() {
  Json vocab = Json::object();
  // The alphabet of byte-level BPE: printable bytes stand for themselves, others for U+0100 and up.
  int32_t next = 0;
  const auto add = [&](char32_t c) {
    std::string utf8;
    if (c < 0x80) {
      utf8 = static_cast<char>(c);
    } else {
      utf8 = {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    }
    vocab[utf8] = next++;
  };
  char32_t shifted = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    add(printable ? byte : shifted++);
  }
  for (const char* merged : {"he", "ll", "hell", "hello", "\u0120w"}) vocab[merged] = next++;
  const auto added = [](int id, const char* content, bool special) {
    return Json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", {added(300, "<|im_end|>", true), added(301, "<think>", false)}},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"},
               {"pattern", {{"Regex", "\\p{N}| ?[^\\s\\p{N}]+|\\s+"}}},
               {"behavior", "Isolated"},
               {"invert", false}},
              {{"type", "ByteLevel"},
               {"add_prefix_space", false},
               {"trim_offsets", true},
               {"use_regex", false}}}}}},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", {"h e", "l l", "he ll", "hell o", "\u0120 w"}}}}};
}

void CheckError(const absl::Status& status) {
  const bool expected = status.ok() || status.code() == absl::StatusCode::kInvalidArgument ||
                        status.code() == absl::StatusCode::kUnimplemented ||
                        status.code() == absl::StatusCode::kResourceExhausted;
  DFLASH_CHECK(expected, status.ToString().c_str());
}

void Run(char kind, std::string_view input) {
  static const TemporaryFolder* const folder = new TemporaryFolder;
  static const Json small = SmallTokenizer();
  static const bool loads = [] {
    folder->Write("tokenizer.json", small.dump());
    return Tokenizer::Load(folder->path()).ok();
  }();
  DFLASH_CHECK(loads, "the small tokenizer itself");
  const size_t zero = input.find('\0');
  const std::string_view file = input.substr(0, zero);
  const std::string_view text =
      zero == std::string_view::npos ? "hello world 42 <|im_end|>" : input.substr(zero + 1);
  const std::string json = kind == 'w' ? std::string(file) : fuzz::EditedJson(small, file);
  folder->Write("tokenizer.json", json);
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(folder->path());
  CheckError(tokenizer.status());
  if (!tokenizer.ok()) return;
  for (const AddedTokens added : {AddedTokens::kParse, AddedTokens::kAsText}) {
    const absl::StatusOr<std::vector<int32_t>> ids = tokenizer->Encode(text, added);
    CheckError(ids.status());
    if (!ids.ok()) continue;
    for (const int32_t id : *ids) DFLASH_CHECK(id >= 0 && id < tokenizer->vocabulary_size());
    const absl::StatusOr<std::string> decoded = tokenizer->Decode(*ids, SpecialTokens::kKeep);
    DFLASH_CHECK(decoded.ok(), decoded.status().ToString().c_str());
    DFLASH_CHECK(ReplaceIllFormed(*decoded) == *decoded);
    // Whatever the vocabulary, the merges and the pattern: without a normalizer nothing is lost.
    if (json.find("\"normalizer\":null") != std::string::npos)
      DFLASH_CHECK(*decoded == ReplaceIllFormed(text));
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  dflash::Run(static_cast<char>(data[0]),
              std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
