// Requests that are refused: each with the right code, naming what is wrong, and the next one works.
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"

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
      {"repetition_penalty", [](Request* r) { r->mutable_sampling()->set_repetition_penalty(1.1f); },
       kMissing, "sampling.repetition_penalty"},
      {"frequency_penalty", [](Request* r) { r->mutable_sampling()->set_frequency_penalty(0.5f); }, kMissing,
       "sampling.frequency_penalty"},
      {"presence_penalty", [](Request* r) { r->mutable_sampling()->set_presence_penalty(0.5f); }, kMissing,
       "sampling.presence_penalty"},
      {"n", [](Request* r) { r->mutable_sampling()->set_n(2); }, kMissing, "sampling.n"},
      {"logit_bias", [](Request* r) { r->mutable_sampling()->add_logit_bias()->set_bias(1); }, kMissing,
       "sampling.logit_bias"},
      {"min_tokens", [](Request* r) { r->mutable_stopping()->set_min_tokens(3); }, kMissing,
       "stopping.min_tokens"},
      {"include_stop_in_text", [](Request* r) { r->mutable_stopping()->set_include_stop_in_text(true); },
       kMissing, "stopping.include_stop_in_text"},
      {"bad_words", [](Request* r) { r->mutable_stopping()->add_bad_words()->add_ids(1); }, kMissing,
       "stopping.bad_words"},
      {"json_schema", [](Request* r) { r->mutable_constraint()->set_json_schema("{}"); }, kMissing,
       "constraint"},
      {"regex", [](Request* r) { r->mutable_constraint()->set_regex("a*"); }, kMissing, "constraint"},
      {"top_logprobs", [](Request* r) { r->mutable_output()->set_top_logprobs(0); }, kMissing,
       "output.top_logprobs"},
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

}  // namespace
}  // namespace dflash::integration
