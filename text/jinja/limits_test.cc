// What a template or a conversation from outside must not be able to do: exhaust the stack, the memory or the
// time.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/jinja/json_values.h"
#include "text/jinja/template.h"

namespace dflash::jinja {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

std::string Repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

absl::StatusOr<MarkedText> Render(const std::string& source, const Limits& limits = {},
                                  const Json& variables = {}) {
  const auto parsed = Template::Parse(source, limits);
  if (!parsed.ok()) return parsed.status();
  Runtime runtime(limits, absl::UnixEpoch(), absl::UTCTimeZone());
  std::vector<std::pair<std::string, Value>> values;
  for (const auto& [name, value] : variables.items()) {
    auto converted = FromJson(runtime, name, value, /*is_content=*/true);
    if (!converted.ok()) return converted.status();
    values.emplace_back(name, *converted);
  }
  return parsed->Render(runtime, std::move(values));
}

void ExpectExhausts(const std::string& limit, const std::string& source, const Limits& limits = {}) {
  const auto result = Render(source, limits);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted)
      << source.substr(0, 200) << ": " << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(limit)) << source.substr(0, 200);
}

TEST(JinjaLimitsTest, TemplateBytes) {
  Limits limits;
  limits.max_template_bytes = 10;
  EXPECT_EQ(Render("0123456789", limits)->bytes(), "0123456789");
  ExpectExhausts("max_template_bytes = 10", "01234567890", limits);
}

TEST(JinjaLimitsTest, Nesting) {
  const int n = 20'000;
  for (const std::string& source : {
           "{{ " + Repeat("(", n) + "1" + Repeat(")", n) + " }}",
           "{{ " + Repeat("[", n) + Repeat("]", n) + " }}",
           "{{ " + Repeat("{1: ", n) + "1" + Repeat("}", n) + " }}",
           "{{ " + Repeat("not ", n) + "1 }}",
           "{{ " + Repeat("-", n) + "1 }}",
           "{{ 1" + Repeat(" + 1", n) + " }}",
           "{{ 1" + Repeat(" * 1", n) + " }}",
           "{{ 1" + Repeat(" ** 1", n) + " }}",
           "{{ 1" + Repeat(" and 1", n) + " }}",
           "{{ 1" + Repeat(" or 1", n) + " }}",
           "{{ 1" + Repeat(" if 1 else 1", n) + " }}",
           "{{ 1" + Repeat(" if 1", n) + " }}",
           "{{ x" + Repeat(".x", n) + " }}",
           "{{ x" + Repeat("[0]", n) + " }}",
           "{{ x" + Repeat("[x", n) + Repeat("]", n) + " }}",
           "{{ x" + Repeat("[1:x", n) + Repeat("]", n) + " }}",
           "{{ x" + Repeat("()", n) + " }}",
           "{{ x" + Repeat("(x", n) + Repeat(")", n) + " }}",
           "{{ x" + Repeat(" | trim", n) + " }}",
           "{{ x" + Repeat(" | default(x", n) + Repeat(")", n) + " }}",
           "{{ x" + Repeat(" is eq x", 1) + Repeat(" == (x", n) + Repeat(")", n) + " }}",
           "{{ x is eq " + Repeat("[", n) + Repeat("]", n) + " }}",
           Repeat("{% if 1 %}", n) + Repeat("{% endif %}", n),
           Repeat("{% for x in y %}", n) + Repeat("{% endfor %}", n),
           Repeat("{% set x %}", n) + Repeat("{% endset %}", n),
           Repeat("{% generation %}", n) + Repeat("{% endgeneration %}", n),
           "{% for " + Repeat("(", n) + "x" + Repeat(")", n) + " in y %}{% endfor %}",
       }) {
    ExpectExhausts("max_nesting = 200", source);
  }
}

TEST(JinjaLimitsTest, LongFlatTemplatesAreFine) {
  const int n = 3000;
  EXPECT_EQ(Render("{{ 1" + Repeat(" ~ 1", n) + " }}")->size(), 3001u);
  EXPECT_EQ(Render("{{ [1" + Repeat(", 1", n) + "] | length }}")->bytes(), "3001");
  EXPECT_EQ(Render("{{ 1" + Repeat(" == 1", n) + " }}")->bytes(), "True");
  EXPECT_EQ(Render("{% if 0 %}" + Repeat("{% elif 0 %}", n) + "{% else %}x{% endif %}")->bytes(), "x");
  EXPECT_EQ(Render(Repeat("{{ 1 }}", n))->size(), 3000u);
  EXPECT_EQ(Render("{{ 1" + Repeat(" + 1", 150) + " }}")->bytes(), "151");
}

TEST(JinjaLimitsTest, CallDepth) {
  ExpectExhausts("max_call_depth = 800", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
  ExpectExhausts("max_call_depth = 800", "{% macro m(x=m()) %}{% endmacro %}{{ m() }}");
  ExpectExhausts(
      "max_call_depth = 800",
      "{% macro a(l) %}{% for x in l %}{% if x %}{{ b(l) | trim }}{% endif %}{% endfor %}{% endmacro %}"
      "{% macro b(l) %}{% set x %}{{ a(l) }}{% endset %}{% endmacro %}{{ a([1]) }}");
  // A string is a sequence of strings, for ever.
  ExpectExhausts("max_call_depth = 800", "{{ 'a' | map(" + Repeat("'map', ", 2000) + "'upper') | list }}");
  EXPECT_EQ(Render("{% macro m(n) %}{% if n %}{{ n % 10 }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}")
                ->size(),
            60u);
}

TEST(JinjaLimitsTest, ValueDepth) {
  ExpectExhausts(
      "max_value_depth = 200",
      "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}");
  ExpectExhausts(
      "max_value_depth = 200",
      "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}");
  ExpectExhausts("max_value_depth = 200",
                 "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x.get} "
                 "%}{% endfor %}");
  ExpectExhausts(
      "max_value_depth = 200",
      "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% for j in ns.x %}{% set ns.x = [loop] %}"
      "{% endfor %}{% for j in ns.x %}{% set ns.x = [loop, j] %}{% endfor %}{% endfor %}");
  Json deep = 1;
  for (int i = 0; i < 5000; ++i) deep = Json::array({std::move(deep)});
  const auto result = Render("x", {}, {{"deep", deep}});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("deep: nests deeper than max_value_depth = 200"));
  // A namespace may hold itself, and is freed all the same.
  EXPECT_EQ(Render("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x[0].x[0].x | length }}")->bytes(),
            "1");
}

TEST(JinjaLimitsTest, Steps) {
  const std::string forever = "{% for i in range(100000) %}{% for j in range(100000) %}";
  ExpectExhausts("max_steps = 20000000", forever + "{% endfor %}{% endfor %}");
  // Each of these is cheap to write down and would take for ever.
  const std::string setup =
      "{% set ns = namespace(l=[1], s='0123456789abcdef', d={}) %}{% for i in range(15) %}{% set ns.l = ns.l "
      "+ ns.l %}"
      "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{% set l = ns.l %}{% set s = ns.s %}";
  for (const char* work : {"{% set x = l + l %}",
                           "{% set x = l | list %}",
                           "{% set x = l[::-1] %}",
                           "{% set x = l == l[:] %}",
                           "{% set x = 2 in l %}",
                           "{% set x = l | sort %}",
                           "{% set x = l | map('abs') %}",
                           "{% set x = l | select %}",
                           "{% set x = l | join %}",
                           "{% set x = l | tojson %}",
                           "{% set x = l | string %}",
                           "{% set x = l | sum %}",
                           "{% set x = l | max %}",
                           "{% set x = l | reverse %}",
                           "{% set x = l < l[:] %}",
                           "{% set x = l * 2 %}",
                           "{% set x = s ~ 'a' %}",
                           "{% set x = s + 'a' %}",
                           "{% set x = s | trim %}",
                           "{% set x = s.split('z') %}",
                           "{% set x = s.replace('z', '') %}",
                           "{% set x = s | upper %}",
                           "{% set x = s[::-1] %}",
                           "{% set x = s | list %}",
                           "{% set x = 'z' in s %}",
                           "{% set x = s == s[1:] + 'x' %}",
                           "{% set x = s < s[:-1] %}",
                           "{% set x = s.find('z') %}",
                           "{% set x = s.startswith(s) %}",
                           "{% set x = s | e %}",
                           "{% set x = s | tojson %}",
                           "{% set x = s | int %}",
                           "{% set x = s | indent %}",
                           "{% set x = s.count('z') %}",
                           "{% set x = s.title() %}",
                           "{% set x = s.splitlines() %}",
                           "{% set x = {s: 1}[s] %}",
                           "{% set x = s.strip(s) %}",
                           "{% set x = range(100000) %}",
                           "{% set x = s.rsplit('z') %}",
                           "{% set x = s | title %}",
                           "{% set x = s | float %}",
                           "{% set x = s | string | replace('z', '') %}",
                           "{% set x = l | unique | list %}",
                           "{% set x = l | min %}",
                           "{% set x = l | select('odd') | list %}",
                           "{% set x = l | map(attribute='x') | list %}",
                           "{% set x = s ~ l %}"}) {
    Limits limits;
    limits.max_steps = 1'000'000;
    const auto result = Render(setup + forever + work + "{% endfor %}{% endfor %}", limits);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted)
        << work << ": " << result.status();
  }
}

// Few objects that look like many: each of a list's two elements is the list before.
TEST(JinjaLimitsTest, SharedValuesAreWalkedWithinTheSteps) {
  const std::string setup =
      "{% set ns = namespace(x=1, y=1) %}{% for i in range(100) %}{% set ns.x = [ns.x, ns.x] %}"
      "{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
  for (const char* work :
       {"{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x == ns.y }}", "{{ ns.x < ns.y }}", "{{ ns.x ~ '' }}"}) {
    Limits limits;
    limits.max_steps = 1'000'000;
    const auto result = Render(setup + work, limits);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted)
        << work << ": " << result.status();
  }
}

TEST(JinjaLimitsTest, OutputBytes) {
  Limits limits;
  limits.max_output_bytes = 1000;
  EXPECT_EQ(Render("{{ 'x' * 1000 }}", limits)->size(), 1000u);
  for (const char* source :
       {"{{ 'x' * 1001 }}", "{{ 'x' * 999 }}{{ 'ab' }}", "{% for i in range(1001) %}x{% endfor %}",
        "{% set x = 'x' * 600 %}{% set y = x + x %}", "{% set x = 'x' * 600 %}{% set y = x ~ x %}",
        "{% set x = 'x' * 600 %}{% set y = x.replace('x', 'xx') %}",
        "{% set x = 'x' * 600 %}{% set y = [x, x] | join %}",
        "{% set x = 'x' * 600 %}{% set y = [x, x] | tojson %}",
        "{% set x = 'x' * 600 %}{% set y = [x, x] | string %}",
        "{% set x %}{% for i in range(1001) %}x{% endfor %}{% endset %}", "{{ 'x' | indent(1001) }}",
        "{{ [1] | tojson(indent=1001) }}", "{% set x = 'x' * 600 %}{% set y = x.join(['a', 'b', 'c']) %}",
        "{{ 'x' * 9223372036854775807 }}", "{{ [[1]] | tojson(indent=600) }}",
        "{{ ('x\n' * 400) | indent(2) }}"}) {
    ExpectExhausts("max_output_bytes = 1000", source, limits);
  }
  ExpectExhausts("max_steps", "{{ [1] * 9223372036854775807 }}");
  EXPECT_EQ(Render("{{ '' * 9223372036854775807 }}{{ [] * 9223372036854775807 }}")->bytes(), "[]");
}

TEST(JinjaLimitsTest, IntegersAtTheirEnds) {
  const std::string min = "(-9223372036854775807 - 1)", max = "9223372036854775807";
  EXPECT_EQ(Render("{{ " + min + " % -1 }} {{ " + min + " // 1 }} {{ " + max + " % 2 }}")->bytes(),
            "0 -9223372036854775808 1");
  EXPECT_EQ(Render("{{ [1, 2][" + min + ":" + max + "] }} {{ 'ab'[" + max + ":" + min + ":" + min +
                   "] }} {{ [1, 2][::" + max + "] }}")
                ->bytes(),
            "[1, 2] b [1]");
  EXPECT_EQ(Render("{{ [1][" + min + "] }}|{{ 'a'[" + max + "] }}|{{ range(" + max + ", " + min + ", " + min +
                   ") | list }}")
                ->bytes(),
            "||[9223372036854775807, -1]");
  for (const std::string& source : std::initializer_list<std::string>{
           min + " // -1", "-" + min, max + " + 1", min + " - 1", max + " * 2", min + " | abs", "3 ** 41",
           "'9223372036854775808' | int", "1e19 | int", "-1e19 | int"}) {
    EXPECT_EQ(Render("{{ " + source + " }}").status().code(), absl::StatusCode::kUnimplemented) << source;
  }
  EXPECT_EQ(
      Render("{{ '-9223372036854775808' | int }} {{ (-2) ** 63 }} {{ 1 ** 9223372036854775807 }} {{ 0 ** " +
             max + " }} {{ (-1) ** " + max + " }}")
          ->bytes(),
      "-9223372036854775808 -9223372036854775808 1 0 -1");
}

TEST(JinjaLimitsTest, ErrorsNameTheLine) {
  const auto message = [](const std::string& source) {
    return std::string(Render(source).status().message());
  };
  EXPECT_THAT(message("a\nb\n{{ 1 + }}"), HasSubstr("line 3: expected an expression, got '}}'"));
  EXPECT_THAT(message("{#\n\n#}\n{{ x.y }}"), HasSubstr("line 4: 'x' is undefined"));
  EXPECT_THAT(message("{% macro m() %}\n{{ 1 / 0 }}{% endmacro %}\n\n{{ m() }}"),
              HasSubstr("line 2: division by zero"));
  EXPECT_THAT(message("{{ [1,\n2,\nnone + 1] }}"), HasSubstr("line 3: unsupported operand types for +"));
  EXPECT_THAT(message("\n{% if x %}\n{% for y in x %}\n"), HasSubstr("no 'endfor' for the block of line 3"));
  EXPECT_THAT(message("\n{{ raise_exception('no\nway') }}"), HasSubstr("line 2: no\nway"));
}

}  // namespace
}  // namespace dflash::jinja
