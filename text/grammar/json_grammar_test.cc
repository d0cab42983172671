// Grammars of JSON: what they take and refuse, and that whatever they lead to conforms.
#include "text/grammar/json_grammar.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace dflash {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

bool Takes(GrammarAutomaton& automaton, const std::string& text) {
  const auto state = automaton.Read(automaton.start(), text);
  return state >= 0 && automaton.IsText(state);
}

void ExpectTakes(Grammar grammar, const std::vector<std::string>& right,
                 const std::vector<std::string>& wrong) {
  GrammarAutomaton automaton(std::move(grammar));
  for (const std::string& text : right) EXPECT_TRUE(Takes(automaton, text)) << text;
  for (const std::string& text : wrong) EXPECT_FALSE(Takes(automaton, text)) << text;
}

TEST(JsonGrammar, AnyObject) {
  ExpectTakes(
      *AnyJsonObject(),
      {"{}", "\n\n{}", "{ }", R"({"a":1})", R"({"a": -1.5e+10, "b": [1, {"c": null}, true, "x\n\u00e9"]})",
       "{\n  \"a\": [\n    1,\n    2\n  ]\n}", "{\"\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80\": 0}",
       R"({"\ud83d\ude00":[]})"},
      {"",
       "[]",
       "1",
       "{",
       "}",
       "{}}",
       "{,}",
       R"({"a"})",
       R"({"a":})",
       R"({"a":1,})",
       R"({"a":01})",
       R"({"a":1.})",
       R"({"a":+1})",
       R"({a:1})",
       R"({"a":"\x"})",
       R"({"a":"\ud83d"})",
       "{\"a\":\"\n\"}",
       "{\"a\":\"\xff\"}",
       "{\"a\":\"\xc0\xaf\"}",
       "{\"a\":\"\xed\xa0\x80\"}",
       "{\"a\":tru}",
       "{} x"});
}

TEST(JsonGrammar, ObjectsInTheOrderOfTheSchema) {
  const std::string schema = R"({"type": "object", "required": ["name", "tags"], "properties": {
      "name": {"type": "string", "title": "A name"}, "age": {"type": ["integer", "null"]},
      "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 2}}})";
  ExpectTakes(
      *ConformsTo(schema),
      {R"({"name":"x","tags":["a"]})", R"({"name": "", "age": 7, "tags": [3, "b"]})",
       R"({"name":"x","age":null,"tags":["b"]})"},
      {R"({})", R"({"name":"x"})", R"({"tags":["a"],"name":"x"})", R"({"name":1,"tags":["a"]})",
       R"({"name":"x","tags":[]})", R"({"name":"x","tags":["a","b","a"]})", R"({"name":"x","tags":["c"]})",
       R"({"name":"x","age":1.5,"tags":["a"]})", R"({"name":"x","tags":["a"],"other":1})"});
}

TEST(JsonGrammar, AdditionalPropertiesAreOthers) {
  const std::string schema = R"({"properties": {"a": {"type": "null"}, "ab": {"const": 1}, "\u00fc": true},
      "additionalProperties": {"type": "integer"}})";
  ExpectTakes(
      *ConformsTo(schema),
      {R"({})", R"({"a":null})", R"({"a":null,"b":1,"abc":2})", R"({"":5,"aa":0})", R"({"ab":1,"x":1})"},
      {R"({"a":1})", R"({"x":null})", R"({"x":1,"a":null})", R"({"b":1,"a":2})", R"({"b":1,"ab":2})",
       R"({"b":1,"\u0061":2})", "{\"b\":1,\"\xc3\xbc\":2}"});
}

TEST(JsonGrammar, StringsNumbersConstantsAndReferences) {
  ExpectTakes(*ConformsTo(R"({"type": "string", "minLength": 2, "maxLength": 3})"),
              {R"("ab")", R"("abc")", "\"\xc3\xbc\xe2\x82\xac\"", R"("\n\u00e9")"},
              {R"("a")", R"("abcd")", R"("")"});
  ExpectTakes(*ConformsTo(R"({"const": {"a": [1, null]}})"), {R"({"a":[1,null]})"}, {R"({"a":[1]})"});
  ExpectTakes(*ConformsTo("true"), {"1", "\"x\"", "[[]]", "null"}, {"nul"});
  const std::string tree = R"({"$defs": {"tree": {"type": "object", "required": ["left"], "properties": {
      "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}}}, "$ref": "#/$defs/tree"})";
  std::string deep = "null";
  for (int i = 0; i < 30; ++i) deep = "{\"left\":" + deep + "}";
  ExpectTakes(*ConformsTo(tree), {R"({"left":null})", R"({"left": {"left": null}})", deep},
              {"null", R"({})"});
  ExpectTakes(*OneOf({"yes", "no", "nothing"}), {"yes", "no", "nothing"}, {"y", "not", "yesno", ""});
}

TEST(JsonGrammar, RefusesByName) {
  const struct {
    const char* schema;
    absl::StatusCode code;
    const char* words;
  } cases[] = {
      {"{", absl::StatusCode::kInvalidArgument, "schema"},
      {"[]", absl::StatusCode::kInvalidArgument, "#"},
      {R"({"type": "strin"})", absl::StatusCode::kInvalidArgument, "strin"},
      {R"({"type": "string", "pattern": "a*"})", absl::StatusCode::kUnimplemented, "\"pattern\""},
      {R"({"type": "object", "properties": {"x": {"type": "number", "minimum": 1}}})",
       absl::StatusCode::kUnimplemented, "#/properties/x: keyword \"minimum\""},
      {R"({"oneOf": [true]})", absl::StatusCode::kUnimplemented, "\"oneOf\""},
      {R"({"allOf": [true, true]})", absl::StatusCode::kUnimplemented, "allOf"},
      {R"({"anyOf": [true], "type": "null"})", absl::StatusCode::kUnimplemented, "\"type\" beside \"anyOf\""},
      {R"({"anyOf": []})", absl::StatusCode::kInvalidArgument, "anyOf"},
      {R"({"enum": []})", absl::StatusCode::kInvalidArgument, "nothing conforms"},
      {"false", absl::StatusCode::kInvalidArgument, "nothing conforms"},
      {R"({"$ref": "#"})", absl::StatusCode::kInvalidArgument, ""},
      {R"({"$ref": "#/$defs/x"})", absl::StatusCode::kInvalidArgument, "#/$defs/x"},
      {R"({"$ref": "http://x/y"})", absl::StatusCode::kUnimplemented, "$ref"},
      {R"({"type": "array", "maxItems": 1, "minItems": 2})", absl::StatusCode::kInvalidArgument, "maxItems"},
      {R"({"type": "string", "maxLength": 1025})", absl::StatusCode::kInvalidArgument, "maxLength"},
      {R"({"required": ["x"]})", absl::StatusCode::kUnimplemented, "\"x\""},
      {R"({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})",
       absl::StatusCode::kInvalidArgument, "nothing conforms"},
  };
  for (const auto& c : cases) {
    const absl::Status status = ConformsTo(c.schema).status();
    EXPECT_EQ(status.code(), c.code) << c.schema << " " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.words)) << c.schema;
  }
  EXPECT_EQ(ConformsTo(std::string(kMaxSchemaBytes + 1, ' ')).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(OneOf({}).ok());
}

// What makes large grammars or many stacks is refused or bounded, quickly.
TEST(JsonGrammar, SizesAreBounded) {
  std::string many = R"({"anyOf": [)";
  for (int i = 0; i < 2000; ++i)
    absl::StrAppend(&many, i > 0 ? "," : "", R"({"type":"string","maxLength":1000})");
  many += "]}";
  EXPECT_EQ(ConformsTo(many.substr(0, 40) + many.substr(40)).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::string chain = R"({"$defs":{)";
  for (int i = 0; i < 1500; ++i)
    absl::StrAppend(&chain, R"("a)", i, R"(":{"$ref":"#/$defs/a)", i + 1, R"("},)");
  chain += R"("a1500":{"type":"null"}},"$ref":"#/$defs/a0"})";
  absl::StatusOr<Grammar> grammar = ConformsTo(chain);
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  GrammarAutomaton automaton(*std::move(grammar));
  EXPECT_TRUE(Takes(automaton, "null"));
  std::string stacks = R"({"$defs":{"x40":{"type":"null"})";
  for (int i = 0; i < 40; ++i) {
    const std::string next = absl::StrCat(R"({"type":"array","items":{"$ref":"#/$defs/x)", i + 1, R"("}})");
    absl::StrAppend(&stacks, R"(,"x)", i, R"(":{"anyOf":[)", next, ",", next, "]}");
  }
  stacks += R"(},"$ref":"#/$defs/x0"})";
  grammar = ConformsTo(stacks);
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  GrammarAutomaton ambiguous(*std::move(grammar));
  const auto state = ambiguous.Read(ambiguous.start(), std::string(39, '['));
  EXPECT_TRUE(state >= 0 || state == GrammarAutomaton::kTooMany);
  std::string open;
  GrammarAutomaton any(*AnyJsonObject());
  auto at = any.Read(any.start(), "{\"a\":");
  int depth = 0;
  while (at >= 0 && depth < 1000) {
    at = any.Step(at, '[');
    ++depth;
  }
  EXPECT_EQ(at, GrammarAutomaton::kDead);
  EXPECT_GT(depth, 64);
  EXPECT_LE(depth, Grammar::kMaxDepth + 1);
}

// A validator that knows nothing of grammars.
bool Conforms(const Json& value, const Json& schema, const Json& root) {
  if (schema.is_boolean()) return schema.get<bool>();
  if (schema.contains("$ref"))
    return Conforms(value, root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), root);
  if (schema.contains("anyOf")) {
    return std::any_of(schema["anyOf"].begin(), schema["anyOf"].end(),
                       [&](const Json& option) { return Conforms(value, option, root); });
  }
  if (schema.contains("const")) return value == schema["const"];
  if (schema.contains("enum")) return std::count(schema["enum"].begin(), schema["enum"].end(), value) > 0;
  const auto is = [&](const std::string& type) {
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    return type == (value.is_string() ? "string" : value.is_boolean() ? "boolean" : value.type_name());
  };
  if (schema.contains("type")) {
    const Json& type = schema["type"];
    const bool fits =
        type.is_string() ? is(type) : std::any_of(type.begin(), type.end(), [&](const Json& one) {
          return is(one.get<std::string>());
        });
    if (!fits) return false;
  }
  if (value.is_array()) {
    if (value.size() < schema.value("minItems", 0u) || value.size() > schema.value("maxItems", 1'000'000u))
      return false;
    for (const Json& item : value) {
      if (schema.contains("items") && !Conforms(item, schema["items"], root)) return false;
    }
  }
  if (value.is_object()) {
    for (const Json& name : schema.value("required", Json::array())) {
      if (!value.contains(name.get<std::string>())) return false;
    }
    for (const auto& [name, member] : value.items()) {
      const Json properties = schema.value("properties", Json::object());
      if (properties.contains(name)) {
        if (!Conforms(member, properties[name], root)) return false;
      } else if (schema.contains("additionalProperties") &&
                 !Conforms(member, schema["additionalProperties"], root)) {
        return false;
      }
    }
  }
  return true;
}

// Random walks over the bytes that are possible: there always is one, and every end conforms.
TEST(JsonGrammar, EveryWalkConforms) {
  const std::string schemas[] = {
      R"({"type": "object"})",
      R"({"type": "object", "required": ["a", "c"], "properties": {"a": {"type": "integer"}, "b": {"type": "string"},
          "c": {"type": "array", "items": {"type": ["boolean", "null"]}}}})",
      R"({"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": [{"type": "number"}, {"enum": ["x", [1]]}]}})",
      R"({"$defs": {"n": {"type": "object", "required": ["v"], "properties": {"v": {"type": "integer"},
          "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}, "$ref": "#/$defs/n"})",
      R"({"type": "object", "properties": {"aa": {"const": null}, "ab": {"type": "boolean"}},
          "additionalProperties": {"type": "string"}})",
  };
  std::mt19937 random(3);
  for (const std::string& text : schemas) {
    const Json schema = Json::parse(text);
    GrammarAutomaton automaton(*ConformsTo(text));
    int ended = 0;
    for (int walk = 0; walk < 400; ++walk) {
      std::string written;
      auto state = automaton.start();
      while (!automaton.IsText(state) || (automaton.GoesOn(state) && random() % 4 != 0)) {
        std::vector<int> possible;
        for (int byte = 0; byte < 256; ++byte) {
          if (automaton.Step(state, static_cast<uint8_t>(byte)) >= 0) possible.push_back(byte);
        }
        ASSERT_FALSE(possible.empty()) << "nowhere to go behind " << written;
        int byte = possible[random() % possible.size()];
        // Rather what closes something, or the walk would not end.
        for (const char close : {'}', ']', '"', ','}) {
          if (written.size() > 30 && std::count(possible.begin(), possible.end(), close) > 0) {
            byte = close;
            break;
          }
        }
        written += static_cast<char>(byte);
        state = automaton.Step(state, static_cast<uint8_t>(byte));
        if (written.size() > 2000) break;
      }
      if (written.size() > 2000) continue;
      ++ended;
      const Json value = Json::parse(written, nullptr, /*allow_exceptions=*/false);
      ASSERT_FALSE(value.is_discarded()) << written;
      ASSERT_TRUE(Conforms(value, schema, schema)) << written << "\nagainst " << text;
    }
    EXPECT_GT(ended, 100) << text;
  }
}

// An automaton that forgets all but two places behind every byte reads what another one reads.
TEST(JsonGrammar, WhatIsForgottenIsMetAgain) {
  const std::string schema =
      R"({"$defs": {"n": {"type": "object", "required": ["v"], "properties": {"v": {"type": "integer"},
          "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}, "$ref": "#/$defs/n"})";
  const std::string text = R"({"v": -12, "next": {"v": 3, "next": {"v": 10, "next": null}}})";
  GrammarAutomaton whole(*ConformsTo(schema)), forgets(*ConformsTo(schema));
  auto expected = whole.start(), state = forgets.start(), dead = GrammarAutomaton::kDead;
  auto behind_key = forgets.Read(state, R"({"v")");
  for (const char c : text) {
    for (int byte = 0; byte < 256; ++byte) {
      ASSERT_EQ(forgets.Step(state, static_cast<uint8_t>(byte)) >= 0,
                whole.Step(expected, static_cast<uint8_t>(byte)) >= 0)
          << byte;
    }
    expected = whole.Step(expected, static_cast<uint8_t>(c));
    state = forgets.Step(state, static_cast<uint8_t>(c));
    ASSERT_EQ(forgets.IsText(state), whole.IsText(expected));
    ASSERT_EQ(forgets.GoesOn(state), whole.GoesOn(expected));
    GrammarAutomaton::State same = state;
    forgets.Forget(std::vector<GrammarAutomaton::State*>{&state, &behind_key, &dead, &same});
    EXPECT_LE(forgets.states(), 3);
    EXPECT_LT(forgets.configurations(), 500);
    ASSERT_EQ(same, state);
    ASSERT_EQ(dead, GrammarAutomaton::kDead);
  }
  EXPECT_TRUE(forgets.IsText(state));
  EXPECT_TRUE(forgets.IsText(forgets.Read(behind_key, ":7}")));
  EXPECT_TRUE(forgets.IsText(forgets.Read(forgets.start(), text)));
}

}  // namespace
}  // namespace dflash
