#include "text/jinja/json_values.h"

#include <string>
#include <utility>
#include <vector>

#include "text/jinja/unicode.h"

namespace dflash::jinja {

namespace {

class Converter {
 public:
  Converter(Runtime& runtime, bool is_content) : runtime_(runtime), is_content_(is_content) {}

  absl::StatusOr<Value> Convert(const nlohmann::ordered_json& json, int depth) {
    if (depth > runtime_.limits().max_value_depth) {
      return absl::ResourceExhaustedError(
          absl::StrCat("nests deeper than max_value_depth = ", runtime_.limits().max_value_depth));
    }
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
    using Type = nlohmann::ordered_json::value_t;
    switch (json.type()) {
      case Type::null:
        return Value(None{}, is_content_);
      case Type::boolean:
        return Value(json.get<bool>(), is_content_);
      case Type::number_integer:
        return Value(json.get<int64_t>(), is_content_);
      case Type::number_unsigned:
        if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
          return RenderError("an integer above 2^63 - 1");
        return Value(json.get<int64_t>(), is_content_);
      case Type::number_float:
        return Value(json.get<double>(), is_content_);
      case Type::string:
        return ConvertText(json.get_ref<const std::string&>());
      case Type::array: {
        std::vector<Value> items;
        items.reserve(json.size());
        for (const nlohmann::ordered_json& item : json) {
          DFLASH_ASSIGN_OR_RETURN(Value value, Convert(item, depth + 1));
          items.push_back(std::move(value));
        }
        return runtime_.NewSequence(Sequence::Kind::kList, std::move(items), is_content_);
      }
      case Type::object: {
        std::vector<std::pair<Value, Value>> items;
        items.reserve(json.size());
        for (const auto& [key, item] : json.get_ref<const nlohmann::ordered_json::object_t&>()) {
          DFLASH_ASSIGN_OR_RETURN(Value name, ConvertText(key));
          DFLASH_ASSIGN_OR_RETURN(Value value, Convert(item, depth + 1));
          items.emplace_back(std::move(name), std::move(value));
        }
        return runtime_.NewDict(std::move(items), is_content_);
      }
      case Type::binary:
      case Type::discarded:
        break;
    }
    return RenderError("a value that JSON cannot hold");
  }

 private:
  absl::StatusOr<Value> ConvertText(const std::string& text) {
    if (!IsValidUtf8(text)) return RenderError("text that is not valid UTF-8");
    DFLASH_RETURN_IF_ERROR(runtime_.ChargeText(text.size()));
    return Value(is_content_ ? MarkedText::FromContent(text) : MarkedText::FromTemplate(text));
  }

  Runtime& runtime_;
  const bool is_content_;
};

}  // namespace

absl::StatusOr<Value> FromJson(Runtime& runtime, std::string_view name, const nlohmann::ordered_json& json,
                               bool is_content) {
  absl::StatusOr<Value> value = Converter(runtime, is_content).Convert(json, 1);
  if (!value.ok()) return Annotate(value.status(), std::string(name));
  return value;
}

}  // namespace dflash::jinja
