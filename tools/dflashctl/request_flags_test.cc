#include "tools/dflashctl/request_flags.h"

#include <atomic>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/dflashctl/commands.h"

namespace dflash::ctl {
namespace {

using ::testing::ElementsAre;

v1::GenerateRequest RequestOf(std::vector<const char*> arguments) {
  RequestFlags flags;
  FlagParser parser("dflashctl test", "");
  flags.Register(&parser);
  arguments.insert(arguments.begin(), "dflashctl test");
  FlagParser::Outcome outcome;
  const absl::Status status = parser.Parse(static_cast<int>(arguments.size()), arguments.data(), &outcome);
  EXPECT_TRUE(status.ok()) << status;
  v1::GenerateRequest request;
  flags.Apply(&request);
  return request;
}

TEST(RequestFlags, WhatIsNotGivenIsNotSent) {
  const v1::GenerateRequest request = RequestOf({});
  EXPECT_FALSE(request.sampling().has_temperature());
  EXPECT_FALSE(request.sampling().has_top_p());
  EXPECT_FALSE(request.sampling().has_top_k());
  EXPECT_FALSE(request.sampling().has_min_p());
  EXPECT_FALSE(request.sampling().has_seed());
  EXPECT_FALSE(request.stopping().has_max_tokens());
  EXPECT_FALSE(request.speculation().has_max_draft_tokens());
  EXPECT_EQ(request.speculation().mode(), v1::SPECULATION_MODE_UNSPECIFIED);
}

TEST(RequestFlags, ZeroIsAValue) {
  const v1::GenerateRequest request =
      RequestOf({"--temperature", "0", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "0"});
  EXPECT_TRUE(request.sampling().has_temperature());
  EXPECT_TRUE(request.sampling().has_top_k());
  EXPECT_TRUE(request.sampling().has_top_p());
  EXPECT_TRUE(request.sampling().has_min_p());
  EXPECT_TRUE(request.sampling().has_seed());
}

TEST(RequestFlags, EveryFlagReachesItsField) {
  const v1::GenerateRequest request =
      RequestOf({"--temperature=0.7", "--top-p=0.9", "--top-k=20", "--min-p=0.05", "--seed=42",
                 "--max-tokens=64", "--speculation=off", "--max-draft-tokens=7"});
  EXPECT_FLOAT_EQ(request.sampling().temperature(), 0.7f);
  EXPECT_FLOAT_EQ(request.sampling().top_p(), 0.9f);
  EXPECT_EQ(request.sampling().top_k(), 20u);
  EXPECT_FLOAT_EQ(request.sampling().min_p(), 0.05f);
  EXPECT_EQ(request.sampling().seed(), 42u);
  EXPECT_EQ(request.stopping().max_tokens(), 64u);
  EXPECT_EQ(request.speculation().mode(), v1::SPECULATION_MODE_OFF);
  EXPECT_EQ(request.speculation().max_draft_tokens(), 7u);
  EXPECT_EQ(RequestOf({"--speculation=dflash"}).speculation().mode(), v1::SPECULATION_MODE_DFLASH);
}

TEST(RequestFlags, TheLargestSeedAndNothingBeyond) {
  EXPECT_EQ(RequestOf({"--seed=18446744073709551615"}).sampling().seed(), 18446744073709551615u);
  const auto refused = [](const char* argument) {
    RequestFlags flags;
    FlagParser parser("dflashctl test", "");
    flags.Register(&parser);
    const char* const arguments[] = {"dflashctl test", argument};
    FlagParser::Outcome outcome;
    return std::string(parser.Parse(2, arguments, &outcome).message());
  };
  EXPECT_EQ(refused("--seed=18446744073709551616"),
            "--seed must be a whole number from 0 to 18446744073709551615, not '18446744073709551616'");
  EXPECT_EQ(refused("--seed=-1"), "--seed must be a whole number from 0 to 18446744073709551615, not '-1'");
  EXPECT_EQ(refused("--timeout=0"), "--timeout must be a number from 0.001 to 1e+06, not '0'");
  EXPECT_EQ(refused("--top-p=1.0000001"), "--top-p must be a number from 0 to 1, not '1.0000001'");
}

TEST(ParseTokenIds, SeparatorsAndErrors) {
  const auto ids = ParseTokenIds(" 1,2 3\n4 ,\n5\t");
  ASSERT_TRUE(ids.ok());
  EXPECT_THAT(ids->ids(), ElementsAre(1u, 2u, 3u, 4u, 5u));
  EXPECT_EQ(ParseTokenIds("1 x2").status().message(), "'x2' is not a token id");
  EXPECT_EQ(ParseTokenIds("-1").status().message(), "'-1' is not a token id");
  EXPECT_EQ(ParseTokenIds("4294967296").status().message(), "'4294967296' is not a token id");
  for (const char* empty : {"1,,2", "1, ,2", ",1", "1,", " , ", "1 2 , "}) {
    EXPECT_EQ(ParseTokenIds(empty).status().message(), "'' is not a token id") << empty;
  }
  EXPECT_EQ(ParseTokenIds(" \n").status().message(), "no token ids");
}

TEST(CheckUtf8, NamesWhatIsBroken) {
  EXPECT_TRUE(CheckUtf8("grüß 😀", "x").ok());
  EXPECT_EQ(CheckUtf8("a\xff", "--message").message(), "--message is not valid UTF-8");
}

TEST(RunConcurrently, RunsEveryJobOnce) {
  std::vector<std::atomic<int>> runs(100);
  std::atomic<int> now = 0, most = 0;
  const grpc::Status status = RunConcurrently(100, 4, [&](int64_t index) {
    const int running = ++now;
    for (int seen = most; seen < running && !most.compare_exchange_weak(seen, running);) {
    }
    ++runs[static_cast<size_t>(index)];
    --now;
    return grpc::Status::OK;
  });
  EXPECT_TRUE(status.ok());
  for (const auto& count : runs) EXPECT_EQ(count, 1);
  EXPECT_LE(most, 4);
}

TEST(RunConcurrently, StopsAtTheFirstError) {
  std::atomic<int> runs = 0;
  const grpc::Status status = RunConcurrently(100, 1, [&](int64_t index) {
    ++runs;
    return index == 3 ? grpc::Status(grpc::StatusCode::INTERNAL, "third") : grpc::Status::OK;
  });
  EXPECT_EQ(status.error_message(), "third");
  EXPECT_EQ(runs, 4);
}

}  // namespace
}  // namespace dflash::ctl
