#include "daemon/settings.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SettingsTest : public ::testing::Test {
 protected:
  ~SettingsTest() override { std::filesystem::remove(path_); }
  void WriteFile(const std::string& text) { std::ofstream(path_) << text; }
  absl::StatusOr<CommandLine> Read(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "dflashd");
    return ReadSettings(static_cast<int>(arguments.size()), arguments.data(), environment_);
  }
  std::string Error(const std::vector<const char*>& arguments) {
    return std::string(Read(arguments).status().message());
  }

  const std::string path_ = ::testing::TempDir() + "settings_test." + std::to_string(getpid()) + ".yaml";
  std::map<std::string, std::string> environment_;
};

TEST_F(SettingsTest, AFlagBeatsTheEnvironmentWhichBeatsTheFile) {
  WriteFile("tp: 2\nthreads: 2\nmax-sequences: 2\nmodel: /file\nspeculation: 'off'\n");
  environment_ = {{"DFLASHD_CONFIG", path_},
                  {"DFLASHD_THREADS", "3"},
                  {"DFLASHD_MAX_SEQUENCES", "3"},
                  {"DFLASHD_SERVICE_HOST", "10.0.0.1"}};
  const auto read = Read({"--max-sequences", "4"});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->settings.tp, 2);
  EXPECT_EQ(read->settings.threads, 3);
  EXPECT_EQ(read->settings.max_sequences, 4);
  EXPECT_EQ(read->settings.groups, 1);
  EXPECT_EQ(read->settings.model, "/file");
  EXPECT_TRUE(read->settings.speculation_given);
  EXPECT_EQ(read->text, std::nullopt);
  // Another file than the environment names.
  EXPECT_THAT(Error({"--config", "/nonexistent.yaml"}), HasSubstr("/nonexistent.yaml"));
}

TEST_F(SettingsTest, PrintConfigSaysWhereValuesComeFromAndCanBeReadAgain) {
  WriteFile("tp: 2\nmodel: \"it's: a # model\"\n");
  environment_ = {{"DFLASHD_THREADS", "3"}};
  const auto read = Read({"--config", path_.c_str(), "--print-config", "--max-queue-seconds", "0.1"});
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_TRUE(read->text.has_value());
  EXPECT_THAT(*read->text,
              AllOf(HasSubstr("\ntp: 2  # file\n"), HasSubstr("\nthreads: 3  # environment\n"),
                    HasSubstr("\nmax-queue-seconds: 0.1  # flag\n"), HasSubstr("\ngroups: 1  # default\n"),
                    HasSubstr("\nshare-device: false  # default\n"),
                    HasSubstr("\nmodel: 'it''s: a # model'  # file\n")));
  environment_.clear();
  WriteFile(*read->text);
  const auto again = Read({"--config", path_.c_str(), "--print-config"});
  ASSERT_TRUE(again.ok()) << again.status();
  std::string expected = *read->text;
  for (const char* source : {"# flag\n", "# environment\n", "# default\n"}) {
    for (size_t at; (at = expected.find(source)) != std::string::npos;) {
      expected.replace(at, std::string(source).size(), "# file\n");
    }
  }
  EXPECT_EQ(*again->text, expected);
}

TEST_F(SettingsTest, WhatIsWrongIsNamedWithItsPlace) {
  const auto file_error = [&](const std::string& text) {
    WriteFile(text);
    return Error({"--config", path_.c_str()});
  };
  EXPECT_THAT(file_error("tp: 2\nthread: 2\n"),
              HasSubstr(path_ + ":2: unknown key thread (did you mean threads?)"));
  EXPECT_THAT(file_error("tp: many\n"),
              HasSubstr(path_ + ":1: tp must be a whole number from 1 to 8, not 'many'"));
  EXPECT_THAT(file_error("share-device: yes\n"), HasSubstr("share-device must be true or false, not 'yes'"));
  EXPECT_THAT(file_error("config: x\n"), HasSubstr("config has no place in a file"));
  EXPECT_THAT(file_error("listen: 8500\n"), HasSubstr("listen must be HOST:PORT"));
  EXPECT_THAT(file_error("{\"tp\": 0}"), HasSubstr("tp must be"));
  // Also what another source overrides.
  WriteFile("tp: 0\n");
  EXPECT_THAT(Error({"--config", path_.c_str(), "--tp", "2"}), HasSubstr("tp must be"));
  environment_ = {{"DFLASHD_TP", "x"}};
  EXPECT_THAT(Error({"--tp", "2"}), HasSubstr("DFLASHD_TP: tp must be"));
}

TEST_F(SettingsTest, AVariableThatIsNearlyAKeysIsATypo) {
  environment_ = {{"DFLASHD_MAX_QUEUED_REQUEST", "4"}};
  EXPECT_THAT(Error({"--model", "m"}),
              HasSubstr("unknown environment variable DFLASHD_MAX_QUEUED_REQUEST (did you mean "
                        "DFLASHD_MAX_QUEUED_REQUESTS?)"));
  // What Kubernetes tells about services of such names, and what is not ours.
  environment_ = {{"DFLASHD_SERVICE_HOST", "10.0.0.1"},
                  {"DFLASHD_SERVICE_PORT", "8500"},
                  {"DFLASHD_SERVICE_PORT_GRPC", "8500"},
                  {"DFLASHD_PORT", "tcp://10.0.0.1:8500"},
                  {"DFLASHD_PORT_8500_TCP_ADDR", "10.0.0.1"},
                  {"DFLASHD_HEADLESS_SERVICE_HOST", "10.0.0.1"},
                  {"DFLASHD_METRICS_PORT_8503_TCP", "tcp://10.0.0.1:8503"},
                  {"DFLASHER_TP", "x"},
                  {"PATH", "/bin"}};
  const auto read = Read({"--model", "m"});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->warnings.empty()) << read->warnings[0];
  environment_ = {{"DFLASHD_QUITE_ANOTHER_THING", "1"}};
  const auto warned = Read({"--model", "m"});
  ASSERT_TRUE(warned.ok()) << warned.status();
  ASSERT_EQ(warned->warnings.size(), 1u);
  EXPECT_EQ(warned->warnings[0], "the environment variable DFLASHD_QUITE_ANOTHER_THING is no setting");
}

// --print-config shows what a start would take, and nothing else.
TEST_F(SettingsTest, PrintConfigRefusesWhatAStartRefuses) {
  const auto error = [&](std::vector<const char*> flags) {
    const std::string of_start = Error(flags);
    flags.push_back("--print-config");
    EXPECT_EQ(Error(flags), of_start);
    return of_start;
  };
  EXPECT_THAT(error({}), HasSubstr("--model is required"));
  EXPECT_THAT(error({"--model", ""}), HasSubstr("--model is required"));
  EXPECT_THAT(error({"--model", "m", "--otlp-endpoint", "https://collector:4318"}),
              AllOf(HasSubstr("--otlp-endpoint"), HasSubstr("must be http://")));
  EXPECT_THAT(error({"--model", "m", "--speculation", "dflash"}), HasSubstr("needs --draft-model"));
  EXPECT_THAT(error({"--model", "m", "--tls-cert", "c"}), HasSubstr("--tls-key go together"));
  EXPECT_THAT(error({"--model", "m", "--tls-client-ca", "c"}), HasSubstr("needs both"));
  EXPECT_THAT(error({"--model", "m", "--connect", "a:1"}), HasSubstr("--group-secret-file"));
  EXPECT_THAT(error({"--model", "m", "--connect", "a", "--group-secret-file", "f"}), HasSubstr("--connect"));
  EXPECT_THAT(error({"--model", "m", "--connect", ",", "--group-secret-file", "f"}),
              HasSubstr("--connect names nobody"));
  EXPECT_THAT(error({"--model", "m", "--max-prefill-tokens", "10"}),
              HasSubstr("--max-prefill-tokens must be 0 or a whole number from 64 to"));
  EXPECT_THAT(error({"--model", "m", "--admin-listen", "nonsense"}),
              HasSubstr("--admin-listen must be HOST:PORT, or unix:PATH"));
  EXPECT_THAT(error({"--model", "m", "--inject-defect", "nonsense"}),
              HasSubstr("--inject-defect must be one of none|offset0|"));
  WriteFile("model: m\nadmin-listen: nonsense\n");
  EXPECT_THAT(error({"--config", path_.c_str()}), HasSubstr(path_ + ":2: admin-listen must be"));
}

TEST_F(SettingsTest, HowErrorsAreSaidIsReadFirst) {
  const auto format = [&](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "dflashd");
    return EarlyLogFormat(static_cast<int>(arguments.size()), arguments.data(), environment_);
  };
  const auto of_file = [&](const std::string& text) {
    WriteFile(text);
    return format({"--modle", "x", "--config", path_.c_str()});
  };
  EXPECT_EQ(format({}), "");
  EXPECT_EQ(of_file("model: 'log-format: text'\nlog-format: json\n"), "json");
  EXPECT_EQ(of_file("model: m\n# log-format: json\n"), "");
  // Files that do not parse.
  EXPECT_EQ(of_file("model: 'm\n  \"log-format\" : 'json' # here\n"), "json");
  EXPECT_EQ(of_file("tp: [\n#log-format: json\n"), "");
  EXPECT_EQ(of_file("{\"tp\": 1, \"log-format\":\"json\", "), "json");
  EXPECT_EQ(of_file(std::string(100'000, ' ') + ":,,:{\x01"), "");
  // As for every key.
  WriteFile("log-format: json\n");
  environment_ = {{"DFLASHD_CONFIG", path_}};
  EXPECT_EQ(format({}), "json");
  environment_["DFLASHD_LOG_FORMAT"] = "text";
  EXPECT_EQ(format({}), "text");
  EXPECT_EQ(format({"--log-format=json"}), "json");
}

TEST_F(SettingsTest, HelpIsThereWhateverElseIsWrong) {
  environment_ = {{"DFLASHD_TP", "x"}, {"DFLASHD_CONFIG", "/nonexistent"}};
  const auto read = Read({"--help"});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->text.value_or(""), HasSubstr("--print-config"));
  EXPECT_THAT(Read({"--version"})->text.value_or(""), HasSubstr("dflashd "));
}

}  // namespace
}  // namespace dflash
