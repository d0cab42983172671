// More than a thousand requests that must be refused, made by rule from the protos themselves and from
// tables: each gets the right code, reason and field, and the request after it is answered as ever.
#include <cfloat>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/raw_call.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using ::testing::HasSubstr;
using Path = std::vector<const FieldDescriptor*>;

struct Case {
  std::string name;
  std::string method;
  std::string bytes;
  grpc::StatusCode code;
  std::string reason;
  std::string field;    // exactly
  std::string message;  // a part
};

constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
constexpr grpc::StatusCode kUnbuilt = grpc::StatusCode::UNIMPLEMENTED;

// --- Requests that are right but for one thing

v1::GenerateRequest Good() { return ShortRequest(); }

v1::GenerateRequest GoodChat() {
  v1::GenerateRequest request = ChatRequest("hello");
  v1::ChatMessage* turn = request.mutable_chat()->add_messages();
  turn->set_role("assistant");
  for (int i = 0; i < 2; ++i) {
    turn->add_tool_calls()->set_name("f");
    turn->mutable_tool_calls(i)->set_arguments_json("{}");
    request.mutable_chat()->add_tools_json(R"({"type": "function", "function": {"name": "f"}})");
  }
  return request;
}

// The request types, by method, each with what makes it right.
std::map<std::string, std::unique_ptr<Message>> GoodRequests() {
  std::map<std::string, std::unique_ptr<Message>> requests;
  requests["Generate"] = std::make_unique<v1::GenerateRequest>(Good());
  requests["Cancel"] = std::make_unique<v1::CancelRequest>();
  auto tokenize = std::make_unique<v1::TokenizeRequest>();
  tokenize->set_text("x");
  requests["Tokenize"] = std::move(tokenize);
  auto detokenize = std::make_unique<v1::DetokenizeRequest>();
  detokenize->add_token_ids(1);
  requests["Detokenize"] = std::move(detokenize);
  auto render = std::make_unique<v1::RenderChatRequest>();
  *render->mutable_chat() = GoodChat().chat();
  requests["RenderChat"] = std::move(render);
  requests["GetModelInfo"] = std::make_unique<v1::GetModelInfoRequest>();
  requests["GetLoad"] = std::make_unique<v1::GetLoadRequest>();
  return requests;
}

// --- Walking a message type

// Every path to a field, at any depth (the types here are not recursive).
void FindPaths(const Descriptor& type, const Path& before, std::vector<Path>* paths) {
  for (int i = 0; i < type.field_count(); ++i) {
    Path path = before;
    path.push_back(type.field(i));
    paths->push_back(path);
    if (path.back()->message_type() != nullptr) FindPaths(*path.back()->message_type(), path, paths);
  }
}
std::vector<Path> Paths(const Message& message) {
  std::vector<Path> paths;
  FindPaths(*message.GetDescriptor(), {}, &paths);
  return paths;
}

// "chat.messages[0].content", as the server writes it.
std::string Written(const Path& path) {
  std::string text;
  for (const FieldDescriptor* field : path) {
    absl::StrAppend(&text, text.empty() ? "" : ".", field->name(), field->is_repeated() ? "[0]" : "");
  }
  return text;
}

// The message at the end of `path` (its last field not included when `whole` is false); repeated fields are
// emptied and get one entry.
Message* Reach(Message* message, const Path& path, bool whole) {
  for (size_t i = 0; i + (whole ? 0 : 1) < path.size(); ++i) {
    const Reflection* reflection = message->GetReflection();
    if (path[i]->is_repeated()) {
      reflection->ClearField(message, path[i]);
      message = reflection->AddMessage(message, path[i]);
    } else {
      message = reflection->MutableMessage(message, path[i]);
    }
  }
  return message;
}

// --- Rules

// Text that is not UTF-8 in every string field of every request.
void AddIllFormedText(std::vector<Case>* cases) {
  const std::vector<std::string> sequences = {"\x80",                    // a continuation alone
                                              "\xc3",                    // a character cut short
                                              "\xe2\x82",                //
                                              "\xf0\x9f\x98",            //
                                              std::string("\xc3\0", 2),  // and not continued
                                              "\xc0\xaf",                // overlong
                                              "\xe0\x80\xaf",            //
                                              "\xf0\x80\x80\xaf",        //
                                              "\xed\xa0\x80",            // a surrogate
                                              "\xf4\x90\x80\x80",        // above U+10FFFF
                                              "\xf8\x88\x80\x80\x80",    // five bytes
                                              "\xff"};
  for (const auto& [method, good] : GoodRequests()) {
    for (const Path& path : Paths(*good)) {
      if (path.back()->type() != FieldDescriptor::TYPE_STRING) continue;
      for (size_t i = 0; i < sequences.size(); ++i) {
        const std::unique_ptr<Message> message(good->New());
        message->CopyFrom(*good);
        Message* last = Reach(message.get(), path, /*whole=*/false);
        const std::string text = "a" + sequences[i];
        if (path.back()->is_repeated()) {
          last->GetReflection()->ClearField(last, path.back());
          last->GetReflection()->AddString(last, path.back(), text);
        } else {
          last->GetReflection()->SetString(last, path.back(), text);
        }
        cases->push_back({absl::StrCat("ill-formed text ", i, " in ", Written(path)), method,
                          message->SerializeAsString(), kInvalid, "BAD_PARAMETER", Written(path),
                          "not valid UTF-8"});
      }
    }
  }
}

// In every message of every request: a field that this build does not know, and every field it knows with
// another type on the wire, which is the same.
void AddUnknownFields(std::vector<Case>* cases) {
  for (const auto& [method, good] : GoodRequests()) {
    std::vector<Path> places = {{}};
    for (const Path& path : Paths(*good)) {
      if (path.back()->message_type() != nullptr) places.push_back(path);
    }
    for (const Path& place : places) {
      const auto add = [&](int number, const std::string& what,
                           const std::function<void(google::protobuf::UnknownFieldSet*)>& add_field) {
        const std::unique_ptr<Message> message(good->New());
        message->CopyFrom(*good);
        Message* last = Reach(message.get(), place, /*whole=*/true);
        const std::string field = absl::StrCat("field ", number, " of ", last->GetDescriptor()->full_name());
        add_field(last->GetReflection()->MutableUnknownFields(last));
        cases->push_back({absl::StrCat(what, " in ", Written(place)), method, message->SerializeAsString(),
                          kUnbuilt, "UNSUPPORTED", Written(place), field});
      };
      add(4000, "unknown varint", [](auto* fields) { fields->AddVarint(4000, 1); });
      add(4000, "unknown fixed32", [](auto* fields) { fields->AddFixed32(4000, 1); });
      add(4000, "unknown fixed64", [](auto* fields) { fields->AddFixed64(4000, 1); });
      add(4000, "unknown bytes", [](auto* fields) { fields->AddLengthDelimited(4000, "x"); });
      add(4000, "unknown group", [](auto* fields) { fields->AddGroup(4000)->AddVarint(1, 1); });
      const Descriptor& type = place.empty() ? *good->GetDescriptor() : *place.back()->message_type();
      for (int i = 0; i < type.field_count(); ++i) {
        const int number = type.field(i)->number();
        add(number, absl::StrCat("wrong type of ", type.field(i)->name()),
            [number](auto* fields) { fields->AddFixed64(number, 1); });
      }
    }
  }
}

// A request cut off anywhere where it does not happen to be another request.
void AddTruncated(std::vector<Case>* cases) {
  for (const auto& [method, good] : GoodRequests()) {
    std::string bytes = good->SerializeAsString();
    if (method == "Generate") bytes = GoodChat().SerializeAsString();
    for (size_t size = 1; size < bytes.size(); ++size) {
      const std::unique_ptr<Message> parsed(good->New());
      const std::string cut = bytes.substr(0, size);
      if (parsed->ParseFromString(cut)) continue;
      cases->push_back({absl::StrCat("cut after ", size), method, cut, kInvalid, "BAD_PARAMETER", "",
                        absl::StrCat("no message ", good->GetDescriptor()->full_name())});
    }
    for (const std::string& garbage : {std::string("\xff\xff\xff\xff"), std::string(1, '\0'),
                                       std::string("\x07"), std::string("GET / HTTP/1.1\r\n")}) {
      const std::unique_ptr<Message> parsed(good->New());
      if (parsed->ParseFromString(garbage)) continue;
      cases->push_back({"garbage", method, garbage, kInvalid, "BAD_PARAMETER", "", "no message"});
    }
  }
}

// Adds a Generate request: a good one, changed.
using Change = std::function<void(v1::GenerateRequest*)>;
void Add(std::vector<Case>* cases, const std::string& name, const Change& change, grpc::StatusCode code,
         const std::string& reason, const std::string& field, const std::string& message = "",
         bool chat = false) {
  v1::GenerateRequest request = chat ? GoodChat() : Good();
  change(&request);
  cases->push_back({name, "Generate", request.SerializeAsString(), code, reason, field,
                    message.empty() ? field : message});
}
void AddBad(std::vector<Case>* cases, const std::string& name, const std::string& field,
            const Change& change) {
  Add(cases, name, change, kInvalid, "BAD_PARAMETER", field);
}
void AddUnbuilt(std::vector<Case>* cases, const std::string& field, const Change& change) {
  Add(cases, "unbuilt " + field, change, kUnbuilt, "UNSUPPORTED", field);
}

void AddNumbers(std::vector<Case>* cases) {
  const float inf = INFINITY, nan = NAN;
  for (const float bad : {nan, -nan, inf, -inf, -1.f, -FLT_MIN, -1e-45f, std::nextafter(100.f, 200.f), 101.f,
                          FLT_MAX, FLT_TRUE_MIN, FLT_MIN, std::nextafter(1e-6f, 0.f)}) {
    AddBad(cases, absl::StrCat("temperature ", bad), "sampling.temperature",
           [=](auto* r) { r->mutable_sampling()->set_temperature(bad); });
  }
  for (const float bad : {nan, -nan, inf, -inf, 0.f, -0.f, -1.f, std::nextafter(1.f, 2.f), 2.f, FLT_MAX,
                          FLT_TRUE_MIN, FLT_MIN, std::nextafter(1e-6f, 0.f)}) {
    AddBad(cases, absl::StrCat("top_p ", bad), "sampling.top_p",
           [=](auto* r) { r->mutable_sampling()->set_top_p(bad); });
  }
  for (const float bad : {nan, -nan, inf, -inf, -1.f, -1e-45f, std::nextafter(1.f, 2.f), 2.f, FLT_MAX,
                          FLT_TRUE_MIN, FLT_MIN, std::nextafter(1e-6f, 0.f)}) {
    AddBad(cases, absl::StrCat("min_p ", bad), "sampling.min_p",
           [=](auto* r) { r->mutable_sampling()->set_min_p(bad); });
  }
  Add(
      cases, "top_p just above 1",
      [](auto* r) { r->mutable_sampling()->set_top_p(std::nextafter(1.f, 2.f)); }, kInvalid, "BAD_PARAMETER",
      "sampling.top_p", "not 1.00000012");
  for (const uint32_t bad : {2147483648u, 4294967295u}) {
    AddBad(cases, absl::StrCat("top_k ", bad), "sampling.top_k",
           [=](auto* r) { r->mutable_sampling()->set_top_k(bad); });
  }
  for (const float bad : {nan, inf, -inf, 0.f, -1.f, std::nextafter(10.f, 20.f), FLT_MAX, FLT_TRUE_MIN,
                          FLT_MIN, 1e-37f, std::nextafter(0.01f, 0.f)}) {
    AddBad(cases, absl::StrCat("repetition_penalty ", bad), "sampling.repetition_penalty",
           [=](auto* r) { r->mutable_sampling()->set_repetition_penalty(bad); });
  }
  for (const float bad : {nan, inf, -inf, std::nextafter(2.f, 3.f), std::nextafter(-2.f, -3.f), FLT_MAX}) {
    AddBad(cases, absl::StrCat("frequency_penalty ", bad), "sampling.frequency_penalty",
           [=](auto* r) { r->mutable_sampling()->set_frequency_penalty(bad); });
    AddBad(cases, absl::StrCat("presence_penalty ", bad), "sampling.presence_penalty",
           [=](auto* r) { r->mutable_sampling()->set_presence_penalty(bad); });
  }
  for (const float bad : {nan, inf, -inf, std::nextafter(100.f, 200.f), -101.f}) {
    AddBad(cases, absl::StrCat("bias ", bad), "sampling.logit_bias[1].bias", [=](auto* r) {
      r->mutable_sampling()->add_logit_bias();
      r->mutable_sampling()->add_logit_bias()->set_token_id(1);
      r->mutable_sampling()->mutable_logit_bias(1)->set_bias(bad);
    });
  }
  for (const uint32_t bad : {21u, 22u, 4294967295u}) {
    AddBad(cases, absl::StrCat("top_logprobs ", bad), "output.top_logprobs",
           [=](auto* r) { r->mutable_output()->set_top_logprobs(bad); });
  }
  for (const uint32_t bad : {9u, 4096u, 4294967295u}) {
    AddBad(cases, absl::StrCat("min_tokens ", bad), "stopping.min_tokens", [=](auto* r) {
      r->mutable_stopping()->set_max_tokens(8);
      r->mutable_stopping()->set_min_tokens(bad);
    });
  }
  AddBad(cases, "n 0", "sampling.n", [](auto* r) { r->mutable_sampling()->set_n(0); });
  AddBad(cases, "max_tokens 0", "stopping.max_tokens",
         [](auto* r) { r->mutable_stopping()->set_max_tokens(0); });
  AddBad(cases, "no drafts", "speculation.max_draft_tokens",
         [](auto* r) { r->mutable_speculation()->set_max_draft_tokens(0); });
  for (const int bad : {-11, 11, INT_MAX, INT_MIN}) {
    AddBad(cases, absl::StrCat("priority ", bad), "scheduling.priority",
           [=](auto* r) { r->mutable_scheduling()->set_priority(bad); });
  }
  for (const int bad : {5, 6, 77, -1, INT_MAX, INT_MIN}) {
    AddBad(cases, absl::StrCat("mode ", bad), "speculation.mode",
           [=](auto* r) { r->mutable_speculation()->set_mode(static_cast<v1::SpeculationMode>(bad)); });
  }
}

void AddUnbuiltFields(std::vector<Case>* cases) {
  for (const uint32_t value : {2u, 100u, 4294967295u}) {
    AddUnbuilt(cases, "output.min_chunk_interval_ms",
               [=](auto* r) { r->mutable_output()->set_min_chunk_interval_ms(value); });
    AddUnbuilt(cases, "speculation.tree_nodes",
               [=](auto* r) { r->mutable_speculation()->set_tree_nodes(value - 2); });
    AddBad(cases, absl::StrCat("cache_salt ", value), "scheduling.cache_salt", [=](auto* r) {
      r->mutable_scheduling()->set_cache_salt(std::string(257 + std::min(value, 1000u), 's'));
    });
  }
  for (const uint32_t bad : {21u, 4294967295u}) {
    AddBad(cases, absl::StrCat("prompt_logprobs ", bad), "output.prompt_logprobs",
           [=](auto* r) { r->mutable_output()->set_prompt_logprobs(bad); });
  }
  AddUnbuilt(cases, "sampling.beam_width", [](auto* r) { r->mutable_sampling()->set_beam_width(2); });
  AddUnbuilt(cases, "chat.messages[0].images",
             [](auto* r) { r->mutable_chat()->add_messages()->add_images(std::string(1000, 'x')); });
  AddUnbuilt(cases, "constraint.regex", [](auto* r) { r->mutable_constraint()->set_regex("(a+)+$"); });
  for (const char* schema : {R"({"type":"string","pattern":"(a+)+$"})", R"({"oneOf":[true]})",
                             R"({"properties":{"x":{"minimum":1}}})", R"({"$ref":"http://x"})"}) {
    AddUnbuilt(cases, "constraint.json_schema",
               [=](auto* r) { r->mutable_constraint()->set_json_schema(schema); });
  }
  for (const char* twice : {R"({"type": "string", "type": "integer"})",
                            R"({"type": "object", "properties": {"a": {}, "b": {"enum": [1], "enum": [2]}}})",
                            R"({"properties": {"a": {}, "a": {}}})"}) {
    Add(
        cases, absl::StrCat("a key twice: ", twice),
        [=](auto* r) { r->mutable_constraint()->set_json_schema(twice); }, kInvalid, "BAD_PARAMETER",
        "constraint.json_schema", "twice");
  }
  Add(
      cases, "a label twice",
      [](auto* r) {
        for (int i = 0; i < 2; ++i) r->add_metadata()->set_key("team");
      },
      kInvalid, "BAD_PARAMETER", "metadata[1].key", "twice");
  AddUnbuilt(cases, "constraint.ebnf", [](auto* r) { r->mutable_constraint()->set_ebnf("root ::= root"); });
  AddUnbuilt(cases, "speculation.mode",
             [](auto* r) { r->mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH_TREE); });
  AddUnbuilt(cases, "speculation.mode",
             [](auto* r) { r->mutable_speculation()->set_mode(v1::SPECULATION_MODE_MTP); });
}

void AddConstraints(std::vector<Case>* cases) {
  for (const uint32_t bad : {17u, 100u, 4294967295u})
    AddBad(cases, absl::StrCat("n ", bad), "sampling.n", [=](auto* r) { r->mutable_sampling()->set_n(bad); });
  AddBad(cases, "parse without text", "output.parse", [](auto* r) { r->mutable_output()->set_parse(true); });
  AddBad(cases, "no output to go on", "resume.output_token_ids", [](auto* r) { r->mutable_resume(); });
  AddBad(cases, "no such token to go on behind", "resume.output_token_ids[0]",
         [](auto* r) { r->mutable_resume()->add_output_token_ids(4096); });
  Add(
      cases, "another model's output", [](auto* r) { r->mutable_resume()->add_output_token_ids(1); },
      grpc::StatusCode::ABORTED, "REVISION_MISMATCH", "resume.model_fingerprint");
  AddBad(cases, "label without key", "metadata[0].key", [](auto* r) { r->add_metadata(); });
  AddBad(cases, "many labels", "metadata", [](auto* r) {
    for (int i = 0; i < 17; ++i) r->add_metadata()->set_key("k");
  });
  for (const size_t size : {size_t{257}, size_t{1'000'000}}) {
    AddBad(cases, absl::StrCat("label of ", size), "metadata[0].value", [=](auto* r) {
      r->add_metadata()->set_key("k");
      r->mutable_metadata(0)->set_value(std::string(size, 'v'));
    });
  }
  for (const std::string& schema : {std::string(), std::string("{"), std::string("[]"), std::string("1"),
                                    std::string("false"), std::string(R"({"type":"x"})"),
                                    std::string(R"({"$ref":"#"})"), std::string(R"({"$ref":"#/$defs/none"})"),
                                    std::string(R"({"enum":[]})"), std::string(R"({"maxLength":99999})"),
                                    std::string(65'537, ' '), R"({"items":)" + std::string(200, '[') + "}"}) {
    AddBad(cases, absl::StrCat("schema ", schema.substr(0, 30)), "constraint.json_schema",
           [=](auto* r) { r->mutable_constraint()->set_json_schema(schema); });
  }
  AddBad(cases, "no object", "constraint.json_object",
         [](auto* r) { r->mutable_constraint()->set_json_object(false); });
  AddBad(cases, "no choice", "constraint.choice.choices",
         [](auto* r) { r->mutable_constraint()->mutable_choice(); });
  AddBad(cases, "empty choice", "constraint.choice.choices[1]", [](auto* r) {
    r->mutable_constraint()->mutable_choice()->add_choices("x");
    r->mutable_constraint()->mutable_choice()->add_choices("");
  });
  for (const int count : {1025, 100'000}) {
    AddBad(cases, absl::StrCat(count, " choices"), "constraint.choice.choices", [=](auto* r) {
      for (int i = 0; i < count; ++i) r->mutable_constraint()->mutable_choice()->add_choices("x");
    });
  }
  AddBad(cases, "long choices", "constraint.choice.choices[1]", [](auto* r) {
    for (int i = 0; i < 2; ++i)
      r->mutable_constraint()->mutable_choice()->add_choices(std::string(40'000, 'x'));
  });
}

void AddTokensAndCounts(std::vector<Case>* cases) {
  for (const int place : {0, 1, 63, 64, 4000}) {
    for (const uint32_t id : {4096u, 4097u, 2147483647u, 2147483648u, 4294967295u}) {
      AddBad(cases, absl::StrCat("token ", id, " at ", place), absl::StrCat("tokens.ids[", place, "]"),
             [=](auto* r) {
               r->mutable_tokens()->mutable_ids()->Resize(place + 1, 1);
               r->mutable_tokens()->set_ids(place, id);
             });
      if (place < 64) {
        AddBad(cases, absl::StrCat("stop token ", id, " at ", place),
               absl::StrCat("stopping.token_ids[", place, "]"), [=](auto* r) {
                 r->mutable_stopping()->mutable_token_ids()->Resize(place + 1, 1);
                 r->mutable_stopping()->set_token_ids(place, id);
               });
      }
      v1::DetokenizeRequest detokenize;
      detokenize.mutable_token_ids()->Resize(place + 1, 1);
      detokenize.set_token_ids(place, id);
      const std::string field = absl::StrCat("token_ids[", place, "]");
      cases->push_back({absl::StrCat("detokenize ", id, " at ", place), "Detokenize",
                        detokenize.SerializeAsString(), kInvalid, "BAD_PARAMETER", field,
                        absl::StrCat("no token has id ", id)});
    }
  }
  for (const uint32_t id : {4096u, 4294967295u}) {
    AddBad(cases, absl::StrCat("bias of token ", id), "sampling.logit_bias[0].token_id",
           [=](auto* r) { r->mutable_sampling()->add_logit_bias()->set_token_id(id); });
    AddBad(cases, absl::StrCat("bad word with token ", id), "stopping.bad_words[0].ids[1]", [=](auto* r) {
      v1::TokenIds* word = r->mutable_stopping()->add_bad_words();
      word->add_ids(1);
      word->add_ids(id);
    });
  }
  AddBad(cases, "two biases of one token", "sampling.logit_bias[1].token_id", [](auto* r) {
    for (int i = 0; i < 2; ++i) r->mutable_sampling()->add_logit_bias()->set_token_id(7);
  });
  for (const uint32_t count : {1025u, 100'000u}) {
    AddBad(cases, absl::StrCat(count, " biases"), "sampling.logit_bias", [=](auto* r) {
      for (uint32_t i = 0; i < count; ++i) r->mutable_sampling()->add_logit_bias()->set_token_id(i);
    });
  }
  for (const int count : {65, 10'000}) {
    AddBad(cases, absl::StrCat(count, " bad words"), "stopping.bad_words", [=](auto* r) {
      for (int i = 0; i < count; ++i) r->mutable_stopping()->add_bad_words()->add_ids(1);
    });
  }
  for (const int size : {0, 33, 10'000}) {
    AddBad(cases, absl::StrCat("bad word of ", size), "stopping.bad_words[0].ids",
           [=](auto* r) { r->mutable_stopping()->add_bad_words()->mutable_ids()->Resize(size, 1); });
  }
  for (const int count : {17, 18, 100, 10'000}) {
    AddBad(cases, absl::StrCat(count, " stop strings"), "stopping.strings", [=](auto* r) {
      for (int i = 0; i < count; ++i) r->mutable_stopping()->add_strings("x");
    });
  }
  for (const int count : {65, 66, 1000, 100'000}) {
    AddBad(cases, absl::StrCat(count, " stop tokens"), "stopping.token_ids",
           [=](auto* r) { r->mutable_stopping()->mutable_token_ids()->Resize(count, 1); });
  }
  for (const int place : {0, 1, 15}) {
    for (const size_t bytes : {size_t{0}, size_t{257}, size_t{1000}, size_t{1'000'000}}) {
      AddBad(cases, absl::StrCat("stop string of ", bytes, " at ", place),
             absl::StrCat("stopping.strings[", place, "]"), [=](auto* r) {
               for (int i = 0; i < place; ++i) r->mutable_stopping()->add_strings("x");
               r->mutable_stopping()->add_strings(std::string(bytes, 'x'));
             });
    }
  }
  for (const int count : {4097, 5000, 100'000}) {
    AddBad(cases, absl::StrCat(count, " messages"), "chat.messages", [=](auto* r) {
      for (int i = 0; i < count; ++i) r->mutable_chat()->add_messages()->set_role("user");
    });
  }
  for (const int count : {4097, 1'000'000}) {
    AddBad(cases, absl::StrCat(count, " tools"), "chat.tools_json", [=](auto* r) {
      *r = GoodChat();
      for (int i = 0; i < count; ++i) r->mutable_chat()->add_tools_json("{}");
    });
    AddBad(cases, absl::StrCat(count, " calls"), "chat.messages[1].tool_calls", [=](auto* r) {
      *r = GoodChat();
      for (int i = 0; i < count; ++i) r->mutable_chat()->mutable_messages(1)->add_tool_calls();
    });
  }
  for (const size_t bytes : {(size_t{2} << 20) + 1, size_t{8'000'000}}) {
    v1::TokenizeRequest tokenize;
    tokenize.set_text(std::string(bytes, ' '));
    cases->push_back({absl::StrCat("tokenize ", bytes), "Tokenize", tokenize.SerializeAsString(), kInvalid,
                      "BAD_PARAMETER", "text", "at most 2097152"});
    *tokenize.mutable_chat() = GoodChat().chat();
    tokenize.mutable_chat()->mutable_messages(0)->set_content(std::string(bytes, 'x'));
    cases->push_back({absl::StrCat("tokenize chat of ", bytes), "Tokenize", tokenize.SerializeAsString(),
                      kInvalid, "BAD_PARAMETER", "chat", "at most 2097152"});
  }
  for (const int place : {0, 1, 100, 4095}) {
    AddBad(cases, absl::StrCat("no role at ", place), absl::StrCat("chat.messages[", place, "].role"),
           [=](auto* r) {
             for (int i = 0; i < place; ++i) r->mutable_chat()->add_messages()->set_role("user");
             r->mutable_chat()->add_messages();
           });
  }
  // Over the context limit of 4096 tokens.
  for (const int count : {4096, 4097, 5000, 1'000'000}) {
    Add(
        cases, absl::StrCat(count, " tokens"),
        [=](auto* r) { r->mutable_tokens()->mutable_ids()->Resize(count, 1); }, kInvalid, "CONTEXT_TOO_LONG",
        "tokens.ids", absl::StrCat("the prompt has ", count, " tokens"));
  }
  for (const uint32_t count : {4092u, 4096u, 2147483648u, 4294967295u}) {  // the prompt has 5
    Add(
        cases, absl::StrCat("max_tokens ", count),
        [=](auto* r) { r->mutable_stopping()->set_max_tokens(count); }, kInvalid, "CONTEXT_TOO_LONG",
        "stopping.max_tokens");
  }
  for (const size_t bytes : {size_t{50'000}, size_t{1'000'000}, size_t{7'000'000}}) {
    std::string text;
    for (size_t i = 0; text.size() < bytes; ++i) absl::StrAppend(&text, " ", i);
    Add(
        cases, absl::StrCat("text of ", bytes), [=](auto* r) { r->set_text(text); }, kInvalid,
        "CONTEXT_TOO_LONG", "text");
    Add(
        cases, absl::StrCat("message of ", bytes),
        [=](auto* r) { r->mutable_chat()->mutable_messages(0)->set_content(text); }, kInvalid,
        "CONTEXT_TOO_LONG", "chat", "", /*chat=*/true);
  }
}

void AddNames(std::vector<Case>* cases) {
  for (int c = 0; c < 128; ++c) {
    const bool legal = std::isalnum(c) != 0 || c == '.' || c == '_' || c == ':' || c == '-';
    if (legal) continue;
    AddBad(cases, absl::StrCat("character ", c, " in the id"), "request_id",
           [=](auto* r) { r->set_request_id(std::string("a") + static_cast<char>(c) + "b"); });
  }
  for (const std::string& id :
       {std::string("\xc3\xbc"), std::string(129, 'a'), std::string(1'000'000, 'a')}) {
    AddBad(cases, absl::StrCat("id of ", id.size()), "request_id", [=](auto* r) { r->set_request_id(id); });
  }
  for (const std::string& model :
       {std::string("other"), std::string("TINY-QWEN3.6"), std::string("tiny-qwen3.6 "), std::string("/"),
        std::string(1'000'000, 'm')}) {
    Add(
        cases, absl::StrCat("model of ", model.size()), [=](auto* r) { r->set_model(model); },
        grpc::StatusCode::NOT_FOUND, "MODEL_NOT_FOUND", "model");
  }
}

void AddJson(std::vector<Case>* cases) {
  const std::vector<std::string> not_objects = {
      "",
      " ",
      "x",
      "null",
      "true",
      "1",
      "-",
      "1.",
      "[]",
      "[{}]",
      "\"{}\"",
      "{",
      "}",
      "{}}",
      "{}{}",
      "{]",
      "{a:1}",
      "{'a':1}",
      "{\"a\"}",
      "{\"a\":}",
      "{\"a\":1,}",
      "{\"a\":01}",
      "{\"a\":+1}",
      "{\"a\":.5}",
      "{\"a\":NaN}",
      "{\"a\":Infinity}",
      "{\"a\":1e999}",
      "{\"a\":-1e999}",
      "{\"a\":9223372036854775808}",
      "{\"a\":\"\\x\"}",
      "{\"a\":\"\\u12\"}",
      "{\"a\":\"\\ud800\"}",
      "{\"a\":\"\n\"}",
      "{/**/}",
      "// {}",
      "{\"a\":1 \"b\":2}",
      std::string("{\0}", 3),
      "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}",
      std::string(100'000, '{'),
      "{\"a\":\"" + std::string(5 << 20, 'x') + "\"}"};
  for (size_t i = 0; i < not_objects.size(); ++i) {
    const std::string& text = not_objects[i];
    for (const int place : {0, 1}) {
      Add(
          cases, absl::StrCat("tool ", i, " at ", place),
          [=](auto* r) { r->mutable_chat()->set_tools_json(place, text); }, kInvalid, "BAD_PARAMETER",
          absl::StrCat("chat.tools_json[", place, "]"), "", /*chat=*/true);
      Add(
          cases, absl::StrCat("arguments ", i, " at ", place),
          [=](auto* r) {
            r->mutable_chat()->mutable_messages(1)->mutable_tool_calls(place)->set_arguments_json(text);
          },
          kInvalid, "BAD_PARAMETER", absl::StrCat("chat.messages[1].tool_calls[", place, "].arguments_json"),
          "",
          /*chat=*/true);
    }
  }
}

void AddPrompts(std::vector<Case>* cases) {
  AddBad(cases, "no prompt", "prompt", [](auto* r) { r->clear_prompt(); });
  AddBad(cases, "empty text", "text", [](auto* r) { r->set_text(""); });
  AddBad(cases, "no tokens", "tokens.ids", [](auto* r) { r->mutable_tokens()->clear_ids(); });
  AddBad(cases, "no messages", "chat.messages", [](auto* r) { r->mutable_chat(); });
  cases->push_back({"tokenize nothing", "Tokenize", "", kInvalid, "BAD_PARAMETER", "input", "input"});
  cases->push_back(
      {"render nothing", "RenderChat", "", kInvalid, "BAD_PARAMETER", "chat.messages", "chat.messages"});
  // What the template refuses, in its own words.
  for (const char* role : {"wizard", "User", "SYSTEM", " user", "user\n", "<|im_end|>", "\xc3\xbc"}) {
    Add(
        cases, absl::StrCat("role ", role),
        [=](auto* r) { r->mutable_chat()->mutable_messages(0)->set_role(role); }, kInvalid, "TEMPLATE_ERROR",
        "chat", absl::StrCat("unknown role: ", role), /*chat=*/true);
  }
  // Whose words are cut, so that they do not fill the trailers.
  for (const std::string& word : {std::string("x"), std::string("\xc3\xbc"), std::string("\n")}) {
    std::string role;
    while (role.size() < 100'000) role += word;
    Add(
        cases, "a long role", [=](auto* r) { r->mutable_chat()->mutable_messages(0)->set_role(role); },
        kInvalid, "TEMPLATE_ERROR", "chat", "unknown role: " + role.substr(0, 900), /*chat=*/true);
  }
  for (const int place : {1, 2, 100}) {
    Add(
        cases, absl::StrCat("system message at ", place),
        [=](auto* r) {
          for (int i = 0; i < place; ++i) r->mutable_chat()->add_messages()->set_role("user");
          r->mutable_chat()->add_messages()->set_role("system");
        },
        kInvalid, "TEMPLATE_ERROR", "chat", "a system message must come first");
  }
}

// Refused by gRPC itself: no ErrorInfo.
void AddBeyondOurReach(std::vector<Case>* cases) {
  v1::GenerateRequest request;
  request.set_text(std::string((8 << 20) + 1, 'x'));
  cases->push_back({"over 8 MiB", "Generate", request.SerializeAsString(),
                    grpc::StatusCode::RESOURCE_EXHAUSTED, "", "", "larger than max"});
  for (const char* method : {"Nothing", "generate", "", "Generate/x"}) {
    cases->push_back({absl::StrCat("method ", method), method, "", kUnbuilt, "", "", ""});
  }
}

double Rejected(Server& server) {
  const std::string page = server.Metrics(),
                    series = "dflashd_requests_total{api=\"grpc\",outcome=\"rejected\"";
  const size_t line = page.find(series);
  if (line == std::string::npos) return -1;
  return std::stod(page.substr(page.find("} ", line) + 2));
}

TEST(HostileRequests, EachIsRefusedByNameAndTheNextWorks) {
  google::protobuf::SetLogHandler(nullptr);  // of this test: it writes ill-formed text on purpose
  std::vector<Case> cases;
  AddIllFormedText(&cases);
  AddUnknownFields(&cases);
  AddTruncated(&cases);
  AddNumbers(&cases);
  AddUnbuiltFields(&cases);
  AddConstraints(&cases);
  AddTokensAndCounts(&cases);
  AddNames(&cases);
  AddJson(&cases);
  AddPrompts(&cases);
  AddBeyondOurReach(&cases);
  EXPECT_GE(cases.size(), 1000u);

  Server server;
  ASSERT_NE(server.channel(), nullptr);
  // The good request: the beginning of a golden answer, with its text.
  const GoldenText golden = GoldenTexts().front();
  v1::GenerateRequest good = TokenRequest(golden.prompt_ids, 6);
  good.mutable_output()->set_text(true);
  const std::vector<uint32_t> tokens(golden.output_ids.begin(), golden.output_ids.begin() + 6);
  const std::string text = server.GenerateOk(good).text;
  EXPECT_THAT(golden.output_text, ::testing::StartsWith(text));
  EXPECT_FALSE(text.empty());

  const double rejected_before = Rejected(server);
  EXPECT_GE(rejected_before, 0);
  int refusals = 0;
  std::set<std::string> fields;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.method + ": " + c.name);
    const RawAnswer answer = RawCall(server.channel(), c.method, c.bytes);
    EXPECT_EQ(answer.status.error_code(), c.code) << answer.status.error_message();
    EXPECT_EQ(answer.reason, c.reason);
    EXPECT_EQ(answer.field, c.field) << answer.status.error_message();
    EXPECT_THAT(answer.status.error_message(), HasSubstr(c.message));
    EXPECT_LT(answer.status.error_message().size(), 4096u) << "a client's own words come back at length";
    EXPECT_EQ(answer.messages, 0);
    if (c.method == "Generate" && !c.reason.empty()) ++refusals;
    fields.insert(c.field);
    const ctl::Generation generation = server.GenerateOk(good);
    EXPECT_EQ(generation.token_ids, tokens);
    EXPECT_EQ(generation.text, text);
    if (::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() > 40) {
      FAIL() << "and so on";
    }
  }
  // Every refusal counts.
  EXPECT_EQ(Rejected(server) - rejected_before, refusals);
  EXPECT_TRUE(server.WaitUntilIdle());
  std::printf("%zu cases, %zu fields\n", cases.size(), fields.size());
}

// Whether a call had ended before its message was read, or after: its client has cancelled it, and no more.
TEST(HostileRequests, WhatIsCancelledAtOnceIsNoRefusal) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const double rejected_before = Rejected(server);
  for (int i = 0; i < 300; ++i) {
    OpenStream stream(server.stub(), EndlessRequest());
    stream.Cancel();
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  EXPECT_TRUE(server.WaitUntilIdle());
  EXPECT_EQ(Rejected(server), rejected_before);
  EXPECT_GT(SumOfMetric(server.Metrics(), "dflashd_requests_total", "outcome=\"cancelled\""), 0);
}

// A call with too much metadata is refused by itself; its neighbours on the connection do not notice.
TEST(HostileRequests, TooMuchMetadataIsOneCallsOwnProblem) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  OpenStream neighbour(server.stub(), EndlessRequest());
  ASSERT_TRUE(neighbour.ReadFirstTokens());
  const auto call = [&](const std::string& method, size_t bytes) {
    return CallEmpty(server.channel(), method, {"x-padding", std::string(bytes, 'x')});
  };
  EXPECT_TRUE(call("/dflash.v1.InferenceService/GetLoad", 12 << 10).ok()) << "above gRPC's own default limit";
  for (const char* method : {"/dflash.v1.InferenceService/GetLoad", "/dflash.v1.InferenceService/Tokenize",
                             "/dflash.v1.InferenceService/Generate"}) {
    for (const size_t bytes : {size_t{17} << 10, size_t{60} << 10, size_t{500} << 10}) {
      SCOPED_TRACE(absl::StrCat(method, " with ", bytes));
      const grpc::Status status = call(method, bytes);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << ctl::Describe(status);
      EXPECT_THAT(ctl::Describe(status), HasSubstr("METADATA_TOO_LARGE"));
    }
  }
  const auto admin = grpc::CreateChannel(server.admin_address(), grpc::InsecureChannelCredentials());
  EXPECT_EQ(CallEmpty(admin, "/dflash.v1.AdminService/GetSpeculation", {"x", std::string(20 << 10, 'x')})
                .error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  // To its end, on the connection that it began on.
  EXPECT_TRUE(neighbour.Finish().ok());
  EXPECT_EQ(neighbour.tokens(), 3000u);
}

}  // namespace
}  // namespace dflash::integration
