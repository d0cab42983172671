#include "tools/dflashctl/connection.h"

#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

v1::GenerateResponse Started(uint64_t seq) {
  v1::GenerateResponse response;
  response.set_seq(seq);
  response.mutable_started();
  return response;
}

v1::GenerateResponse ChunkOf(uint64_t seq, uint32_t offset, uint32_t tokens) {
  v1::GenerateResponse response;
  response.set_seq(seq);
  response.mutable_chunk()->set_first_token_offset(offset);
  for (uint32_t i = 0; i < tokens; ++i) response.mutable_chunk()->add_token_ids(i);
  return response;
}

v1::GenerateResponse FinishedWith(uint64_t seq, uint32_t tokens) {
  v1::GenerateResponse response;
  response.set_seq(seq);
  response.mutable_finished()->mutable_usage()->set_completion_tokens(tokens);
  return response;
}

// What a checker says about the first bad message, or at the end.
std::string Verdict(const std::vector<v1::GenerateResponse>& stream) {
  StreamChecker checker;
  for (const v1::GenerateResponse& response : stream) {
    if (const auto wrong = checker.See(response)) return *wrong;
  }
  return checker.AtEnd().value_or("");
}

TEST(StreamChecker, AcceptsAWholeStream) {
  EXPECT_EQ(Verdict({Started(0), ChunkOf(1, 0, 1), ChunkOf(2, 1, 16), FinishedWith(3, 17)}), "");
  // Token ids left out on request.
  EXPECT_EQ(Verdict({Started(0), ChunkOf(1, 0, 0), FinishedWith(2, 17)}), "");
}

TEST(StreamChecker, SeesWhatIsLost) {
  EXPECT_EQ(Verdict({Started(0), ChunkOf(2, 0, 1)}), "message 2 came where 1 was due");
  EXPECT_EQ(Verdict({Started(0), ChunkOf(1, 0, 1), ChunkOf(2, 2, 1)}),
            "a chunk begins at token 2 where 1 was due");
  EXPECT_EQ(Verdict({Started(0), ChunkOf(1, 0, 2), FinishedWith(2, 3)}), "usage counts 3 tokens, 2 came");
  EXPECT_EQ(Verdict({Started(0), ChunkOf(1, 0, 2)}), "the stream ended without Finished");
  EXPECT_EQ(Verdict({ChunkOf(0, 0, 2)}), "a chunk before Started");
  EXPECT_EQ(Verdict({FinishedWith(0, 0)}), "Finished before Started");
  EXPECT_EQ(Verdict({Started(0), Started(1)}), "Started came twice");
  EXPECT_EQ(Verdict({Started(0), FinishedWith(1, 0), ChunkOf(2, 0, 1)}), "a message after Finished");
  EXPECT_EQ(Verdict({v1::GenerateResponse()}), "a message without an event");
}

TEST(StreamChecker, ChecksRounds) {
  v1::GenerateResponse chunk = ChunkOf(1, 0, 3);
  v1::StepInfo* round = chunk.mutable_chunk()->add_steps();
  round->set_drafted(2);
  round->set_accepted(2);
  round->set_token_count(3);
  EXPECT_EQ(Verdict({Started(0), chunk, FinishedWith(2, 3)}), "");
  round->set_token_count(4);
  EXPECT_EQ(Verdict({Started(0), chunk}), "a round gave more tokens than accepted + 1");
  round->set_accepted(3);
  EXPECT_EQ(Verdict({Started(0), chunk}), "a round accepted more than was drafted");
}

TEST(Describe, CodeAndMessage) {
  EXPECT_EQ(Describe(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "tokens.ids[3]: 9000 is no token id")),
            "INVALID_ARGUMENT: tokens.ids[3]: 9000 is no token id");
  // Details that do not parse are left out.
  EXPECT_EQ(Describe(grpc::Status(grpc::StatusCode::INTERNAL, "m", "\xff\xff")), "INTERNAL: m");
}

TEST(Describe, ReasonAndRetry) {
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500000000);
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  details.add_details()->PackFrom(retry);
  EXPECT_EQ(Describe(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full",
                                  details.SerializeAsString())),
            "RESOURCE_EXHAUSTED: the queue is full (QUEUE_FULL, retry in 1.5s)");
}

TEST(Connection, NobodyListens) {
  Interrupt interrupt;
  Endpoint endpoint;
  endpoint.address = "127.0.0.1:1";
  Connection connection(endpoint, &interrupt);
  v1::GetLoadResponse load;
  EXPECT_EQ(connection.GetLoad(&load).error_code(), grpc::StatusCode::UNAVAILABLE);
  Generation generation;
  EXPECT_EQ(connection.Generate({}, absl::InfiniteDuration(), nullptr, &generation).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace dflash::ctl
