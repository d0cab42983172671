#include "text/tokenizer_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"

namespace dflash {
namespace {

using Json = nlohmann::json;
using Pointer = Json::json_pointer;
using absl::StatusCode;

class TokenizerFileTest : public testing::Test {
 protected:
  TokenizerFileTest() {
    folder_ = testing::TempDir() + "/tokenizer_file_test_" + std::to_string(getpid());
    std::filesystem::create_directories(folder_);
  }
  ~TokenizerFileTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  absl::Status Status() const { return Tokenizer::Load(folder_).status(); }

  // A small file of the format: the bytes, three merges, two added tokens.
  static Json Small() {
    Json vocabulary;
    for (int byte = 0, next = 0x100; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
      const int character = printable ? byte : next++;
      std::string written;
      if (character < 0x80) {
        written = {static_cast<char>(character)};
      } else {
        written = {static_cast<char>(0xC0 | character >> 6), static_cast<char>(0x80 | (character & 0x3F))};
      }
      vocabulary[written] = byte;
    }
    vocabulary["ab"] = 256;
    vocabulary["abc"] = 257;
    vocabulary["\u0120ab"] = 258;
    const auto added = [](int id, const char* content, bool special) {
      return Json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                  {"rstrip", false}, {"normalized", false}, {"special", special}};
    };
    const Json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
    return {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", {added(259, "<end>", true), added(260, "<t>", false)}},
        {"normalizer", {{"type", "NFC"}}},
        {"pre_tokenizer",
         {{"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"},
             {"pattern", {{"Regex", " ?[a-z]+"}}},
             {"behavior", "Isolated"},
             {"invert", false}},
            byte_level}}}},
        {"post_processor", nullptr},
        {"decoder", byte_level},
        {"model",
         {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", vocabulary},
          {"merges",
           Json::array({Json::array({"a", "b"}), Json::array({"ab", "c"}), Json::array({"\u0120", "ab"})})}}},
    };
  }
  static Json Config() {
    Json config = {
        {"add_bos_token", false}, {"tokenizer_class", "X"}, {"added_tokens_decoder", Json::object()}};
    for (const auto& [id, content, special] :
         {std::tuple{"259", "<end>", true}, std::tuple{"261", "<new>", true}}) {
      config["added_tokens_decoder"][id] = {{"content", content},   {"lstrip", false},
                                            {"rstrip", false},      {"normalized", false},
                                            {"single_word", false}, {"special", special}};
    }
    return config;
  }

  std::string folder_;
};

// What is wrong and where; no value removes the key.
struct Mutation {
  const char* pointer;
  std::optional<Json> value;
  StatusCode code;
  const char* message;
};

void Apply(Json& json, const char* where, const std::optional<Json>& value) {
  const Pointer pointer(where);
  if (value) {
    json[pointer] = *value;
  } else {
    EXPECT_EQ(json[pointer.parent_pointer()].erase(pointer.back()), 1u) << where;
  }
}

TEST_F(TokenizerFileTest, TheSmallFileIsRight) {
  Write("tokenizer.json", Small().dump());
  Write("tokenizer_config.json", Config().dump());
  const auto file = ReadTokenizerFile(folder_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->nfc);
  EXPECT_EQ(file->split_pattern, " ?[a-z]+");
  EXPECT_EQ(file->tokens.size(), 262u);
  EXPECT_EQ(file->tokens[258], " ab");
  EXPECT_EQ(file->tokens[261], "<new>");
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(file->byte_tokens[static_cast<size_t>(byte)], byte);
    EXPECT_EQ(file->tokens[static_cast<size_t>(byte)], std::string(1, static_cast<char>(byte)));
  }
  const auto tokenizer = Tokenizer::Load(folder_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode("abc ab<end>e\u0301<new>", AddedTokens::kParse).value(),
              testing::ElementsAre(257, 258, 259, 0xC3, 0xA9, 261));
  EXPECT_TRUE(tokenizer->Find(261)->special);
}

TEST_F(TokenizerFileTest, WhatMayDifferMayDiffer) {
  const std::pair<const char*, std::optional<Json>> variants[] = {
      {"/truncation", std::nullopt},
      {"/padding", std::nullopt},
      {"/normalizer", nullptr},
      {"/post_processor", Json{{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}}},
      {"/post_processor", std::nullopt},
      {"/model/continuing_subword_prefix", ""},
      {"/model/end_of_word_suffix", ""},
      {"/model/dropout", std::nullopt},
      {"/model/ignore_merges", std::nullopt},
      {"/model/merges", Json::array({"a b", "ab c", "\u0120 ab"})},  // older files
      {"/model/merges", Json::array()},
      {"/model/vocab/<end>", 259},  // an added token in the vocabulary too
      {"/added_tokens", Json::array()},
      {"/added_tokens/0/id", 300},  // a gap
      {"/pre_tokenizer/pretokenizers/1/trim_offsets", true},
      {"/decoder/add_prefix_space", true},
  };
  for (const auto& [pointer, value] : variants) {
    Json json = Small();
    Apply(json, pointer, value);
    Write("tokenizer.json", json.dump());
    EXPECT_TRUE(Status().ok()) << pointer << ": " << Status();
  }
  Json json = Small();
  json["added_tokens"][0]["id"] = 300;
  Write("tokenizer.json", json.dump());
  const auto tokenizer = Tokenizer::Load(folder_);
  EXPECT_EQ(tokenizer->vocabulary_size(), 301);
  EXPECT_EQ(tokenizer->Find(299).status().code(), StatusCode::kInvalidArgument);
  json["normalizer"] = nullptr;
  json["model"]["merges"] = Json::array({"a b", "ab c", "\u0120 ab"});
  Write("tokenizer.json", json.dump());
  EXPECT_THAT(Tokenizer::Load(folder_)->Encode("e\u0301 ab", AddedTokens::kParse).value(),
              testing::ElementsAre('e', 0xCC, 0x81, 258));
}

TEST_F(TokenizerFileTest, WhatIsNoObjectAndWhatLeadsNowhere) {
  Write("tokenizer.json", "0");
  EXPECT_EQ(std::string(ReadTokenizerFile(folder_).status().message()),
            folder_ + "/tokenizer.json: must be an object");
  Write("tokenizer.json", Small().dump());
  const std::string config = folder_ + "/tokenizer_config.json";
  std::filesystem::create_symlink(config, config);
  const absl::Status status = ReadTokenizerFile(folder_).status();
  std::filesystem::remove(config);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(std::string(status.message()), config + ": Too many levels of symbolic links");
  EXPECT_TRUE(ReadTokenizerFile(folder_).ok()) << "only what is not there is absent";
}

TEST_F(TokenizerFileTest, EveryMutationIsAnErrorThatNamesItsKey) {
  constexpr auto kBad = StatusCode::kInvalidArgument;
  constexpr auto kNotHere = StatusCode::kUnimplemented;
  const Json split = Small()["pre_tokenizer"]["pretokenizers"][0];
  const Json byte_level = Small()["decoder"];
  const Mutation mutations[] = {
      {"/version", "2.0", kNotHere, "version"},
      {"/version", std::nullopt, kBad, "version: missing"},
      {"/version", 1, kBad, "version"},
      {"/surprise", 1, kBad, "surprise: unknown key"},
      {"/truncation", Json::object(), kNotHere, "truncation"},
      {"/padding", Json::object(), kNotHere, "padding"},
      {"/normalizer/type", "NFKC", kNotHere, "normalizer.type: \"NFKC\""},
      {"/normalizer", Json{{"type", "Sequence"}, {"normalizers", Json::array()}}, kNotHere,
       "normalizer.type"},
      {"/normalizer", "NFC", kBad, "normalizer: must be an object"},
      {"/normalizer/more", 1, kBad, "normalizer.more"},
      {"/pre_tokenizer", nullptr, kBad, "pre_tokenizer"},
      {"/pre_tokenizer", byte_level, kNotHere, "pre_tokenizer.type: \"ByteLevel\""},
      {"/pre_tokenizer/pretokenizers", Json::array({split}), kNotHere, "pre_tokenizer.pretokenizers"},
      {"/pre_tokenizer/pretokenizers", Json::array({byte_level, split}), kNotHere, "pretokenizers[0].type"},
      {"/pre_tokenizer/pretokenizers", Json::array({split, split}), kNotHere, "pretokenizers[1].type"},
      {"/pre_tokenizer/pretokenizers/0/pattern", Json{{"String", " "}}, kNotHere, "pattern.String"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "(", kBad, "pattern.Regex"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "a*", kBad, "pattern.Regex"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Removed", kNotHere, "behavior"},
      {"/pre_tokenizer/pretokenizers/0/invert", true, kNotHere, "invert"},
      {"/pre_tokenizer/pretokenizers/0/invert", std::nullopt, kBad, "invert"},
      {"/pre_tokenizer/pretokenizers/1/add_prefix_space", true, kNotHere, "add_prefix_space"},
      {"/pre_tokenizer/pretokenizers/1/use_regex", true, kNotHere, "use_regex"},
      {"/pre_tokenizer/pretokenizers/1/use_regex", std::nullopt, kNotHere, "use_regex"},  // means true
      {"/pre_tokenizer/pretokenizers/1/x", 1, kBad, "pretokenizers[1].x"},
      {"/post_processor", Json{{"type", "TemplateProcessing"}}, kNotHere, "post_processor.type"},
      {"/decoder", nullptr, kBad, "decoder"},
      {"/decoder/type", "Metaspace", kNotHere, "decoder.type"},
      {"/added_tokens", Json::object(), kBad, "added_tokens"},
      {"/added_tokens/0", 7, kBad, "added_tokens[0]"},
      {"/added_tokens/1/lstrip", true, kNotHere, "added_tokens[1].lstrip"},
      {"/added_tokens/1/rstrip", true, kNotHere, "added_tokens[1].rstrip"},
      {"/added_tokens/1/single_word", true, kNotHere, "added_tokens[1].single_word"},
      {"/added_tokens/1/normalized", true, kNotHere, "added_tokens[1].normalized"},
      {"/added_tokens/1/special", std::nullopt, kBad, "added_tokens[1].special"},
      {"/added_tokens/1/special", "no", kBad, "added_tokens[1].special"},
      {"/added_tokens/1/content", "", kBad, "added_tokens[1].content"},
      {"/added_tokens/1/content", std::string(257, 'x'), kBad, "added_tokens[1].content"},
      {"/added_tokens/1/content", "<end>", kBad, "added_tokens[1].content"},
      {"/added_tokens/1/content", "ab", kBad, "\"ab\" has id 256, but 260"},
      {"/added_tokens/1/id", 259, kBad, "added_tokens[1].id"},
      {"/added_tokens/1/id", 256, kBad, "id 256 is that of the added token \"<t>\""},
      {"/added_tokens/1/id", -1, kBad, "added_tokens[1].id"},
      {"/added_tokens/1/id", kMaxVocabularySize, kBad, "added_tokens[1].id"},
      {"/added_tokens/1/id", 1e300, kBad, "added_tokens[1].id"},
      {"/added_tokens/1/id", "260", kBad, "added_tokens[1].id"},
      {"/added_tokens/1/more", 1, kBad, "added_tokens[1].more"},
      {"/model", nullptr, kBad, "model"},
      {"/model/type", "Unigram", kNotHere, "model.type"},
      {"/model/type", std::nullopt, kBad, "model.type"},
      {"/model/dropout", 0.1, kNotHere, "model.dropout"},
      {"/model/unk_token", "<unk>", kNotHere, "model.unk_token"},
      {"/model/continuing_subword_prefix", "##", kNotHere, "model.continuing_subword_prefix"},
      {"/model/end_of_word_suffix", "</w>", kNotHere, "model.end_of_word_suffix"},
      {"/model/fuse_unk", true, kNotHere, "model.fuse_unk"},
      {"/model/byte_fallback", true, kNotHere, "model.byte_fallback"},
      {"/model/ignore_merges", true, kNotHere, "model.ignore_merges"},
      {"/model/ignore_merges", 0, kBad, "model.ignore_merges"},
      {"/model/extra", 0, kBad, "model.extra: unknown key"},
      {"/model/vocab", std::nullopt, kBad, "model.vocab"},
      {"/model/vocab", Json::array(), kBad, "model.vocab"},
      {"/model/vocab", Json::object(), kBad, "no token for the byte 0"},
      {"/model/vocab/a", std::nullopt, kBad, "no token for the byte 97"},
      {"/model/vocab/ab", 257, kBad, "id 257 has two tokens"},
      {"/model/vocab/ab", -1, kBad, "\"ab\""},
      {"/model/vocab/ab", kMaxVocabularySize, kBad, "\"ab\""},
      {"/model/vocab/ab", 1.5, kBad, "\"ab\""},
      {"/model/vocab/a b", 261, kBad, "\"a b\": has a character outside"},
      {"/model/vocab/\u65e5", 261, kBad, "has a character outside"},
      {"/model/vocab/", 261, kBad, "\"\": an empty token"},
      {"/model/merges", std::nullopt, kBad, "model.merges"},
      {"/model/merges", Json::object(), kBad, "model.merges"},
      {"/model/merges/1", Json::array({"ab", "c", "d"}), kBad, "model.merges[1]"},
      {"/model/merges/1", 7, kBad, "model.merges[1]"},
      {"/model/merges/1", Json::array({"ab", 7}), kBad, "model.merges[1]"},
      {"/model/merges/1", "abc", kBad, "model.merges[1]"},
      {"/model/merges/1", "ab  c", kBad, "model.merges[1]"},
      {"/model/merges/1", "ab c ", kBad, "model.merges[1]"},
      {"/model/merges/1", Json::array({"ab", "d"}), kBad, "model.merges[1]"},
      {"/model/merges/1", Json::array({"ab", "\u65e5"}), kBad, "model.merges[1]"},
      {"/model/merges/1", Json::array({"a", "b"}), kBad, "model: merges[1]"},
  };
  for (const Mutation& mutation : mutations) {
    Json json = Small();
    Apply(json, mutation.pointer, mutation.value);
    Write("tokenizer.json", json.dump());
    EXPECT_EQ(Status().code(), mutation.code) << mutation.pointer << ": " << Status();
    EXPECT_THAT(std::string(Status().message()), testing::HasSubstr(mutation.message)) << mutation.pointer;
    EXPECT_THAT(std::string(Status().message()), testing::HasSubstr("tokenizer.json: ")) << mutation.pointer;
  }
}

TEST_F(TokenizerFileTest, EveryMutationOfTheConfigIsAnErrorThatNamesItsKey) {
  constexpr auto kBad = StatusCode::kInvalidArgument;
  constexpr auto kNotHere = StatusCode::kUnimplemented;
  const Mutation mutations[] = {
      {"/add_bos_token", true, kNotHere, "add_bos_token"},
      {"/add_eos_token", true, kNotHere, "add_eos_token"},
      {"/add_prefix_space", true, kNotHere, "add_prefix_space"},
      {"/clean_up_tokenization_spaces", true, kNotHere, "clean_up_tokenization_spaces"},
      {"/clean_up_tokenization_spaces", "no", kBad, "clean_up_tokenization_spaces"},
      {"/added_tokens_decoder", Json::array(), kBad, "added_tokens_decoder"},
      {"/added_tokens_decoder/259/special", false, kBad, "added_tokens_decoder.259.content"},
      {"/added_tokens_decoder/259/content", "<else>", kBad, "added_tokens_decoder.259.id"},
      {"/added_tokens_decoder/261/content", "<t>", kBad, "added_tokens_decoder.261.content"},
      {"/added_tokens_decoder/261/content", "abc", kBad, "\"abc\" has id 257, but 261"},
      {"/added_tokens_decoder/261/normalized", true, kNotHere, "added_tokens_decoder.261.normalized"},
      {"/added_tokens_decoder/261/extra", 1, kBad, "added_tokens_decoder.261.extra"},
      {"/added_tokens_decoder/x", Json::object(), kBad, "added_tokens_decoder.x"},
      {"/added_tokens_decoder/-1", Json::object(), kBad, "added_tokens_decoder.-1"},
      {"/added_tokens_decoder/99999999999", Json::object(), kBad, "added_tokens_decoder.99999999999"},
      {"/added_tokens_decoder/262", 5, kBad, "added_tokens_decoder.262"},
  };
  Write("tokenizer.json", Small().dump());
  for (const Mutation& mutation : mutations) {
    Json json = Config();
    Apply(json, mutation.pointer, mutation.value);
    Write("tokenizer_config.json", json.dump());
    EXPECT_EQ(Status().code(), mutation.code) << mutation.pointer << ": " << Status();
    EXPECT_THAT(std::string(Status().message()), testing::HasSubstr(mutation.message)) << mutation.pointer;
  }
}

TEST_F(TokenizerFileTest, FilesThatAreNoJson) {
  EXPECT_EQ(Status().code(), StatusCode::kNotFound);
  const std::string whole = Small().dump();
  const std::string deep(5000, '[');
  for (const std::string& text :
       {std::string(), std::string("[]"), std::string("null"), std::string("{"), deep, whole + "x",
        whole.substr(0, whole.size() / 2), std::string("{\"version\": \"\xFF\"}")}) {
    Write("tokenizer.json", text);
    EXPECT_EQ(Status().code(), StatusCode::kInvalidArgument) << Status();
  }
  // The same key twice: which of both would be meant?
  Write("tokenizer.json", "{\"version\": \"1.0\"," + whole.substr(1));
  EXPECT_EQ(Status().code(), StatusCode::kInvalidArgument) << Status();
  std::string twice = whole;
  twice.replace(twice.find("\"ab\":256"), 8, "\"ab\":256,\"ab\":261");
  Write("tokenizer.json", twice);
  EXPECT_THAT(std::string(Status().message()), testing::HasSubstr("\"ab\": occurs twice"));
  std::filesystem::remove(folder_ + "/tokenizer.json");
  std::filesystem::create_directory(folder_ + "/tokenizer.json");
  EXPECT_FALSE(Status().ok());
}

TEST_F(TokenizerFileTest, DamagedFilesLoadOrFailCleanly) {
  std::mt19937 random(17);
  size_t loaded = 0;
  for (int round = 0; round < 400; ++round) {
    std::string text = Small().dump();
    const size_t place = random() % text.size();
    const char* const replacements[] = {"", "0", "-1", "null", "\"", "{", "]", ",", "\\u0000", "1e9", "\xC3"};
    text.replace(place, 1 + random() % 3, replacements[random() % std::size(replacements)]);
    Write("tokenizer.json", text);
    const auto tokenizer = Tokenizer::Load(folder_);
    if (!tokenizer.ok()) continue;
    ++loaded;
    const auto ids = tokenizer->Encode("abc <end> \u00E9 12", AddedTokens::kParse);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_TRUE(tokenizer->Decode(*ids, SpecialTokens::kKeep).ok());
  }
  EXPECT_LT(loaded, 200u);
}

TEST_F(TokenizerFileTest, ItsDigestIsThatOfBothFiles) {
  EXPECT_EQ(TokenizerDigest(folder_).status().code(), StatusCode::kNotFound);
  std::set<std::string> digests;
  const auto digest = [&](const char* tokenizer, const char* config) {
    Write("tokenizer.json", tokenizer);
    if (config != nullptr) Write("tokenizer_config.json", config);
    return TokenizerDigest(folder_).value();
  };
  const std::string first = digest("{}", nullptr);
  EXPECT_EQ(first.size(), 64u);
  EXPECT_EQ(digest("{}", nullptr), first);
  digests = {first, digest("{ }", nullptr), digest("{}", "x"), digest("{}", "y")};
  EXPECT_EQ(digests.size(), 4u);
}

}  // namespace
}  // namespace dflash
