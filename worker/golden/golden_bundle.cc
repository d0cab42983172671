#include "worker/golden/golden_bundle.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/json_value.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "text/ordered_json.h"

namespace dflash::golden {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "dflash-golden-2";
constexpr char kFirstFormat[] = "dflash-golden-1";  // its fingerprints were those of a few whole tensors
constexpr int64_t kFirstRows = 64;                  // of a prompt, of hidden states
constexpr int64_t kLastRows = 16;                   // of taps and context features
constexpr char kBundleFile[] = "bundle.json";
constexpr size_t kMaxFileBytes = size_t{256} << 20;
constexpr size_t kMaxPrompts = 4096;

// Control characters: of C0, DEL, and of C1, which UTF-8 writes as C2 80 to C2 9F.
bool HasControls(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) return true;
    const unsigned char next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) return true;
  }
  return false;
}

absl::StatusOr<Json> ReadJson(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, int64_t{kMaxFileBytes}));
  return ParseOrderedJson(text, path, {.max_bytes = kMaxFileBytes});
}

// One object of a file, read strictly.
class Object {
 public:
  static absl::StatusOr<Object> Create(const Json& json, std::string path) {
    if (!json.is_object()) return absl::InvalidArgumentError(absl::StrCat(path, ": not an object"));
    return Object(json, std::move(path));
  }
  const Json* Find(const std::string& key) {
    read_.insert(key);
    const auto found = json_->find(key);
    return found == json_->end() || found->is_null() ? nullptr : &*found;
  }
  absl::Status Bad(const std::string& key, const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", key, ": ", what));
  }
  absl::StatusOr<std::string> Text(const std::string& key) {
    const Json* value = Find(key);
    if (value == nullptr || !value->is_string()) return Bad(key, "a string is required");
    return value->get<std::string>();
  }
  // Words that reports and terminals show as they are.
  absl::StatusOr<std::string> Line(const std::string& key) {
    DFLASH_ASSIGN_OR_RETURN(std::string text, Text(key));
    if (HasControls(text)) return Bad(key, "control characters in " + Printable(text));
    return text;
  }
  absl::StatusOr<double> Number(const std::string& key, double lowest, double highest) {
    const Json* value = Find(key);
    if (value == nullptr || !value->is_number()) return Bad(key, "a number is required");
    const double number = value->get<double>();
    if (!(number >= lowest && number <= highest))
      return Bad(key, absl::StrCat(number, " is not in [", lowest, ", ", highest, "]"));
    return number;
  }
  absl::StatusOr<int64_t> Integer(const std::string& key, int64_t lowest, int64_t highest) {
    const Json* value = Find(key);
    if (value == nullptr || !IsInteger(*value, lowest, highest))
      return Bad(key, absl::StrCat("a whole number in [", lowest, ", ", highest, "] is required"));
    return value->get<int64_t>();
  }
  // A list of whole numbers in [lowest, highest].
  template <typename T>
  absl::Status Integers(const std::string& key, int64_t lowest, int64_t highest, bool required,
                        std::vector<T>* to) {
    const Json* list = Find(key);
    if (list == nullptr && !required) return absl::OkStatus();
    if (list == nullptr || !list->is_array()) return Bad(key, "a list of whole numbers is required");
    for (const Json& entry : *list) {
      if (!IsInteger(entry, lowest, highest))
        return Bad(key, absl::StrCat("not a whole number in [", lowest, ", ", highest, "]"));
      to->push_back(static_cast<T>(entry.get<int64_t>()));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::map<std::string, std::string>> TextMap(const std::string& key) {
    std::map<std::string, std::string> map;
    const Json* object = Find(key);
    if (object == nullptr) return map;
    if (!object->is_object()) return Bad(key, "not an object");
    for (const auto& [name, value] : object->items()) {
      if (!value.is_string()) return Bad(key, "a string is required");
      if (HasControls(name)) return Bad(key, "control characters in " + Printable(name));
      map[name] = value.get<std::string>();
    }
    return map;
  }
  absl::Status CheckAllRead() const {
    for (const auto& [key, value] : json_->items()) {
      if (!read_.contains(key)) return Bad(Printable(key), "unknown key");
    }
    return absl::OkStatus();
  }

 private:
  Object(const Json& json, std::string path) : json_(&json), path_(std::move(path)) {}
  static bool IsInteger(const Json& value, int64_t lowest, int64_t highest) {
    constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > kMost))
      return false;
    return value.get<int64_t>() >= lowest && value.get<int64_t>() <= highest;
  }
  const Json* json_;
  std::string path_;
  std::set<std::string> read_;
};

absl::StatusOr<ExpectedContract> ReadContract(const Json& json, const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(Object object, Object::Create(json, path));
  ExpectedContract contract;
  DFLASH_RETURN_IF_ERROR(object.Integers("target_layer_ids", 0, 1 << 20, true, &contract.taps));
  if (contract.taps.empty()) return object.Bad("target_layer_ids", "empty");
  DFLASH_ASSIGN_OR_RETURN(const int64_t mask, object.Integer("mask_token_id", 0, 1 << 30));
  contract.mask_token_id = static_cast<int32_t>(mask);
  DFLASH_ASSIGN_OR_RETURN(contract.block_size, object.Integer("block_size", 2, 1 << 10));
  DFLASH_ASSIGN_OR_RETURN(contract.rope_theta, object.Number("rope_theta", 1, 1e12));
  DFLASH_ASSIGN_OR_RETURN(contract.rotary_fraction, object.Number("rotary_fraction", 0, 1));
  DFLASH_ASSIGN_OR_RETURN(contract.rms_norm_eps, object.Number("rms_norm_eps", 0, 1));
  const Json* layers = object.Find("layers");
  if (layers == nullptr || !layers->is_array() || layers->empty())
    return object.Bad("layers", "a list is required");
  for (const Json& entry : *layers) {
    DFLASH_ASSIGN_OR_RETURN(Object layer, Object::Create(entry, path + ".layers"));
    DFLASH_ASSIGN_OR_RETURN(const std::string kind, layer.Text("kind"));
    if (kind != "sliding_attention" && kind != "full_attention")
      return layer.Bad("kind", "unknown: " + Printable(kind));
    DraftLayerMask mask_of_layer;
    mask_of_layer.kind = kind == "full_attention" ? DraftLayerKind::kFull : DraftLayerKind::kSliding;
    DFLASH_ASSIGN_OR_RETURN(mask_of_layer.window, layer.Integer("window", 0, 1 << 30));
    const Json* causal = layer.Find("causal");
    if (causal == nullptr || !causal->is_boolean()) return layer.Bad("causal", "true or false is required");
    mask_of_layer.causal = causal->get<bool>();
    DFLASH_RETURN_IF_ERROR(layer.CheckAllRead());
    contract.layers.push_back(mask_of_layer);
  }
  DFLASH_RETURN_IF_ERROR(object.CheckAllRead());
  return contract;
}

absl::StatusOr<GoldenChat> ReadChat(const Json& json, const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(Object object, Object::Create(json, path));
  GoldenChat chat;
  const Json* messages = object.Find("messages");
  if (messages == nullptr || !messages->is_array()) return object.Bad("messages", "a list is required");
  chat.messages = *messages;
  if (const Json* thinking = object.Find("enable_thinking")) {
    if (!thinking->is_boolean()) return object.Bad("enable_thinking", "not true or false");
    chat.enable_thinking = thinking->get<bool>();
  }
  return chat;
}

absl::StatusOr<std::vector<GoldenPrompt>> ReadPrompts(const std::string& path, int64_t block_size) {
  DFLASH_ASSIGN_OR_RETURN(const Json json, ReadJson(path));
  if (!json.is_array() || json.empty() || json.size() > kMaxPrompts)
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a list of 1 to ", kMaxPrompts, " prompts is required"));
  constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
  std::vector<GoldenPrompt> prompts;
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string where = absl::StrCat(path, ": prompt ", i);
    DFLASH_ASSIGN_OR_RETURN(Object object, Object::Create(json[i], where));
    GoldenPrompt prompt;
    DFLASH_ASSIGN_OR_RETURN(prompt.kind, object.Line("kind"));
    if (object.Find("text") != nullptr) {
      DFLASH_ASSIGN_OR_RETURN(prompt.text, object.Text("text"));
    }
    DFLASH_RETURN_IF_ERROR(object.Integers("prompt_ids", 0, kMaxId, true, &prompt.prompt_ids));
    DFLASH_RETURN_IF_ERROR(object.Integers("output_ids", 0, kMaxId, true, &prompt.output_ids));
    DFLASH_RETURN_IF_ERROR(
        object.Integers("acceptance_lengths", 1, block_size, false, &prompt.acceptance_lengths));
    if (prompt.prompt_ids.empty()) return object.Bad("prompt_ids", "empty");
    if (prompt.output_ids.empty()) return object.Bad("output_ids", "empty");
    if (const Json* chat = object.Find("chat")) {
      DFLASH_ASSIGN_OR_RETURN(prompt.chat, ReadChat(*chat, where + ".chat"));
    }
    prompts.push_back(std::move(prompt));  // other keys are the recorder's own
  }
  return prompts;
}

// A name inside the bundle's folder.
absl::StatusOr<std::string> FileIn(Object& object, const std::string& folder, const std::string& key) {
  DFLASH_ASSIGN_OR_RETURN(const std::string name, object.Line(key));
  if (name.empty() || name.find('/') != std::string::npos)
    return object.Bad(key, "not the name of a file in the folder");
  return absl::StrCat(folder, "/", name);
}

std::string MaskText(const DraftLayerMask& mask) {
  return absl::StrCat(mask.kind == DraftLayerKind::kSliding ? "sliding" : "full", ":",
                      mask.window == 0 ? std::string("unlimited") : absl::StrCat(mask.window), ":",
                      mask.causal ? "causal" : "bidirectional");
}

// "[9, any, 256]"
std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[",
                      absl::StrJoin(shape, ", ",
                                    [](std::string* out, int64_t size) {
                                      absl::StrAppend(out,
                                                      size == 0 ? std::string("any") : absl::StrCat(size));
                                    }),
                      "]");
}

std::string MasksText(const std::vector<DraftLayerMask>& masks) {
  return absl::StrJoin(
      masks, ",", [](std::string* out, const DraftLayerMask& mask) { absl::StrAppend(out, MaskText(mask)); });
}

Json ContractJson(const ExpectedContract& contract) {
  Json json = {{"target_layer_ids", contract.taps},           {"mask_token_id", contract.mask_token_id},
               {"block_size", contract.block_size},           {"rope_theta", contract.rope_theta},
               {"rotary_fraction", contract.rotary_fraction}, {"rms_norm_eps", contract.rms_norm_eps}};
  for (const DraftLayerMask& mask : contract.layers) {
    json["layers"].push_back(
        {{"kind", mask.kind == DraftLayerKind::kSliding ? "sliding_attention" : "full_attention"},
         {"window", mask.window},
         {"causal", mask.causal}});
  }
  return json;
}

template <typename T>
double ShareOfDifferences(const std::vector<T>& a, const std::vector<T>& b) {
  const size_t size = std::max(a.size(), b.size());
  if (size == 0) return 0;
  size_t different = size - std::min(a.size(), b.size());
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) different += a[i] != b[i];
  return static_cast<double>(different) / static_cast<double>(size);
}

}  // namespace

ExpectedContract ContractOf(const DraftConfig& config) {
  ExpectedContract contract;
  for (const LayerIndex tap : config.target_layer_ids) contract.taps.push_back(Number(tap));
  contract.mask_token_id = config.mask_token_id;
  contract.block_size = config.block_size;
  contract.rope_theta = config.rope_theta;
  contract.rms_norm_eps = config.rms_norm_eps;
  contract.layers = config.layers;
  return contract;
}

ExpectedContract ContractOf(const FeatureContract& contract) {
  ExpectedContract expected;
  for (const LayerIndex tap : contract.taps) expected.taps.push_back(Number(tap));
  expected.mask_token_id = contract.mask_token_id;
  expected.block_size = contract.block_size;
  expected.rope_theta = contract.rope_theta;
  expected.rotary_fraction = contract.rotary_fraction;
  expected.rms_norm_eps = contract.rms_norm_eps;
  expected.norm_weight = contract.norm_weight;
  expected.layers = contract.layers;
  return expected;
}

std::string Differences(const ExpectedContract& actual, const ExpectedContract& expected) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* name, const std::string& a, const std::string& e) {
    if (a != e) differences.push_back(absl::StrCat(name, " is ", a, " and not ", e));
  };
  compare("target_layer_ids", absl::StrJoin(actual.taps, ","), absl::StrJoin(expected.taps, ","));
  compare("mask_token_id", absl::StrCat(actual.mask_token_id), absl::StrCat(expected.mask_token_id));
  compare("block_size", absl::StrCat(actual.block_size), absl::StrCat(expected.block_size));
  compare("rope_theta", absl::StrCat(actual.rope_theta), absl::StrCat(expected.rope_theta));
  compare("rotary fraction", absl::StrCat(actual.rotary_fraction), absl::StrCat(expected.rotary_fraction));
  compare("rms_norm_eps", absl::StrCat(actual.rms_norm_eps), absl::StrCat(expected.rms_norm_eps));
  const auto norm = [](NormWeight weight) { return weight == NormWeight::kPlain ? "w" : "1 + w"; };
  compare("weight of the norms", norm(actual.norm_weight), norm(expected.norm_weight));
  compare("masks of the layers", MasksText(actual.layers), MasksText(expected.layers));
  return absl::StrJoin(differences, "; ");
}

absl::StatusOr<GoldenBundle> GoldenBundle::Open(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kBundleFile);
  DFLASH_ASSIGN_OR_RETURN(const Json json, ReadJson(path));
  DFLASH_ASSIGN_OR_RETURN(Object object, Object::Create(json, path));
  DFLASH_ASSIGN_OR_RETURN(const std::string format, object.Text("format"));
  if (format != kFormat && format != kFirstFormat)
    return object.Bad("format", absl::StrCat("only ", kFormat, " and ", kFirstFormat, " are known"));
  DFLASH_ASSIGN_OR_RETURN(const std::string tensors_path, FileIn(object, folder, "tensors"));
  DFLASH_ASSIGN_OR_RETURN(SafetensorsFile tensors, SafetensorsFile::Open(tensors_path));
  GoldenBundle bundle(std::move(tensors));
  bundle.folder_ = folder;
  DFLASH_ASSIGN_OR_RETURN(bundle.producer_, object.Line("producer"));
  const Json* contract = object.Find("contract");
  if (contract == nullptr) return object.Bad("contract", "an object is required");
  DFLASH_ASSIGN_OR_RETURN(bundle.contract_, ReadContract(*contract, path + ": contract"));
  DFLASH_ASSIGN_OR_RETURN(bundle.target_weights_, object.TextMap("target_weights"));
  DFLASH_ASSIGN_OR_RETURN(bundle.drafter_weights_, object.TextMap("drafter_weights"));
  DFLASH_ASSIGN_OR_RETURN(bundle.target_digests_, object.TextMap("target_digests"));
  DFLASH_ASSIGN_OR_RETURN(bundle.drafter_digests_, object.TextMap("drafter_digests"));
  DFLASH_ASSIGN_OR_RETURN(const std::string prompts_path, FileIn(object, folder, "prompts"));
  DFLASH_ASSIGN_OR_RETURN(bundle.prompts_, ReadPrompts(prompts_path, bundle.contract_.block_size));
  bundle.prompts_path_ = prompts_path;
  if (format == kFirstFormat) {
    bundle.target_weights_.clear();
    bundle.drafter_weights_.clear();
  }
  // Chats of prompts whose file has none.
  if (const Json* chats = object.Find("chats")) {
    if (!chats->is_object()) return object.Bad("chats", "not an object");
    for (const auto& [number, chat] : chats->items()) {
      size_t index = bundle.prompts_.size();
      for (size_t i = 0; i < bundle.prompts_.size(); ++i) {
        if (number == absl::StrCat(i)) index = i;
      }
      if (index == bundle.prompts_.size())
        return object.Bad("chats", "not the number of a prompt: " + Printable(number));
      DFLASH_ASSIGN_OR_RETURN(bundle.prompts_[index].chat, ReadChat(chat, path + ": chats"));
    }
  }
  DFLASH_RETURN_IF_ERROR(object.CheckAllRead());
  DFLASH_RETURN_IF_ERROR(bundle.CheckTensors());
  return bundle;
}

PairSizes SizesOf(const TargetConfig& target) {
  return {.vocabulary = target.vocab_size,
          .head_rows = target.vocab_size,
          .hidden_size = target.hidden_size,
          .layers = static_cast<int64_t>(target.layers.size())};
}

absl::Status GoldenBundle::CheckTensor(const StoredTensor& tensor, size_t prompt,
                                       const std::string& name) const {
  const auto bad = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(tensors_.path(), ": ", tensor.name, ": ", what));
  };
  const auto length = static_cast<int64_t>(prompts_[prompt].prompt_ids.size());
  const auto taps = static_cast<int64_t>(contract_.taps.size());
  std::vector<int64_t> shape;  // 0: any size
  if (name == "hidden_states") shape = {0, std::min(length, kFirstRows), 0};
  if (name == "last_logits") shape = {0};
  if (name == "taps_last16") shape = {std::min(length, kLastRows), 0};
  if (name == "context_feature_last16") shape = {std::min(length, kLastRows), 0};
  if (name == "draft_logits") shape = {contract_.block_size - 1, 0};
  if (shape.empty()) return absl::OkStatus();  // the recorder's own
  if (tensor.dtype != "F32") return bad(absl::StrCat("dtype ", tensor.dtype, ", wanted F32"));
  const bool fits =
      std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end(),
                 [](int64_t wanted, int64_t stored) { return wanted == 0 ? stored > 0 : stored == wanted; });
  if (!fits || (name == "taps_last16" && tensor.shape[1] % taps != 0)) {
    return bad(absl::StrCat("shape ", ShapeText(tensor.shape), ", wanted ", ShapeText(shape),
                            name == "taps_last16" ? absl::StrCat(", its columns of ", taps, " taps") : "",
                            " for a prompt of ", length, " tokens and a block of ", contract_.block_size));
  }
  // A block at a time: hidden states of a large model are many.
  const int64_t rows = std::max<int64_t>(1, (int64_t{1} << 20) / tensor.cols());
  std::vector<float> values;
  for (int64_t first = 0; first < tensor.rows(); first += rows) {
    const int64_t count = std::min(rows, tensor.rows() - first);
    values.resize(static_cast<size_t>(count * tensor.cols()));
    DFLASH_RETURN_IF_ERROR(tensors_.Read(tensor, {first, count, 0, tensor.cols()}, values.data(),
                                         static_cast<int64_t>(values.size() * sizeof(float))));
    const auto no_number =
        std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (no_number != values.end())
      return bad(
          absl::StrCat("element ", first * tensor.cols() + (no_number - values.begin()), " is ", *no_number));
  }
  return absl::OkStatus();
}

absl::Status GoldenBundle::CheckTensors() const {
  for (const StoredTensor& tensor : tensors_.tensors()) {
    const size_t dot = tensor.name.find('.');
    size_t prompt = prompts_.size();
    if (dot != std::string::npos && tensor.name[0] == 'p' &&
        (!absl::SimpleAtoi(tensor.name.substr(1, dot - 1), &prompt) ||
         absl::StrCat("p", prompt) != tensor.name.substr(0, dot))) {
      prompt = prompts_.size();
    }
    if (prompt >= prompts_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(tensors_.path(), ": ", Printable(tensor.name),
                                                     ": not a tensor of one of the ", prompts_.size(),
                                                     " prompts"));
    }
    DFLASH_RETURN_IF_ERROR(CheckTensor(tensor, prompt, tensor.name.substr(dot + 1)));
  }
  return absl::OkStatus();
}

absl::Status GoldenBundle::CheckFits(const PairSizes& sizes) const {
  for (size_t i = 0; i < prompts_.size() && sizes.vocabulary > 0; ++i) {
    const std::pair<const char*, const std::vector<int32_t>*> lists[] = {
        {"prompt_ids", &prompts_[i].prompt_ids}, {"output_ids", &prompts_[i].output_ids}};
    for (const auto& [key, ids] : lists) {
      for (const int32_t id : *ids) {
        if (id < sizes.vocabulary) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(prompts_path_, ": prompt ", i, ": ", key, ": token id ", id,
                         ", but the target's vocabulary has ", sizes.vocabulary));
      }
    }
  }
  const auto taps = static_cast<int64_t>(contract_.taps.size());
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const std::pair<const char*, std::vector<int64_t>> shapes[] = {
        {"hidden_states", {sizes.layers == 0 ? 0 : sizes.layers + 1, 0, sizes.hidden_size}},
        {"last_logits", {sizes.head_rows}},
        {"taps_last16", {0, taps * sizes.hidden_size}},
        {"context_feature_last16", {0, sizes.hidden_size}},
        {"draft_logits", {0, sizes.head_rows}}};
    for (const auto& [name, shape] : shapes) {
      const StoredTensor* tensor = tensors_.Find(absl::StrCat("p", i, ".", name));
      if (tensor == nullptr) continue;
      const bool fits =
          std::equal(shape.begin(), shape.end(), tensor->shape.begin(), tensor->shape.end(),
                     [](int64_t wanted, int64_t stored) { return wanted == 0 || stored == wanted; });
      if (fits) continue;
      return absl::InvalidArgumentError(absl::StrCat(tensors_.path(), ": ", tensor->name, ": shape ",
                                                     ShapeText(tensor->shape), ", but of this pair it is ",
                                                     ShapeText(shape)));
    }
  }
  return absl::OkStatus();
}

bool GoldenBundle::HasTensor(size_t prompt, const std::string& name) const {
  return tensors_.Find(absl::StrCat("p", prompt, ".", name)) != nullptr;
}

bool GoldenBundle::HasTensors(size_t prompt) const {
  const std::string prefix = absl::StrCat("p", prompt, ".");
  return std::any_of(tensors_.tensors().begin(), tensors_.tensors().end(),
                     [&](const StoredTensor& tensor) { return tensor.name.starts_with(prefix); });
}

absl::StatusOr<Rows> GoldenBundle::Tensor(size_t prompt, const std::string& name) const {
  const std::string full = absl::StrCat("p", prompt, ".", name);
  const StoredTensor* stored = tensors_.Find(full);
  if (stored == nullptr) return absl::NotFoundError(absl::StrCat(tensors_.path(), ": no tensor ", full));
  DFLASH_CHECK(stored->dtype == "F32" && !stored->shape.empty() && stored->bytes > 0, full.c_str());  // Open
  std::vector<float> values(static_cast<size_t>(stored->bytes) / sizeof(float));
  DFLASH_RETURN_IF_ERROR(
      tensors_.Read(*stored, {0, stored->rows(), 0, stored->cols()}, values.data(), stored->bytes));
  const int64_t cols = stored->shape.back();
  return Rows(static_cast<int64_t>(values.size()) / cols, cols, values);
}

absl::Status WriteBundle(const RecordedBundle& bundle, const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::create_directories(folder, error)) {
    return error ? absl::UnavailableError(absl::StrCat(folder, ": ", error.message()))
                 : absl::AlreadyExistsError(absl::StrCat(folder, " exists"));
  }
  Json prompts = Json::array();
  for (const GoldenPrompt& prompt : bundle.prompts) {
    Json entry = {{"kind", prompt.kind},
                  {"text", prompt.text},
                  {"prompt_ids", prompt.prompt_ids},
                  {"output_ids", prompt.output_ids},
                  {"acceptance_lengths", prompt.acceptance_lengths}};
    if (prompt.chat) {
      entry["chat"]["messages"] = prompt.chat->messages;
      if (prompt.chat->enable_thinking) entry["chat"]["enable_thinking"] = *prompt.chat->enable_thinking;
    }
    prompts.push_back(std::move(entry));
  }
  const Json root = {{"format", kFormat},
                     {"producer", bundle.producer},
                     {"prompts", "prompts.json"},
                     {"tensors", "tensors.safetensors"},
                     {"target_weights", bundle.target_weights},
                     {"drafter_weights", bundle.drafter_weights},
                     {"target_digests", bundle.target_digests},
                     {"drafter_digests", bundle.drafter_digests},
                     {"contract", ContractJson(bundle.contract)}};
  Json header = Json::object();
  std::string data;
  for (const RecordedBundle::Tensor& tensor : bundle.tensors) {
    const size_t begin = data.size();
    for (const double value : tensor.values) {
      const auto narrow = static_cast<float>(value);
      data.append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    }
    header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string header_text = header.dump();
  const uint64_t header_size = header_text.size();
  std::string tensors(reinterpret_cast<const char*>(&header_size), sizeof(header_size));
  absl::StrAppend(&tensors, header_text, data);
  const std::pair<const char*, std::string> files[] = {{"prompts.json", prompts.dump(1) + "\n"},
                                                       {"tensors.safetensors", tensors},
                                                       {kBundleFile, root.dump(2) + "\n"}};
  for (const auto& [name, bytes] : files) {
    std::ofstream file(absl::StrCat(folder, "/", name), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush().good())
      return absl::UnavailableError(absl::StrCat(folder, "/", name, ": cannot be written"));
  }
  return absl::OkStatus();
}

absl::StatusOr<BundleComparison> CompareBundles(const GoldenBundle& actual, const GoldenBundle& expected,
                                                double limit) {
  BundleComparison comparison;
  const auto add = [&](std::string what, std::string interface, double error, double bound) {
    comparison.lines.push_back({std::move(what), std::move(interface), error, bound});
  };
  // What one side has and the other lacks. False: neither has it, or both do.
  const auto lacks = [&](const std::string& what, const char* interface, bool in_actual, bool in_expected) {
    if (in_actual == in_expected) return false;
    add(absl::StrCat(what, ": only the ", in_actual ? "first" : "second", " bundle has it"), interface,
        std::numeric_limits<double>::infinity(), 0);
    return true;
  };
  const auto weights = [&](const char* what_of, const std::map<std::string, std::string>& a,
                           const std::map<std::string, std::string>& e) {
    std::set<std::string> names;
    for (const auto* map : {&a, &e}) {
      for (const auto& [name, digest] : *map) names.insert(name);
    }
    for (const std::string& name : names) {
      const std::string what = absl::StrCat(what_of, " ", name);
      if (lacks(what, "revisions", a.contains(name), e.contains(name))) continue;
      add(what, "revisions", a.at(name) == e.at(name) ? 0 : 1, 0);
    }
  };
  weights("fingerprint of target", actual.target_weights(), expected.target_weights());
  weights("fingerprint of drafter", actual.drafter_weights(), expected.drafter_weights());
  weights("digest of target", actual.target_digests(), expected.target_digests());
  weights("digest of drafter", actual.drafter_digests(), expected.drafter_digests());
  const std::string contract = Differences(actual.contract(), expected.contract());
  add(contract.empty() ? "contract" : "contract: " + contract, "config", contract.empty() ? 0 : 1, 0);
  if (actual.prompts().size() != expected.prompts().size()) {
    add(absl::StrCat("number of prompts: ", actual.prompts().size(), " and not ", expected.prompts().size()),
        "template", 1, 0);
  }
  const size_t count = std::min(actual.prompts().size(), expected.prompts().size());
  for (size_t i = 0; i < count; ++i) {
    const GoldenPrompt& a = actual.prompts()[i];
    const GoldenPrompt& e = expected.prompts()[i];
    add(absl::StrCat("tokens of prompt ", i), "tokenizer", ShareOfDifferences(a.prompt_ids, e.prompt_ids), 0);
    const std::string text = absl::StrCat("text of prompt ", i);
    if (!lacks(text, "template", !a.text.empty(), !e.text.empty()) && !a.text.empty())
      add(text, "template", a.text == e.text ? 0 : 1, 0);
    const std::string chat = absl::StrCat("chat of prompt ", i);
    if (!lacks(chat, "template", a.chat.has_value(), e.chat.has_value()) && a.chat) {
      const bool same =
          a.chat->messages == e.chat->messages && a.chat->enable_thinking == e.chat->enable_thinking;
      add(chat, "template", same ? 0 : 1, 0);
    }
  }
  // In the order in which they follow from each other.
  constexpr std::pair<const char*, const char*> kTensors[] = {{"hidden_states", "target"},
                                                              {"last_logits", "target"},
                                                              {"taps_last16", "tap-layer"},
                                                              {"context_feature_last16", "fusion"},
                                                              {"draft_logits", "draft-logits"}};
  for (const auto& [name, interface] : kTensors) {
    for (size_t i = 0; i < count; ++i) {
      const std::string what = absl::StrCat(name, " of prompt ", i);
      if (lacks(what, interface, actual.HasTensor(i, name), expected.HasTensor(i, name)) ||
          !actual.HasTensor(i, name)) {
        continue;
      }
      DFLASH_ASSIGN_OR_RETURN(const Rows a, actual.Tensor(i, name));
      DFLASH_ASSIGN_OR_RETURN(const Rows e, expected.Tensor(i, name));
      add(what, interface, RelativeError(a, e), limit);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const GoldenPrompt& a = actual.prompts()[i];
    const GoldenPrompt& e = expected.prompts()[i];
    add(absl::StrCat("output of prompt ", i), "end-to-end", ShareOfDifferences(a.output_ids, e.output_ids),
        0);
    const std::string what = absl::StrCat("acceptance lengths of prompt ", i);
    if (lacks(what, "end-to-end", !a.acceptance_lengths.empty(), !e.acceptance_lengths.empty()) ||
        a.acceptance_lengths.empty()) {
      continue;
    }
    // The last round is counted in more than one way.
    const auto but_last = [](std::vector<int64_t> lengths) {
      lengths.pop_back();
      return lengths;
    };
    add(what, "end-to-end",
        ShareOfDifferences(but_last(a.acceptance_lengths), but_last(e.acceptance_lengths)), 0);
  }
  return comparison;
}

}  // namespace dflash::golden
