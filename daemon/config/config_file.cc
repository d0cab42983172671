#include "daemon/config/config_file.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/json_value.h"
#include "base/status.h"
#include "text/utf8.h"
#include "yaml-cpp/yaml.h"

namespace dflash {
namespace {

absl::Status Bad(const std::string& place, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(place, ": ", what));
}

std::string Shortest(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), number).ptr};
}

absl::StatusOr<std::vector<ConfigEntry>> ReadJson(std::string_view text, const std::string& origin) {
  DFLASH_ASSIGN_OR_RETURN(const JsonValue document, ParseJson(text, origin));
  if (document.kind != JsonValue::Kind::kObject) return Bad(origin, "must be one mapping");
  std::vector<ConfigEntry> entries;
  for (const JsonMember& member : document.members) {
    ConfigEntry entry = {member.key, "", origin};
    switch (member.value.kind) {
      case JsonValue::Kind::kString:
        entry.value = member.value.string;
        break;
      case JsonValue::Kind::kInt:
        entry.value = absl::StrCat(member.value.integer);
        break;
      case JsonValue::Kind::kFloat:
        entry.value = Shortest(member.value.number);
        break;
      case JsonValue::Kind::kBool:
        entry.value = member.value.boolean ? "true" : "false";
        break;
      case JsonValue::Kind::kNull:
      case JsonValue::Kind::kArray:
      case JsonValue::Kind::kObject:
        return Bad(origin,
                   absl::StrCat(Printable(member.key), ": must be a string, a number or true or false, not ",
                                Name(member.value.kind)));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

// The YAML library takes a quote that is never closed for a text up to the end, and so would swallow the keys
// behind it; and it stops where a document ends. This key is put behind everything: when it does not come out
// again, something has swallowed it.
constexpr char kEnd[] = "end-of-the-file";

// May throw YAML::Exception, which ParseConfig turns into a Status.
absl::StatusOr<std::vector<ConfigEntry>> ReadYaml(std::string_view text, const std::string& origin) {
  // Not LoadAll: of a text like ",[" it makes documents without end.
  const YAML::Node document = YAML::Load(absl::StrCat(std::string(text), "\n", kEnd, ": 1\n"));
  std::vector<ConfigEntry> entries;
  if (!document.IsMap()) return Bad(origin, "must be one mapping");
  std::set<std::string> seen;
  for (const auto& pair : document) {
    const std::string place = absl::StrCat(origin, ":", pair.first.Mark().line + 1);
    if (!pair.first.IsScalar()) return Bad(place, "a key must be a name");
    const std::string key = pair.first.Scalar();
    if (!seen.insert(key).second) return Bad(place, absl::StrCat(Printable(key), " is there twice"));
    // "?" is the tag of a plain scalar, "!" of one in quotes.
    const bool plain = pair.second.IsScalar() && (pair.second.Tag() == "?" || pair.second.Tag() == "!");
    if (!plain) {
      return Bad(place, absl::StrCat(Printable(key), ": must be a string, a number or true or false",
                                     pair.second.IsNull() ? ", and is empty" : ""));
    }
    // The YAML library writes the escapes \N and \_ as one byte each, not as UTF-8.
    for (const std::string& scalar : {key, pair.second.Scalar()}) {
      if (ReplaceIllFormed(scalar) != scalar)
        return Bad(place, absl::StrCat(Printable(key), " is not valid UTF-8"));
    }
    entries.push_back({key, pair.second.Scalar(), place});
  }
  if (entries.empty() || entries.back().key != kEnd)
    return Bad(origin, "has several documents, or a quote that is not closed");
  entries.pop_back();
  return entries;
}

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ParseConfig(std::string_view text, std::string_view origin) {
  const std::string name(origin);
  if (static_cast<int64_t>(text.size()) > kMaxConfigBytes) {
    return Bad(name, absl::StrCat("has ", text.size(), " bytes, over ", kMaxConfigBytes));
  }
  if (ReplaceIllFormed(text) != text) return Bad(name, "is not valid UTF-8");
  // One of them, 0x04, is the end of everything to the YAML library: what follows would be lost in silence.
  const auto control = std::find_if(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte < 0x20 && c != '\t' && c != '\n' && c != '\r') || byte == 0x7f;
  });
  if (control != text.end()) {
    return Bad(absl::StrCat(name, ":", 1 + std::count(text.begin(), control, '\n')),
               "has a control character");
  }
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin != std::string_view::npos && text[begin] == '{') return ReadJson(text, name);
  try {
    return ReadYaml(text, name);
  } catch (const YAML::Exception& error) {
    return Bad(error.mark.is_null() ? name : absl::StrCat(name, ":", error.mark.line + 1), error.msg);
  }
}

}  // namespace dflash
