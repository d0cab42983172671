#include "base/flag_parser.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/host_port.h"
#include "base/json_object.h"

namespace dflash {
namespace {

using Setter = std::function<absl::Status(const std::string&)>;

Setter SetText(std::string* target) {
  return [target](const std::string& text) {
    *target = text;
    return absl::OkStatus();
  };
}

template <typename Number, typename Target>
Setter SetInteger(Number min, Number max, Target* target) {
  return [=](const std::string& text) -> absl::Status {
    Number parsed = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (error != std::errc() || end != text.data() + text.size() || parsed < min || parsed > max) {
      return absl::InvalidArgumentError(absl::StrCat("must be a whole number from ", min, " to ", max));
    }
    *target = parsed;
    return absl::OkStatus();
  };
}

Setter SetIntegerOrZero(int64_t min, int64_t max, int64_t* target) {
  const Setter in_range = SetInteger(min, max, target);
  return [=](const std::string& text) -> absl::Status {
    if (text == "0") {
      *target = 0;
      return absl::OkStatus();
    }
    if (in_range(text).ok()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("must be 0 or a whole number from ", min, " to ", max));
  };
}

template <typename Target>
Setter SetNumber(double min, double max, Target* target) {
  return [=](const std::string& text) -> absl::Status {
    double parsed = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(parsed) || parsed < min ||
        parsed > max) {
      return absl::InvalidArgumentError(absl::StrCat("must be a number from ", min, " to ", max));
    }
    *target = parsed;
    return absl::OkStatus();
  };
}

std::string ToText(int64_t number) { return absl::StrCat(number); }
std::string ToText(uint64_t number) { return absl::StrCat(number); }
std::string ToText(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), number).ptr};
}
const std::string& ToText(const std::string& text) { return text; }

template <typename Target>
std::function<std::optional<std::string>()> Show(const Target* target) {
  return [target] { return std::optional<std::string>(ToText(*target)); };
}
template <typename Number>
std::function<std::optional<std::string>()> Show(const std::optional<Number>* target) {
  return
      [target] { return target->has_value() ? std::optional<std::string>(ToText(**target)) : std::nullopt; };
}

}  // namespace

FlagParser::FlagParser(std::string program, std::string summary)
    : program_(std::move(program)), summary_(std::move(summary)) {}

void FlagParser::Add(Flag flag) {
  DFLASH_CHECK(Find(flag.name) == nullptr, flag.name.c_str());
  flags_.push_back(std::move(flag));
}

FlagParser::Flag* FlagParser::Find(std::string_view name) {
  for (Flag& flag : flags_) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

bool FlagParser::Given(std::string_view name) const {
  const Flag* flag = const_cast<FlagParser*>(this)->Find(name);
  DFLASH_CHECK(flag != nullptr);
  return flag->source != Source::kDefault;
}

void FlagParser::Text(std::string name, std::string value, std::string help, std::string* target) {
  Add({.name = std::move(name),
       .value = std::move(value),
       .help = std::move(help),
       .default_text = *target,
       .set = SetText(target),
       .show = Show(target)});
}

void FlagParser::Integer(std::string name, std::string value, std::string help, int64_t min, int64_t max,
                         int64_t* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetInteger(min, max, target), target);
}

void FlagParser::IntegerOrZero(std::string name, std::string value, std::string help, int64_t min,
                               int64_t max, int64_t* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetIntegerOrZero(min, max, target), target);
}

void FlagParser::Integer(std::string name, std::string value, std::string help, int64_t min, int64_t max,
                         std::optional<int64_t>* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetInteger(min, max, target), target);
}

void FlagParser::Integer(std::string name, std::string value, std::string help, uint64_t min, uint64_t max,
                         std::optional<uint64_t>* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetInteger(min, max, target), target);
}

void FlagParser::Number(std::string name, std::string value, std::string help, double min, double max,
                        double* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetNumber(min, max, target), target);
}

void FlagParser::Number(std::string name, std::string value, std::string help, double min, double max,
                        std::optional<double>* target) {
  AddNumber(std::move(name), std::move(value), std::move(help), SetNumber(min, max, target), target);
}

template <typename Target>
void FlagParser::AddNumber(std::string name, std::string value, std::string help,
                           std::function<absl::Status(const std::string&)> set, Target* target) {
  const auto show = Show(target);
  Add({.name = std::move(name),
       .value = std::move(value),
       .help = std::move(help),
       .default_text = show().value_or(""),
       .set = std::move(set),
       .show = show,
       .is_text = false});
}

void FlagParser::Address(std::string name, std::string help, int min_port, std::string* target) {
  Add({.name = std::move(name),
       .value = "HOST:PORT",
       .help = std::move(help),
       .default_text = *target,
       .set = [target, min_port](const std::string& text) -> absl::Status {
         const auto parsed = SplitHostPort(text);
         if (!parsed.ok() || parsed->second < min_port) {
           return absl::InvalidArgumentError(
               absl::StrCat("must be HOST:PORT with a port from ", min_port, " to 65535"));
         }
         *target = text;
         return absl::OkStatus();
       },
       .show = Show(target)});
}

void FlagParser::AddressOrSocket(std::string name, std::string help, std::string* target) {
  static constexpr std::string_view kSocket = "unix:";
  static constexpr size_t kMaxPath = 107;  // bytes that a socket's name has room for
  Add({.name = std::move(name),
       .value = "ADDRESS",
       .help = std::move(help),
       .default_text = *target,
       .set = [target](const std::string& text) -> absl::Status {
         const bool is_socket = text.starts_with(kSocket);
         const size_t path = is_socket ? text.size() - kSocket.size() : 0;
         if (is_socket ? path == 0 || path > kMaxPath : !text.empty() && !SplitHostPort(text).ok()) {
           return absl::InvalidArgumentError(
               absl::StrCat("must be HOST:PORT, or unix:PATH of at most ", kMaxPath, " bytes"));
         }
         *target = text;
         return absl::OkStatus();
       },
       .show = Show(target)});
}

void FlagParser::Switch(std::string name, std::string help, bool* target) {
  Add({.name = std::move(name),
       .value = "",
       .help = std::move(help),
       .default_text = "",
       .set = [target](const std::string& text) -> absl::Status {
         if (text != "true" && text != "false") return absl::InvalidArgumentError("must be true or false");
         *target = text == "true";
         return absl::OkStatus();
       },
       .show = [target] { return std::optional<std::string>(*target ? "true" : "false"); },
       .is_text = false,
       .kind = Flag::Kind::kSwitch});
}

void FlagParser::Positional(std::string name, std::string help, std::string* target) {
  Add({.name = std::move(name),
       .value = "",
       .help = std::move(help),
       .default_text = "",
       .set = SetText(target),
       .show = Show(target),
       .kind = Flag::Kind::kPositional});
}

void FlagParser::Choice(std::string name, std::vector<std::string> choices, std::string help,
                        std::string* target) {
  std::string value = absl::StrJoin(choices, "|");
  Add({.name = std::move(name),
       .value = value,
       .help = std::move(help),
       .default_text = *target,
       .set = [target, value, choices = std::move(choices)](const std::string& text) -> absl::Status {
         if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
           return absl::InvalidArgumentError(absl::StrCat("must be one of ", value));
         }
         *target = text;
         return absl::OkStatus();
       },
       .show = Show(target)});
}

std::string FlagParser::Nearest(std::string_view name) const {
  std::vector<std::string> names;
  for (const Flag& known : flags_) {
    if (known.kind != Flag::Kind::kPositional) names.push_back(known.name);
  }
  return NearestName(std::string(name), names);
}

absl::Status FlagParser::Set(Source source, std::string_view name, const std::string& value) {
  Flag* flag = Find(name);
  if (flag == nullptr || flag->kind == Flag::Kind::kPositional) {
    const std::string nearest = Nearest(name);
    return absl::NotFoundError(
        absl::StrCat("unknown key ", std::string(name),
                     nearest.empty() ? "" : absl::StrCat(" (did you mean ", nearest, "?)")));
  }
  if (absl::Status status = flag->set(value); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(name), " ", status.message(), ", not '", value, "'"));
  }
  flag->source = source;
  return absl::OkStatus();
}

std::vector<FlagParser::Value> FlagParser::Values() const {
  std::vector<Value> values;
  for (const Flag& flag : flags_) {
    if (flag.kind == Flag::Kind::kPositional) continue;
    values.push_back({flag.name, flag.show(), flag.is_text, flag.source});
  }
  return values;
}

absl::Status FlagParser::Parse(int argc, const char* const* argv, Outcome* outcome) {
  *outcome = Outcome::kRun;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      *outcome = Outcome::kHelp;
      return absl::OkStatus();
    }
    if (argument == "--version") {
      *outcome = Outcome::kVersion;
      return absl::OkStatus();
    }
    if (argument.size() < 3 || argument.substr(0, 2) != "--") {
      if (absl::Status status = TakePositional(argument); !status.ok()) return status;
      continue;
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    Flag* flag = Find(name);
    if (flag == nullptr || flag->kind == Flag::Kind::kPositional) {
      std::string text = absl::StrCat("unknown flag --", name);
      const std::string nearest = Nearest(name);
      if (!nearest.empty()) absl::StrAppend(&text, " (did you mean --", nearest, "?)");
      return absl::InvalidArgumentError(text);
    }
    if (flag->source == Source::kFlag) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " is given twice"));
    }
    flag->source = Source::kFlag;
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (flag->kind == Flag::Kind::kSwitch) {
      value = "true";
    } else if (i + 1 < argc) {
      value = argv[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    }
    if (absl::Status status = flag->set(value); !status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " ", status.message(), ", not '", value, "'"));
    }
  }
  for (const Flag& flag : flags_) {
    if (flag.kind == Flag::Kind::kPositional && flag.source != Source::kFlag) {
      return absl::InvalidArgumentError(absl::StrCat(flag.name, " is missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status FlagParser::TakePositional(const std::string& argument) {
  const bool looks_like_flag = argument.size() > 1 && argument[0] == '-';
  for (Flag& flag : flags_) {
    if (looks_like_flag || flag.kind != Flag::Kind::kPositional || flag.source == Source::kFlag) continue;
    flag.source = Source::kFlag;
    return flag.set(argument);
  }
  return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", argument, "'"));
}

std::string FlagParser::Help() const {
  std::string usage = absl::StrCat("Usage: ", program_), list;
  for (const Flag& flag : flags_) {
    const bool positional = flag.kind == Flag::Kind::kPositional;
    if (positional) absl::StrAppend(&usage, " ", flag.name);
    absl::StrAppend(&list, positional ? "  " : "  --", flag.name, flag.value.empty() ? "" : " ", flag.value,
                    "\n      ", flag.help);
    if (!flag.default_text.empty()) absl::StrAppend(&list, " (default ", flag.default_text, ")");
    absl::StrAppend(&list, "\n");
  }
  return absl::StrCat(usage, " [flags]\n", summary_, "\n\n", list, "  --help, --version\n");
}

std::optional<std::string> EarlyValue(int argc, const char* const* argv, std::string_view flag) {
  for (int i = 1; i < argc; ++i) {
    std::string_view word = argv[i];
    if (!word.starts_with("--") || !word.substr(2).starts_with(flag)) continue;
    word.remove_prefix(2 + flag.size());
    if (word.starts_with('=')) return std::string(word.substr(1));
    if (word.empty() && i + 1 < argc) return std::string(argv[i + 1]);
  }
  return std::nullopt;
}

}  // namespace dflash
