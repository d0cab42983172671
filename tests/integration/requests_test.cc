// Requests that are refused: each with the right code, naming what is wrong, and the next one works.
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"
#include "text/testing/exploding_schemas.h"

namespace dflash::integration {
namespace {

using ::testing::HasSubstr;
using Request = v1::GenerateRequest;

struct Refusal {
  const char* name;
  std::function<void(Request*)> spoil;
  grpc::StatusCode code;
  const char* message;
};

class RequestsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server(); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(server_->channel(), nullptr); }

  void ExpectRefusals(const std::vector<Refusal>& refusals) {
    const std::vector<uint32_t> expected = server_->GenerateOk(ShortRequest()).token_ids;
    ASSERT_EQ(expected.size(), 4u);
    for (const Refusal& refusal : refusals) {
      SCOPED_TRACE(refusal.name);
      Request request = ShortRequest();
      refusal.spoil(&request);
      ctl::Generation generation;
      const grpc::Status status = Generate(server_->channel(), request, kPatience, &generation);
      EXPECT_EQ(status.error_code(), refusal.code) << ctl::Describe(status);
      EXPECT_THAT(status.error_message(), HasSubstr(refusal.message));
      EXPECT_TRUE(generation.token_ids.empty());
      EXPECT_EQ(server_->GenerateOk(ShortRequest()).token_ids, expected);
    }
  }

  static Server* server_;
};
Server* RequestsTest::server_ = nullptr;

TEST_F(RequestsTest, BadValuesNameTheirField) {
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ExpectRefusals({
      {"no prompt", [](Request* r) { r->clear_prompt(); }, kInvalid, "prompt"},
      {"empty text", [](Request* r) { r->set_text(""); }, kInvalid, "text"},
      {"no tokens", [](Request* r) { r->mutable_tokens()->clear_ids(); }, kInvalid, "tokens"},
      {"no messages", [](Request* r) { r->mutable_chat(); }, kInvalid, "chat.messages"},
      {"unknown role",
       [](Request* r) {
         v1::ChatMessage* message = r->mutable_chat()->add_messages();
         message->set_role("wizard");
         message->set_content("hi");
       },
       kInvalid, "wizard"},
      {"token out of range", [](Request* r) { r->mutable_tokens()->set_ids(1, 4096); }, kInvalid,
       "tokens.ids[1]"},
      {"huge token", [](Request* r) { r->mutable_tokens()->set_ids(0, 4294967295u); }, kInvalid,
       "tokens.ids[0]"},
      {"prompt over the context",
       [](Request* r) {
         r->mutable_tokens()->clear_ids();
         for (int i = 0; i < 5000; ++i) r->mutable_tokens()->add_ids(1);
       },
       kInvalid, "5000"},
      {"prompt and max_tokens over the context",
       [](Request* r) { r->mutable_stopping()->set_max_tokens(4094); }, kInvalid, "max_tokens"},
      {"max_tokens 0", [](Request* r) { r->mutable_stopping()->set_max_tokens(0); }, kInvalid,
       "stopping.max_tokens"},
      {"NaN temperature", [=](Request* r) { r->mutable_sampling()->set_temperature(nan); }, kInvalid,
       "sampling.temperature"},
      {"negative temperature", [](Request* r) { r->mutable_sampling()->set_temperature(-1); }, kInvalid,
       "sampling.temperature"},
      {"infinite temperature",
       [](Request* r) { r->mutable_sampling()->set_temperature(std::numeric_limits<float>::infinity()); },
       kInvalid, "sampling.temperature"},
      {"top_p 0", [](Request* r) { r->mutable_sampling()->set_top_p(0); }, kInvalid, "sampling.top_p"},
      {"NaN top_p", [=](Request* r) { r->mutable_sampling()->set_top_p(nan); }, kInvalid, "sampling.top_p"},
      {"min_p above 1", [](Request* r) { r->mutable_sampling()->set_min_p(1.5f); }, kInvalid,
       "sampling.min_p"},
      {"huge top_k", [](Request* r) { r->mutable_sampling()->set_top_k(4294967295u); }, kInvalid,
       "sampling.top_k"},
      {"bad id", [](Request* r) { r->set_request_id("with space"); }, kInvalid, "request_id"},
      {"too many stop strings",
       [](Request* r) {
         for (int i = 0; i < 17; ++i) r->mutable_stopping()->add_strings("x");
       },
       kInvalid, "stopping.strings"},
      {"empty stop string", [](Request* r) { r->mutable_stopping()->add_strings(""); }, kInvalid,
       "stopping.strings[0]"},
      {"no drafts", [](Request* r) { r->mutable_speculation()->set_max_draft_tokens(0); }, kInvalid,
       "speculation.max_draft_tokens"},
      {"unknown model", [](Request* r) { r->set_model("other"); }, grpc::StatusCode::NOT_FOUND, "model: "},
  });
}

TEST_F(RequestsTest, WhatIsNotBuiltIsRefusedByName) {
  constexpr grpc::StatusCode kMissing = grpc::StatusCode::UNIMPLEMENTED;
  ExpectRefusals({
      {"pattern",
       [](Request* r) { r->mutable_constraint()->set_json_schema(R"({"type": "string", "pattern": "a"})"); },
       kMissing, "\"pattern\""},
      {"regex", [](Request* r) { r->mutable_constraint()->set_regex("a*"); }, kMissing, "constraint"},
      {"min_chunk_interval_ms", [](Request* r) { r->mutable_output()->set_min_chunk_interval_ms(10); },
       kMissing, "output.min_chunk_interval_ms"},
      {"tree", [](Request* r) { r->mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH_TREE); },
       kMissing, "speculation.mode"},
      {"mtp", [](Request* r) { r->mutable_speculation()->set_mode(v1::SPECULATION_MODE_MTP); }, kMissing,
       "speculation.mode"},
      {"tree_nodes", [](Request* r) { r->mutable_speculation()->set_tree_nodes(32); }, kMissing,
       "speculation.tree_nodes"},
  });
}

TEST_F(RequestsTest, NeutralValuesAreAccepted) {
  Request request = ShortRequest();
  v1::Sampling* sampling = request.mutable_sampling();
  sampling->set_repetition_penalty(1);
  sampling->set_frequency_penalty(0);
  sampling->set_presence_penalty(0);
  sampling->set_n(1);
  request.mutable_stopping()->set_min_tokens(0);
  request.mutable_output()->set_min_chunk_interval_ms(0);
  request.mutable_scheduling()->set_priority(-10);
  request.mutable_scheduling()->set_no_prefix_cache(true);
  EXPECT_EQ(server_->GenerateOk(request).token_ids, server_->GenerateOk(ShortRequest()).token_ids);
}

TEST_F(RequestsTest, StopsEndTheOutput) {
  const GoldenText golden = GoldenTexts().front();  // "19, 28, 37, 46, ..."
  Request request = TokenRequest(golden.prompt_ids, 128);
  request.mutable_output()->set_text(true);
  request.mutable_stopping()->add_strings(", 46");
  const ctl::Generation by_string = server_->GenerateOk(request);
  EXPECT_EQ(by_string.text, "19, 28, 37");
  EXPECT_EQ(by_string.finished.reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(by_string.finished.matched_stop_string(), ", 46");

  request = TokenRequest(golden.prompt_ids, 128);
  request.mutable_stopping()->add_token_ids(golden.output_ids[5]);
  const ctl::Generation by_token = server_->GenerateOk(request);
  EXPECT_EQ(by_token.finished.reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(by_token.finished.matched_stop_token(), golden.output_ids[5]);
  EXPECT_EQ(by_token.token_ids.back(), golden.output_ids[5]);

  request = TokenRequest(golden.prompt_ids, 7);
  const ctl::Generation by_length = server_->GenerateOk(request);
  EXPECT_EQ(by_length.finished.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(by_length.token_ids.size(), 7u);
}

// Each parameter reaches the model, and says what it does in the stream.
TEST_F(RequestsTest, ParametersChangeTheChoice) {
  const GoldenText golden = GoldenTexts().front();
  const Request plain = TokenRequest(golden.prompt_ids, 12);
  const std::vector<uint32_t> tokens = server_->GenerateOk(plain).token_ids;
  ASSERT_EQ(tokens.size(), 12u);

  Request request = plain;
  request.mutable_sampling()->set_repetition_penalty(2);
  request.mutable_sampling()->set_frequency_penalty(1);
  request.mutable_sampling()->set_presence_penalty(1);
  const ctl::Generation penalized = server_->GenerateOk(request);
  EXPECT_NE(penalized.token_ids, tokens);
  EXPECT_EQ(penalized.started.effective_sampling().repetition_penalty(), 2);
  EXPECT_EQ(penalized.started.effective_sampling().frequency_penalty(), 1);
  request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
  EXPECT_EQ(server_->GenerateOk(request).token_ids, penalized.token_ids);

  request = plain;
  v1::LogitBias* bias = request.mutable_sampling()->add_logit_bias();
  bias->set_token_id(77);
  bias->set_bias(100);
  EXPECT_EQ(server_->GenerateOk(request).token_ids, std::vector<uint32_t>(12, 77));

  request = plain;
  request.mutable_stopping()->add_bad_words()->add_ids(tokens[3]);
  EXPECT_THAT(server_->GenerateOk(request).token_ids, ::testing::Not(::testing::Contains(tokens[3])));

  request = plain;
  request.mutable_stopping()->add_token_ids(tokens[2]);
  EXPECT_EQ(server_->GenerateOk(request).token_ids.size(), 3u);
  request.mutable_stopping()->set_min_tokens(8);
  EXPECT_GE(server_->GenerateOk(request).token_ids.size(), 8u);

  request = TokenRequest(golden.prompt_ids, 128);
  request.mutable_output()->set_text(true);
  request.mutable_stopping()->add_strings(", 46");
  request.mutable_stopping()->set_include_stop_in_text(true);
  EXPECT_EQ(server_->GenerateOk(request).text, "19, 28, 37, 46");
}

TEST_F(RequestsTest, LogProbabilities) {
  const GoldenText golden = GoldenTexts().front();
  Request request = TokenRequest(golden.prompt_ids, 12);
  request.mutable_output()->set_top_logprobs(3);
  const ctl::Generation generation = server_->GenerateOk(request);
  ASSERT_EQ(generation.logprobs.size(), 12u);
  for (size_t i = 0; i < generation.logprobs.size(); ++i) {
    const v1::TokenLogprobs& place = generation.logprobs[i];
    ASSERT_EQ(place.top_size(), 3);
    // Greedy: the token is the best one.
    EXPECT_EQ(place.top(0).token_id(), generation.token_ids[i]);
    EXPECT_EQ(place.top(0).logprob(), place.logprob());
    EXPECT_GE(place.top(0).logprob(), place.top(1).logprob());
    EXPECT_LE(place.logprob(), 0);
  }
  request.mutable_output()->set_top_logprobs(0);
  const ctl::Generation alone = server_->GenerateOk(request);
  ASSERT_EQ(alone.logprobs.size(), 12u);
  EXPECT_EQ(alone.logprobs[0].top_size(), 0);
  EXPECT_EQ(alone.logprobs[0].logprob(), generation.logprobs[0].logprob());
}

// A prompt of several chunks, in several messages; then what decoding said of its tokens.
TEST_F(RequestsTest, LogProbabilitiesOfPrompts) {
  std::vector<uint32_t> prompt;
  for (const GoldenText& golden : GoldenTexts()) {
    if (prompt.size() < 700) prompt.insert(prompt.end(), golden.prompt_ids.begin(), golden.prompt_ids.end());
  }
  prompt.resize(700);
  Request request = TokenRequest(prompt, 12);
  request.mutable_output()->set_top_logprobs(2);
  const ctl::Generation output = server_->GenerateOk(request);
  EXPECT_TRUE(output.prompt_logprobs.empty());
  ASSERT_EQ(output.token_ids.size(), 12u);
  request.mutable_tokens()->mutable_ids()->Add(output.token_ids.begin(), output.token_ids.end());
  request.mutable_output()->set_prompt_logprobs(2);
  request.mutable_sampling()->set_n(2);
  request.mutable_sampling()->set_temperature(1);
  const ctl::Generation scored = server_->GenerateOk(request);
  EXPECT_EQ(scored.started.cached_tokens(), 0u);
  ASSERT_EQ(scored.prompt_logprobs.size(), 700 + 12 - 1u);
  EXPECT_TRUE(scored.others[0].prompt_logprobs.empty());
  EXPECT_EQ(scored.token_ids.size(), 12u);
  for (size_t i = 0; i < 12; ++i) {
    const v1::TokenLogprobs& place = scored.prompt_logprobs[700 - 1 + i];
    EXPECT_NEAR(place.logprob(), output.logprobs[i].logprob(), 2e-3);
    ASSERT_EQ(place.top_size(), 2);
    EXPECT_EQ(place.top(0).token_id(), output.token_ids[i]);
  }
  // With a cache that knows the prompt: the same bits.
  request.mutable_sampling()->set_n(1);
  const ctl::Generation again = server_->GenerateOk(request);
  ASSERT_EQ(again.prompt_logprobs.size(), scored.prompt_logprobs.size());
  for (size_t i = 0; i < again.prompt_logprobs.size(); ++i)
    EXPECT_EQ(again.prompt_logprobs[i].logprob(), scored.prompt_logprobs[i].logprob()) << i;
}

TEST_F(RequestsTest, ConstraintsHold) {
  Request request = ChatRequest("Tell me about yourself.");
  request.mutable_chat()->set_enable_thinking(false);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(3);
  request.mutable_stopping()->set_max_tokens(200);
  request.mutable_constraint()->set_json_schema(
      R"({"type": "object", "required": ["name", "age"], "properties": {"name": {"type": "string", "maxLength": 20},
          "age": {"type": "integer"}}})");
  const ctl::Generation generation = server_->GenerateOk(request);
  EXPECT_EQ(generation.finished.reason(), v1::FINISH_REASON_EOS);
  const auto json = nlohmann::json::parse(generation.text, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << generation.text;
  EXPECT_TRUE(json["name"].is_string());
  EXPECT_TRUE(json["age"].is_number_integer());
  request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
  EXPECT_EQ(server_->GenerateOk(request).token_ids, generation.token_ids);

  request.mutable_constraint()->mutable_choice()->add_choices("left");
  request.mutable_constraint()->mutable_choice()->add_choices("right");
  request.mutable_stopping()->set_ignore_eos(true);
  const ctl::Generation choice = server_->GenerateOk(request);
  EXPECT_THAT(choice.text, ::testing::AnyOf("left", "right"));
  EXPECT_EQ(choice.finished.reason(), v1::FINISH_REASON_CONSTRAINT);
}

// That shows while the request runs, and is the client's all the same.
TEST_F(RequestsTest, AConstraintThatIsTooLargeIsRejected) {
  Request request = ShortRequest();
  request.mutable_stopping()->set_max_tokens(1000);
  request.mutable_output()->set_text(true);
  request.mutable_constraint()->set_json_schema(testing::DoublingSchema());
  const auto count = [&](const char* metric, const char* label) {
    return SumOfMetric(server_->Metrics(), metric, label);
  };
  const double rejected = count("dflashd_requests_total", "outcome=\"rejected\""),
               invalid = count("dflashd_requests_rejected_total", "reason=\"invalid\""),
               errors = count("dflashd_requests_total", "outcome=\"error\"");
  ctl::Generation generation;
  const grpc::Status status = Generate(server_->channel(), request, kPatience, &generation);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("CONSTRAINT_TOO_LARGE"));
  EXPECT_THAT(generation.text, HasSubstr("["));
  EXPECT_EQ(count("dflashd_requests_total", "outcome=\"rejected\""), rejected + 1);
  EXPECT_EQ(count("dflashd_requests_rejected_total", "reason=\"invalid\""), invalid + 1);
  EXPECT_EQ(count("dflashd_requests_total", "outcome=\"error\""), errors);
  EXPECT_EQ(server_->GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST_F(RequestsTest, ChoicesAreRequestsOfTheirOwn) {
  const GoldenText golden = GoldenTexts().back();
  Request request = TokenRequest(golden.prompt_ids, 20);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(11);
  request.mutable_output()->set_text(true);
  const ctl::Generation alone = server_->GenerateOk(request);
  request.mutable_sampling()->set_n(3);
  const ctl::Generation three = server_->GenerateOk(request);
  EXPECT_EQ(three.started.effective_sampling().n(), 3u);
  EXPECT_EQ(three.token_ids, alone.token_ids);
  EXPECT_EQ(three.text, alone.text);
  ASSERT_EQ(three.others.size(), 2u);
  EXPECT_NE(three.others[0].token_ids, alone.token_ids);
  EXPECT_NE(three.others[0].token_ids, three.others[1].token_ids);
  for (const ctl::Generation& other : three.others) {
    EXPECT_EQ(other.finished.usage().completion_tokens(), other.token_ids.size());
  }
  EXPECT_TRUE(server_->WaitUntilIdle());
}

TEST_F(RequestsTest, AnOutputGoesOnFromItsBeginning) {
  Request request = TokenRequest(GoldenTexts().back().prompt_ids, 30);
  request.mutable_sampling()->set_temperature(0.8f);
  request.mutable_output()->set_text(true);
  const ctl::Generation whole = server_->GenerateOk(request);
  ASSERT_EQ(whole.token_ids.size(), 30u);
  request.mutable_sampling()->set_seed(whole.started.effective_sampling().seed());
  for (int i = 0; i < 12; ++i)
    request.mutable_resume()->add_output_token_ids(whole.token_ids[static_cast<size_t>(i)]);
  request.mutable_resume()->set_model_fingerprint(whole.started.model_fingerprint());
  EXPECT_EQ(server_->ModelInfo().model_fingerprint(), whole.started.model_fingerprint());
  grpc::ClientContext context;
  const auto reader = server_->stub().Generate(&context, request);
  std::vector<uint32_t> tokens(whole.token_ids.begin(), whole.token_ids.begin() + 12);
  v1::GenerateResponse response;
  std::string text;
  while (reader->Read(&response)) {
    if (!response.has_chunk()) continue;
    EXPECT_EQ(response.chunk().first_token_offset(), tokens.size());
    tokens.insert(tokens.end(), response.chunk().token_ids().begin(), response.chunk().token_ids().end());
    text += response.chunk().text();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, whole.token_ids);
  EXPECT_THAT(whole.text, ::testing::EndsWith(text));
  EXPECT_EQ(response.finished().usage().completion_tokens(), 30u);
}

// The model does not know the form of tool calls, so a constraint of one choice makes it write one.
TEST_F(RequestsTest, ChatsAreTakenApart) {
  Request request = ChatRequest("What is the weather?");
  request.mutable_chat()->set_enable_thinking(true);
  request.mutable_chat()->add_tools_json(
      R"({"type": "function", "function": {"name": "weather", "parameters": {"properties": {"day": {"type": "string"}}}}})");
  request.mutable_stopping()->set_max_thinking_tokens(6);
  request.mutable_stopping()->set_max_tokens(200);
  request.mutable_constraint()->mutable_choice()->add_choices(
      "I look.\n\n[call]{\"name\": \"weather\", \"arguments\": {\"day\": \"1\"}}[/call]");
  const ctl::Generation plain = server_->GenerateOk(request);
  EXPECT_THAT(plain.text, ::testing::HasSubstr("</think>"));
  request.mutable_output()->set_parse(true);
  request.add_metadata()->set_key("team");
  request.mutable_metadata(0)->set_value("blue");
  const ctl::Generation parsed = server_->GenerateOk(request);
  EXPECT_EQ(parsed.token_ids, plain.token_ids);
  EXPECT_THAT(parsed.text, ::testing::StartsWith("I look.\n\n[call]"));
  EXPECT_THAT(plain.text, ::testing::HasSubstr(parsed.reasoning));
  EXPECT_FALSE(parsed.reasoning.empty());
  ASSERT_EQ(parsed.started.metadata_size(), 1);
  EXPECT_EQ(parsed.started.metadata(0).value(), "blue");
}

// Cut after any of its chunks, an output that is taken apart goes on as if it had not been cut.
TEST_F(RequestsTest, ChatsThatAreTakenApartGoOnFromAnyPlace) {
  for (const bool thinks : {true, false}) {
    SCOPED_TRACE(thinks ? "thinking" : "no thinking");
    Request request = ChatRequest("What is the weather?");
    request.mutable_chat()->set_enable_thinking(thinks);
    request.mutable_stopping()->set_max_thinking_tokens(6);
    request.mutable_stopping()->set_max_tokens(200);
    request.mutable_output()->set_parse(true);
    request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);  // a chunk a token, mostly
    // The last mark is none.
    request.mutable_constraint()->mutable_choice()->add_choices(
        "I look.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"day\": "
        "\"1\"}}\n</tool_call>\n\nWell <too");
    std::vector<v1::Chunk> chunks;
    ctl::Generation whole;
    {
      grpc::ClientContext context;
      const grpc::Status status = ctl::ReadGeneration(
          server_->stub(), &context, request, [&](const v1::Chunk& chunk) { chunks.push_back(chunk); },
          &whole);
      ASSERT_TRUE(status.ok()) << ctl::Describe(status);
    }
    ASSERT_EQ(whole.tool_calls.size(), 1u);
    EXPECT_EQ(whole.tool_calls[0].name(), "weather");
    EXPECT_EQ(whole.text, "I look.Well <too") << "line breaks around a call are the form's";
    EXPECT_EQ(whole.reasoning.empty(), !thinks);
    EXPECT_GT(chunks.size(), whole.token_ids.size() / 2) << "hardly a place to cut at";
    ctl::Generation before;
    int places = 0;
    for (const v1::Chunk& chunk : chunks) {
      if (chunk.token_ids_size() == 0) break;
      before.token_ids.insert(before.token_ids.end(), chunk.token_ids().begin(), chunk.token_ids().end());
      before.text += chunk.text();
      before.reasoning += chunk.reasoning();
      before.tool_calls.insert(before.tool_calls.end(), chunk.tool_calls().begin(), chunk.tool_calls().end());
      // What the parser held back at the end may come with the last token, and then comes again behind it.
      if (before.token_ids.size() == whole.token_ids.size()) break;
      if (++places % 2 == thinks) continue;  // every other one, together all of the constrained part
      SCOPED_TRACE(absl::StrCat("cut after ", before.token_ids.size(), " tokens"));
      Request rest = request;
      rest.mutable_resume()->mutable_output_token_ids()->Add(before.token_ids.begin(),
                                                             before.token_ids.end());
      rest.mutable_resume()->set_model_fingerprint(whole.started.model_fingerprint());
      if (before.token_ids.size() % 2 == 0) rest.mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH);
      const ctl::Generation after = server_->GenerateOk(rest);
      EXPECT_EQ(before.token_ids.size() + after.token_ids.size(), whole.token_ids.size());
      EXPECT_EQ(before.text + after.text, whole.text);
      EXPECT_EQ(before.reasoning + after.reasoning, whole.reasoning);
      std::vector<v1::ToolCall> calls = before.tool_calls;
      calls.insert(calls.end(), after.tool_calls.begin(), after.tool_calls.end());
      ASSERT_EQ(calls.size(), 1u);
      EXPECT_EQ(calls[0].name(), whole.tool_calls[0].name());
      EXPECT_EQ(calls[0].arguments_json(), whole.tool_calls[0].arguments_json());
    }
  }
}

}  // namespace
}  // namespace dflash::integration
