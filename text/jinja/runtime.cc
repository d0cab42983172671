#include "text/jinja/runtime.h"

#include <algorithm>

namespace dflash::jinja {

absl::StatusOr<std::vector<std::optional<Value>>> Bind(std::string_view function,
                                                       const std::vector<std::string_view>& parameters,
                                                       size_t required, const Arguments& arguments) {
  if (arguments.positional.size() > parameters.size()) {
    return RenderError(View(function), "() takes at most ", parameters.size(), " arguments, ",
                       arguments.positional.size(), " given");
  }
  std::vector<std::optional<Value>> bound(arguments.positional.begin(), arguments.positional.end());
  bound.resize(parameters.size());
  for (const auto& [name, value] : arguments.keyword) {
    const auto parameter = std::find(parameters.begin(), parameters.end(), name);
    if (parameter == parameters.end()) return RenderError(View(function), "() has no argument '", name, "'");
    std::optional<Value>& slot = bound[static_cast<size_t>(parameter - parameters.begin())];
    if (slot.has_value()) return RenderError(View(function), "() got two values for argument '", name, "'");
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!bound[i].has_value())
      return RenderError(View(function), "() needs argument '", View(parameters[i]), "'");
  }
  return bound;
}

absl::Status Runtime::Charge(size_t steps) {
  const auto left = static_cast<size_t>(limits_.max_steps - steps_);
  if (steps > left) {
    steps_ = limits_.max_steps;
    return absl::ResourceExhaustedError(
        absl::StrCat("rendering takes more than max_steps = ", limits_.max_steps, " steps"));
  }
  steps_ += static_cast<int64_t>(steps);
  return absl::OkStatus();
}

absl::Status Runtime::ChargeAppend(size_t size, size_t bytes) {
  if (size > limits_.max_output_bytes || bytes > limits_.max_output_bytes - size) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rendering makes a text longer than max_output_bytes = ", limits_.max_output_bytes));
  }
  return Charge(bytes / 16);
}

absl::Status Runtime::CheckDepth(int depth) const {
  if (depth <= limits_.max_value_depth) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("a value nests deeper than max_value_depth = ", limits_.max_value_depth));
}

absl::Status Runtime::CheckCallDepth(int depth) const {
  if (depth <= limits_.max_call_depth) [[likely]]
    return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("rendering nests deeper than max_call_depth = ", limits_.max_call_depth));
}

absl::StatusOr<Value> Runtime::NewSequence(Sequence::Kind kind, std::vector<Value> items, bool is_content) {
  DFLASH_RETURN_IF_ERROR(Charge(items.size()));
  auto sequence = std::make_shared<Sequence>();
  for (const Value& item : items) sequence->depth = std::max(sequence->depth, 1 + DepthOf(item));
  DFLASH_RETURN_IF_ERROR(CheckDepth(sequence->depth));
  sequence->kind = kind;
  sequence->items = std::move(items);
  sequence->is_content = is_content;
  return Value(std::shared_ptr<const Sequence>(std::move(sequence)));
}

absl::StatusOr<Value> Runtime::NewDict(std::vector<std::pair<Value, Value>> items, bool is_content) {
  DFLASH_RETURN_IF_ERROR(Charge(items.size()));
  auto dict = std::make_shared<Dict>();
  for (const auto& item : items) dict->depth = std::max(dict->depth, 1 + DepthOf(item.second));
  DFLASH_RETURN_IF_ERROR(CheckDepth(dict->depth));
  dict->items = std::move(items);
  dict->is_content = is_content;
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

absl::StatusOr<Value> Runtime::NewMethod(const Value& self, std::string_view name) {
  DFLASH_RETURN_IF_ERROR(Charge(1));
  return Value(std::make_shared<const Method>(Method{self, std::string(name)}));
}

Namespace* Runtime::NewNamespace() {
  namespaces_.push_back(std::make_unique<Namespace>());
  return namespaces_.back().get();
}

}  // namespace dflash::jinja
