#include "daemon/log/trace_context.h"

#include <string>

#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(TraceContext, ReadsWhatTheStandardAllows) {
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736", span = "00f067aa0ba902b7";
  const auto context = ParseTraceparent("00-" + trace + "-" + span + "-01");
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->trace_id, trace);
  EXPECT_EQ(context->span_id, span);
  EXPECT_EQ(context->flags, 1);
  EXPECT_EQ(FormatTraceparent(*context), "00-" + trace + "-" + span + "-01");
  EXPECT_TRUE(ParseTraceparent("cc-" + trace + "-" + span + "-01-what-comes").has_value());
  for (const std::string& bad :
       {std::string(), "00-" + trace + "-" + span, "00-" + trace + "-" + span + "-01-x",
        "ff-" + trace + "-" + span + "-01", "00-" + std::string(32, '0') + "-" + span + "-01",
        "00-" + trace + "-" + std::string(16, '0') + "-01", "00-" + trace + "-" + span + "-0g",
        "00_" + trace + "-" + span + "-01", "0x-" + trace + "-" + span + "-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" + span + "-01", "cc-" + trace + "-" + span + "-01x"}) {
    EXPECT_FALSE(ParseTraceparent(bad).has_value()) << bad;
  }
}

TEST(TraceContext, GoesOnOrBegins) {
  const TraceContext caller = {"4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 0xff};
  EXPECT_EQ(FormatTraceparent(ContinueTrace(caller, 1, 2, 0xabc)),
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000abc-01");
  EXPECT_EQ(FormatTraceparent(ContinueTrace(std::nullopt, 0x10, 0x20, 0)),
            "00-00000000000000100000000000000020-0000000000000001-00");
}

}  // namespace
}  // namespace dflash
