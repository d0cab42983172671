// Templates of one language feature each, as answered by Jinja2 itself
// (tools/vectors/make-chat-template-vectors.py).
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"
#include "text/jinja/json_values.h"
#include "text/jinja/template.h"

namespace dflash::jinja {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<MarkedText> Render(const std::string& source, const Json& variables, bool is_content) {
  const Limits limits;
  const auto parsed = Template::Parse(source, limits);
  if (!parsed.ok()) return parsed.status();
  Runtime runtime(limits, absl::FromCivil(absl::CivilSecond(2026, 3, 9, 7, 5, 1), absl::UTCTimeZone()),
                  absl::UTCTimeZone());
  std::vector<std::pair<std::string, Value>> values;
  for (const auto& [name, value] : variables.items()) {
    auto converted = FromJson(runtime, name, value, is_content);
    if (!converted.ok()) return converted.status();
    values.emplace_back(name, *converted);
  }
  return parsed->Render(runtime, std::move(values));
}

TEST(JinjaConformanceTest, AnswersLikeJinja2) {
  std::ifstream file(DFLASHD_SOURCE_DIR "/tests/vectors/jinja_snippets.jsonl");
  std::string line;
  Json variables;
  int rendered = 0, refused = 0, unsupported = 0;
  while (std::getline(file, line)) {
    const Json vector = Json::parse(line);
    if (vector.contains("variables")) {
      variables = vector["variables"];
      continue;
    }
    const std::string source = vector["template"];
    SCOPED_TRACE(vector["group"].get<std::string>() + ": " + source);
    for (const bool is_content : {true, false}) {
      const absl::StatusOr<MarkedText> result = Render(source, variables, is_content);
      if (vector.contains("unsupported")) {
        EXPECT_EQ(result.status().code(), absl::StatusCode::kUnimplemented) << result.status();
        ++unsupported;
      } else if (vector.contains("text")) {
        EXPECT_TRUE(result.ok()) << result.status() << "\nexpected: " << vector["text"];
        if (result.ok()) {
          EXPECT_EQ(result->bytes(), vector["text"].get<std::string>());
        }
        ++rendered;
      } else {
        EXPECT_FALSE(result.ok()) << (result.ok() ? result->bytes() : "") << "\nexpected: " << vector;
        EXPECT_EQ(result.status().message().substr(0, 5), "line ") << result.status();
        if (vector.contains("raises")) {
          EXPECT_NE(result.status().message().find(vector["raises"].get<std::string>()),
                    absl::string_view::npos)
              << result.status();
        }
        ++refused;
      }
    }
  }
  EXPECT_GT(rendered, 500);
  EXPECT_GT(refused, 300);
  EXPECT_GT(unsupported, 80);
}

}  // namespace
}  // namespace dflash::jinja
