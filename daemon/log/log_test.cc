#include "daemon/log/log.h"

#include <sstream>

#include "daemon/log/trace_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

using ::testing::ContainsRegex;
using ::testing::EndsWith;

class LogTest : public ::testing::Test {
 protected:
  void SetUp(LogFormat format, spdlog::level::level_enum level = spdlog::level::info) {
    SetUpLog(format, level, std::make_shared<spdlog::sinks::ostream_sink_st>(out_));
  }
  void SetUp() override { before_ = spdlog::default_logger(); }
  void TearDown() override { spdlog::set_default_logger(before_); }

  std::ostringstream out_;
  std::shared_ptr<spdlog::logger> before_;
};

TEST_F(LogTest, Text) {
  SetUp(LogFormat::kText);
  spdlog::info("hello {}", "wor\nld");
  EXPECT_THAT(out_.str(),
              ContainsRegex("^20[0-9-]+T[0-9:]+[.][0-9][0-9][0-9]Z info dflashd: hello wor ld\n$"));
  LogEvent(spdlog::level::warn, "request ended",
           {{"id", std::string("a\nb")}, {"tokens", int64_t{7}}, {"s", 0.25}});
  EXPECT_THAT(out_.str(), EndsWith(" warning dflashd: request ended id=a b tokens=7 s=0.25\n"));
}

TEST_F(LogTest, Json) {
  SetUp(LogFormat::kJson);
  spdlog::error("a \"quote\"\\ and\na line\x01 \xc3\xa9");
  LogEvent(spdlog::level::info, "request ended",
           {{"id", std::string("x\",\"level\":\"y")},
            {"tokens", int64_t{-7}},
            {"s", 1e-7},
            {"nan", std::nan("")}});
  std::istringstream lines(out_.str());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["msg"], "a \"quote\"\\ and\na line\x01 \xc3\xa9");
  EXPECT_EQ(first["level"], "error");
  EXPECT_EQ(first["component"], "dflashd");
  EXPECT_THAT(first["ts"].get<std::string>(), ContainsRegex("^20[0-9-]+T[0-9:]+[.][0-9]{6}Z$"));
  ASSERT_TRUE(std::getline(lines, line));
  const auto second = nlohmann::json::parse(line);
  EXPECT_EQ(second["msg"], "request ended");
  EXPECT_EQ(second["level"], "info") << "a field's text stays a field's text";
  EXPECT_EQ(second["id"], "x\",\"level\":\"y");
  EXPECT_EQ(second["tokens"], -7);
  EXPECT_EQ(second["s"], 1e-7);
  EXPECT_TRUE(second["nan"].is_null());
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(LogTest, LevelsAndNotices) {
  SetUp(LogFormat::kText, ParseLogLevel("error"));
  spdlog::warn("no");
  LogEvent(spdlog::level::info, "no", {});
  EXPECT_EQ(out_.str(), "");
  spdlog::default_logger()->log(spdlog::level::off, "whatever the level");
  EXPECT_THAT(out_.str(), EndsWith(" notice dflashd: whatever the level\n"));
  EXPECT_EQ(ParseLogLevel("debug"), spdlog::level::debug);
  EXPECT_EQ(ParseLogLevel("warn"), spdlog::level::warn);
}

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
