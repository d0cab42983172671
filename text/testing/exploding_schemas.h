// Small schemas whose alternatives multiply as an output goes on, or that make large grammars.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dflash::testing {

struct ExplodingSchema {
  enum class End { kRefused, kTooLarge, kFollowed };
  const char* name;
  std::string schema;
  const char* wanted;  // text that leads to the worst places over and over; empty: any does
  End end;             // of an output that goes there
};

// Behind n brackets the text may be in any of 2^n places: at some bracket those are more than are followed.
inline std::string DoublingSchema() {
  std::string schema = R"({"$defs":{"x40":{"type":"null"})";
  for (int i = 0; i < 40; ++i) {
    const std::string next =
        absl::StrCat(R"({"type":"array","minItems":1,"items":{"$ref":"#/$defs/x)", i + 1, R"("}})");
    absl::StrAppend(&schema, R"(,"x)", i, R"(":{"anyOf":[)", next, ",", next, "]}");
  }
  return schema + R"(},"$ref":"#/$defs/x0"})";
}

inline std::vector<ExplodingSchema> ExplodingSchemas() {
  const auto any_of = [](int first, int last, const auto& option) {
    std::string all = R"({"anyOf":[)";
    for (int i = first; i <= last; ++i) absl::StrAppend(&all, i > first ? "," : "", option(i));
    return all + "]}";
  };
  // Each array may be any of them in each of the arrays around it.
  const auto arrays = [&](int count) {
    return any_of(1, count, [](int i) {
      return absl::StrCat(R"({"type":"array","items":{"$ref":"#"},"maxItems":)", i, "}");
    });
  };
  // Each character is one of each of the strings.
  const auto strings = [&](int count, int least) {
    return any_of(0, count - 1, [&](int i) {
      return absl::StrCat(R"({"type":"string","minLength":)", least, R"(,"maxLength":)", least + i, "}");
    });
  };
  const auto properties = [](int count) {
    std::string all = R"({"type":"object","properties":{)";
    for (int i = 0; i < count; ++i) absl::StrAppend(&all, i > 0 ? "," : "", R"("p)", i, R"(":{})");
    return all + "}}";
  };
  const std::string objects = any_of(1, 40, [](int i) {
    return absl::StrCat(
        R"({"type":"object","required":["a"],"properties":{"a":{"anyOf":[{"$ref":"#"},true]},"x)", i,
        R"(":{}}})");
  });
  using End = ExplodingSchema::End;
  return {
      {"9 arrays in each other", arrays(9), "[", End::kTooLarge},
      {"39 arrays", arrays(39), "[", End::kTooLarge},
      {"59 arrays", arrays(59), "[", End::kTooLarge},
      {"79 arrays", arrays(79), "[", End::kTooLarge},
      {"249 arrays", arrays(249), "[", End::kTooLarge},
      {"two arrays in two arrays", DoublingSchema(), "[", End::kTooLarge},
      {"40 objects in each other", objects, R"({"a":)", End::kTooLarge},
      {"80 lengths of strings", strings(80, 500), "", End::kTooLarge},
      {"24 lengths of strings", strings(24, 500), "", End::kFollowed},
      {"2000 properties, none required", properties(2000), "{", End::kTooLarge},
      {"4000 alternatives", any_of(1, 4000, [](int) { return R"({"type":"null"})"; }), "", End::kRefused},
      {"300 long strings", strings(300, 700), "", End::kRefused},
  };
}

}  // namespace dflash::testing
