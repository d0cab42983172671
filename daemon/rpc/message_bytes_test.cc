#include "daemon/rpc/message_bytes.h"

#include <string>
#include <vector>

#include "daemon/request/request_error.h"
#include "dflash/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;

// A length-delimited field, as on the wire; numbers and sizes below 128 only.
std::string Field(int number, const std::string& content) {
  return std::string(1, static_cast<char>(number << 3 | 2)) + static_cast<char>(content.size()) + content;
}

absl::Status Parse(const std::string& bytes) {
  v1::GenerateRequest message;
  return ParseRequest(bytes, &message);
}

TEST(ParseRequest, ReadsWhatIsRight) {
  v1::GenerateRequest message, read;
  message.set_text("grüß 😀 \xEF\xBF\xBD");
  message.mutable_stopping()->add_strings("x");
  ASSERT_TRUE(ParseRequest(message.SerializeAsString(), &read).ok());
  EXPECT_EQ(read.SerializeAsString(), message.SerializeAsString());
  EXPECT_TRUE(Parse("").ok());
}

TEST(ParseRequest, NamesTheFieldOfTextThatIsNotUtf8) {
  const std::string bad = "a\xff";
  const struct {
    std::string bytes;
    const char* field;
  } cases[] = {
      {Field(1, bad), "request_id"},
      {Field(3, bad), "text"},
      {Field(9, "") + Field(3, bad), "text"},
      // chat.messages: the second one's content.
      {Field(5, Field(1, Field(1, "user")) + Field(1, Field(1, "user") + Field(2, bad))),
       "chat.messages[1].content"},
      {Field(5, Field(1, Field(4, Field(1, "f")) + Field(4, Field(2, bad)))),
       "chat.messages[0].tool_calls[1].arguments_json"},
      {Field(5, Field(5, "{}") + Field(5, "{}") + Field(5, bad)), "chat.tools_json[2]"},
      {Field(7, Field(3, "ok") + Field(3, bad)), "stopping.strings[1]"},
      {Field(8, Field(4, Field(1, bad))), "constraint.choice.choices[0]"},
  };
  for (const auto& c : cases) {
    const absl::Status status = Parse(c.bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_EQ(DetailsOf(status).field, c.field);
    EXPECT_EQ(DetailsOf(status).reason, "BAD_PARAMETER");
    EXPECT_EQ(status.message(), std::string(c.field) + ": is not valid UTF-8");
  }
}

TEST(ParseRequest, EveryIllFormedSequence) {
  for (const std::string& bad :
       {"\x80"s, "\xbf"s, "\xc3"s, "\xe2\x82"s, "\xf0\x9f\x98"s, "\xc0\xaf"s, "\xe0\x80\xaf"s,
        "\xf0\x80\x80\xaf"s, "\xed\xa0\x80"s, "\xed\xbf\xbf"s, "\xf4\x90\x80\x80"s, "\xfe"s}) {
    EXPECT_EQ(DetailsOf(Parse(Field(3, "x" + bad))).field, "text") << testing::PrintToString(bad);
    EXPECT_EQ(Parse(Field(3, "x" + bad)).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(ParseRequest, BytesThatAreNoMessage) {
  for (const std::string& bytes :
       {"\x1a"s, "\x1a\x05x"s, "\x1a\xff\xff\xff\xff\x0fx"s, "\x07"s, "\x04"s, "\x0b\x14"s, "\x00"s,
        "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"s, Field(5, "\x0a"s), Field(6, "\x0d\x01"s)}) {
    const absl::Status status = Parse(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << testing::PrintToString(bytes);
    EXPECT_EQ(DetailsOf(status).reason, "BAD_PARAMETER");
    EXPECT_THAT(std::string(status.message()), HasSubstr("no message dflash.v1.GenerateRequest"));
  }
}

TEST(ParseRequest, FieldsThatNobodyKnows) {
  // Field 4000 of Sampling, a varint; field 1 of DetokenizeRequest as text, whose type is another.
  const absl::Status inner = Parse(Field(6, "\x80\xfa\x01\x01"s));
  EXPECT_EQ(inner.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(inner.message()), HasSubstr("sampling: field 4000 of dflash.v1.Sampling"));
  EXPECT_EQ(DetailsOf(inner).field, "sampling") << "a path that is there";
  // Field 9 of the second message of the chat.
  const absl::Status deep = Parse(Field(5, Field(1, "") + Field(1, Field(9, "x"))));
  EXPECT_EQ(DetailsOf(deep).field, "chat.messages[1]");
  EXPECT_EQ(DetailsOf(Parse(Field(4000, "x"))).field, "");
  v1::CancelRequest cancel;
  EXPECT_EQ(ParseRequest(Field(9, "x"), &cancel).code(), absl::StatusCode::kUnimplemented);
  v1::GetLoadRequest load;
  EXPECT_THAT(std::string(ParseRequest(Field(1, "x"), &load).message()),
              HasSubstr("field 1 of dflash.v1.GetLoadRequest"));
}

TEST(ParseRequest, PiecesOfOneMessage) {
  v1::GenerateRequest message, read;
  message.set_text(std::string(1000, 'x'));
  const std::string bytes = message.SerializeAsString();
  const grpc::Slice pieces[] = {grpc::Slice(bytes.substr(0, 10)), grpc::Slice(bytes.substr(10))};
  ASSERT_TRUE(ParseRequest(grpc::ByteBuffer(pieces, 2), &read).ok());
  EXPECT_EQ(read.text(), message.text());
  ASSERT_TRUE(ParseRequest(ToByteBuffer(message), &read).ok());
  EXPECT_EQ(read.text(), message.text());
  ASSERT_TRUE(ParseRequest(ToByteBuffer(v1::GenerateRequest()), &read).ok());
  EXPECT_EQ(read.ByteSizeLong(), 0u);
}

}  // namespace
}  // namespace dflash
