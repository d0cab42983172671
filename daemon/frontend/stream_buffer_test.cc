#include "daemon/frontend/stream_buffer.h"

#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

StepOutput Step(std::vector<int32_t> tokens, std::string text, std::vector<Round> rounds = {}) {
  return {std::move(tokens), std::move(text), std::move(rounds), {}, {}};
}

OutputChunk NextChunk(StreamBuffer& buffer) {
  std::optional<StreamEvent> event = buffer.Next();
  EXPECT_TRUE(event.has_value() && std::holds_alternative<OutputChunk>(*event));
  return event.has_value() ? std::get<OutputChunk>(*event) : OutputChunk();
}

TEST(StreamBuffer, AFastReaderGetsEveryStep) {
  StreamBuffer buffer({});
  EXPECT_FALSE(buffer.Next().has_value());
  ASSERT_TRUE(buffer.AddTokens(Step({10}, "a")).ok());
  OutputChunk first = NextChunk(buffer);
  EXPECT_EQ(first.first_token_offset, 0);
  EXPECT_THAT(first.tokens, ElementsAre(10));
  EXPECT_THAT(first.steps, IsEmpty());
  ASSERT_TRUE(buffer.AddTokens(Step({11, 12}, "bc", {{15, 1}})).ok());
  OutputChunk second = NextChunk(buffer);
  EXPECT_EQ(second.first_token_offset, 1);
  EXPECT_EQ(second.text, "bc");
  ASSERT_EQ(second.steps.size(), 1u);
  EXPECT_EQ(second.steps[0].accepted, 1);
  EXPECT_EQ(second.steps[0].first_token_offset, 1);
  EXPECT_EQ(second.steps[0].token_count, 2);
  buffer.AddFinished({});
  EXPECT_TRUE(std::holds_alternative<FinishedOutput>(buffer.Next().value()));
  EXPECT_FALSE(buffer.Next().has_value());
}

StepOutput PromptPlaces(size_t count, float first) {
  StepOutput output;
  for (size_t i = 0; i < count; ++i)
    output.prompt_log_probs.push_back({.log_prob = first - static_cast<float>(i), .top = {}});
  return output;
}

// However many there are, they come first, in pieces, and make nobody a slow reader.
TEST(StreamBuffer, LogProbabilitiesOfThePromptComeInPieces) {
  StreamBuffer buffer({.max_unsent_bytes = 64});
  ASSERT_TRUE(buffer.AddTokens(PromptPlaces(200, 0)).ok());
  ASSERT_TRUE(buffer.AddTokens(PromptPlaces(200, -200)).ok());
  ASSERT_TRUE(buffer.AddTokens(Step({10}, "a")).ok());
  int64_t place = 0;
  for (const size_t size : {256, 144}) {
    const OutputChunk chunk = NextChunk(buffer);
    EXPECT_EQ(chunk.first_prompt_position, place + 1);
    EXPECT_THAT(chunk.tokens, IsEmpty());
    ASSERT_EQ(chunk.prompt_log_probs.size(), size);
    for (const PlaceLogProbs& log_probs : chunk.prompt_log_probs)
      EXPECT_EQ(log_probs.log_prob, -static_cast<float>(place++));
  }
  const OutputChunk chunk = NextChunk(buffer);
  EXPECT_THAT(chunk.tokens, ElementsAre(10));
  EXPECT_THAT(chunk.prompt_log_probs, IsEmpty());
  EXPECT_EQ(buffer.AddTokens(Step({}, std::string(65, 'x'))).code(), absl::StatusCode::kResourceExhausted);
}

TEST(StreamBuffer, ASlowReaderGetsThemMergedWithEveryRound) {
  StreamBuffer buffer({});
  ASSERT_TRUE(buffer.AddTokens(Step({10}, "a")).ok());
  ASSERT_TRUE(buffer.AddTokens(Step({11, 12, 13}, "bcd", {{15, 2}})).ok());
  ASSERT_TRUE(buffer.AddTokens(Step({14}, "", {{15, 0}})).ok());
  buffer.AddFinished({});
  const OutputChunk chunk = NextChunk(buffer);
  EXPECT_EQ(chunk.first_token_offset, 0);
  EXPECT_THAT(chunk.tokens, ElementsAre(10, 11, 12, 13, 14));
  EXPECT_EQ(chunk.text, "abcd");
  ASSERT_EQ(chunk.steps.size(), 2u);
  EXPECT_EQ(chunk.steps[0].first_token_offset, 1);
  EXPECT_EQ(chunk.steps[0].token_count, 3);
  EXPECT_EQ(chunk.steps[1].first_token_offset, 4);
  EXPECT_EQ(chunk.steps[1].drafted, 15);
  EXPECT_TRUE(std::holds_alternative<FinishedOutput>(buffer.Next().value()));
}

TEST(StreamBuffer, LeavesOutWhatIsNotWanted) {
  StreamBuffer buffer({.text = true, .tokens = false, .steps = false});
  ASSERT_TRUE(buffer.AddTokens(Step({10}, "")).ok());
  EXPECT_FALSE(buffer.Next().has_value()) << "nothing to say";
  ASSERT_TRUE(buffer.AddTokens(Step({11, 12}, "bc", {{15, 1}})).ok());
  const OutputChunk chunk = NextChunk(buffer);
  EXPECT_EQ(chunk.first_token_offset, 1);
  EXPECT_THAT(chunk.tokens, IsEmpty());
  EXPECT_THAT(chunk.steps, IsEmpty());
  EXPECT_EQ(chunk.text, "bc");
}

TEST(StreamBuffer, BoundsWhatWaits) {
  StreamBuffer buffer({.text = true, .tokens = true, .steps = true, .max_unsent_bytes = 64});
  ASSERT_TRUE(buffer.AddTokens(Step({1, 2}, std::string(50, 'x'))).ok());
  EXPECT_EQ(buffer.unsent_bytes(), 58u);
  const absl::Status full = buffer.AddTokens(Step({3}, "yyyyy"));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(full).reason, "SLOW_CONSUMER");
  EXPECT_THAT(NextChunk(buffer).tokens, ElementsAre(1, 2));
  EXPECT_TRUE(buffer.AddTokens(Step({3}, "yyyyy")).ok());
}

TEST(StreamBuffer, TakesTextApart) {
  StreamBuffer buffer({});
  buffer.SetParser(std::make_unique<ChatOutputParser>(
      ChatOutputParser::Options{.begins_in_reasoning = true, .tools = {}}));
  ASSERT_TRUE(buffer.AddTokens(Step({1}, "hm\n</thi")).ok());
  EXPECT_EQ(NextChunk(buffer).reasoning, "hm");
  ASSERT_TRUE(buffer.AddTokens(Step({2}, "nk>\n\nSo: <tool_call>{\"name\": \"f\"}")).ok());
  EXPECT_EQ(NextChunk(buffer).text, "So: ");
  ASSERT_TRUE(buffer.AddTokens(Step({3}, "</tool_call>\nx <too")).ok());
  const OutputChunk call = NextChunk(buffer);
  ASSERT_EQ(call.calls.size(), 1u);
  EXPECT_EQ(call.calls[0].name, "f");
  EXPECT_EQ(call.calls[0].arguments_json, "{}");
  buffer.AddFinished({});
  EXPECT_EQ(NextChunk(buffer).text, "<too");
  EXPECT_TRUE(std::holds_alternative<FinishedOutput>(buffer.Next().value()));
}

// What a client gets of parsed text.
struct Parts {
  std::string reasoning, text;
  std::vector<std::string> calls;
  void Add(const OutputChunk& chunk) {
    reasoning += chunk.reasoning;
    text += chunk.text;
    for (const ToolCall& call : chunk.calls) calls.push_back(call.name + call.arguments_json);
  }
  bool operator==(const Parts&) const = default;
};

TEST(StreamBuffer, TakesTextApartBehindWhateverWasSent) {
  const std::string written =
      "hm\n\nso\n</think>\n\nI look.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": "
      "1}}\n</tool_call>\n"
      "Done <too";
  for (const bool thinks : {true, false}) {
    const auto stream = [&](std::string_view sent, std::string_view rest, bool finish) {
      StreamBuffer buffer({});
      buffer.SetParser(std::make_unique<ChatOutputParser>(
          ChatOutputParser::Options{.begins_in_reasoning = thinks, .tools = {}}));
      buffer.GoOnBehind(sent);
      Parts parts;
      for (const char c : rest) {
        EXPECT_TRUE(buffer.AddTokens(Step({1}, std::string(1, c))).ok());
        parts.Add(NextChunk(buffer));
      }
      if (!finish) return parts;
      buffer.AddFinished({});
      while (const std::optional<StreamEvent> event = buffer.Next()) {
        if (const auto* chunk = std::get_if<OutputChunk>(&*event)) parts.Add(*chunk);
      }
      return parts;
    };
    const Parts whole = stream("", written, true);
    EXPECT_EQ(whole.calls.size(), 1u);
    EXPECT_EQ(whole.reasoning, thinks ? "hm\n\nso" : "");
    for (size_t cut = 0; cut <= written.size(); ++cut) {
      Parts both = stream("", written.substr(0, cut), false);
      const Parts rest = stream(written.substr(0, cut), written.substr(cut), true);
      both.reasoning += rest.reasoning;
      both.text += rest.text;
      both.calls.insert(both.calls.end(), rest.calls.begin(), rest.calls.end());
      EXPECT_EQ(both, whole) << "thinks " << thinks << ", cut at " << cut;
    }
  }
}

TEST(StreamBuffer, OffsetsBeginWhereTheOutputGoesOn) {
  StreamBuffer buffer({.first_token = 7});
  ASSERT_TRUE(buffer.AddTokens(Step({1, 2}, "", {{3, 1}})).ok());
  const OutputChunk chunk = NextChunk(buffer);
  EXPECT_EQ(chunk.first_token_offset, 7);
  EXPECT_EQ(chunk.steps[0].first_token_offset, 7);
}

}  // namespace
}  // namespace dflash
