// Broken model folders, made by rule from the small pair's files and from docs/config-keys.md: each is
// refused with the right code, naming the file and what is wrong in it, leaves nothing behind, and the engine
// that runs goes on.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/load_group.h"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

const std::string kTarget = DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6";
const std::string kDrafter = DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6-dflash";

enum class Part { kTarget, kDrafter, kTemplate };

struct Case {
  std::string name;
  Part part;                                           // whose folder is damaged
  std::string file;                                    // and which file of it
  std::function<void(const std::string& path)> write;  // puts something else in the file's place
  std::set<absl::StatusCode> codes = {absl::StatusCode::kInvalidArgument};
  std::vector<std::string> words;  // of the message, besides the file's name
};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::function<void(const std::string&)> Bytes(std::string bytes) {
  return
      [bytes = std::move(bytes)](const std::string& path) { std::ofstream(path, std::ios::binary) << bytes; };
}
std::function<void(const std::string&)> Text(const Json& json) { return Bytes(json.dump()); }

// --- Configurations: every required key of docs/config-keys.md, missing and with values of wrong types

struct RequiredKey {
  std::string file;
  Part part;
  std::string path;
  std::string type;
};

std::vector<RequiredKey> RequiredKeys() {
  std::ifstream page(DFLASHD_SOURCE_DIR "/docs/config-keys.md");
  EXPECT_TRUE(page.good());
  std::vector<RequiredKey> keys;
  std::string heading;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) heading = line.substr(3);
    if (!line.starts_with("| `")) continue;
    std::vector<std::string> cells;
    std::istringstream columns(line.substr(2));
    for (std::string cell; std::getline(columns, cell, '|');) {
      cell.erase(0, cell.find_first_not_of(' '));
      cell.erase(cell.find_last_not_of(' ') + 1);
      cells.push_back(cell);
    }
    if (cells[2] != "required") continue;
    std::string path = cells[0].substr(1, cells[0].find('`', 1) - 1);
    if (heading == "Target: config.json, text level") path = "text_config." + path;
    keys.push_back({heading.ends_with("generation_config.json") ? "generation_config.json" : "config.json",
                    heading.starts_with("Drafter") ? Part::kDrafter : Part::kTarget, path, cells[1]});
  }
  EXPECT_GE(keys.size(), 45u);
  return keys;
}

Json::json_pointer Pointer(std::string path) {
  for (char& c : path) c = c == '.' ? '/' : c;
  return Json::json_pointer("/" + path);
}

void AddConfigurations(std::vector<Case>* cases) {
  for (const RequiredKey& key : RequiredKeys()) {
    const std::string folder = key.part == Part::kDrafter ? kDrafter : kTarget;
    const Json good = Json::parse(ReadAll(folder + "/" + key.file));
    const Json::json_pointer pointer = Pointer(key.path);
    ASSERT_TRUE(good.contains(pointer)) << key.path;
    const std::string leaf = pointer.back();
    const auto add = [&](const std::string& name, const Json& json) {
      // A wrong value may be refused because it is not built rather than because it is wrong.
      cases->push_back({absl::StrCat(name, " ", key.path),
                        key.part,
                        key.file,
                        Text(json),
                        {absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnimplemented},
                        {leaf}});
    };
    Json without = good;
    without[pointer.parent_pointer()].erase(leaf);
    // Of these another key of the file says the same.
    if (leaf != "tie_word_embeddings" && leaf != "layer_types" &&
        key.path != "text_config.rope_parameters.partial_rotary_factor") {
      add("without", without);
    }
    for (const Json& wrong :
         {Json::object(), Json("\xEF\xBF\xBD"), Json(1e300), Json::parse("[[]]"), Json(INT64_MIN)}) {
      Json with = good;
      with[pointer] = wrong;
      add(absl::StrCat(wrong.dump(), " as"), with);
    }
    Json extra = good;
    extra[pointer.parent_pointer()][leaf + "x"] = 1;
    add("unlisted key beside", extra);
  }
}

// --- Weights: every tensor of the drafter and of a shard of the target, one thing wrong with its entry at a
// time

// A file whose header is `header` and whose data are as many zeros as the good one has: nothing but the
// header is read before a folder is refused.
std::function<void(const std::string&)> WithHeader(const Json& header, uintmax_t data_bytes) {
  return [text = header.dump(), data_bytes](const std::string& path) {
    std::string length;
    for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(text.size() >> (8 * i) & 255));
    { std::ofstream(path, std::ios::binary) << length << text; }
    fs::resize_file(path, 8 + text.size() + data_bytes);
  };
}

struct WeightFile {
  Part part;
  std::string name;
};
const WeightFile kWeightFiles[] = {{Part::kDrafter, "model.safetensors"},
                                   {Part::kTarget, "model-00002-of-00002.safetensors"}};

struct Parsed {
  std::string bytes;
  size_t header_bytes = 0;
  Json header;
};
Parsed Parse(const WeightFile& file) {
  Parsed parsed;
  parsed.bytes = ReadAll((file.part == Part::kDrafter ? kDrafter : kTarget) + "/" + file.name);
  for (size_t i = 8; i-- > 0;)
    parsed.header_bytes = parsed.header_bytes << 8 | static_cast<uint8_t>(parsed.bytes[i]);
  parsed.header = Json::parse(parsed.bytes.substr(8, parsed.header_bytes));
  return parsed;
}

void AddTensors(std::vector<Case>* cases) {
  for (const WeightFile& file : kWeightFiles) {
    const Parsed good = Parse(file);
    const uintmax_t data_bytes = good.bytes.size() - 8 - good.header_bytes;
    for (const auto& [name, entry] : good.header.items()) {
      if (name == "__metadata__" || name.starts_with("mtp.")) continue;  // mtp: known, not built, skipped
      const auto add = [&](const std::string& what, const Json& header, absl::StatusCode code) {
        cases->push_back({absl::StrCat(what, " ", name),
                          file.part,
                          file.name,
                          WithHeader(header, data_bytes),
                          {code},
                          {name}});
      };
      const auto with = [&](const char* key, const Json& value) {
        Json header = good.header;
        header[name][key] = value;
        return header;
      };
      const int64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
      Json renamed = good.header;
      renamed.erase(name);
      renamed[name + "x"] = entry;
      add("another name for", renamed, absl::StatusCode::kInvalidArgument);
      Json other_type = good.header;
      other_type[name]["dtype"] = entry["dtype"] == "BF16" ? "F16" : "I32";
      add("another dtype of", other_type, absl::StatusCode::kUnimplemented);
      add("an unknown dtype of", with("dtype", "BF17"), absl::StatusCode::kUnimplemented);
      Json shape = entry["shape"];
      shape.push_back(1);
      shape.push_back(1);
      add("more dimensions of", with("shape", shape), absl::StatusCode::kInvalidArgument);
      shape = entry["shape"];
      shape[0] = shape[0].get<int64_t>() + 1;
      add("one more row of", with("shape", shape), absl::StatusCode::kInvalidArgument);
      add("a negative size of", with("shape", Json::array({-1})), absl::StatusCode::kInvalidArgument);
      add("an enormous size of", with("shape", Json::array({INT64_MAX, INT64_MAX})),
          absl::StatusCode::kInvalidArgument);
      add("data before the beginning of", with("data_offsets", Json::array({begin - 1, end - 1})),
          absl::StatusCode::kInvalidArgument);
      add("backward data of", with("data_offsets", Json::array({end, begin})),
          absl::StatusCode::kInvalidArgument);
      // Its neighbours are named: they no longer follow each other.
      cases->push_back(
          {"enormous offsets of " + name,
           file.part,
           file.name,
           WithHeader(with("data_offsets", Json::array({INT64_MAX - (end - begin), INT64_MAX})), data_bytes),
           {absl::StatusCode::kInvalidArgument},
           {" begins at ", "a hole"}});
      add("a key too many of", with("x", 1), absl::StatusCode::kInvalidArgument);
    }
  }
}

// --- Files that are cut, are no files, or are something else

void AddFiles(std::vector<Case>* cases) {
  using enum absl::StatusCode;
  for (const WeightFile& file : kWeightFiles) {
    const Parsed good = Parse(file);
    const auto add = [&](const std::string& name, const std::function<void(const std::string&)>& write,
                         const std::set<absl::StatusCode>& codes) {
      cases->push_back({name, file.part, file.name, write, codes, {}});
    };
    const size_t data = 8 + good.header_bytes;
    for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, data / 2, data - 1, data,
                              data + 1, (data + good.bytes.size()) / 2, good.bytes.size() - 1}) {
      add(absl::StrCat("cut after ", size), Bytes(good.bytes.substr(0, size)), {kDataLoss, kInvalidArgument});
    }
    add("a byte too many", Bytes(good.bytes + "x"), {kInvalidArgument});
    for (const uint64_t length :
         {uint64_t{0}, uint64_t{1}, uint64_t{good.header_bytes - 1}, uint64_t{good.header_bytes + 1},
          uint64_t{good.bytes.size()}, uint64_t{100'000'001}, uint64_t{1} << 63, UINT64_MAX}) {
      std::string bytes = good.bytes;
      for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 255);
      add(absl::StrCat("a header of ", length), Bytes(bytes), {kInvalidArgument, kDataLoss});
    }
    std::string zeros = good.bytes;
    std::fill(zeros.begin() + 8, zeros.begin() + static_cast<ptrdiff_t>(data), '\0');
    add("a header of zeros", Bytes(zeros), {kInvalidArgument});
    std::string deep = good.bytes;
    std::fill(deep.begin() + 9, deep.begin() + static_cast<ptrdiff_t>(data), '[');
    add("a header of brackets", Bytes(deep), {kInvalidArgument});
  }
  for (const auto& [part, file] :
       std::vector<std::pair<Part, std::string>>{{Part::kTarget, "config.json"},
                                                 {Part::kTarget, "generation_config.json"},
                                                 {Part::kTarget, "model.safetensors.index.json"},
                                                 {Part::kTarget, "tokenizer.json"},
                                                 {Part::kTarget, "model-00001-of-00002.safetensors"},
                                                 {Part::kDrafter, "config.json"},
                                                 {Part::kDrafter, "model.safetensors"},
                                                 {Part::kTemplate, "tokenizer.json"},
                                                 {Part::kTemplate, "chat_template.jinja"}}) {
    const auto add = [&](const std::string& name, const std::function<void(const std::string&)>& write) {
      cases->push_back({name,
                        part,
                        file,
                        write,
                        {kInvalidArgument, kNotFound, kDataLoss, kUnavailable, kPermissionDenied},
                        {}});
    };
    const bool is_template = file == "chat_template.jinja";
    if (!is_template) {  // an empty template, or one without tags, is a template
      add("an empty file", Bytes(""));
      add("one brace", Bytes("{"));
      add("brackets", Bytes(std::string(100'000, '[')));
      add("a JSON array", Bytes("[]"));
      add("zeros", Bytes(std::string(1000, '\0')));
      add("a null", Bytes("null"));
      add("two documents", Bytes("{}{}"));
      add("nothing", [](const std::string&) {});
    }
    add("not UTF-8", Bytes("{\"a\": \"\xff\"}"));
    add("a folder", [](const std::string& path) { fs::create_directory(path); });
    add("a link to itself", [](const std::string& path) { fs::create_symlink(path, path); });
    if (!is_template)
      add("a link to nothing", [](const std::string& path) { fs::create_symlink("/nonexistent/x", path); });
    add("a pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); });
    add("a device", [](const std::string& path) { fs::create_symlink("/dev/zero", path); });
  }
}

void AddIndex(std::vector<Case>* cases) {
  using enum absl::StatusCode;
  const std::string file = "model.safetensors.index.json";
  const Json good = Json::parse(ReadAll(kTarget + "/" + file));
  const auto add = [&](const std::string& name, const Json& json, const std::string& word,
                       const std::set<absl::StatusCode>& codes = {absl::StatusCode::kInvalidArgument}) {
    cases->push_back({name, Part::kTarget, file, Text(json), codes, {word}});
  };
  int count = 0;
  for (const auto& [name, shard] : good["weight_map"].items()) {
    if (++count > 12) break;
    Json json = good;
    json["weight_map"].erase(name);
    add("index without " + name, json, name);
    json = good;
    json["weight_map"][name] = shard == "model-00001-of-00002.safetensors"
                                   ? "model-00002-of-00002.safetensors"
                                   : "model-00001-of-00002.safetensors";
    add("other shard for " + name, json, name);
    json = good;
    json["weight_map"][name] = 1;
    add("number for " + name, json, name);
    json = good;
    json["weight_map"][name + "x"] = shard;
    add("index with " + name + "x", json, name + "x");
  }
  for (const char* path :
       {"", ".", "..", "../x.safetensors", "/etc/passwd", "a/b.safetensors", ".safetensors", "x.bin",
        "a b.safetensors", "a\nb.safetensors", "\u00fc.safetensors"}) {
    Json json = good;
    json["weight_map"]["lm_head.weight"] = path;
    add(absl::StrCat("shard named '", path, "'"), json, "lm_head.weight");
  }
  Json json = good;
  json["weight_map"]["lm_head.weight"] = "model-00003-of-00002.safetensors";
  add("shard that is not there", json, "model-00003-of-00002.safetensors", {kNotFound});
  json = good;
  json["weight_map"] = Json::object();
  add("empty map", json, "weight_map");
  json["weight_map"] = Json::array();
  add("map as list", json, "weight_map");
  json = good;
  json["x"] = 1;
  add("unknown key", json, "x");
}

// --- Tokenizer

void AddTokenizer(std::vector<Case>* cases) {
  const Json good = Json::parse(ReadAll(kTarget + "/tokenizer.json"));
  const auto add = [&](const std::string& pointer, const Json& value, const std::string& word) {
    Json json = good;
    const Json::json_pointer place(pointer);
    if (value.is_discarded()) {
      Json& parent = json[place.parent_pointer()];
      if (parent.is_array()) {
        parent.erase(std::stoul(place.back()));
      } else {
        parent.erase(place.back());
      }
    } else {
      json[place] = value;
    }
    for (const Part part : {Part::kTarget, Part::kTemplate}) {
      cases->push_back(
          {absl::StrCat("tokenizer: ", pointer, value.is_discarded() ? " gone" : " = " + value.dump()),
           part,
           "tokenizer.json",
           Text(json),
           {absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnimplemented},
           {word}});
    }
  };
  const Json gone = Json(nlohmann::detail::value_t::discarded);
  for (const char* key : {"version", "pre_tokenizer", "decoder", "added_tokens", "model"}) {
    add(absl::StrCat("/", key), gone, key);
    for (const Json& wrong : {Json(1), Json("x"), Json::array({1}), Json(true)})
      add(absl::StrCat("/", key), wrong, key);
  }
  for (const char* key : {"truncation", "padding"}) add(absl::StrCat("/", key), Json::object(), key);
  for (const char* key : {"type", "vocab", "merges"}) add(absl::StrCat("/model/", key), gone, key);
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                          "fuse_unk", "byte_fallback", "ignore_merges"}) {
    add(absl::StrCat("/model/", key), "x", key);
  }
  for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
    add(absl::StrCat("/added_tokens/0/", key), true, key);
    add(absl::StrCat("/added_tokens/0/", key), gone, key);
    add(absl::StrCat("/added_tokens/0/", key), 1, key);
  }
  for (const Json& id :
       {Json(-1), Json(4089), Json(5), Json(1 << 22), Json(INT64_MAX), Json("1"), Json(1.5), gone}) {
    add("/added_tokens/0/id", id, "added");
  }
  for (const Json& content : {Json(""), Json(std::string(257, 'x')), Json(1), Json("<|im_start|>"), gone}) {
    add("/added_tokens/0/content", content, "content");
  }
  for (const Json& id : {Json(-1), Json(1), Json(1 << 22), Json("1"), Json(nullptr)})
    add("/model/vocab/!", id, "vocab");
  for (const Json& merge : {Json("a"), Json("a b c"), Json("zzzz yyyy"), Json(1), Json::array({"a"}),
                            Json::array({"a", 1}), Json("\u4e2d a")}) {
    add("/model/merges/3", merge, "merges[3]");
  }
  add("/model/merges/9", good["model"]["merges"][3], "merge");
  for (const Json& regex : {Json("("), Json("[z-a]"), Json("(?<x>a)(?<x>b)"), Json(1), gone}) {
    add("/pre_tokenizer/pretokenizers/0/pattern/Regex", regex, "Regex");
  }
  add("/normalizer", Json{{"type", "NFKC"}}, "type");
  add("/unknown", 1, "unknown");
}

// --- Chat template

void AddTemplates(std::vector<Case>* cases) {
  using enum absl::StatusCode;
  for (const char* source : {"{{",
                             "{%",
                             "{#",
                             "{{ }}",
                             "{{ 1 + }}",
                             "{{ (1 }}",
                             "{{ 'a }}",
                             "{{ a. }}",
                             "{{ a[ }}",
                             "{% if %}{% endif %}",
                             "{% if 1 %}",
                             "{% endif %}",
                             "{% for %}{% endfor %}",
                             "{% for x y %}{% endfor %}",
                             "{% for x in y %}",
                             "{% set %}",
                             "{% set 1 = 2 %}",
                             "{% nonsense %}",
                             "{% else %}",
                             "{% macro %}{% endmacro %}",
                             "{% break %}x{% for",
                             "{{ 1 | nonsense }}",
                             "{{ 1 is nonsense }}",
                             "{% include 'x' %}",
                             "{% import 'x' as y %}",
                             "{% extends 'x' %}",
                             "{% block x %}{% endblock %}",
                             "{{ 0x }}",
                             "{{ 1__0 }}",
                             "{{ ~ }}",
                             "{{ a b }}",
                             "{% raw %}",
                             "{{ {1: } }}"}) {
    cases->push_back({absl::StrCat("template ", source),
                      Part::kTemplate,
                      "chat_template.jinja",
                      Bytes(source),
                      {kInvalidArgument, kUnimplemented},
                      {"line 1"}});
  }
  for (const auto& [name, source] :
       std::map<std::string, std::string>{{"parentheses", "{{ " + std::string(100'000, '(')},
                                          {"minus signs", "{{ " + std::string(100'000, '-') + "1 }}"},
                                          {"a template of two megabytes", std::string(2 << 20, 'x')}}) {
    cases->push_back({name,
                      Part::kTemplate,
                      "chat_template.jinja",
                      Bytes(source),
                      {kResourceExhausted, kInvalidArgument},
                      {}});
  }
}

int OpenDescriptors() {
  return static_cast<int>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
}

TEST(HostileFiles, EachIsRefusedByNameAndTheEngineGoesOn) {
  std::vector<Case> cases;
  AddConfigurations(&cases);
  AddTensors(&cases);
  AddFiles(&cases);
  AddIndex(&cases);
  AddTokenizer(&cases);
  AddTemplates(&cases);
  EXPECT_GE(cases.size(), 1000u);

  GroupOptions good_options;
  good_options.model = kTarget;
  good_options.draft_model = kDrafter;
  good_options.threads = 1;
  good_options.max_sequences = 1;
  const auto no_log = [](const std::string&) {};
  const testing::GoldenPrompt golden = (*testing::LoadGoldenPrompts()).front();
  GenerationRequest request = testing::GoldenRequest(golden);
  request.max_tokens = 6;
  const std::vector<int32_t> tokens(golden.output_ids.begin(), golden.output_ids.begin() + 6);
  const auto works = [&](Engine& engine) {
    const auto outcomes = testing::RunAll(engine, {request});
    ASSERT_TRUE(outcomes.ok()) << outcomes.status();
    EXPECT_EQ(outcomes->front().tokens, tokens);
    EXPECT_EQ(golden.output_text.rfind(outcomes->front().text, 0), 0u) << outcomes->front().text;
    EXPECT_FALSE(outcomes->front().text.empty());
  };
  absl::StatusOr<Group> running = LoadGroup(good_options, no_log);
  ASSERT_TRUE(running.ok()) << running.status();
  const auto engine = running->MakeEngine(512, nullptr);
  ASSERT_TRUE(engine.ok()) << engine.status();
  works(**engine);

  const int descriptors = OpenDescriptors();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.file + ": " + c.name);
    const TemporaryFolder folder;
    folder.LinkAll(c.part == Part::kDrafter ? kDrafter : kTarget);
    fs::remove(folder.File(c.file));
    c.write(folder.File(c.file));
    absl::Status status;
    if (c.part == Part::kTemplate) {
      status = CheckpointPrompts::Load(folder.path()).status();
    } else {
      GroupOptions options = good_options;
      (c.part == Part::kDrafter ? options.draft_model : options.model) = folder.path();
      status = LoadGroup(options, no_log).status();
    }
    EXPECT_TRUE(c.codes.contains(status.code())) << status;
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr(fs::path(c.file).stem().string()));
    for (const std::string& word : c.words) EXPECT_THAT(message, HasSubstr(word));
    EXPECT_LT(message.size(), 4096u);
    EXPECT_EQ(OpenDescriptors(), descriptors);
    works(**engine);
    if (::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() > 40) {
      FAIL() << "and so on";
    }
  }
  // And a good folder loads as ever.
  absl::StatusOr<Group> again = LoadGroup(good_options, no_log);
  ASSERT_TRUE(again.ok()) << again.status();
  works(**again->MakeEngine(512, nullptr));
  std::printf("%zu cases\n", cases.size());
}

}  // namespace
}  // namespace dflash
