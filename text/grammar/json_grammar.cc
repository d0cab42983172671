#include "text/grammar/json_grammar.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "text/ordered_json.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;
using Node = Grammar::Node;
using Rule = Grammar::Rule;

// The parts that all JSON has.
class JsonRules {
 public:
  explicit JsonRules(Grammar* grammar) : grammar_(*grammar) {
    space_ = MakeSpace();
    character_ = MakeCharacter();
    string_ = MakeString();
    number_ = MakeNumber(/*integer=*/false);
    integer_ = MakeNumber(/*integer=*/true);
    any_ = grammar_.AddRule();
    any_object_ = MakeAnyObject();
    any_array_ = grammar_.AddRule();
    MakeArray(any_array_, any_, 0, -1);
    const Node start = grammar_.Start(any_), end = grammar_.End(any_);
    for (const Rule rule : {any_object_, any_array_, string_, number_}) grammar_.AddCall(start, rule, end);
    for (const char* word : {"true", "false", "null"}) grammar_.AddText(start, word, end);
  }

  Rule any() const { return any_; }
  Rule any_object() const { return any_object_; }
  Rule any_array() const { return any_array_; }
  Rule string() const { return string_; }
  Rule number() const { return number_; }
  Rule integer() const { return integer_; }

  Node Space(Node from) {
    const Node to = grammar_.AddNode();
    grammar_.AddCall(from, space_, to);
    return to;
  }
  // One character of a string.
  void Character(Node from, Node to) {
    grammar_.AddRange(from, 0x20, '"' - 1, to);
    grammar_.AddRange(from, '"' + 1, '\\' - 1, to);
    grammar_.AddRange(from, '\\' + 1, 0x7f, to);
    grammar_.AddCall(from, character_, to);
  }
  // '"' and `least` to `most` (-1: any number of) characters and '"'.
  void CountedString(Rule rule, int64_t least, int64_t most) {
    const Node close = grammar_.AddNode();
    Node at = grammar_.AddText(grammar_.Start(rule), "\"");
    for (int64_t count = 0; count < std::max(least, most); ++count) {
      if (count >= least) grammar_.AddEmpty(at, close);
      const Node to = grammar_.AddNode();
      Character(at, to);
      at = to;
    }
    if (most < 0) Character(at, at);
    grammar_.AddEmpty(at, close);
    grammar_.AddText(close, "\"", grammar_.End(rule));
  }
  void MakeArray(Rule rule, Rule item, int64_t least, int64_t most) {
    const Node close = grammar_.AddNode();
    Node at = Space(grammar_.AddText(grammar_.Start(rule), "["));
    if (least == 0) grammar_.AddText(at, "]", grammar_.End(rule));
    for (int64_t count = 0; most < 0 || count < most; ++count) {
      if (count > 0) {
        if (count >= least) grammar_.AddEmpty(at, close);
        at = Space(grammar_.AddText(at, ","));
      }
      const Node behind = grammar_.AddNode();
      grammar_.AddCall(at, item, behind);
      at = behind;
      if (most >= 0 || count + 1 < std::max<int64_t>(least, 1)) continue;
      // Any number of further ones.
      const Node next = Space(grammar_.AddText(at, ","));
      grammar_.AddCall(next, item, at);
      break;
    }
    if (most != 0) grammar_.AddEmpty(at, close);
    grammar_.AddText(Space(close), "]", grammar_.End(rule));
  }
  // A key of an object that is none of `taken`: plain characters only, so that no other spelling is one of
  // them.
  Rule MakeKey(const std::set<std::string>& taken) {
    const Rule rule = grammar_.AddRule();
    const Node free = grammar_.AddNode();
    const Node first = grammar_.AddText(grammar_.Start(rule), "\"");
    AddKeyNodes(rule, first, free, "", taken);
    PlainCharacter(free, free, {});
    grammar_.AddText(free, "\"", grammar_.End(rule));
    return rule;
  }

 private:
  // Any character but '"' and '\\', and but those that begin with a byte in `except`.
  void PlainCharacter(Node from, Node to, const std::set<char>& except) {
    int low = 0x20;
    for (int byte = 0x20; byte <= 0x80; ++byte) {
      const bool is_out =
          byte == 0x80 || byte == '"' || byte == '\\' || except.contains(static_cast<char>(byte));
      if (!is_out) continue;
      if (low < byte) grammar_.AddRange(from, static_cast<uint8_t>(low), static_cast<uint8_t>(byte - 1), to);
      low = byte + 1;
    }
    const bool has_wide = std::any_of(except.begin(), except.end(), [](char c) { return (c & 0x80) != 0; });
    if (!has_wide) grammar_.AddCall(from, wide_, to);
  }
  // Where the key so far is `before`, which some of `taken` begin with.
  void AddKeyNodes(Rule rule, Node at, Node free, const std::string& before,
                   const std::set<std::string>& taken) {
    std::set<char> next;
    for (auto name = taken.lower_bound(before); name != taken.end() && name->starts_with(before); ++name) {
      if (name->size() > before.size()) next.insert((*name)[before.size()]);
    }
    if (!taken.contains(before)) grammar_.AddText(at, "\"", grammar_.End(rule));
    PlainCharacter(at, free, next);
    for (const char c : next) {
      // A name with such a character cannot be written from here on.
      if (static_cast<unsigned char>(c) >= 0x80 || c == '"' || c == '\\' ||
          static_cast<unsigned char>(c) < 0x20)
        continue;
      const Node to = grammar_.AddNode();
      grammar_.AddRange(at, static_cast<uint8_t>(c), static_cast<uint8_t>(c), to);
      AddKeyNodes(rule, to, free, before + c, taken);
    }
  }
  Rule MakeSpace() {
    const Rule rule = grammar_.AddRule();
    const Node end = grammar_.End(rule), blanks = grammar_.AddNode();
    grammar_.AddEmpty(grammar_.Start(rule), blanks);
    grammar_.AddText(grammar_.Start(rule), "\n", blanks);
    Node at = blanks;
    for (int count = 0; count < 32; ++count) {
      grammar_.AddEmpty(at, end);
      const Node to = grammar_.AddNode();
      grammar_.AddRange(at, ' ', ' ', to);
      grammar_.AddRange(at, '\t', '\t', to);
      at = to;
    }
    grammar_.AddEmpty(at, end);
    return rule;
  }
  void Hex(Node from, Node to) {
    grammar_.AddRange(from, '0', '9', to);
    grammar_.AddRange(from, 'a', 'f', to);
    grammar_.AddRange(from, 'A', 'F', to);
  }
  Node Hexes(Node from, int count) {
    for (; count > 0; --count) {
      const Node to = grammar_.AddNode();
      Hex(from, to);
      from = to;
    }
    return from;
  }
  // Characters of several bytes, well-formed UTF-8 alone, and escapes.
  Rule MakeCharacter() {
    wide_ = grammar_.AddRule();
    struct Sequence {
      uint8_t low, high, second_low, second_high;
      int more;  // bytes 80..bf behind the second
    };
    for (const Sequence& s : {Sequence{0xc2, 0xdf, 0x80, 0xbf, 0}, Sequence{0xe0, 0xe0, 0xa0, 0xbf, 1},
                              Sequence{0xe1, 0xec, 0x80, 0xbf, 1}, Sequence{0xed, 0xed, 0x80, 0x9f, 1},
                              Sequence{0xee, 0xef, 0x80, 0xbf, 1}, Sequence{0xf0, 0xf0, 0x90, 0xbf, 2},
                              Sequence{0xf1, 0xf3, 0x80, 0xbf, 2}, Sequence{0xf4, 0xf4, 0x80, 0x8f, 2}}) {
      const Node first = grammar_.AddNode();
      grammar_.AddRange(grammar_.Start(wide_), s.low, s.high, first);
      Node at = grammar_.AddNode();
      grammar_.AddRange(first, s.second_low, s.second_high, at);
      for (int i = 0; i < s.more; ++i) {
        const Node to = grammar_.AddNode();
        grammar_.AddRange(at, 0x80, 0xbf, to);
        at = to;
      }
      grammar_.AddEmpty(at, grammar_.End(wide_));
    }
    const Rule rule = grammar_.AddRule();
    const Node end = grammar_.End(rule);
    grammar_.AddCall(grammar_.Start(rule), wide_, end);
    const Node escape = grammar_.AddText(grammar_.Start(rule), "\\");
    for (const char c : std::string_view("\"\\/bfnrt"))
      grammar_.AddRange(escape, static_cast<uint8_t>(c), static_cast<uint8_t>(c), end);
    const Node code = grammar_.AddText(escape, "u");
    const Node other = grammar_.AddNode();  // not d
    grammar_.AddRange(code, '0', '9', other);
    for (const auto& [low, high] :
         {std::pair('a', 'c'), std::pair('e', 'f'), std::pair('A', 'C'), std::pair('E', 'F')})
      grammar_.AddRange(code, static_cast<uint8_t>(low), static_cast<uint8_t>(high), other);
    grammar_.AddEmpty(Hexes(other, 3), end);
    const Node d = grammar_.AddNode(), low = grammar_.AddNode(), high = grammar_.AddNode();
    for (const char c : {'d', 'D'})
      grammar_.AddRange(code, static_cast<uint8_t>(c), static_cast<uint8_t>(c), d);
    grammar_.AddRange(d, '0', '7', low);
    grammar_.AddEmpty(Hexes(low, 2), end);
    // A pair of surrogates.
    grammar_.AddRange(d, '8', '9', high);
    grammar_.AddRange(d, 'a', 'b', high);
    grammar_.AddRange(d, 'A', 'B', high);
    const Node second = grammar_.AddText(Hexes(high, 2), "\\u");
    const Node second_d = grammar_.AddNode(), third = grammar_.AddNode();
    for (const char c : {'d', 'D'})
      grammar_.AddRange(second, static_cast<uint8_t>(c), static_cast<uint8_t>(c), second_d);
    grammar_.AddRange(second_d, 'c', 'f', third);
    grammar_.AddRange(second_d, 'C', 'F', third);
    grammar_.AddEmpty(Hexes(third, 2), end);
    return rule;
  }
  Rule MakeString() {
    const Rule rule = grammar_.AddRule();
    CountedString(rule, 0, -1);
    return rule;
  }
  // One to `most` digits.
  Node Digits(Node from, int most, Node end) {
    Node at = from;
    for (int count = 0; count < most; ++count) {
      const Node to = grammar_.AddNode();
      grammar_.AddRange(at, '0', '9', to);
      grammar_.AddEmpty(to, end);
      at = to;
    }
    return at;
  }
  Rule MakeNumber(bool integer) {
    const Rule rule = grammar_.AddRule();
    const Node unsigned_start = grammar_.AddNode(), whole = grammar_.AddNode(), first = grammar_.AddNode();
    grammar_.AddEmpty(grammar_.Start(rule), unsigned_start);
    grammar_.AddText(grammar_.Start(rule), "-", unsigned_start);
    grammar_.AddText(unsigned_start, "0", whole);
    grammar_.AddRange(unsigned_start, '1', '9', first);
    grammar_.AddEmpty(first, whole);
    Digits(first, 15, whole);
    grammar_.AddEmpty(whole, grammar_.End(rule));
    if (integer) return rule;
    const Node fraction = grammar_.AddNode(), sign = grammar_.AddNode(), exponent = grammar_.AddNode();
    grammar_.AddEmpty(whole, fraction);
    Digits(grammar_.AddText(whole, "."), 16, fraction);
    grammar_.AddEmpty(fraction, grammar_.End(rule));
    for (const char* e : {"e", "E"}) grammar_.AddText(fraction, e, sign);
    grammar_.AddEmpty(sign, exponent);
    for (const char* s : {"+", "-"}) grammar_.AddText(sign, s, exponent);
    Digits(exponent, 2, grammar_.End(rule));
    return rule;
  }
  Rule MakeAnyObject() {
    const Rule rule = grammar_.AddRule();
    const Node end = grammar_.End(rule), behind = grammar_.AddNode();
    const Node first = Space(grammar_.AddText(grammar_.Start(rule), "{"));
    grammar_.AddText(first, "}", end);
    const auto member = [&](Node from) {
      const Node colon = grammar_.AddNode();
      grammar_.AddCall(from, string_, colon);
      grammar_.AddCall(Space(grammar_.AddText(colon, ":")), any_, behind);
    };
    member(first);
    member(Space(grammar_.AddText(behind, ",")));
    grammar_.AddText(Space(behind), "}", end);
    return rule;
  }

  Grammar& grammar_;
  Rule space_, character_, wide_, string_, number_, integer_, any_, any_object_, any_array_;
};

class SchemaCompiler {
 public:
  static constexpr size_t kMaxNameBytes = 512;  // of a property

  explicit SchemaCompiler(const Json& document) : document_(document), rules_(&grammar_) {}

  absl::StatusOr<Grammar> Compile() {
    DFLASH_ASSIGN_OR_RETURN(const Rule root, RuleOf(document_, "#"));
    while (!unfilled_.empty() && !grammar_.is_full()) {
      const Unfilled next = std::move(unfilled_.back());
      unfilled_.pop_back();
      DFLASH_RETURN_IF_ERROR(Fill(next.rule, *next.schema, next.place));
    }
    const Rule whole = grammar_.AddRule();
    // Behind thinking come two line breaks.
    grammar_.AddCall(rules_.Space(rules_.Space(grammar_.Start(whole))), root, grammar_.End(whole));
    DFLASH_RETURN_IF_ERROR(grammar_.Finish(whole));
    return std::move(grammar_);
  }

 private:
  static absl::Status Bad(const std::string& place, const std::string& text) {
    return absl::InvalidArgumentError(absl::StrCat(place, ": ", text));
  }
  // Every schema has one rule, made when it is met first, so that it may refer to itself.
  absl::StatusOr<Rule> RuleOf(const Json& schema, const std::string& place) {
    const auto found = made_.find(&schema);
    if (found != made_.end()) return found->second;
    if (made_.size() > 10'000) return Bad(place, "too many schemas");
    const Rule rule = grammar_.AddRule();
    made_.emplace(&schema, rule);
    unfilled_.push_back({rule, &schema, place});
    return rule;
  }

  absl::Status Fill(Rule rule, const Json& schema, const std::string& place) {
    const Node start = grammar_.Start(rule), end = grammar_.End(rule);
    if (schema.is_boolean()) {
      if (schema.get<bool>()) grammar_.AddCall(start, rules_.any(), end);
      return absl::OkStatus();  // false: nothing conforms
    }
    if (!schema.is_object()) return Bad(place, "a schema is an object or a boolean");
    DFLASH_RETURN_IF_ERROR(CheckKeywords(schema, place));
    if (schema.contains("$ref")) {
      DFLASH_RETURN_IF_ERROR(CheckAlone(schema, "$ref", place));
      DFLASH_ASSIGN_OR_RETURN(const Rule target, Resolve(schema["$ref"], place));
      grammar_.AddCall(start, target, end);
      return absl::OkStatus();
    }
    for (const char* keyword : {"anyOf", "allOf"}) {
      if (!schema.contains(keyword)) continue;
      DFLASH_RETURN_IF_ERROR(CheckAlone(schema, keyword, place));
      const Json& list = schema[keyword];
      const std::string at = absl::StrCat(place, "/", keyword);
      if (!list.is_array() || list.empty()) return Bad(at, "must be a list of schemas");
      if (std::string_view(keyword) == "allOf" && list.size() > 1)
        return absl::UnimplementedError(absl::StrCat(at, ": with more than one schema is not in this build"));
      for (size_t i = 0; i < list.size(); ++i) {
        DFLASH_ASSIGN_OR_RETURN(const Rule option, RuleOf(list[i], absl::StrCat(at, "/", i)));
        grammar_.AddCall(start, option, end);
      }
      return absl::OkStatus();
    }
    if (schema.contains("const") || schema.contains("enum")) {
      const char* keyword = schema.contains("const") ? "const" : "enum";
      DFLASH_RETURN_IF_ERROR(CheckAlone(schema, keyword, place, /*may_have_type=*/true));
      std::vector<Json> values;
      if (schema.contains("const")) {
        values.push_back(schema["const"]);
      } else {
        if (!schema["enum"].is_array()) return Bad(absl::StrCat(place, "/enum"), "must be a list");
        values.assign(schema["enum"].begin(), schema["enum"].end());
      }
      std::vector<std::string> texts;
      for (const Json& value : values) texts.push_back(value.dump());
      grammar_.AddOneOf(start, std::move(texts), end);
      return absl::OkStatus();
    }
    DFLASH_ASSIGN_OR_RETURN(const std::vector<std::string> types, TypesOf(schema, place));
    if (types.empty()) grammar_.AddCall(start, rules_.any(), end);
    for (const std::string& type : types) DFLASH_RETURN_IF_ERROR(AddType(rule, type, schema, place));
    return absl::OkStatus();
  }

  static absl::Status CheckKeywords(const Json& schema, const std::string& place) {
    static const auto* const kKnown = new std::set<std::string>{
        "type",  "enum",     "const",    "properties", "required",  "additionalProperties",
        "items", "minItems", "maxItems", "minLength",  "maxLength", "anyOf",
        "allOf", "$ref"};
    for (const auto& [keyword, value] : schema.items()) {
      if (kKnown->contains(keyword) || IsAnnotation(keyword)) continue;
      return absl::UnimplementedError(
          absl::StrCat(place, ": keyword \"", keyword, "\" is not in this build"));
    }
    return absl::OkStatus();
  }
  // Keywords that say nothing about what conforms.
  static bool IsAnnotation(const std::string& keyword) {
    static const auto* const kAnnotations = new std::set<std::string>{
        "title",     "description", "default", "examples", "format", "deprecated", "readOnly",
        "writeOnly", "$schema",     "$id",     "$comment", "$defs",  "definitions"};
    return kAnnotations->contains(keyword);
  }
  static absl::Status CheckAlone(const Json& schema, const std::string& keyword, const std::string& place,
                                 bool may_have_type = false) {
    for (const auto& [other, value] : schema.items()) {
      if (other == keyword || IsAnnotation(other) || (may_have_type && other == "type")) continue;
      return absl::UnimplementedError(
          absl::StrCat(place, ": \"", other, "\" beside \"", keyword, "\" is not in this build"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Rule> Resolve(const Json& reference, const std::string& place) {
    const std::string at = absl::StrCat(place, "/$ref");
    if (!reference.is_string()) return Bad(at, "must be a string");
    const std::string& text = reference.get_ref<const std::string&>();
    if (text.empty() || text[0] != '#' || (text.size() > 1 && text[1] != '/'))
      return absl::UnimplementedError(absl::StrCat(at, ": only \"#\" and \"#/...\" are in this build"));
    const Json* target = &document_;
    size_t begin = 2;
    while (text.size() > 1 && begin <= text.size()) {
      const size_t end = std::min(text.find('/', begin), text.size());
      const std::string part =
          absl::StrReplaceAll(text.substr(begin, end - begin), {{"~1", "/"}, {"~0", "~"}});
      if (!target->is_object() || !target->contains(part)) return Bad(at, absl::StrCat("there is no ", text));
      target = &(*target)[part];
      begin = end + 1;
    }
    return RuleOf(*target, text);
  }

  // Empty: any.
  static absl::StatusOr<std::vector<std::string>> TypesOf(const Json& schema, const std::string& place) {
    std::vector<std::string> types;
    if (!schema.contains("type")) {
      for (const char* keyword : {"properties", "required", "additionalProperties"}) {
        if (schema.contains(keyword)) return std::vector<std::string>{"object"};
      }
      for (const char* keyword : {"items", "minItems", "maxItems"}) {
        if (schema.contains(keyword)) return std::vector<std::string>{"array"};
      }
      if (schema.contains("minLength") || schema.contains("maxLength"))
        return std::vector<std::string>{"string"};
      return types;
    }
    const Json& type = schema["type"];
    const std::string at = absl::StrCat(place, "/type");
    if (type.is_array()) {
      for (const Json& one : type) {
        if (!one.is_string()) return Bad(at, "must be a string or a list of strings");
        types.push_back(one.get<std::string>());
      }
      if (types.empty()) return Bad(at, "is empty");
      return types;
    }
    if (!type.is_string()) return Bad(at, "must be a string or a list of strings");
    types.push_back(type.get<std::string>());
    return types;
  }

  absl::Status AddType(Rule rule, const std::string& type, const Json& schema, const std::string& place) {
    const Node start = grammar_.Start(rule), end = grammar_.End(rule);
    if (type == "string") {
      DFLASH_ASSIGN_OR_RETURN(const auto bounds, Bounds(schema, "minLength", "maxLength", place));
      if (bounds.first == 0 && bounds.second < 0) {
        grammar_.AddCall(start, rules_.string(), end);
      } else {
        const Rule counted = grammar_.AddRule();
        rules_.CountedString(counted, bounds.first, bounds.second);
        grammar_.AddCall(start, counted, end);
      }
    } else if (type == "number") {
      grammar_.AddCall(start, rules_.number(), end);
    } else if (type == "integer") {
      grammar_.AddCall(start, rules_.integer(), end);
    } else if (type == "boolean") {
      for (const char* word : {"true", "false"}) grammar_.AddText(start, word, end);
    } else if (type == "null") {
      grammar_.AddText(start, "null", end);
    } else if (type == "array") {
      DFLASH_ASSIGN_OR_RETURN(const auto bounds, Bounds(schema, "minItems", "maxItems", place));
      Rule item = rules_.any();
      if (schema.contains("items")) {
        DFLASH_ASSIGN_OR_RETURN(item, RuleOf(schema["items"], absl::StrCat(place, "/items")));
      }
      const Rule array = grammar_.AddRule();
      rules_.MakeArray(array, item, bounds.first, bounds.second);
      grammar_.AddCall(start, array, end);
    } else if (type == "object") {
      return AddObject(start, end, schema, place);
    } else {
      return Bad(absl::StrCat(place, "/type"), absl::StrCat("there is no type \"", type, "\""));
    }
    return absl::OkStatus();
  }

  // The least number and the most, -1 where there is no bound.
  static absl::StatusOr<std::pair<int64_t, int64_t>> Bounds(const Json& schema, const char* least,
                                                            const char* most, const std::string& place) {
    std::pair<int64_t, int64_t> bounds = {0, -1};
    for (const auto& [keyword, bound] : {std::pair(least, &bounds.first), std::pair(most, &bounds.second)}) {
      if (!schema.contains(keyword)) continue;
      const Json& value = schema[keyword];
      if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() > kMaxCountedItems)
        return Bad(absl::StrCat(place, "/", keyword), absl::StrCat("must be from 0 to ", kMaxCountedItems));
      *bound = value.get<int64_t>();
    }
    if (bounds.second >= 0 && bounds.second < bounds.first)
      return Bad(absl::StrCat(place, "/", most), absl::StrCat("is less than ", least));
    return bounds;
  }

  absl::Status AddObject(Node start, Node end, const Json& schema, const std::string& place) {
    std::vector<std::pair<std::string, const Json*>> properties;
    if (schema.contains("properties")) {
      if (!schema["properties"].is_object())
        return Bad(absl::StrCat(place, "/properties"), "must be an object");
      for (const auto& [name, value] : schema["properties"].items()) properties.emplace_back(name, &value);
    }
    std::set<std::string> required, names;
    if (schema.contains("required")) {
      if (!schema["required"].is_array())
        return Bad(absl::StrCat(place, "/required"), "must be a list of names");
      for (const Json& name : schema["required"]) {
        if (!name.is_string()) return Bad(absl::StrCat(place, "/required"), "must be a list of names");
        required.insert(name.get<std::string>());
      }
    }
    const bool says = schema.contains("additionalProperties");
    std::optional<Rule> others;
    if (says &&
        !(schema["additionalProperties"].is_boolean() && !schema["additionalProperties"].get<bool>())) {
      DFLASH_ASSIGN_OR_RETURN(
          others, RuleOf(schema["additionalProperties"], absl::StrCat(place, "/additionalProperties")));
    } else if (!says && properties.empty() && required.empty()) {
      grammar_.AddCall(start, rules_.any_object(), end);
      return absl::OkStatus();
    }
    for (const auto& [name, value] : properties) {
      if (name.size() > kMaxNameBytes)
        return Bad(absl::StrCat(place, "/properties"),
                   absl::StrCat("names have at most ", kMaxNameBytes, " bytes"));
      names.insert(name);
    }
    for (const std::string& name : required) {
      if (names.contains(name)) continue;
      return absl::UnimplementedError(absl::StrCat(
          place, "/required: \"", name, "\" is not among the properties, which is not in this build"));
    }
    // Two rows of nodes: before property i with nothing written yet, and with something.
    const Node first = rules_.Space(grammar_.AddText(start, "{"));
    Node none = first, some = grammar_.AddNode();
    const auto member = [&](Node from, bool is_first, const std::string* name, Rule value, Node to) {
      if (!is_first) from = rules_.Space(grammar_.AddText(from, ","));
      Node colon;
      if (name != nullptr) {
        colon = grammar_.AddText(from, Json(*name).dump());
      } else {
        colon = grammar_.AddNode();
        grammar_.AddCall(from, other_key_, colon);
      }
      grammar_.AddCall(rules_.Space(grammar_.AddText(colon, ":")), value, to);
    };
    for (const auto& [name, value] : properties) {
      DFLASH_ASSIGN_OR_RETURN(const Rule rule, RuleOf(*value, absl::StrCat(place, "/properties/", name)));
      const Node next_none = grammar_.AddNode(), next_some = grammar_.AddNode();
      member(none, true, &name, rule, next_some);
      member(some, false, &name, rule, next_some);
      if (!required.contains(name)) {
        grammar_.AddEmpty(none, next_none);
        grammar_.AddEmpty(some, next_some);
      }
      none = next_none;
      some = next_some;
    }
    if (others.has_value()) {
      other_key_ = rules_.MakeKey(names);
      member(none, true, nullptr, *others, some);
      member(some, false, nullptr, *others, some);
    }
    grammar_.AddText(none, "}", end);
    grammar_.AddText(rules_.Space(some), "}", end);
    return absl::OkStatus();
  }

  const Json& document_;
  Grammar grammar_;
  JsonRules rules_;
  struct Unfilled {
    Rule rule;
    const Json* schema;
    std::string place;
  };
  std::map<const Json*, Rule> made_;
  std::vector<Unfilled> unfilled_;
  Rule other_key_ = -1;
};

}  // namespace

absl::StatusOr<Grammar> AnyJsonObject() {
  Grammar grammar;
  JsonRules rules(&grammar);
  const Rule whole = grammar.AddRule();
  grammar.AddCall(rules.Space(rules.Space(grammar.Start(whole))), rules.any_object(), grammar.End(whole));
  DFLASH_RETURN_IF_ERROR(grammar.Finish(whole));
  return grammar;
}

absl::StatusOr<Grammar> ConformsTo(const std::string& schema) {
  if (schema.size() > kMaxSchemaBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema has ", schema.size(), " bytes, at most ", kMaxSchemaBytes, " are allowed"));
  }
  absl::StatusOr<Json> document = ParseOrderedJson(schema, "schema", {.repeated_keys = false});
  if (!document.ok()) return absl::InvalidArgumentError(document.status().message());
  return SchemaCompiler(*document).Compile();
}

absl::StatusOr<Grammar> OneOf(const std::vector<std::string>& texts) {
  if (texts.empty()) return absl::InvalidArgumentError("there is no text to choose");
  Grammar grammar;
  const Rule root = grammar.AddRule();
  grammar.AddOneOf(grammar.Start(root), texts, grammar.End(root));
  DFLASH_RETURN_IF_ERROR(grammar.Finish(root));
  return grammar;
}

}  // namespace dflash
