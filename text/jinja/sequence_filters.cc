// The filters that walk sequences and dicts.
#include <algorithm>
#include <cctype>
#include <memory>
#include <utility>

#include "text/jinja/access.h"
#include "text/jinja/filters.h"
#include "text/jinja/format.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/value_tests.h"

namespace dflash::jinja {

namespace {

using Result = absl::StatusOr<Value>;
using Bound = std::vector<std::optional<Value>>;
using Kind = Sequence::Kind;

bool IsIterator(const Value& value) {
  return value.AsSequence() != nullptr && value.AsSequence()->kind == Kind::kIterator;
}

// The item reached by an attribute path such as "function.name" or "0"; None for no path stands for the item
// itself.
Result FollowPath(Runtime& runtime, const Value& item, const Value& path) {
  if (path.IsNone()) return item;
  if (AsInteger(path).has_value()) return GetItem(runtime, item, path);
  if (path.AsText() == nullptr) return RenderError("an attribute must be a string or an integer");
  Value current = item;
  std::string_view rest = path.AsText()->bytes();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    const bool is_index = !part.empty() && part.size() < 10 &&
                          std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    const Value key =
        is_index ? Value(static_cast<int64_t>(std::stol(std::string(part)))) : Value::Text(part);
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
    DFLASH_ASSIGN_OR_RETURN(current, GetItem(runtime, current, key));
    if (dot == std::string_view::npos) return current;
    rest = rest.substr(dot + 1);
  }
}

// What sorting and comparing filters compare: the attribute, in lower case unless `case_sensitive`.
Result SortKey(Runtime& runtime, const Value& item, const Value& path, bool case_sensitive) {
  DFLASH_ASSIGN_OR_RETURN(Value key, FollowPath(runtime, item, path));
  if (case_sensitive || key.AsText() == nullptr) return key;
  DFLASH_ASSIGN_OR_RETURN(MarkedText lower,
                          ToCase(runtime, *key.AsText(), [](char32_t) { return LetterCase::kLower; }));
  return Value(std::move(lower));
}

absl::StatusOr<std::vector<Value>> SortKeys(Runtime& runtime, const std::vector<Value>& items,
                                            const Value& path, bool case_sensitive) {
  std::vector<Value> keys;
  for (const Value& item : items) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
    DFLASH_ASSIGN_OR_RETURN(Value key, SortKey(runtime, item, path, case_sensitive));
    keys.push_back(std::move(key));
  }
  return keys;
}

Result First(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("first", {}, 0, arguments).status());
  if (IsIterator(input)) {
    const Sequence& iterator = *input.AsSequence();
    if (iterator.position < iterator.items.size()) return iterator.items[iterator.position++];
  } else if (const MarkedText* text = input.AsText(); text != nullptr && !text->empty()) {
    return GetItem(runtime, input, Value(int64_t{0}));
  } else {
    DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
    if (!items->items.empty()) return items->items.front();
  }
  return Value::MakeUndefined("No first item, sequence was empty.");
}

Result Last(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("last", {}, 0, arguments).status());
  if (IsIterator(input)) return RenderError("a generator cannot be reversed");
  if (const MarkedText* text = input.AsText(); text != nullptr && !text->empty()) {
    return GetItem(runtime, input, Value(int64_t{-1}));
  }
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  return items->items.empty() ? Value::MakeUndefined("No last item, sequence was empty.")
                              : items->items.back();
}

Result LengthFilter(Runtime&, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("length", {}, 0, arguments).status());
  DFLASH_ASSIGN_OR_RETURN(const int64_t length, Length(input));
  return Value(length);
}

Result List(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("list", {}, 0, arguments).status());
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  return runtime.NewSequence(Kind::kList, items->items);
}

Result Reverse(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("reverse", {}, 0, arguments).status());
  if (input.AsText() != nullptr) return GetSlice(runtime, input, Value(), Value(), Value(int64_t{-1}));
  const bool was_iterator = IsIterator(input);
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  std::vector<Value> reversed(items->items.rbegin(), items->items.rend());
  return runtime.NewSequence(was_iterator ? Kind::kList : Kind::kIterator, std::move(reversed));
}

Result JoinFilter(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("join", {"d", "attribute"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText separator,
                          ToText(runtime, bound[0].value_or(Value(MarkedText()))));
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  std::vector<MarkedText> texts;
  for (const Value& item : items->items) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
    DFLASH_ASSIGN_OR_RETURN(const Value part, FollowPath(runtime, item, bound[1].value_or(Value())));
    DFLASH_ASSIGN_OR_RETURN(MarkedText text, ToText(runtime, part));
    texts.push_back(std::move(text));
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText joined, Join(runtime, separator, texts));
  return Value(std::move(joined));
}

Result Items(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("items", {}, 0, arguments).status());
  if (input.IsUndefined()) return runtime.NewSequence(Kind::kIterator, {});
  if (input.AsDict() == nullptr) return RenderError("items needs a mapping, got ", TypeName(input));
  DFLASH_ASSIGN_OR_RETURN(const Value view, CallMethod(runtime, Method{input, "items"}, {}));
  return runtime.NewSequence(Kind::kIterator, view.AsSequence()->items);
}

Result DictSort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound,
                          Bind("dictsort", {"case_sensitive", "by", "reverse"}, 0, arguments));
  if (input.AsDict() == nullptr) return RenderError("dictsort needs a mapping, got ", TypeName(input));
  std::string_view by = "key";
  if (bound[1].has_value() && bound[1]->AsText() != nullptr) by = bound[1]->AsText()->bytes();
  if (by != "key" && by != "value") return RenderError("dictsort sorts by \"key\" or \"value\"");
  DFLASH_ASSIGN_OR_RETURN(const Value view, CallMethod(runtime, Method{input, "items"}, {}));
  const std::vector<Value>& pairs = view.AsSequence()->items;
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Value> keys,
                          SortKeys(runtime, pairs, Value(int64_t{by == "key" ? 0 : 1}),
                                   bound[0].has_value() && IsTrue(*bound[0])));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<size_t> order,
                          SortedOrder(runtime, keys, bound[2].has_value() && IsTrue(*bound[2])));
  std::vector<Value> sorted;
  for (size_t i : order) sorted.push_back(pairs[i]);
  return runtime.NewSequence(Kind::kList, std::move(sorted));
}

Result Sort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound,
                          Bind("sort", {"reverse", "case_sensitive", "attribute"}, 0, arguments));
  const Value path = bound[2].value_or(Value());
  if (path.AsText() != nullptr && path.AsText()->bytes().find(',') != std::string_view::npos) {
    return absl::UnimplementedError("sorting by several attributes is not supported");
  }
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Value> keys,
                          SortKeys(runtime, items->items, path, bound[1].has_value() && IsTrue(*bound[1])));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<size_t> order,
                          SortedOrder(runtime, keys, bound[0].has_value() && IsTrue(*bound[0])));
  std::vector<Value> sorted;
  for (size_t i : order) sorted.push_back(items->items[i]);
  return runtime.NewSequence(Kind::kList, std::move(sorted));
}

Result Unique(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("unique", {"case_sensitive", "attribute"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  std::vector<Value> seen, unique;
  for (const Value& item : items->items) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
    DFLASH_ASSIGN_OR_RETURN(Value key, SortKey(runtime, item, bound[1].value_or(Value()),
                                               bound[0].has_value() && IsTrue(*bound[0])));
    if (!IsKey(key) && !key.IsUndefined()) {
      return absl::UnimplementedError(
          absl::StrCat("unique on values of type ", TypeName(key), " is not supported"));
    }
    bool is_new = true;
    for (const Value& other : seen) {
      DFLASH_ASSIGN_OR_RETURN(const bool same, Compare(runtime, CompareOperator::kEqual, key, other));
      if (same) {
        is_new = false;
        break;
      }
    }
    if (!is_new) continue;
    seen.push_back(std::move(key));
    unique.push_back(item);
  }
  return runtime.NewSequence(Kind::kIterator, std::move(unique));
}

template <CompareOperator kBetter>
Result Extreme(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound,
                          Bind("min or max", {"case_sensitive", "attribute"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  if (items->items.empty()) return Value::MakeUndefined("No aggregated item, sequence was empty.");
  DFLASH_ASSIGN_OR_RETURN(
      const std::vector<Value> keys,
      SortKeys(runtime, items->items, bound[1].value_or(Value()), bound[0].has_value() && IsTrue(*bound[0])));
  size_t best = 0;
  for (size_t i = 1; i < keys.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(const bool better, Compare(runtime, kBetter, keys[i], keys[best]));
    if (better) best = i;
  }
  return items->items[best];
}

Result Sum(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("sum", {"attribute", "start"}, 0, arguments));
  Value total = bound[1].value_or(Value(int64_t{0}));
  if (total.AsText() != nullptr) return RenderError("sum() cannot add strings");
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
  for (const Value& item : items->items) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
    DFLASH_ASSIGN_OR_RETURN(const Value part, FollowPath(runtime, item, bound[0].value_or(Value())));
    DFLASH_ASSIGN_OR_RETURN(total, ApplyBinary(runtime, BinaryOperator::kAdd, total, part));
  }
  return total;
}

// map(attribute=..., default=...) or map(filter name, arguments of the filter).
Result Map(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Runtime::Level level(runtime);  // the filter can be map again
  DFLASH_RETURN_IF_ERROR(level.status);
  DFLASH_RETURN_IF_ERROR(runtime.Charge(arguments.positional.size()));
  const Filter* filter = nullptr;
  Bound bound;
  Arguments rest = arguments;
  if (arguments.positional.empty()) {
    DFLASH_ASSIGN_OR_RETURN(bound, Bind("map", {"attribute", "default"}, 1, arguments));
  } else {
    const MarkedText* name = arguments.positional.front().AsText();
    if (name == nullptr) return RenderError("map() needs the name of a filter");
    DFLASH_ASSIGN_OR_RETURN(filter, FindFilter(name->bytes()));
    rest.positional.erase(rest.positional.begin());
  }
  std::vector<Value> mapped;
  if (IsTrue(input)) {
    DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
    for (const Value& item : items->items) {
      DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
      Result result =
          filter != nullptr ? filter->apply(runtime, item, rest) : FollowPath(runtime, item, *bound[0]);
      DFLASH_RETURN_IF_ERROR(result.status());
      if (filter == nullptr && result->IsUndefined() && bound[1].has_value() && !bound[1]->IsNone())
        result = *bound[1];
      mapped.push_back(*std::move(result));
    }
  }
  return runtime.NewSequence(Kind::kIterator, std::move(mapped));
}

// select(test, arguments...) and reject; with `kByAttribute`, selectattr(attribute, test, arguments...) and
// rejectattr.
template <bool kKeeps, bool kByAttribute>
Result Select(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(runtime.Charge(arguments.positional.size()));
  Arguments rest = arguments;
  const auto take = [&rest] {
    Value value = std::move(rest.positional.front());
    rest.positional.erase(rest.positional.begin());
    return value;
  };
  Value path;
  if (kByAttribute) {
    if (rest.positional.empty())
      return RenderError("selectattr() and rejectattr() need the name of an attribute");
    path = take();
  }
  const ValueTest* test = nullptr;
  if (!rest.positional.empty()) {
    const Value name = take();
    if (name.AsText() == nullptr) return RenderError("select() needs the name of a test");
    DFLASH_ASSIGN_OR_RETURN(test, FindValueTest(name.AsText()->bytes()));
  }
  std::vector<Value> selected;
  if (IsTrue(input)) {
    DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, input));
    for (const Value& item : items->items) {
      DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
      DFLASH_ASSIGN_OR_RETURN(const Value tested, FollowPath(runtime, item, path));
      bool passes = false;
      if (test == nullptr) {
        passes = IsTrue(tested);
      } else {
        DFLASH_ASSIGN_OR_RETURN(passes, test->apply(runtime, tested, rest));
      }
      if (passes == kKeeps) selected.push_back(item);
    }
  }
  return runtime.NewSequence(Kind::kIterator, std::move(selected));
}

}  // namespace

const std::vector<Filter>& SequenceFilters() {
  static const auto* const kFilters = new std::vector<Filter>{
      {"count", LengthFilter},
      {"dictsort", DictSort},
      {"first", First},
      {"items", Items},
      {"join", JoinFilter},
      {"last", Last},
      {"length", LengthFilter},
      {"list", List},
      {"map", Map},
      {"max", Extreme<CompareOperator::kGreater>},
      {"min", Extreme<CompareOperator::kLess>},
      {"reject", Select<false, false>},
      {"rejectattr", Select<false, true>},
      {"reverse", Reverse},
      {"select", Select<true, false>},
      {"selectattr", Select<true, true>},
      {"sort", Sort},
      {"sum", Sum},
      {"unique", Unique},
  };
  return *kFilters;
}

}  // namespace dflash::jinja
