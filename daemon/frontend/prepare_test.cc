#include "daemon/frontend/prepare.h"

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One token per byte; a chat is its contents.
class ByteEncoder : public PromptEncoder {
 public:
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const override {
    return std::vector<int32_t>(text.begin(), text.end());
  }
  absl::StatusOr<std::vector<int32_t>> EncodeChat(const ChatPrompt& chat, size_t max_bytes) const override {
    std::string text;
    for (const ChatMessage& message : chat.messages) text += message.content;
    if (text.size() > max_bytes) return absl::OutOfRangeError(absl::StrCat("it has ", text.size(), " bytes"));
    return EncodeText(text);
  }
  std::optional<int32_t> FindToken(const std::string& content) const override {
    if (content == "<think>") return 700;
    if (content == "</think>" && has_close) return 701;
    return std::nullopt;
  }
  size_t MaxBytes(int64_t tokens) const override { return static_cast<size_t>(tokens); }
  bool has_close = true;
};

GroupInfo Info() {
  GroupInfo info;
  info.vocabulary_size = 1000;
  info.max_context_tokens = 100;
  info.dflash_block_size = 16;
  info.speculate_by_default = true;
  info.eos_token_ids = {998, 999};
  info.default_temperature = 0.6f;
  info.default_top_k = 20;
  info.default_top_p = 0.95f;
  return info;
}

ClientRequest TextRequest(const std::string& text = "hello") {
  ClientRequest request;
  request.prompt = TextPrompt{text};
  return request;
}

absl::StatusOr<GroupRequest> CheckAndPrepare(const ClientRequest& request, const GroupInfo& info = Info()) {
  if (absl::Status status = CheckRequest(request, info); !status.ok()) return status;
  return Prepare(request, info, ByteEncoder(), 42);
}

TEST(Prepare, FillsInDefaults) {
  const auto prepared = CheckAndPrepare(TextRequest());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_THAT(prepared->prompt_tokens, ElementsAre('h', 'e', 'l', 'l', 'o'));
  EXPECT_EQ(prepared->max_tokens, 95);
  EXPECT_EQ(prepared->temperature, 0.6f);
  EXPECT_EQ(prepared->top_k, 20);
  EXPECT_EQ(prepared->top_p, 0.95f);
  EXPECT_EQ(prepared->min_p, 0);
  EXPECT_EQ(prepared->seed, 42u);
  EXPECT_THAT(prepared->stop_token_ids, ElementsAre(998, 999));
  EXPECT_TRUE(prepared->speculate);
  EXPECT_EQ(prepared->max_draft_tokens, 0);
  EXPECT_TRUE(prepared->return_text);
}

TEST(Prepare, TakesWhatIsSet) {
  ClientRequest request;
  request.prompt = TokenPrompt{{1, 999}};
  request.temperature = 0;
  request.top_k = 0;
  request.top_p = 1;
  request.min_p = 0.25f;
  request.seed = 7;
  request.max_tokens = 98;
  request.stop_token_ids = {5};
  request.stop_strings = {"END"};
  request.ignore_eos = true;
  request.speculation = SpeculationChoice::kOff;
  request.max_draft_tokens = 99;
  request.special_tokens_in_text = true;
  request.use_prefix_cache = false;
  request.cache_salt = "tenant";
  const auto prepared = CheckAndPrepare(request);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->temperature, 0);
  EXPECT_EQ(prepared->top_k, 0);
  EXPECT_EQ(prepared->top_p, 1);
  EXPECT_EQ(prepared->min_p, 0.25f);
  EXPECT_EQ(prepared->seed, 7u);
  EXPECT_EQ(prepared->max_tokens, 98);
  EXPECT_THAT(prepared->stop_token_ids, ElementsAre(5));
  EXPECT_THAT(prepared->stop_strings, ElementsAre("END"));
  EXPECT_FALSE(prepared->speculate);
  EXPECT_EQ(prepared->max_draft_tokens, 15) << "more than the block gives means all of it";
  EXPECT_FALSE(prepared->return_text) << "a token prompt gets tokens";
  EXPECT_TRUE(prepared->keep_special_tokens);
  EXPECT_FALSE(prepared->use_prefix_cache);
  EXPECT_EQ(prepared->cache_salt, "tenant");
}

TEST(Prepare, WithoutADrafterItRunsWithoutUnlessStrict) {
  GroupInfo info = Info();
  info.dflash_block_size = 0;
  ClientRequest request = TextRequest();
  request.speculation = SpeculationChoice::kDFlash;
  EXPECT_FALSE(CheckAndPrepare(request, info)->speculate);
  request.strict_speculation = true;
  const absl::Status status = CheckAndPrepare(request, info).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(status).reason, "METHOD_NOT_LOADED");
}

TEST(Prepare, SpeculationOffOnTheServerCanBeAskedFor) {
  GroupInfo info = Info();
  info.speculate_by_default = false;
  ClientRequest request = TextRequest();
  EXPECT_FALSE(CheckAndPrepare(request, info)->speculate);
  request.speculation = SpeculationChoice::kDFlash;
  EXPECT_TRUE(CheckAndPrepare(request, info)->speculate);
}

TEST(Prepare, NamesTheFieldOfABadRequest) {
  const float nan = std::nanf("");
  const float inf = std::numeric_limits<float>::infinity();
  using Change = std::function<void(ClientRequest&)>;
  const struct {
    const char* field;
    Change change;
    const char* reason = "BAD_PARAMETER";
  } cases[] = {
      {"prompt", [](ClientRequest& r) { r.prompt = std::monostate(); }},
      {"text", [](ClientRequest& r) { r.prompt = TextPrompt{""}; }},
      {"tokens.ids", [](ClientRequest& r) { r.prompt = TokenPrompt{}; }},
      {"tokens.ids[2]",
       [](ClientRequest& r) {
         r.prompt = TokenPrompt{{0, 999, 1000}};
       }},
      {"tokens.ids[0]", [](ClientRequest& r) { r.prompt = TokenPrompt{{4294967295u}}; }},
      {"chat.messages", [](ClientRequest& r) { r.prompt = ChatPrompt{}; }},
      {"chat.messages[1].role",
       [](ClientRequest& r) {
         ChatPrompt chat;
         chat.messages = {{"user", "x", {}, {}}, {"", "y", {}, {}}};
         r.prompt = chat;
       }},
      {"chat",
       [](ClientRequest& r) {
         ChatPrompt chat;
         chat.messages = {{"user", "", {}, {}}};
         r.prompt = chat;
       }},
      {"sampling.temperature", [=](ClientRequest& r) { r.temperature = nan; }},
      {"sampling.temperature", [=](ClientRequest& r) { r.temperature = inf; }},
      {"sampling.temperature", [](ClientRequest& r) { r.temperature = -0.5f; }},
      {"sampling.temperature", [](ClientRequest& r) { r.temperature = 100.5f; }},
      {"sampling.temperature", [](ClientRequest& r) { r.temperature = 1e-7f; }},
      {"sampling.temperature", [](ClientRequest& r) { r.temperature = 1e-40f; }},
      {"sampling.top_p", [](ClientRequest& r) { r.top_p = 1e-40f; }},
      {"sampling.min_p", [](ClientRequest& r) { r.min_p = 1e-40f; }},
      {"sampling.top_p", [=](ClientRequest& r) { r.top_p = nan; }},
      {"sampling.top_p", [](ClientRequest& r) { r.top_p = 0; }},
      {"sampling.top_p", [](ClientRequest& r) { r.top_p = 1.01f; }},
      {"sampling.min_p", [=](ClientRequest& r) { r.min_p = -inf; }},
      {"sampling.min_p", [](ClientRequest& r) { r.min_p = 1.5f; }},
      {"sampling.top_k", [](ClientRequest& r) { r.top_k = 2147483648u; }},
      {"stopping.max_tokens", [](ClientRequest& r) { r.max_tokens = 0; }},
      {"stopping.max_tokens", [](ClientRequest& r) { r.max_tokens = 96; }, "CONTEXT_TOO_LONG"},
      {"stopping.max_tokens", [](ClientRequest& r) { r.max_tokens = 4294967295u; }, "CONTEXT_TOO_LONG"},
      {"text", [](ClientRequest& r) { r.prompt = TextPrompt{std::string(100, 'x')}; }, "CONTEXT_TOO_LONG"},
      {"tokens.ids", [](ClientRequest& r) { r.prompt = TokenPrompt{std::vector<uint32_t>(101, 1)}; },
       "CONTEXT_TOO_LONG"},
      {"stopping.strings", [](ClientRequest& r) { r.stop_strings.resize(17, "x"); }},
      {"stopping.strings[1]",
       [](ClientRequest& r) {
         r.stop_strings = {"x", ""};
       }},
      {"stopping.strings[0]", [](ClientRequest& r) { r.stop_strings = {std::string(257, 'x')}; }},
      {"stopping.token_ids", [](ClientRequest& r) { r.stop_token_ids.resize(65, 1); }},
      {"stopping.token_ids[1]",
       [](ClientRequest& r) {
         r.stop_token_ids = {1, 1000};
       }},
      {"speculation.max_draft_tokens", [](ClientRequest& r) { r.max_draft_tokens = 0; }},
  };
  for (const auto& c : cases) {
    ClientRequest request = TextRequest();
    c.change(request);
    const absl::Status status = CheckAndPrepare(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << ": " << status;
    EXPECT_EQ(DetailsOf(status).field, c.field) << status;
    EXPECT_EQ(DetailsOf(status).reason, c.reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

TEST(Prepare, BoundsAreInclusive) {
  ClientRequest request = TextRequest(std::string(99, 'x'));
  EXPECT_EQ(CheckAndPrepare(request)->max_tokens, 1);
  request = TextRequest();
  request.temperature = 100;
  request.top_p = 1;
  request.min_p = 1;
  request.top_k = 2147483647u;
  request.max_tokens = 95;
  request.stop_strings.resize(16, std::string(256, 'x'));
  EXPECT_TRUE(CheckAndPrepare(request).ok());
}

// The encoder of this test has one token a byte, and the limit is 100 tokens with one of output.
TEST(CheckTextFits, TellsByTheBytesAlone) {
  const ByteEncoder encoder;
  EXPECT_TRUE(CheckTextFits(TextPrompt{std::string(99, 'x')}, Info(), encoder).ok());
  EXPECT_TRUE(CheckTextFits(TokenPrompt{std::vector<uint32_t>(1000, 1)}, Info(), encoder).ok());
  const absl::Status status = CheckTextFits(TextPrompt{std::string(100, 'x')}, Info(), encoder);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailsOf(status).reason, "CONTEXT_TOO_LONG");
  EXPECT_EQ(DetailsOf(status).field, "text");
  EXPECT_THAT(DetailsOf(status).metadata, ElementsAre(std::pair<std::string, std::string>("limit", "100")));
  EXPECT_EQ(status.message(),
            "text: the prompt has 100 bytes, no text over 99 fits in the context limit of 100 tokens");
}

TEST(Prepare, AChatIsMeasuredWhenItIsRendered) {
  ClientRequest request;
  ChatPrompt chat;
  chat.messages = {{"user", std::string(60, 'x'), {}, {}}, {"user", std::string(39, 'y'), {}, {}}};
  request.prompt = chat;
  EXPECT_TRUE(Prepare(request, Info(), ByteEncoder(), 1).ok());
  chat.messages[1].content += 'z';
  request.prompt = chat;
  const absl::Status status = Prepare(request, Info(), ByteEncoder(), 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailsOf(status).reason, "CONTEXT_TOO_LONG");
  EXPECT_EQ(DetailsOf(status).field, "chat");
  EXPECT_EQ(status.message(),
            "chat: it has 100 bytes, no text over 99 fits in the context limit of 100 tokens");
}

TEST(CheckRequestId, LettersAndLength) {
  EXPECT_TRUE(CheckRequestId("").ok());
  EXPECT_TRUE(CheckRequestId("aZ09._:-").ok());
  EXPECT_TRUE(CheckRequestId(std::string(128, 'a')).ok());
  for (const std::string& id :
       {std::string(129, 'a'), std::string("a b"), std::string("a/b"), std::string("ä")}) {
    EXPECT_EQ(DetailsOf(CheckRequestId(id)).field, "request_id") << id;
    EXPECT_EQ(CheckRequestId(id).code(), absl::StatusCode::kInvalidArgument) << id;
  }
}

TEST(CheckModel, OnlyTheServedOne) {
  EXPECT_TRUE(CheckModel("", "tiny").ok());
  EXPECT_TRUE(CheckModel("tiny", "tiny").ok());
  const absl::Status status = CheckModel("huge", "tiny");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DetailsOf(status).reason, "MODEL_NOT_FOUND");
}

TEST(SpeculationPolicy, AppliesToThoseThatDoNotChooseOrToAll) {
  GroupInfo group;
  group.dflash_block_size = 16;
  group.speculate_by_default = true;
  const auto apply = [&](const SpeculationPolicy& policy, ClientRequest request) {
    GroupInfo info = group;
    EXPECT_TRUE(Apply(policy, &request, &info).ok());
    return std::pair(request, info.speculate_by_default);
  };
  ClientRequest request, chooses;
  chooses.speculation = SpeculationChoice::kDFlash;
  chooses.max_draft_tokens = 9;
  EXPECT_TRUE(apply({}, request).second);
  EXPECT_EQ(apply({}, request).first.max_draft_tokens, std::nullopt);
  EXPECT_FALSE(apply({.speculate = false}, request).second);
  EXPECT_EQ(apply({.speculate = false}, chooses).first.speculation, SpeculationChoice::kDFlash);
  EXPECT_EQ(
      apply({.speculate = false, .max_draft_tokens = 0, .off_for_all = true}, chooses).first.speculation,
      SpeculationChoice::kOff);
  EXPECT_EQ(
      apply({.speculate = {}, .max_draft_tokens = 5, .off_for_all = false}, request).first.max_draft_tokens,
      5u);
  EXPECT_EQ(
      apply({.speculate = {}, .max_draft_tokens = 5, .off_for_all = false}, chooses).first.max_draft_tokens,
      5u);
  EXPECT_EQ(
      apply({.speculate = {}, .max_draft_tokens = 12, .off_for_all = false}, chooses).first.max_draft_tokens,
      9u);
  chooses.strict_speculation = true;
  EXPECT_EQ(Apply({.speculate = false, .max_draft_tokens = 0, .off_for_all = true}, &chooses, &group).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Prepare, TakesOverWhatChangesTheChoice) {
  ClientRequest request = TextRequest();
  auto prepared = CheckAndPrepare(request);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->repetition_penalty, 1);
  EXPECT_EQ(prepared->frequency_penalty, 0);
  EXPECT_EQ(prepared->log_probs, 0);
  EXPECT_EQ(prepared->thinking.max_tokens, -1);
  request.repetition_penalty = 1.5f;
  request.frequency_penalty = -2;
  request.presence_penalty = 2;
  request.logit_bias = {{5, -100}, {999, 100}};
  request.bad_words = {{1, 2, 3}, {4}};
  request.min_tokens = 95;
  request.include_stop_in_text = true;
  request.top_logprobs = 0;
  request.max_thinking_tokens = 0;
  prepared = CheckAndPrepare(request);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->repetition_penalty, 1.5f);
  EXPECT_EQ(prepared->frequency_penalty, -2);
  EXPECT_EQ(prepared->presence_penalty, 2);
  ASSERT_EQ(prepared->logit_bias.size(), 2u);
  EXPECT_EQ(prepared->logit_bias[1].token, 999);
  EXPECT_EQ(prepared->logit_bias[1].bias, 100);
  EXPECT_THAT(prepared->bad_words, ElementsAre(ElementsAre(1, 2, 3), ElementsAre(4)));
  EXPECT_EQ(prepared->min_tokens, 95);
  EXPECT_TRUE(prepared->include_stop_in_text);
  EXPECT_EQ(prepared->log_probs, 1);
  EXPECT_EQ(prepared->thinking.max_tokens, 0);
  EXPECT_EQ(prepared->thinking.open, 700);
  EXPECT_EQ(prepared->thinking.close, 701);
}

TEST(Prepare, NamesTheParameterThatIsOutOfRange) {
  const struct {
    const char* field;
    std::function<void(ClientRequest&)> change;
  } cases[] = {
      {"sampling.repetition_penalty", [](auto& r) { r.repetition_penalty = 0; }},
      {"sampling.repetition_penalty", [](auto& r) { r.repetition_penalty = 1e-38f; }},
      {"sampling.repetition_penalty", [](auto& r) { r.repetition_penalty = 1e-44f; }},
      {"sampling.repetition_penalty", [](auto& r) { r.repetition_penalty = 0.0099f; }},
      {"sampling.repetition_penalty", [](auto& r) { r.repetition_penalty = 10.5f; }},
      {"sampling.frequency_penalty", [](auto& r) { r.frequency_penalty = -2.5f; }},
      {"sampling.presence_penalty", [](auto& r) { r.presence_penalty = NAN; }},
      {"sampling.logit_bias", [](auto& r) { r.logit_bias.resize(1025); }},
      {"sampling.logit_bias[1].token_id",
       [](auto& r) {
         r.logit_bias = {{1, 0}, {1000, 0}};
       }},
      {"sampling.logit_bias[1].token_id",
       [](auto& r) {
         r.logit_bias = {{1, 0}, {1, 1}};
       }},
      {"sampling.logit_bias[0].bias",
       [](auto& r) {
         r.logit_bias = {{1, 101}};
       }},
      {"stopping.bad_words", [](auto& r) { r.bad_words.assign(65, {1}); }},
      {"stopping.bad_words[1].ids",
       [](auto& r) {
         r.bad_words = {{1}, {}};
       }},
      {"stopping.bad_words[0].ids", [](auto& r) { r.bad_words = {std::vector<uint32_t>(33, 1)}; }},
      {"stopping.bad_words[0].ids[1]",
       [](auto& r) {
         r.bad_words = {{1, 1000}};
       }},
      {"stopping.min_tokens", [](auto& r) { r.min_tokens = 96; }},
      {"output.top_logprobs", [](auto& r) { r.top_logprobs = 21; }},
      {"output.prompt_logprobs", [](auto& r) { r.prompt_logprobs = 21; }},
      {"output.prompt_logprobs",
       [](auto& r) {
         r.prompt_logprobs = 0;
         r.seed = 1;
         r.resume = {{1, 2, 3}, FingerprintOf(Info())};
       }},
      {"sampling.n", [](auto& r) { r.n = 0; }},
      {"sampling.n", [](auto& r) { r.n = 17; }},
      {"metadata", [](auto& r) { r.labels.resize(17); }},
      {"metadata[0].key",
       [](auto& r) {
         r.labels = {{"", "x"}};
       }},
      {"metadata[1].key",
       [](auto& r) {
         r.labels = {{"a", "x"}, {std::string(65, 'k'), ""}};
       }},
      {"metadata[1].key",
       [](auto& r) {
         r.labels = {{"a", "x"}, {"a", "y"}};
       }},
      {"metadata[0].value",
       [](auto& r) {
         r.labels = {{"a", std::string(257, 'v')}};
       }},
      {"output.parse",
       [](auto& r) {
         r.parse = true;
         r.text = false;
       }},
      {"resume.output_token_ids", [](auto& r) { r.resume.emplace(); }},
      {"resume.output_token_ids[1]",
       [](auto& r) {
         r.resume = {{1, 1000}, ""};
       }},
      {"sampling.seed",
       [](auto& r) {
         r.resume = {{1}, FingerprintOf(Info())};
       }},
      {"sampling.n",
       [](auto& r) {
         r.resume = {{1}, FingerprintOf(Info())};
         r.n = 2;
       }},
      {"resume.output_token_ids",
       [](auto& r) {
         r.resume = {{1, 2, 3}, FingerprintOf(Info())};
         r.seed = 1;
         r.max_tokens = 2;
       }},
  };
  for (const auto& c : cases) {
    ClientRequest request = TextRequest();
    c.change(request);
    const absl::Status status = CheckAndPrepare(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_EQ(DetailsOf(status).field, c.field);
  }
}

TEST(Prepare, LogProbabilitiesOfAPromptAreBounded) {
  ClientRequest request = TextRequest();
  request.prompt_logprobs = 20;
  EXPECT_EQ(CheckAndPrepare(request)->prompt_log_probs, 21);
  GroupInfo info = Info();
  info.max_context_tokens = 1 << 20;
  const int64_t most = RequestLimits::kMaxPromptLogProbs / 21;
  request.prompt = TextPrompt{std::string(static_cast<size_t>(most), 'x')};
  EXPECT_TRUE(CheckAndPrepare(request, info).ok());
  request.prompt = TextPrompt{std::string(static_cast<size_t>(most) + 1, 'x')};
  const absl::Status status = CheckAndPrepare(request, info).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailsOf(status).field, "output.prompt_logprobs");
  request.prompt_logprobs = 0;
  EXPECT_EQ(CheckAndPrepare(request, info)->prompt_log_probs, 1);
}

TEST(Prepare, ALimitOfThinkingNeedsItsMarks) {
  ClientRequest request = TextRequest();
  request.max_thinking_tokens = 3;
  ByteEncoder encoder;
  encoder.has_close = false;
  const absl::Status status = Prepare(request, Info(), encoder, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(status).field, "stopping.max_thinking_tokens");
}

TEST(Prepare, AnOutputGoesOnOnlyWhereItsModelIs) {
  ClientRequest request = TextRequest();
  request.seed = 3;
  request.resume = {.output = {7, 8}, .fingerprint = FingerprintOf(Info())};
  const auto prepared = CheckAndPrepare(request);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_THAT(prepared->output_tokens, ElementsAre(7, 8));
  EXPECT_FALSE(prepared->report_sent_text);
  request.parse = true;
  EXPECT_TRUE(CheckAndPrepare(request)->report_sent_text) << "the parser has to know it";
  for (const auto& change : std::vector<std::function<void(GroupInfo&)>>{
           [](GroupInfo& info) { info.feature_contract = "other"; },
           [](GroupInfo& info) { info.model.target_revision = "other"; },
           [](GroupInfo& info) { info.backend = "other"; }, [](GroupInfo& info) { info.ranks = 2; }}) {
    GroupInfo other = Info();
    change(other);
    const absl::Status status = CheckAndPrepare(request, other).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(DetailsOf(status).reason, "REVISION_MISMATCH");
  }
}

TEST(Prepare, ChoicesHaveSeedsOfTheirOwn) {
  EXPECT_EQ(SeedOfChoice(42, 0), 42u);
  std::set<uint64_t> seeds;
  for (uint64_t seed : {0u, 1u, 42u}) {
    for (uint32_t index = 0; index < 16; ++index) seeds.insert(SeedOfChoice(seed, index));
  }
  EXPECT_EQ(seeds.size(), 48u);
}

TEST(Prepare, KnowsWhetherThePromptHasOpenedThinking) {
  ClientRequest request;
  request.prompt = TokenPrompt{{1, 700, 2}};
  EXPECT_TRUE(CheckAndPrepare(request)->thinks);
  request.prompt = TokenPrompt{{1, 700, 701, 2}};
  EXPECT_FALSE(CheckAndPrepare(request)->thinks);
}

}  // namespace
}  // namespace dflash
