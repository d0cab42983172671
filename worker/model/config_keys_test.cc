// Mutations of the tiny pair's configurations, generated from the tables of docs/config-keys.md.
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/generation_config.h"
#include "worker/model/target_config.h"

namespace dflash {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

const std::string kPage = std::string(DFLASHD_SOURCE_DIR) + "/docs/config-keys.md";
const std::string kTarget = std::string(DFLASHD_SOURCE_DIR) + "/models/tiny-qwen3.6";
const std::string kDrafter = std::string(DFLASHD_SOURCE_DIR) + "/models/tiny-qwen3.6-dflash";

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_TRUE(in.good()) << path;
  return text.str();
}

// --- The page
// -------------------------------------------------------------------------------------------------------

struct Row {
  std::string key;  // path
  std::string type;
  std::string kind;          // class
  std::string duplicate_of;  // of a "duplicate of X"
  Json example;
  std::vector<Json> refused;
};

std::vector<std::string> CodeSpans(const std::string& cell) {
  std::vector<std::string> spans;
  for (size_t start = cell.find('`'); start != std::string::npos;) {
    const size_t end = cell.find('`', start + 1);
    if (end == std::string::npos) break;
    spans.push_back(cell.substr(start + 1, end - start - 1));
    start = cell.find('`', end + 1);
  }
  return spans;
}

std::string Trim(std::string text) {
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

// The rows of the table under a heading.
std::vector<Row> Table(const std::string& heading) {
  std::vector<Row> rows;
  std::istringstream page(ReadAll(kPage));
  bool inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) inside = line == "## " + heading;
    if (!inside || !line.starts_with("| `")) continue;
    std::vector<std::string> cells;
    std::istringstream columns(line.substr(1));
    for (std::string cell; std::getline(columns, cell, '|');) cells.push_back(Trim(cell));
    EXPECT_EQ(cells.size(), 6u) << line;
    for (const std::string& key : CodeSpans(cells[0])) {
      Row row{key, cells[1], cells[2], "", {}, {}};
      if (cells[2].starts_with("duplicate of ")) {
        row.kind = "duplicate";
        row.duplicate_of = CodeSpans(cells[2]).at(0);
      }
      for (const std::string& text : CodeSpans(cells[3])) row.example = Json::parse(text);
      for (const std::string& text : CodeSpans(cells[4])) row.refused.push_back(Json::parse(text));
      rows.push_back(row);
    }
  }
  EXPECT_FALSE(rows.empty()) << heading;
  return rows;
}

// --- JSON with paths
// ------------------------------------------------------------------------------------------------

Json::json_pointer Pointer(const std::string& path) {
  std::string pointer = "/" + path;
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  return Json::json_pointer(pointer);
}
std::string Leaf(const std::string& path) { return path.substr(path.rfind('.') + 1); }
std::string Parent(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}
bool Present(const Json& json, const std::string& path) {
  return json.contains(Pointer(path)) && !json.at(Pointer(path)).is_null();
}
// Enclosing objects that are absent or null come into being.
Json With(Json json, const std::string& path, const Json& value) {
  const std::string parent = Parent(path);
  if (!parent.empty() && !Present(json, parent)) json[Pointer(parent)] = Json::object();
  json[Pointer(path)] = value;
  return json;
}
Json Without(Json json, const std::string& path) {
  if (Present(json, path)) {
    (Parent(path).empty() ? json : json[Pointer(Parent(path))]).erase(Leaf(path));
  }
  return json;
}

std::string Misspell(const std::string& name) {
  std::string other = name;
  const size_t middle = name.size() / 2;
  other[middle] = other[middle] == 'q' ? 'w' : 'q';
  return other;
}

std::vector<Json> WrongTypes(const std::string& type) {
  const Json text = "1", list = Json::array(), object = Json::object();
  if (type == "int") return {text, 1.0, true, list, object};
  if (type == "float") return {text, true, list, object};
  if (type == "bool") return {text, 0, 1, list, object};
  if (type == "string") return {0, true, list, object};
  if (type == "int list")
    return {text, 1, object, Json::array({1.0}), Json::array({"a"}), Json::array({nullptr})};
  if (type == "string list") return {text, object, Json::array({1}), Json::array({nullptr})};
  if (type == "object") return {text, 1, list, true};
  if (type == "ids") return {text, 1.5, true, object, Json::array({"a"}), Json::array({1.0})};
  EXPECT_EQ(type, "any");
  return {};
}

// --- What is mutated
// ------------------------------------------------------------------------------------------------

// A configuration file, the rows that describe it, and the loading of the whole model around it.
class Subject {
 public:
  virtual ~Subject() = default;
  Json base;
  std::map<std::string, Row> rows;

  void AddRows(const std::string& heading, const std::string& prefix,
               const std::set<std::string>& without = {}) {
    for (Row row : Table(heading)) {
      if (without.contains(row.key)) continue;
      row.key = prefix + row.key;
      if (!row.duplicate_of.empty()) row.duplicate_of = prefix + row.duplicate_of;
      rows.emplace(row.key, row);
    }
  }
  // The status of a complete load, and what the configuration says apart from the text it came from.
  virtual absl::Status Load(const std::string& text, const ConfigOptions& options, std::string* meaning) = 0;
  // The keys that the code asks for when it reads this file.
  virtual std::set<std::string> AskedKeys(const JsonObject& json) = 0;

  absl::Status Load(const Json& json, const ConfigOptions& options = {}, std::string* meaning = nullptr) {
    std::string ignored;
    return Load(json.dump(), options, meaning == nullptr ? &ignored : meaning);
  }
  std::string MeaningOf(const Json& json) {
    std::string meaning;
    const absl::Status status = Load(json, {}, &meaning);
    EXPECT_TRUE(status.ok()) << status;
    return meaning;
  }
};

std::string Meaning(const TargetConfig& c) {
  std::ostringstream out;
  for (const TargetLayerKind kind : c.layers) out << static_cast<int>(kind) << ' ';
  for (const int64_t value :
       {c.vocab_size, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads,
        c.head_dim, c.rotary_dim, c.linear_key_heads, c.linear_value_heads, c.linear_key_head_dim,
        c.linear_value_head_dim, c.conv_kernel, c.max_position_embeddings, int64_t{c.tie_word_embeddings}}) {
    out << value << ' ';
  }
  out << c.rope_theta << ' ' << c.rms_norm_eps << ' ' << static_cast<int>(c.gate_activation);
  return out.str();
}

std::string Meaning(const DraftConfig& c) {
  std::ostringstream out;
  for (const DraftLayerMask& layer : c.layers) {
    out << static_cast<int>(layer.kind) << ':' << layer.window << ':' << layer.causal << ' ';
  }
  for (const LayerIndex id : c.target_layer_ids) out << Number(id) << ',';
  for (const int64_t value : {c.hidden_size, c.intermediate_size, c.num_attention_heads,
                              c.num_key_value_heads, c.head_dim, c.vocab_size, c.max_position_embeddings,
                              c.block_size, int64_t{c.mask_token_id}, c.num_target_layers}) {
    out << ' ' << value;
  }
  out << ' ' << c.rope_theta << ' ' << c.rms_norm_eps;
  return out.str();
}

class TargetSubject : public Subject {
 public:
  // `flat`: a text-only export, all keys at the outer level.
  explicit TargetSubject(bool flat) {
    base = Json::parse(ReadAll(kTarget + "/config.json"));
    if (flat) {
      const Json text = base.at("text_config");
      base.erase("text_config");
      base.update(text);
      AddRows("Target: config.json, outer level", "", {"tie_word_embeddings"});
      AddRows("Target: config.json, text level", "");  // keys of both tables follow the outer one
    } else {
      AddRows("Target: config.json, outer level", "");
      rows.at("tie_word_embeddings").duplicate_of = "text_config.tie_word_embeddings";
      AddRows("Target: config.json, text level", "text_config.");
    }
  }
  using Subject::Load;
  absl::Status Load(const std::string& text, const ConfigOptions& options, std::string* meaning) override {
    DFLASH_ASSIGN_OR_RETURN(const TargetConfig config, TargetConfig::Parse(text, "m/config.json", options));
    DFLASH_RETURN_IF_ERROR(TargetCheckpoint::Open(kTarget, config).status());
    DFLASH_RETURN_IF_ERROR(drafter_->CheckFits(config));
    *meaning = Meaning(config);
    return absl::OkStatus();
  }
  std::set<std::string> AskedKeys(const JsonObject& json) override {
    EXPECT_TRUE(TargetConfig::FromJson(json).ok());
    return json.AskedKeys();
  }

 private:
  absl::StatusOr<DraftConfig> drafter_ = DraftConfig::Load(kDrafter);
};

class DrafterSubject : public Subject {
 public:
  DrafterSubject() {
    base = Json::parse(ReadAll(kDrafter + "/config.json"));
    AddRows("Drafter: config.json", "");
  }
  using Subject::Load;
  absl::Status Load(const std::string& text, const ConfigOptions& options, std::string* meaning) override {
    DFLASH_ASSIGN_OR_RETURN(const DraftConfig config, DraftConfig::Parse(text, "m/config.json", options));
    DFLASH_RETURN_IF_ERROR(config.CheckFits(*target_));
    DFLASH_RETURN_IF_ERROR(DraftCheckpoint::Open(kDrafter, config).status());
    *meaning = Meaning(config);
    return absl::OkStatus();
  }
  std::set<std::string> AskedKeys(const JsonObject& json) override {
    EXPECT_TRUE(DraftConfig::FromJson(json).ok());
    return json.AskedKeys();
  }

 private:
  absl::StatusOr<TargetConfig> target_ = TargetConfig::Load(kTarget);
};

class GenerationSubject : public Subject {
 public:
  GenerationSubject() {
    base = Json::parse(ReadAll(kTarget + "/generation_config.json"));
    AddRows("Target: generation_config.json", "");
  }
  using Subject::Load;
  absl::Status Load(const std::string& text, const ConfigOptions& options, std::string* meaning) override {
    DFLASH_ASSIGN_OR_RETURN(const GenerationConfig c,
                            GenerationConfig::Parse(text, "m/generation_config.json", 4096, options));
    std::ostringstream out;
    for (const int32_t id : c.eos_token_ids) out << id << ' ';
    out << c.do_sample << ' ' << c.temperature << ' ' << c.top_k << ' ' << c.top_p << ' ' << c.min_p;
    *meaning = out.str();
    return absl::OkStatus();
  }
  std::set<std::string> AskedKeys(const JsonObject& json) override {
    EXPECT_TRUE(GenerationConfig::FromJson(json, 4096).ok());
    return json.AskedKeys();
  }
};

std::unique_ptr<Subject> Make(const std::string& name) {
  if (name == "TargetNested") return std::make_unique<TargetSubject>(/*flat=*/false);
  if (name == "TargetFlat") return std::make_unique<TargetSubject>(/*flat=*/true);
  if (name == "Drafter") return std::make_unique<DrafterSubject>();
  return std::make_unique<GenerationSubject>();
}

// --- The mutations
// --------------------------------------------------------------------------------------------------

class ConfigKeysTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    subject_ = Make(GetParam());
    const absl::Status status = subject_->Load(subject_->base);
    ASSERT_TRUE(status.ok()) << status;
  }

  // The file names what is wrong: the file and the key, or one of the other names that are accepted.
  void ExpectError(const Json& json, const std::vector<std::string>& keys,
                   const ConfigOptions& options = {}) {
    const absl::Status status = subject_->Load(json, options);
    ASSERT_FALSE(status.ok()) << "loaded: " << json.dump();
    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)) << status;
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr("config.json"));
    EXPECT_TRUE(std::any_of(keys.begin(), keys.end(),
                            [&](const std::string& key) { return message.find(key) != std::string::npos; }))
        << message << "\nnames none of " << ::testing::PrintToString(keys);
  }
  void ExpectLoads(const Json& json, const ConfigOptions& options = {}) {
    const absl::Status status = subject_->Load(json, options);
    EXPECT_TRUE(status.ok()) << status;
  }
  // The base with this key in it.
  Json WithKey(const Row& row) {
    return Present(subject_->base, row.key) ? subject_->base : With(subject_->base, row.key, row.example);
  }
  bool HasDuplicate(const std::string& key) {
    return std::any_of(subject_->rows.begin(), subject_->rows.end(), [&](const auto& entry) {
      return entry.second.duplicate_of == key && Present(subject_->base, entry.first);
    });
  }

  std::unique_ptr<Subject> subject_;
};

TEST_P(ConfigKeysTest, ThePageListsWhatTheCodeAsksFor) {
  // The nested rope objects are both there, so that their keys are asked for too.
  const std::string prefix = GetParam() == "TargetNested" ? "text_config." : "";
  Json json = subject_->base;
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    if (subject_->rows.contains(prefix + name) && !Present(json, prefix + name)) {
      json = With(json, prefix + name, Json::object());
    }
  }
  const absl::StatusOr<JsonObject> object = JsonObject::Parse(json.dump(), "config.json");
  ASSERT_TRUE(object.ok()) << object.status();
  std::set<std::string> listed;
  for (const auto& [key, row] : subject_->rows) listed.insert(key);
  EXPECT_EQ(subject_->AskedKeys(*object), listed);
}

TEST_P(ConfigKeysTest, ExamplesLoadAndClassesAreKnown) {
  const std::string base_meaning = subject_->MeaningOf(subject_->base);
  for (const auto& [key, row] : subject_->rows) {
    SCOPED_TRACE(key);
    EXPECT_THAT(row.kind, ::testing::AnyOf("required", "duplicate", "tri-state", "optional", "container",
                                           "informational", "refused"));
    if (row.kind == "container") continue;
    const Json json = With(subject_->base, key, row.example);
    if (row.kind == "refused") {
      ExpectError(json, {key});
      EXPECT_TRUE(absl::IsUnimplemented(subject_->Load(json)));
      ExpectError(json, {key}, {.allow_unlisted_keys = true});
      ExpectLoads(With(subject_->base, key, nullptr));
    } else if (row.kind == "tri-state" || row.duplicate_of == "is_causal") {
      EXPECT_NE(subject_->MeaningOf(json), base_meaning);
    } else {
      EXPECT_EQ(subject_->MeaningOf(json), base_meaning);
    }
  }
}

TEST_P(ConfigKeysTest, RemovedKeys) {
  for (const auto& [key, row] : subject_->rows) {
    if (!Present(subject_->base, key) || row.kind == "container") continue;
    SCOPED_TRACE(key);
    for (const Json& json : {Without(subject_->base, key), With(subject_->base, key, nullptr)}) {
      if (row.kind == "required" && !HasDuplicate(key)) {
        ExpectError(json, {key});
        ExpectError(json, {key}, {.allow_unlisted_keys = true});
      } else {
        ExpectLoads(json);
      }
    }
  }
}

TEST_P(ConfigKeysTest, MisspeltKeys) {
  for (const auto& [key, row] : subject_->rows) {
    if (row.kind == "refused") continue;
    SCOPED_TRACE(key);
    const Json json = WithKey(row);
    const std::string parent = Parent(key);
    const std::string other = (parent.empty() ? "" : parent + ".") + Misspell(Leaf(key));
    const Json value =
        row.kind == "container" && !Present(json, key) ? Json::object() : json.at(Pointer(key));
    const Json misspelt = With(Without(json, key), other, value);
    ExpectError(misspelt, {key, other, Leaf(key)});
    if (row.kind == "container") continue;
    if (row.kind == "required" && !HasDuplicate(key)) {
      ExpectError(misspelt, {key}, {.allow_unlisted_keys = true});
    } else {
      ExpectLoads(misspelt, {.allow_unlisted_keys = true});
    }
  }
}

TEST_P(ConfigKeysTest, RefusedValues) {
  for (const auto& [key, row] : subject_->rows) {
    SCOPED_TRACE(key);
    Json json = subject_->base;
    if (row.kind == "duplicate" && !Present(json, row.duplicate_of)) {
      json = With(json, row.duplicate_of, subject_->rows.at(row.duplicate_of).example);
      ExpectLoads(json);
    }
    EXPECT_TRUE(row.kind != "duplicate" || !row.refused.empty());
    for (const Json& value : row.refused) {
      SCOPED_TRACE(value.dump());
      ExpectError(With(json, key, value), {Leaf(key)});
    }
  }
}

TEST_P(ConfigKeysTest, DuplicatesMayStandAlone) {
  const std::string base_meaning = subject_->MeaningOf(subject_->base);
  for (const auto& [key, row] : subject_->rows) {
    if (row.kind != "duplicate" || !Present(subject_->base, row.duplicate_of)) continue;
    SCOPED_TRACE(key);
    EXPECT_EQ(subject_->MeaningOf(With(Without(subject_->base, row.duplicate_of), key, row.example)),
              base_meaning);
  }
}

TEST_P(ConfigKeysTest, WrongTypes) {
  for (const auto& [key, row] : subject_->rows) {
    SCOPED_TRACE(key);
    for (const Json& value : WrongTypes(row.type)) {
      SCOPED_TRACE(value.dump());
      ExpectError(With(subject_->base, key, value), {key});
    }
  }
}

TEST_P(ConfigKeysTest, UnlistedKeys) {
  std::set<std::string> objects = {""};
  for (const auto& [key, row] : subject_->rows) {
    if (key == "text_config" && GetParam() == "TargetFlat") continue;  // would make it the other form
    if (row.kind == "container") objects.insert(key + ".");
  }
  for (const std::string& prefix : objects) {
    const std::string key = prefix + "window_of_the_moon";
    SCOPED_TRACE(key);
    for (const Json& value : {Json(1), Json(nullptr), Json::parse(R"({"a": 1})")}) {
      const Json json = With(subject_->base, key, value);
      ExpectError(json, {"unlisted key " + key});
      ExpectLoads(json, {.allow_unlisted_keys = true});
    }
  }
}

TEST_P(ConfigKeysTest, KeysThatAppearTwice) {
  const std::string text = subject_->base.dump();
  for (const auto& [key, row] : subject_->rows) {
    if (!Present(subject_->base, key) || key.find('.') != std::string::npos) continue;
    SCOPED_TRACE(key);
    std::string ignored;
    const std::string twice = "{\"" + key + "\": " + subject_->base.at(key).dump() + ", " + text.substr(1);
    const absl::Status status = subject_->Load(twice, {.allow_unlisted_keys = true}, &ignored);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(key + ": the key appears twice"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConfigKeysTest,
                         ::testing::Values("TargetNested", "TargetFlat", "Drafter", "Generation"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace dflash
