#include "base/flag_parser.h"

#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

struct Parsed {
  std::string text = "default";
  int64_t integer = 7;
  double number = 0.5;
  std::string choice = "auto";
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  bool text_given = false;
  absl::Status status;
};

Parsed Parse(std::vector<const char*> arguments) {
  Parsed parsed;
  FlagParser parser("program", "Does things.");
  parser.Text("model", "DIR", "Where it lies.", &parsed.text);
  parser.Integer("threads", "N", "How many.", 0, 64, &parsed.integer);
  parser.Number("share", "X", "How much.", 0, 1, &parsed.number);
  parser.Choice("backend", {"auto", "cpu"}, "Which.", &parsed.choice);
  arguments.insert(arguments.begin(), "program");
  parsed.status = parser.Parse(static_cast<int>(arguments.size()), arguments.data(), &parsed.outcome);
  parsed.text_given = parser.Given("model");
  return parsed;
}

TEST(FlagParser, ReadsBothForms) {
  const Parsed parsed = Parse({"--model", "a=b", "--threads=8", "--share", "0.25", "--backend=cpu"});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.text, "a=b");
  EXPECT_EQ(parsed.integer, 8);
  EXPECT_EQ(parsed.number, 0.25);
  EXPECT_EQ(parsed.choice, "cpu");
  EXPECT_TRUE(parsed.text_given);
}

TEST(FlagParser, KeepsDefaults) {
  const Parsed parsed = Parse({});
  EXPECT_TRUE(parsed.status.ok());
  EXPECT_EQ(parsed.text, "default");
  EXPECT_EQ(parsed.integer, 7);
  EXPECT_FALSE(parsed.text_given);
}

TEST(FlagParser, NamesWhatIsWrong) {
  const struct {
    std::vector<const char*> arguments;
    const char* expected;
  } cases[] = {
      {{"--modle", "x"}, "unknown flag --modle (did you mean --model?)"},
      {{"--something-else", "x"}, "unknown flag --something-else"},
      {{"--model"}, "--model needs a value"},
      {{"--model", "a", "--model", "b"}, "--model is given twice"},
      {{"stray"}, "unexpected argument 'stray'"},
      {{"-m", "x"}, "unexpected argument '-m'"},
      {{"--threads", "65"}, "--threads must be a whole number from 0 to 64, not '65'"},
      {{"--threads", "-1"}, "--threads must be"},
      {{"--threads", "1x"}, "--threads must be"},
      {{"--threads", "99999999999999999999"}, "--threads must be"},
      {{"--threads="}, "--threads must be"},
      {{"--share", "nan"}, "--share must be a number from 0 to 1, not 'nan'"},
      {{"--share", "1.5"}, "--share must be"},
      {{"--backend", "gpu"}, "--backend must be one of auto|cpu, not 'gpu'"},
  };
  for (const auto& c : cases) {
    const Parsed parsed = Parse(c.arguments);
    EXPECT_EQ(parsed.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status.message()), HasSubstr(c.expected));
  }
}

TEST(FlagParser, ZeroAndSocketsWhereTheyMayBe) {
  const auto parse = [](const char* flag, const char* value) {
    int64_t rows = 5;
    std::string address = "a:1";
    FlagParser parser("program", "Does things.");
    parser.IntegerOrZero("rows", "N", "How many.", 64, 128, &rows);
    parser.AddressOrSocket("listen", "Where.", &address);
    FlagParser::Outcome outcome;
    const char* const arguments[] = {"program", flag, value};
    const absl::Status status = parser.Parse(3, arguments, &outcome);
    return status.ok() ? std::to_string(rows) + " " + address : std::string(status.message());
  };
  EXPECT_EQ(parse("--rows", "0"), "0 a:1");
  EXPECT_EQ(parse("--rows", "64"), "64 a:1");
  for (const char* wrong : {"63", "129", "-1", "x", "00"})
    EXPECT_EQ(parse("--rows", wrong),
              std::string("--rows must be 0 or a whole number from 64 to 128, not '") + wrong + "'");
  for (const char* right : {"", "[::1]:0", "unix:/run/x.sock"})
    EXPECT_EQ(parse("--listen", right), std::string("5 ") + right);
  const std::string longest = "unix:/" + std::string(106, 'x'), longer = longest + "x";
  EXPECT_EQ(parse("--listen", longest.c_str()), "5 " + longest);
  for (const char* wrong : {"nonsense", "unix:", "a:65536", longer.c_str()})
    EXPECT_THAT(parse("--listen", wrong), HasSubstr("--listen must be HOST:PORT, or unix:PATH"));
}

TEST(EarlyValue, SeesTheFlagInBothForms) {
  const auto early = [](std::vector<const char*> words) {
    words.insert(words.begin(), "program");
    return EarlyValue(static_cast<int>(words.size()), words.data(), "log-format").value_or("nothing");
  };
  EXPECT_EQ(early({}), "nothing");
  EXPECT_EQ(early({"--log-format", "json"}), "json");
  EXPECT_EQ(early({"--modle", "x", "--log-format=json"}), "json");
  EXPECT_EQ(early({"--log-format="}), "");
  EXPECT_EQ(early({"--log-format"}), "nothing");
  EXPECT_EQ(early({"--log-formats", "json", "log-format"}), "nothing");
}

TEST(FlagParser, SwitchesOptionalsAndPositionals) {
  bool loud = false;
  std::optional<int64_t> seed;
  std::optional<double> share;
  std::string file, other;
  FlagParser parser("program", "Does things.");
  parser.Switch("loud", "Says more.", &loud);
  parser.Integer("seed", "N", "Start.", 0, 9, &seed);
  parser.Number("share", "X", "How much.", 0, 1, &share);
  parser.Positional("FILE", "What to read.", &file);
  parser.Positional("OTHER", "What to compare with.", &other);
  EXPECT_THAT(parser.Help(), HasSubstr("Usage: program FILE OTHER [flags]\n"));
  EXPECT_THAT(parser.Help(), HasSubstr("  --seed N\n      Start.\n"));

  FlagParser::Outcome outcome;
  const char* const arguments[] = {"program", "a", "--seed", "0", "--loud", "-"};
  ASSERT_TRUE(parser.Parse(6, arguments, &outcome).ok());
  EXPECT_TRUE(loud);
  EXPECT_EQ(seed, 0);
  EXPECT_EQ(share, std::nullopt);
  EXPECT_EQ(file, "a");
  EXPECT_EQ(other, "-");
}

TEST(FlagParser, NamesWhatIsWrongWithSwitchesAndPositionals) {
  const auto error = [](std::vector<const char*> arguments) {
    bool loud = false;
    std::string file;
    FlagParser parser("program", "Does things.");
    parser.Switch("loud", "Says more.", &loud);
    parser.Positional("FILE", "What to read.", &file);
    arguments.insert(arguments.begin(), "program");
    FlagParser::Outcome outcome;
    return std::string(
        parser.Parse(static_cast<int>(arguments.size()), arguments.data(), &outcome).message());
  };
  EXPECT_EQ(error({"x"}), "");
  EXPECT_EQ(error({}), "FILE is missing");
  EXPECT_EQ(error({"--loud"}), "FILE is missing");
  EXPECT_EQ(error({"x", "y"}), "unexpected argument 'y'");
  EXPECT_EQ(error({"-x"}), "unexpected argument '-x'");
  EXPECT_EQ(error({"x", "--loud=yes"}), "--loud must be true or false, not 'yes'");
  EXPECT_EQ(error({"x", "--loud=false"}), "");
  EXPECT_EQ(error({"x", "--loud", "--loud"}), "--loud is given twice");
  EXPECT_EQ(error({"--FILE", "x"}), "unknown flag --FILE");
}

TEST(FlagParser, ValuesFromElsewhere) {
  using Source = FlagParser::Source;
  std::string model = "a";
  int64_t threads = 3;
  double share = 0.1;
  bool loud = true;
  std::optional<int64_t> seed;
  FlagParser parser("program", "Does things.");
  parser.Text("model", "DIR", "Where.", &model);
  parser.Integer("threads", "N", "How many.", 0, 64, &threads);
  parser.Number("share", "X", "How much.", 0, 1, &share);
  parser.Switch("loud", "Says more.", &loud);
  parser.Integer("seed", "N", "Start.", 0, 9, &seed);
  ASSERT_TRUE(parser.Set(Source::kFile, "threads", "5").ok());
  ASSERT_TRUE(parser.Set(Source::kFile, "loud", "false").ok());
  ASSERT_TRUE(parser.Set(Source::kEnvironment, "threads", "6").ok());
  ASSERT_TRUE(parser.Set(Source::kEnvironment, "share", "0.5").ok());
  EXPECT_EQ(parser.Set(Source::kFile, "thread", "5").message(), "unknown key thread (did you mean threads?)");
  EXPECT_EQ(parser.Set(Source::kFile, "threads", "65").message(),
            "threads must be a whole number from 0 to 64, not '65'");
  FlagParser::Outcome outcome;
  const char* const arguments[] = {"program", "--share=0.25"};
  ASSERT_TRUE(parser.Parse(2, arguments, &outcome).ok());
  EXPECT_FALSE(parser.Given("model"));
  EXPECT_TRUE(parser.Given("threads"));
  std::string all;
  for (const FlagParser::Value& value : parser.Values()) {
    all += value.name + "=" + value.value.value_or("-") + (value.is_text ? "t" : "n") +
           std::to_string(static_cast<int>(value.source)) + " ";
  }
  EXPECT_EQ(all, "model=at0 threads=6n2 share=0.25n3 loud=falsen1 seed=-n0 ");
}

TEST(FlagParser, HelpAndVersion) {
  EXPECT_EQ(Parse({"--help", "--nonsense"}).outcome, FlagParser::Outcome::kHelp);
  EXPECT_EQ(Parse({"--model", "x", "--version"}).outcome, FlagParser::Outcome::kVersion);
  FlagParser parser("program", "Does things.");
  int64_t threads = 3;
  parser.Integer("threads", "N", "How many.", 0, 64, &threads);
  EXPECT_THAT(parser.Help(), HasSubstr("--threads N\n      How many. (default 3)"));
}

}  // namespace
}  // namespace dflash
