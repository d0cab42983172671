#include "text/tokenizer_file.h"

#include <simdjson.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace dflash {
namespace {

namespace dom = simdjson::dom;

constexpr int64_t kMaxFileBytes = int64_t{256} << 20;

// A JSON object of a file. It remembers which keys were asked for: whatever is left is a key that nobody
// knows.
class Object {
 public:
  static absl::StatusOr<Object> From(dom::element element, std::string where) {
    dom::object object;
    if (element.get(object) != simdjson::SUCCESS) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, where.ends_with(": ") ? "" : ": ", "must be an object"));
    }
    return Object(object, std::move(where));
  }

  std::string Where(std::string_view key) const {
    return where_.ends_with(": ") ? where_ + std::string(key) : where_ + "." + std::string(key);
  }
  absl::Status Invalid(std::string_view key, std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(Where(key), ": ", std::string(what)));
  }
  absl::Status Unsupported(std::string_view key, std::string_view what) const {
    return absl::UnimplementedError(absl::StrCat(Where(key), ": ", std::string(what)));
  }

  std::optional<dom::element> Find(std::string_view key) {
    read_.emplace_back(key);
    dom::element element;
    if (object_[key].get(element) != simdjson::SUCCESS) return std::nullopt;
    return element;
  }
  // Absent and null are the same to the format.
  std::optional<dom::element> FindNonNull(std::string_view key) {
    std::optional<dom::element> element = Find(key);
    return element && element->is_null() ? std::nullopt : element;
  }
  absl::StatusOr<dom::element> Require(std::string_view key) {
    if (std::optional<dom::element> element = Find(key)) return *element;
    return Invalid(key, "missing");
  }
  absl::StatusOr<Object> RequireObject(std::string_view key) {
    DFLASH_ASSIGN_OR_RETURN(const dom::element element, Require(key));
    return From(element, Where(key));
  }
  absl::StatusOr<dom::array> RequireArray(std::string_view key) {
    DFLASH_ASSIGN_OR_RETURN(const dom::element element, Require(key));
    dom::array array;
    if (element.get(array) != simdjson::SUCCESS) return Invalid(key, "must be an array");
    return array;
  }
  absl::StatusOr<std::string_view> RequireString(std::string_view key) {
    DFLASH_ASSIGN_OR_RETURN(const dom::element element, Require(key));
    std::string_view value;
    if (element.get(value) != simdjson::SUCCESS) return Invalid(key, "must be a string");
    return value;
  }
  absl::StatusOr<bool> RequireBool(std::string_view key) {
    DFLASH_ASSIGN_OR_RETURN(const dom::element element, Require(key));
    bool value = false;
    if (element.get(value) != simdjson::SUCCESS) return Invalid(key, "must be true or false");
    return value;
  }

  // The feature behind `key` must be off.
  absl::Status RequireFalse(std::string_view key) {
    DFLASH_ASSIGN_OR_RETURN(const bool value, RequireBool(key));
    return value ? Unsupported(key, "true is not supported") : absl::OkStatus();
  }
  absl::Status RequireNullOrFalse(std::string_view key) {
    return FindNonNull(key) ? RequireFalse(key) : absl::OkStatus();
  }
  absl::Status RequireNull(std::string_view key) {
    return FindNonNull(key) ? Unsupported(key, "only null is supported") : absl::OkStatus();
  }
  absl::Status RequireNullOrEmpty(std::string_view key) {
    const std::optional<dom::element> element = FindNonNull(key);
    std::string_view value;
    if (!element || (element->get(value) == simdjson::SUCCESS && value.empty())) return absl::OkStatus();
    return Unsupported(key, "only null or an empty string is supported");
  }
  absl::Status RequireValue(std::string_view key, std::string_view expected) {
    DFLASH_ASSIGN_OR_RETURN(const std::string_view value, RequireString(key));
    if (value == expected) return absl::OkStatus();
    return Unsupported(key, absl::StrCat("\"", std::string(value), "\" is not supported, only \"",
                                         std::string(expected), "\""));
  }

  absl::Status CheckAllRead() const {
    std::vector<std::string_view> seen;
    for (const auto field : object_) {
      if (std::find(read_.begin(), read_.end(), field.key) == read_.end()) {
        return Invalid(field.key, "unknown key");
      }
      if (std::find(seen.begin(), seen.end(), field.key) != seen.end()) return Invalid(field.key, "twice");
      seen.push_back(field.key);
    }
    return absl::OkStatus();
  }

 private:
  Object(dom::object object, std::string where) : object_(object), where_(std::move(where)) {}

  dom::object object_;
  std::string where_;
  std::vector<std::string> read_;
};

absl::StatusOr<simdjson::padded_string> ReadPadded(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  if (file.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": larger than ", kMaxFileBytes, " bytes"));
  }
  simdjson::padded_string text(static_cast<size_t>(file.size()));
  DFLASH_RETURN_IF_ERROR(file.ReadAt(0, file.size(), text.data()));
  return text;
}

// Byte-level tokens are written with one character a byte: the byte's own character where it is printable in
// Latin-1, else the next free one from U+0100 on (the GPT-2 byte-to-character map).
class ByteAlphabet {
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    size_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      bytes_[printable ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
    }
  }
  // Appends the bytes that `written` (well-formed UTF-8) stands for; false when it has another character.
  bool AppendBytes(std::string_view written, std::string& out) const {
    for (size_t i = 0; i < written.size(); ++i) {
      size_t character = static_cast<uint8_t>(written[i]);
      if (character >= 0x80) {
        if (character >= 0xE0) return false;
        character = (character & 0x1F) << 6 | (static_cast<uint8_t>(written[++i]) & 0x3F);
      }
      if (character >= bytes_.size() || bytes_[character] < 0) return false;
      out.push_back(static_cast<char>(bytes_[character]));
    }
    return true;
  }

 private:
  std::array<int16_t, 0x100 + 68> bytes_;  // 68 bytes are not printable
};

absl::Status ReadByteLevel(Object byte_level) {
  DFLASH_RETURN_IF_ERROR(byte_level.RequireValue("type", "ByteLevel"));
  for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) (void)byte_level.Find(key);
  return byte_level.CheckAllRead();
}

class Reader {
 public:
  absl::StatusOr<TokenizerFile> Read(const std::string& folder) {
    const std::string path = folder + "/tokenizer.json";
    DFLASH_ASSIGN_OR_RETURN(const simdjson::padded_string text, ReadPadded(path));
    dom::parser parser;
    DFLASH_ASSIGN_OR_RETURN(Object root, Parse(parser, text, path));
    DFLASH_RETURN_IF_ERROR(ReadRoot(std::move(root)));
    const std::string config_path = folder + "/tokenizer_config.json";
    const absl::StatusOr<simdjson::padded_string> config = ReadPadded(config_path);
    if (config.ok()) DFLASH_RETURN_IF_ERROR(ReadConfig(*config, config_path));
    if (!config.ok() && !absl::IsNotFound(config.status())) return config.status();
    DFLASH_RETURN_IF_ERROR(CheckAddedTokens(path));
    return std::move(file_);
  }

 private:
  static absl::StatusOr<Object> Parse(dom::parser& parser, const simdjson::padded_string& text,
                                      const std::string& path) {
    dom::element root;
    if (const simdjson::error_code error = parser.parse(text).get(root)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": not JSON: ", simdjson::error_message(error)));
    }
    return Object::From(root, path + ": ");
  }

  absl::Status ReadRoot(Object root) {
    DFLASH_RETURN_IF_ERROR(root.RequireValue("version", "1.0"));
    DFLASH_RETURN_IF_ERROR(root.RequireNull("truncation"));
    DFLASH_RETURN_IF_ERROR(root.RequireNull("padding"));
    if (root.FindNonNull("normalizer")) {
      DFLASH_ASSIGN_OR_RETURN(Object normalizer, root.RequireObject("normalizer"));
      DFLASH_RETURN_IF_ERROR(normalizer.RequireValue("type", "NFC"));
      DFLASH_RETURN_IF_ERROR(normalizer.CheckAllRead());
      file_.nfc = true;
    }
    DFLASH_ASSIGN_OR_RETURN(Object pre_tokenizer, root.RequireObject("pre_tokenizer"));
    DFLASH_RETURN_IF_ERROR(ReadPreTokenizer(std::move(pre_tokenizer)));
    if (root.FindNonNull("post_processor")) {
      DFLASH_ASSIGN_OR_RETURN(Object post_processor, root.RequireObject("post_processor"));
      DFLASH_RETURN_IF_ERROR(ReadByteLevel(std::move(post_processor)));
    }
    DFLASH_ASSIGN_OR_RETURN(Object decoder, root.RequireObject("decoder"));
    DFLASH_RETURN_IF_ERROR(ReadByteLevel(std::move(decoder)));
    DFLASH_ASSIGN_OR_RETURN(const dom::array added_tokens, root.RequireArray("added_tokens"));
    size_t index = 0;
    for (const dom::element element : added_tokens) {
      DFLASH_ASSIGN_OR_RETURN(
          Object token, Object::From(element, absl::StrCat(root.Where("added_tokens"), "[", index++, "]")));
      int64_t id = -1;
      DFLASH_ASSIGN_OR_RETURN(const dom::element id_element, token.Require("id"));
      if (id_element.get(id) != simdjson::SUCCESS) return token.Invalid("id", "must be an integer");
      DFLASH_RETURN_IF_ERROR(ReadAddedToken(std::move(token), id, /*again=*/false));
    }
    DFLASH_ASSIGN_OR_RETURN(Object model, root.RequireObject("model"));
    DFLASH_RETURN_IF_ERROR(ReadModel(std::move(model)));
    return root.CheckAllRead();
  }

  absl::Status ReadPreTokenizer(Object sequence) {
    DFLASH_RETURN_IF_ERROR(sequence.RequireValue("type", "Sequence"));
    DFLASH_ASSIGN_OR_RETURN(const dom::array steps, sequence.RequireArray("pretokenizers"));
    DFLASH_RETURN_IF_ERROR(sequence.CheckAllRead());
    if (steps.size() != 2) {
      return sequence.Unsupported("pretokenizers", "must be Split and ByteLevel, in this order");
    }
    const std::string where = sequence.Where("pretokenizers");

    DFLASH_ASSIGN_OR_RETURN(Object split, Object::From(steps.at(0), where + "[0]"));
    DFLASH_RETURN_IF_ERROR(split.RequireValue("type", "Split"));
    DFLASH_ASSIGN_OR_RETURN(Object pattern, split.RequireObject("pattern"));
    if (pattern.Find("String")) return pattern.Unsupported("String", "only Regex is supported");
    DFLASH_ASSIGN_OR_RETURN(file_.split_pattern, pattern.RequireString("Regex"));
    DFLASH_RETURN_IF_ERROR(pattern.CheckAllRead());
    DFLASH_RETURN_IF_ERROR(split.RequireValue("behavior", "Isolated"));
    DFLASH_RETURN_IF_ERROR(split.RequireFalse("invert"));
    DFLASH_RETURN_IF_ERROR(split.CheckAllRead());

    DFLASH_ASSIGN_OR_RETURN(Object byte_level, Object::From(steps.at(1), where + "[1]"));
    DFLASH_RETURN_IF_ERROR(byte_level.RequireValue("type", "ByteLevel"));
    DFLASH_RETURN_IF_ERROR(byte_level.RequireFalse("add_prefix_space"));
    // Absent means true.
    if (!byte_level.Find("use_regex")) return byte_level.Unsupported("use_regex", "must be false");
    DFLASH_RETURN_IF_ERROR(byte_level.RequireFalse("use_regex"));
    (void)byte_level.Find("trim_offsets");
    return byte_level.CheckAllRead();
  }

  // `again`: an equal token of that id may be there already.
  absl::Status ReadAddedToken(Object token, int64_t id, bool again) {
    DFLASH_ASSIGN_OR_RETURN(const std::string_view content, token.RequireString("content"));
    DFLASH_ASSIGN_OR_RETURN(const bool special, token.RequireBool("special"));
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
      DFLASH_RETURN_IF_ERROR(token.RequireFalse(key));
    }
    DFLASH_RETURN_IF_ERROR(token.CheckAllRead());
    if (content.empty() || content.size() > kMaxAddedTokenBytes) {
      return token.Invalid("content", absl::StrCat("must have 1 to ", kMaxAddedTokenBytes, " bytes"));
    }
    if (id < 0 || id >= kMaxVocabularySize) {
      return token.Invalid("id", absl::StrCat(id, " is not in [0, ", kMaxVocabularySize, ")"));
    }
    std::string text(content);
    const auto slot = static_cast<size_t>(id);
    if (const auto known = added_.find(text); known != added_.end()) {
      const AddedToken& other = file_.added_tokens[known->second];
      if (again && other.id == id && other.special == special) return absl::OkStatus();
      return token.Invalid("content",
                           absl::StrCat("\"", text, "\" is an added token already, with id ", other.id,
                                        other.special ? " (special)" : " (not special)"));
    }
    if (slot < file_.tokens.size() && !file_.tokens[slot].empty() && file_.tokens[slot] != text) {
      return token.Invalid("id", absl::StrCat(id, " is that of another token, \"", file_.tokens[slot], "\""));
    }
    added_.emplace(text, file_.added_tokens.size());
    SetToken(slot, text);
    file_.added_tokens.push_back({static_cast<int32_t>(id), std::move(text), special});
    return absl::OkStatus();
  }

  absl::Status ReadModel(Object model) {
    DFLASH_RETURN_IF_ERROR(model.RequireValue("type", "BPE"));
    DFLASH_RETURN_IF_ERROR(model.RequireNull("dropout"));
    DFLASH_RETURN_IF_ERROR(model.RequireNull("unk_token"));
    DFLASH_RETURN_IF_ERROR(model.RequireNullOrEmpty("continuing_subword_prefix"));
    DFLASH_RETURN_IF_ERROR(model.RequireNullOrEmpty("end_of_word_suffix"));
    for (const char* key : {"fuse_unk", "byte_fallback", "ignore_merges"}) {
      DFLASH_RETURN_IF_ERROR(model.RequireNullOrFalse(key));
    }
    DFLASH_RETURN_IF_ERROR(ReadVocabulary(model));
    DFLASH_RETURN_IF_ERROR(ReadMerges(model));
    return model.CheckAllRead();
  }

  absl::Status ReadVocabulary(Object& model) {
    DFLASH_ASSIGN_OR_RETURN(const dom::element element, model.Require("vocab"));
    dom::object vocabulary;
    if (element.get(vocabulary) != simdjson::SUCCESS) return model.Invalid("vocab", "must be an object");
    const size_t size = vocabulary.size();
    file_.tokens.reserve(size + 1024);
    ids_.reserve(size);
    std::vector<bool> taken;
    std::string bytes;
    for (const auto field : vocabulary) {
      const auto invalid = [&](std::string_view what) {
        return model.Invalid("vocab", absl::StrCat("\"", std::string(field.key), "\": ", std::string(what)));
      };
      int64_t id = -1;
      if (field.value.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxVocabularySize) {
        return invalid(absl::StrCat("the id must be an integer in [0, ", kMaxVocabularySize, ")"));
      }
      const auto slot = static_cast<size_t>(id);
      if (slot >= taken.size()) taken.resize(slot + 1);
      if (taken[slot]) return invalid(absl::StrCat("id ", id, " has two tokens"));
      taken[slot] = true;
      // An added token may stand in the vocabulary too, written as it is.
      const bool added = slot < file_.tokens.size() && !file_.tokens[slot].empty();
      if (added && file_.tokens[slot] != field.key) {
        return invalid(absl::StrCat("id ", id, " is that of the added token \"", file_.tokens[slot], "\""));
      }
      bytes.clear();
      if (!alphabet_.AppendBytes(field.key, bytes)) {
        if (added) continue;
        return invalid("has a character outside the byte-level alphabet");
      }
      if (bytes.empty()) return invalid("an empty token");
      if (!ids_.emplace(bytes, static_cast<int32_t>(id)).second) return invalid("occurs twice");
      if (!added) SetToken(slot, bytes);
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto it = ids_.find(std::string(1, static_cast<char>(byte)));
      if (it == ids_.end()) return model.Invalid("vocab", absl::StrCat("no token for the byte ", byte));
      file_.byte_tokens[byte] = it->second;
    }
    return absl::OkStatus();
  }

  absl::Status ReadMerges(Object& model) {
    DFLASH_ASSIGN_OR_RETURN(const dom::array merges, model.RequireArray("merges"));
    const auto id_of = [&](const std::string& bytes) {
      const auto it = ids_.find(bytes);
      return it == ids_.end() ? -1 : it->second;
    };
    std::string left, right;
    for (const dom::element element : merges) {
      const auto invalid = [&](std::string_view what) {
        return model.Invalid(absl::StrCat("merges[", file_.merges.size(), "]"), what);
      };
      std::string_view parts[2];
      std::string_view text;
      dom::array pair;
      if (element.get(text) == simdjson::SUCCESS) {
        const size_t space = text.find(' ');
        if (space == text.npos || text.find(' ', space + 1) != text.npos) {
          return invalid("must be two tokens with one space between them");
        }
        parts[0] = text.substr(0, space);
        parts[1] = text.substr(space + 1);
      } else if (element.get(pair) != simdjson::SUCCESS || pair.size() != 2 ||
                 pair.at(0).get(parts[0]) != simdjson::SUCCESS ||
                 pair.at(1).get(parts[1]) != simdjson::SUCCESS) {
        return invalid("must be a string or a pair of strings");
      }
      left.clear();
      right.clear();
      if (!alphabet_.AppendBytes(parts[0], left) || !alphabet_.AppendBytes(parts[1], right)) {
        return invalid("has a character outside the byte-level alphabet");
      }
      BytePairMerge merge{.left = id_of(left), .right = id_of(right), .result = -1};
      left.append(right);
      merge.result = id_of(left);
      if (merge.left < 0 || merge.right < 0 || merge.result < 0) {
        return invalid("both parts and what they merge into must be in model.vocab");
      }
      file_.merges.push_back(merge);
    }
    return absl::OkStatus();
  }

  absl::Status ReadConfig(const simdjson::padded_string& text, const std::string& path) {
    dom::parser parser;
    DFLASH_ASSIGN_OR_RETURN(Object root, Parse(parser, text, path));
    // These would change the ids or the text; the other keys here are for other programs.
    for (const char* key :
         {"add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"}) {
      DFLASH_RETURN_IF_ERROR(root.RequireNullOrFalse(key));
    }
    const std::optional<dom::element> decoder = root.FindNonNull("added_tokens_decoder");
    if (!decoder) return absl::OkStatus();
    dom::object tokens;
    if (decoder->get(tokens) != simdjson::SUCCESS) {
      return root.Invalid("added_tokens_decoder", "must be an object");
    }
    for (const auto field : tokens) {
      const std::string key(field.key);
      const std::string where = root.Where("added_tokens_decoder") + "." + key;
      int32_t id = -1;
      if (key.size() > 9 || key.find_first_not_of("0123456789") != key.npos || !absl::SimpleAtoi(key, &id)) {
        return absl::InvalidArgumentError(where + ": the key must be a token id");
      }
      DFLASH_ASSIGN_OR_RETURN(Object token, Object::From(field.value, where));
      DFLASH_RETURN_IF_ERROR(ReadAddedToken(std::move(token), id, /*again=*/true));
    }
    return absl::OkStatus();
  }

  // The format takes an added token that is written like an entry of the vocabulary for that entry.
  absl::Status CheckAddedTokens(const std::string& path) const {
    for (const AddedToken& token : file_.added_tokens) {
      std::string bytes;
      if (!alphabet_.AppendBytes(token.content, bytes)) continue;
      const auto entry = ids_.find(bytes);
      if (entry == ids_.end() || entry->second == token.id) continue;
      return absl::InvalidArgumentError(absl::StrCat(path, ": model.vocab: \"", token.content, "\" has id ",
                                                     entry->second, ", but ", token.id,
                                                     " as an added token"));
    }
    return absl::OkStatus();
  }

  void SetToken(size_t id, std::string bytes) {
    if (id >= file_.tokens.size()) file_.tokens.resize(id + 1);
    file_.tokens[id] = std::move(bytes);
  }

  TokenizerFile file_;
  ByteAlphabet alphabet_;
  absl::flat_hash_map<std::string, size_t> added_;  // place in added_tokens, by content
  absl::flat_hash_map<std::string, int32_t> ids_;   // of model.vocab, by bytes
};

}  // namespace

absl::StatusOr<TokenizerFile> ReadTokenizerFile(const std::string& folder) { return Reader().Read(folder); }

absl::StatusOr<std::string> TokenizerDigest(const std::string& folder) {
  DFLASH_ASSIGN_OR_RETURN(const simdjson::padded_string tokenizer, ReadPadded(folder + "/tokenizer.json"));
  const absl::StatusOr<simdjson::padded_string> config = ReadPadded(folder + "/tokenizer_config.json");
  if (!config.ok() && !absl::IsNotFound(config.status())) return config.status();
  return Sha256()
      .Add({tokenizer.data(), tokenizer.size()})
      .Add(config.ok() ? std::string_view(config->data(), config->size()) : std::string_view())
      .HexDigest();
}

}  // namespace dflash
