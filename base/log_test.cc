#include "base/log.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "base/check.h"
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
    SetUpLog("dflashd", format, level, std::make_shared<spdlog::sinks::ostream_sink_st>(out_));
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
  EXPECT_THAT(out_.str(), EndsWith(" warn dflashd: request ended id=a b tokens=7 s=0.25\n"));
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
  EXPECT_THAT(out_.str(), EndsWith(" info dflashd: whatever the level\n"));
  spdlog::critical("the end");
  EXPECT_THAT(out_.str(), EndsWith(" error dflashd: the end\n"));
  EXPECT_EQ(ParseLogLevel("debug"), spdlog::level::debug);
  EXPECT_EQ(ParseLogLevel("warn"), spdlog::level::warn);
}

TEST_F(LogTest, FollowsTheLevelOfAnotherProcess) {
  SetUp(LogFormat::kText);
  const std::string before = ChangedLogLevel();
  for (const char* nothing : {"", "loud", "INFO"}) FollowLogLevel(nothing);
  EXPECT_EQ(ChangedLogLevel(), before);
  EXPECT_EQ(out_.str(), "");
  FollowLogLevel("error");
  EXPECT_EQ(ChangedLogLevel(), "error");
  EXPECT_EQ(spdlog::get_level(), spdlog::level::err);
  EXPECT_THAT(out_.str(), EndsWith(" info dflashd: the log level is now error\n"));
  out_.str("");
  FollowLogLevel("error");
  EXPECT_EQ(out_.str(), "") << "once";
  ChangeLogLevel(spdlog::level::debug);
  EXPECT_EQ(ChangedLogLevel(), "debug");
  FollowLogLevel("error");
  EXPECT_EQ(spdlog::get_level(), spdlog::level::err);
  ChangeLogLevel(spdlog::level::info);
}

TEST(LogDeathTest, WhatOthersWriteToStderrAreLinesToo) {
  const std::string head = "[{]\"ts\":\"[^\"]*Z\",\"level\":\"error\",\"component\":\"dflashd\",\"msg\":\"";
  EXPECT_DEATH(
      {
        SetUpLog("dflash", LogFormat::kText, spdlog::level::info);
        SetUpLog("dflashd", LogFormat::kJson, spdlog::level::info);
        spdlog::error("ours");
        std::fputs("in ", stderr);
        std::fputs("pieces\n\nand \"more\"\n", stderr);
        DFLASH_CHECK(1 == 2, "\"context\"");
      },
      "^" + head + "ours\"[}]\n" + head + "in pieces\"[}]\n" + head + "and \\\\\"more\\\\\"\"[}]\n" + head +
          "[^\"]*log_test.cc:[0-9]+: check failed: 1 == 2 \\\\\"context\\\\\"\"[}]\n$");
}

// Ends it where it was thrown: what would wait for ever on the way out does not get the chance.
TEST(LogDeathTest, ExceptionsThatNobodyConvertedEndTheProcess) {
  struct EndsInVain {
    ~EndsInVain() { std::_Exit(1); }
  };
  const auto die = [](auto exception) {
    SetUpLog("dflashd", LogFormat::kText, spdlog::level::info);
    EndOnUncaughtExceptions(75);
    std::thread([&] {
      const EndsInVain guard;
      throw exception;
    }).join();
  };
  EXPECT_EXIT(die(std::system_error(EAGAIN, std::generic_category())), ::testing::ExitedWithCode(75),
              "error dflashd: unexpected exception: Resource temporarily unavailable\n$");
  EXPECT_EXIT(die(std::bad_alloc()), ::testing::ExitedWithCode(75), "unexpected exception: out of memory\n$");
  EXPECT_EXIT(die(std::runtime_error("a bug")), ::testing::KilledBySignal(SIGABRT),
              "unexpected exception: a bug\n$");
}

}  // namespace
}  // namespace dflash
