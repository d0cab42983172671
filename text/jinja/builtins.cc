#include "text/jinja/builtins.h"

#include <array>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "text/jinja/access.h"
#include "text/jinja/format.h"
#include "text/jinja/operators.h"

namespace dflash::jinja {

namespace {

using Bound = std::vector<std::optional<Value>>;

constexpr int64_t kMaxRange = 100'000;  // of Jinja's sandbox

absl::StatusOr<Value> Range(Runtime& runtime, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("range", {"start", "stop", "step"}, 1, arguments));
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < 3; ++i) {
    if (!bound[i].has_value()) continue;
    const std::optional<int64_t> number = AsInteger(*bound[i]);
    if (!number.has_value()) return RenderError("range() needs integers, got ", TypeName(*bound[i]));
    numbers[i] = *number;
  }
  const auto [start, stop, step] = bound[1].has_value() ? std::array{numbers[0], numbers[1], numbers[2]}
                                                        : std::array{int64_t{0}, numbers[0], int64_t{1}};
  if (step == 0) return RenderError("range() step must not be zero");
  auto range = std::make_shared<Sequence>();
  range->kind = Sequence::Kind::kRange;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    if (static_cast<int64_t>(range->items.size()) == kMaxRange) {
      return absl::ResourceExhaustedError(absl::StrCat("a range of more than ", kMaxRange, " items"));
    }
    range->items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  DFLASH_RETURN_IF_ERROR(runtime.Charge(range->items.size()));
  range->range_repr =
      absl::StrCat("range(", start, ", ", stop, step == 1 ? "" : absl::StrCat(", ", step), ")");
  return Value(std::shared_ptr<const Sequence>(std::move(range)));
}

// The arguments of dict(): a mapping or pairs, then keywords.
absl::StatusOr<std::vector<std::pair<Value, Value>>> Pairs(Runtime& runtime, std::string_view function,
                                                           const Arguments& arguments) {
  if (arguments.positional.size() > 1)
    return RenderError(View(function), "() takes at most 1 positional argument");
  std::vector<std::pair<Value, Value>> pairs;
  const auto assign = [&](const Value& key, const Value& value) -> absl::Status {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1 + pairs.size() / 8));
    if (!IsKey(key))
      return absl::UnimplementedError(
          absl::StrCat("a dict key of type ", TypeName(key), " is not supported"));
    for (auto& pair : pairs) {
      if (!SameKey(pair.first, key)) continue;
      pair.second = value;
      return absl::OkStatus();
    }
    pairs.emplace_back(key, value);
    return absl::OkStatus();
  };
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional.front();
    if (const Dict* dict = source.AsDict()) {
      DFLASH_RETURN_IF_ERROR(runtime.Charge(dict->items.size()));
      pairs = dict->items;
    } else {
      DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, source));
      for (const Value& item : items->items) {
        DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> pair, Iterate(runtime, item));
        if (pair->items.size() != 2) return RenderError(View(function), "() needs pairs of key and value");
        DFLASH_RETURN_IF_ERROR(assign(pair->items[0], pair->items[1]));
      }
    }
  }
  for (const auto& [name, value] : arguments.keyword)
    DFLASH_RETURN_IF_ERROR(assign(Value::Text(name), value));
  return pairs;
}

absl::StatusOr<Value> MakeNamespace(Runtime& runtime, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(auto pairs, Pairs(runtime, "namespace", arguments));
  Namespace* created = runtime.NewNamespace();
  for (auto& [key, value] : pairs) {
    // Other keys could never be read again.
    if (key.AsText() != nullptr) created->attributes.emplace_back(key.AsText()->bytes(), std::move(value));
  }
  return Value(created);
}

absl::StatusOr<Value> StrftimeNow(Runtime& runtime, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("strftime_now", {"format"}, 1, arguments));
  const MarkedText* format = bound[0]->AsText();
  if (format == nullptr) return RenderError("strftime_now() needs a string, got ", TypeName(*bound[0]));
  if (format->bytes().find('\0') != std::string_view::npos || format->size() > 256) {
    return RenderError("strftime_now() needs a format of at most 256 bytes without NUL");
  }
  const std::tm time = absl::ToTM(runtime.now(), runtime.time_zone());
  // The leading character tells an empty result from one that does not fit.
  const std::string pattern = "." + std::string(format->bytes());
  char buffer[4096];
  const size_t size = std::strftime(buffer, sizeof buffer, pattern.c_str(), &time);
  if (size == 0) return RenderError("strftime_now() makes more than ", sizeof buffer, " bytes");
  MarkedTextBuilder builder;
  builder.Append(std::string_view(buffer + 1, size - 1), /*is_content=*/!format->content().empty());
  return Value(builder.Build());
}

}  // namespace

absl::StatusOr<std::optional<Value>> FindBuiltin(std::string_view name) {
  static constexpr std::pair<std::string_view, Builtin> kBuiltins[] = {
      {"range", Builtin::kRange},
      {"dict", Builtin::kDict},
      {"namespace", Builtin::kNamespace},
      {"raise_exception", Builtin::kRaiseException},
      {"strftime_now", Builtin::kStrftimeNow}};
  for (const auto& [builtin_name, builtin] : kBuiltins) {
    if (builtin_name == name) return Value(builtin);
  }
  if (name == "cycler" || name == "joiner" || name == "lipsum") {
    return absl::UnimplementedError(absl::StrCat("the function ", View(name), " is not supported"));
  }
  return std::nullopt;
}

absl::StatusOr<Value> CallBuiltin(Runtime& runtime, Builtin builtin, const Arguments& arguments) {
  switch (builtin) {
    case Builtin::kRange:
      return Range(runtime, arguments);
    case Builtin::kDict: {
      DFLASH_ASSIGN_OR_RETURN(auto pairs, Pairs(runtime, "dict", arguments));
      return runtime.NewDict(std::move(pairs));
    }
    case Builtin::kNamespace:
      return MakeNamespace(runtime, arguments);
    case Builtin::kRaiseException: {
      DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("raise_exception", {"message"}, 1, arguments));
      DFLASH_ASSIGN_OR_RETURN(const MarkedText message, ToText(runtime, *bound[0]));
      return RenderError(View(message.bytes()));
    }
    case Builtin::kStrftimeNow:
      return StrftimeNow(runtime, arguments);
  }
  return absl::InternalError("a builtin function without implementation");
}

}  // namespace dflash::jinja
