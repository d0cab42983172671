#include "daemon/rpc/convert.h"

#include <functional>

#include "daemon/request/request_error.h"
#include "daemon/rpc/grpc_status.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FromMessage, MessagesToolsAndCallsAreCounted) {
  v1::ChatPrompt chat;
  for (int i = 0; i < 4096; ++i) {
    chat.add_messages();
    chat.add_tools_json("{}");
    if (i > 0) chat.mutable_messages(1)->add_tool_calls();
  }
  chat.mutable_messages(2)->add_tool_calls();
  ASSERT_TRUE(FromMessage(chat).ok());
  const auto field = [](const v1::ChatPrompt& message) {
    const absl::Status status = FromMessage(message).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("at most 4096"));
    return DetailsOf(status).field;
  };
  v1::ChatPrompt more = chat;
  more.mutable_messages(2)->add_tool_calls();
  EXPECT_EQ(field(more), "chat.messages[2].tool_calls");
  more = chat;
  more.add_tools_json("{}");
  EXPECT_EQ(field(more), "chat.tools_json");
  more = chat;
  more.add_messages();
  EXPECT_EQ(field(more), "chat.messages");
}

TEST(FromMessage, RefusesWhatIsNotBuiltByName) {
  using Change = std::function<void(v1::GenerateRequest&)>;
  const struct {
    const char* field;
    Change change;
  } cases[] = {
      {"constraint.regex", [](auto& r) { r.mutable_constraint()->set_regex("a"); }},
      {"constraint.ebnf", [](auto& r) { r.mutable_constraint()->set_ebnf("root"); }},
      {"output.min_chunk_interval_ms", [](auto& r) { r.mutable_output()->set_min_chunk_interval_ms(5); }},
      {"speculation.mode",
       [](auto& r) { r.mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH_TREE); }},
      {"speculation.mode", [](auto& r) { r.mutable_speculation()->set_mode(v1::SPECULATION_MODE_MTP); }},
      {"speculation.tree_nodes", [](auto& r) { r.mutable_speculation()->set_tree_nodes(32); }},
      {"sampling.beam_width", [](auto& r) { r.mutable_sampling()->set_beam_width(4); }},
      {"chat.messages[1].images",
       [](auto& r) {
         r.mutable_chat()->add_messages();
         r.mutable_chat()->add_messages()->add_images("png");
       }},
  };
  for (const auto& c : cases) {
    v1::GenerateRequest request;
    request.set_text("hello");
    c.change(request);
    const absl::Status status = FromMessage(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << c.field;
    EXPECT_EQ(DetailsOf(status).field, c.field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

TEST(FromMessage, AcceptsNeutralValues) {
  v1::GenerateRequest request;
  request.set_text("hello");
  v1::Sampling* sampling = request.mutable_sampling();
  sampling->set_repetition_penalty(1);
  sampling->set_frequency_penalty(0);
  sampling->set_presence_penalty(0);
  sampling->set_n(1);
  sampling->set_beam_width(1);
  request.mutable_stopping()->set_min_tokens(0);
  request.mutable_constraint();
  request.mutable_output()->set_min_chunk_interval_ms(0);
  request.mutable_scheduling()->set_priority(0);
  request.mutable_scheduling()->set_no_prefix_cache(true);
  EXPECT_TRUE(FromMessage(request).ok());
}

TEST(FromMessage, TakesLogProbabilitiesOfPrompts) {
  v1::GenerateRequest request;
  request.set_text("hello");
  EXPECT_FALSE(FromMessage(request)->prompt_logprobs.has_value());
  request.mutable_output()->set_prompt_logprobs(0);
  EXPECT_EQ(FromMessage(request)->prompt_logprobs, 0u);
}

TEST(ToMessage, AChunkOfThePromptSaysItsPlace) {
  OutputChunk chunk;
  chunk.first_prompt_position = 257;
  chunk.prompt_log_probs = {{.log_prob = -1.5f, .top = {{.token = 7, .log_prob = -0.5f}}},
                            {.log_prob = -2, .top = {}}};
  const v1::Chunk message = ToMessage(chunk, 0);
  EXPECT_EQ(message.first_prompt_position(), 257u);
  ASSERT_EQ(message.prompt_logprobs_size(), 2);
  EXPECT_EQ(message.prompt_logprobs(0).logprob(), -1.5f);
  EXPECT_EQ(message.prompt_logprobs(0).top(0).token_id(), 7u);
  EXPECT_EQ(message.prompt_logprobs(1).top_size(), 0);
  EXPECT_EQ(message.logprobs_size() + message.token_ids_size(), 0);
}

TEST(FromMessage, TakesChoicesLabelsAndBeginnings) {
  v1::GenerateRequest request;
  request.set_text("hello");
  EXPECT_EQ(FromMessage(request)->n, 1u);
  EXPECT_FALSE(FromMessage(request)->resume.has_value());
  request.mutable_sampling()->set_n(0);
  request.add_metadata()->set_key("team");
  request.mutable_metadata(0)->set_value("x");
  request.mutable_resume()->add_output_token_ids(5);
  request.mutable_resume()->set_model_fingerprint("f");
  request.mutable_output()->set_parse(true);
  const auto taken = FromMessage(request);
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(taken->n, 0u);
  EXPECT_EQ(taken->labels[0].key, "team");
  EXPECT_THAT(taken->resume->output, ElementsAre(5));
  EXPECT_EQ(taken->resume->fingerprint, "f");
  EXPECT_TRUE(taken->parse);
  EXPECT_EQ(OutputOptionsOf(request).first_token, 1);
}

TEST(FromMessage, TakesConstraints) {
  v1::GenerateRequest request;
  request.set_text("hello");
  EXPECT_FALSE(FromMessage(request)->language.any());
  request.mutable_constraint()->set_json_schema("{}");
  EXPECT_EQ(FromMessage(request)->language.json_schema, "{}");
  request.mutable_constraint()->set_json_object(true);
  EXPECT_TRUE(FromMessage(request)->language.json_object);
  request.mutable_constraint()->mutable_choice()->add_choices("a");
  EXPECT_THAT(FromMessage(request)->language.choices, ElementsAre("a"));
  request.mutable_constraint()->mutable_choice()->clear_choices();
  EXPECT_EQ(DetailsOf(FromMessage(request).status()).field, "constraint.choice.choices");
  request.mutable_constraint()->set_json_object(false);
  EXPECT_EQ(DetailsOf(FromMessage(request).status()).field, "constraint.json_object");
  request.mutable_constraint()->set_json_schema("");
  EXPECT_EQ(DetailsOf(FromMessage(request).status()).field, "constraint.json_schema");
}

TEST(FromMessage, RefusesWhatItDoesNotKnow) {
  v1::GenerateRequest request;
  request.set_text("hello");
  request.mutable_speculation()->set_mode(static_cast<v1::SpeculationMode>(77));
  EXPECT_EQ(DetailsOf(FromMessage(request).status()).field, "speculation.mode");
}

TEST(FromMessage, TakesWhatTheCacheShallDo) {
  v1::GenerateRequest request;
  request.set_text("hello");
  EXPECT_TRUE(FromMessage(request)->use_prefix_cache);
  request.mutable_scheduling()->set_no_prefix_cache(true);
  request.mutable_scheduling()->set_cache_salt("tenant");
  EXPECT_FALSE(FromMessage(request)->use_prefix_cache);
  EXPECT_EQ(FromMessage(request)->cache_salt, "tenant");
}

TEST(FromMessage, TellsUnsetFromZero) {
  v1::GenerateRequest request;
  request.mutable_tokens()->add_ids(4294967295u);
  auto unset = FromMessage(request);
  ASSERT_TRUE(unset.ok());
  EXPECT_FALSE(unset->temperature.has_value());
  EXPECT_FALSE(unset->seed.has_value());
  EXPECT_FALSE(unset->max_tokens.has_value());
  EXPECT_THAT(std::get<TokenPrompt>(unset->prompt).ids, ElementsAre(4294967295u));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_seed(0);
  request.mutable_stopping()->set_max_tokens(0);
  auto zero = FromMessage(request);
  EXPECT_EQ(zero->temperature, 0.f);
  EXPECT_EQ(zero->seed, 0u);
  EXPECT_EQ(zero->max_tokens, 0u);
}

TEST(FromMessage, Chat) {
  v1::GenerateRequest request;
  v1::ChatMessage* turn = request.mutable_chat()->add_messages();
  turn->set_role("assistant");
  turn->set_content("x");
  turn->set_reasoning_content("");
  turn->add_tool_calls()->set_name("f");
  request.mutable_chat()->set_enable_thinking(false);
  const ChatPrompt chat = std::get<ChatPrompt>(FromMessage(request)->prompt);
  EXPECT_TRUE(chat.add_generation_prompt);
  EXPECT_EQ(chat.enable_thinking, false);
  EXPECT_FALSE(chat.preserve_thinking.has_value());
  EXPECT_EQ(chat.messages[0].reasoning_content, "");
  EXPECT_EQ(chat.messages[0].tool_calls[0].name, "f");
}

TEST(OutputOptionsOf, TokenPromptsGetNoText) {
  v1::GenerateRequest request;
  request.set_text("x");
  EXPECT_TRUE(OutputOptionsOf(request).text);
  request.mutable_tokens()->add_ids(1);
  EXPECT_FALSE(OutputOptionsOf(request).text);
  EXPECT_TRUE(OutputOptionsOf(request).tokens);
  EXPECT_TRUE(OutputOptionsOf(request).steps);
  request.mutable_output()->set_text(true);
  request.mutable_output()->set_step_info(false);
  EXPECT_TRUE(OutputOptionsOf(request).text);
  EXPECT_FALSE(OutputOptionsOf(request).steps);
}

TEST(ToMessage, FinishedTellsEndTokensFromAskedForOnes) {
  MetricRegistry registry;
  RequestMetrics request_metrics(&registry);
  RequestTimeline timeline(&request_metrics, absl::UnixEpoch());
  timeline.OnStarted(absl::UnixEpoch() + absl::Seconds(1), {.prompt_tokens = 3, .cached_tokens = 2});
  timeline.OnTokens(absl::UnixEpoch() + absl::Seconds(2), 1);
  FinishedOutput finished;
  finished.cause = StopCause::kStopToken;
  finished.matched_stop_token = 7;
  finished.rounds = 4;
  finished.accepted_tokens = 6;
  finished.accepted_per_position = {4, 2};
  timeline.OnFinished(absl::UnixEpoch() + absl::Seconds(5), finished);
  StreamFacts facts;
  facts.request.speculate = true;
  v1::Finished message = ToMessage(finished, facts, 2, timeline);
  EXPECT_EQ(message.reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(message.matched_stop_token(), 7u);
  EXPECT_EQ(message.speculation().mean_acceptance_length(), 2.5);
  EXPECT_THAT(message.speculation().accepted_per_position(), ElementsAre(4u, 2u));
  EXPECT_EQ(message.timings().queue_seconds(), 1);
  EXPECT_EQ(message.timings().time_to_first_token_seconds(), 2);
  EXPECT_EQ(message.timings().total_seconds(), 5);
  EXPECT_EQ(message.usage().cached_tokens(), 2u);
  facts.client_stop_ids = {7};
  EXPECT_EQ(ToMessage(finished, facts, 0, timeline).reason(), v1::FINISH_REASON_STOP_TOKEN);
}

TEST(ToGrpcStatus, CarriesDetails) {
  const grpc::Status status =
      ToGrpcStatus(WithDetails(absl::ResourceExhaustedError("full"), {.reason = "QUEUE_FULL",
                                                                      .field = "text",
                                                                      .retry_after = absl::Milliseconds(1500),
                                                                      .metadata = {{"limit", "4"}}}));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "full");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 8);
  ASSERT_EQ(details.details_size(), 3);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "dflashd");
  EXPECT_EQ(info.metadata().at("limit"), "4");
  google::rpc::BadRequest bad;
  ASSERT_TRUE(details.details(1).UnpackTo(&bad));
  EXPECT_EQ(bad.field_violations(0).field(), "text");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(details.details(2).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_EQ(DetailsOf(absl::InternalError("x")).reason, "BUG");
}

// A client's own words must not make the trailers too long for itself.
TEST(ToGrpcStatus, CutsLongMessages) {
  for (const std::string& word :
       {std::string("x"), std::string("\xc3\xbc"), std::string("\xf0\x9f\x98\x80")}) {
    std::string text;
    while (text.size() < 100'000) text += word;
    const grpc::Status status = ToGrpcStatus(BadParameter("chat", text));
    EXPECT_LE(status.error_message().size(), 1024u);
    EXPECT_GE(status.error_message().size(), 1000u);
    EXPECT_TRUE(status.error_message().ends_with(word + "...")) << status.error_message();
    EXPECT_LE(status.error_details().size(), 3000u);
  }
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(std::string(1024, 'x'))).error_message(),
            std::string(1024, 'x'));
}

}  // namespace
}  // namespace dflash
