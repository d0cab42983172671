// The marks of content through every operation that makes text out of text.
#include "text/jinja/marked_text.h"

#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"
#include "text/jinja/json_values.h"
#include "text/jinja/template.h"

namespace dflash::jinja {
namespace {

// Content in angle brackets, the rest bare.
std::string Show(const MarkedText& text) {
  std::string out;
  size_t done = 0;
  for (const ByteRange& range : text.content()) {
    out.append(text.bytes().substr(done, range.begin - done)).append("<");
    out.append(text.bytes().substr(range.begin, range.end - range.begin)).append(">");
    done = range.end;
  }
  return out.append(text.bytes().substr(done));
}

std::string Render(const std::string& source) {
  const nlohmann::ordered_json variables = {{"s", " aé,b "},      {"k", "key"},         {"n", 5},
                                            {"f", 1.5},           {"yes", true},        {"none_", nullptr},
                                            {"l", {"x", "y", 3}}, {"d", {{"q", "v\n"}}}};
  const Limits limits;
  Runtime runtime(limits, absl::UnixEpoch(), absl::UTCTimeZone());
  std::vector<std::pair<std::string, Value>> values;
  for (const auto& [name, value] : variables.items()) {
    values.emplace_back(name, FromJson(runtime, name, value, /*is_content=*/true).value());
  }
  const auto result = Template::Parse(source, limits)->Render(runtime, std::move(values));
  return result.ok() ? Show(*result) : result.status().ToString();
}

TEST(MarkedTextTest, BuilderMergesNeighbours) {
  MarkedTextBuilder builder;
  builder.Append("ab", false);
  builder.Append("", true);
  builder.Append("cd", true);
  builder.Append(MarkedText::FromContent("é"));
  builder.Append("f", false);
  const MarkedText text = builder.Build();
  EXPECT_EQ(Show(text), "ab<cdé>f");
  EXPECT_EQ(text.content(), (std::vector<ByteRange>{{2, 6}}));
  EXPECT_EQ(text.code_points(), 6u);
  EXPECT_EQ(Show(text.Substring(1, 3)), "b<c>");
  EXPECT_EQ(Show(text.Substring(3, 6)), "<dé>");
  EXPECT_EQ(Show(text.Substring(6, 7)), "f");
  EXPECT_EQ(Show(text.Substring(2, 2)), "");
  EXPECT_EQ(Show(builder.Build()), "");
}

TEST(MarkedTextTest, MarksFollowEveryOperation) {
  const std::pair<const char*, const char*> cases[] = {
      {"a{{ s }}b", "a< aé,b >b"},
      {"{{ 'x' + s ~ 'y' }}", "x< aé,b >y"},
      {"{{ s | trim }}{{ s.strip() }}{{ (' ' ~ s).lstrip() }}", "<aé,baé,baé,b >"},
      {"{{ (s ~ 'z')[2:] }}|{{ s[1] }}|{{ ('z' ~ s)[::-1] }}|{{ s | reverse }}",
       "<é,b >z|<a>|< b,éa >z|< b,éa >"},
      {"{{ s.split(',')[0] }}|{{ ('p,' ~ s).split(',') | join('+') }}", "< aé>|p+< aé>+<b >"},
      {"{{ 'a-b'.replace('-', k) }}|{{ k.replace('e', 'E') }}|{{ 'ab' | replace('', k) }}",
       "a<key>b|<k>E<y>|<key>a<key>b<key>"},
      {"{{ k | upper }}{{ ('x' ~ k).title() }}{{ ('x' ~ k) | capitalize }}{{ 'ß'.upper() ~ k }}",
       "<KEY>X<key>X<key>SS<key>"},
      {"{{ l | join('-') }}|{{ k.join(['a', 'b']) }}|{{ [1, k] | join(k) }}",
       "<x>-<y>-<3>|a<key>b|1<keykey>"},
      {"{{ k | tojson }}|{{ [k, 'a', n] | tojson }}|{{ {k: 1, 'a': d} | tojson }}",
       "\"<key>\"|[\"<key>\", \"a\", <5>]|{\"<key>\": 1, \"a\": <{\"q\": \"v\\n\"}>}"},
      {"{{ l | tojson }}|{{ d | tojson(indent=1) }}|{{ l }}|{{ d }}",
       "<[\"x\", \"y\", 3]>|<{\n \"q\": \"v\\n\"\n}>|<['x', 'y', 3]>|<{'q': 'v\\n'}>"},
      {"{{ [k, 'a'] }}|{{ (k,) }}|{{ d.items() }}|{{ d.keys() | list }}",
       "['<key>', 'a']|('<key>',)|<dict_items([('q', 'v\\n')])>|['<q>']"},
      {"{{ n }}{{ f }}{{ yes }}{{ none_ }}", "<51.5TrueNone>"},
      {"{{ n + 1 }}|{{ -n }}|{{ n | float }}|{{ '7' ~ n }}|{{ (k ~ '7') | int }}|{{ n | string }}|{{ [n] | "
       "sum }}|{{ f | round }}|{{ n | abs }}",
       "<6>|<-5>|<5.0>|7<5>|0|<5>|<5>|<2.0>|<5>"},
      {"{{ k | length }}{{ n == 5 }}{{ k in d }}", "3TrueFalse"},
      {"{{ k | e }}{{ ('<' ~ k) | e }}{{ (k | safe) + '<' }}", "<key>&lt;<keykey>&lt;"},
      {"{{ ('a\n' ~ k) | indent(1) }}|{{ 'a\nb' | indent(k) }}", "a\n <key>|a\n<key>b"},
      {"{% set x %}a{{ k }}b{% endset %}{{ x }}{% macro m(v) %}<{{ v }}>{% endmacro %}{{ m(k) }}",
       "a<key>b<<key>>"},
      {"{% for c in k %}{{ c }}.{% endfor %}{% for q, v in d.items() %}{{ q }}={{ v }}{% endfor %}",
       "<k>.<e>.<y>.<q>=<v\n>"},
      {"{{ l | map('upper') | list }}|{{ l[:2] | sort | first }}|{{ l | last }}|{{ d | dictsort }}|{{ "
       "d.get('q') }}|{{ (d | items | list)[0][1] }}",
       "['<X>', '<Y>', '<3>']|<x>|<3>|[<('q', 'v\\n')>]|<v\n>|<v\n>"},
      {"{{ k * 2 }}{{ missing | default(k) }}{{ k if yes else 'a' }}{{ k or 'a' }}", "<keykeykeykeykey>"},
      {"{{ k.removeprefix('k') }}{{ ('a' ~ k).removesuffix('y') }}{{ ('a\n' ~ k).splitlines() | join('+') }}",
       "<ey>a<ke>a+<key>"},
      {"{{ strftime_now('%Y') }}{{ strftime_now(k) }}", "1970<key>"},
  };
  for (const auto& [source, expected] : cases) EXPECT_EQ(Render(source), expected) << source;
}

}  // namespace
}  // namespace dflash::jinja
