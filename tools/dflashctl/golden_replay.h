// Compares a server's greedy outputs and acceptance lengths with golden data (tests/golden/README.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace dflash::ctl {

// One prompt of golden.json, as far as a replay needs it.
struct GoldenPrompt {
  std::string kind;
  std::vector<uint32_t> prompt_ids;
  std::vector<uint32_t> output_ids;
  std::vector<int64_t> acceptance_lengths;  // accepted drafts + 1, per round
};

// Reads the text of a golden.json. InvalidArgument: not JSON, a missing or mistyped field (named, with its
// prompt), no prompts, a number out of range.
absl::StatusOr<std::vector<GoldenPrompt>> ParseGolden(std::string_view json);

// What the server answered to one prompt.
struct Replayed {
  std::vector<uint32_t> output_ids;
  std::vector<int64_t> acceptance_lengths;
  bool cut = false;  // blocks were (block_cuts.h): the lengths are not to be compared
};

// One prompt's verdict. An index of -1 means "no difference".
struct PromptComparison {
  int64_t first_different_token = -1;
  // The last round is not compared: how it counts depends on where the output ends.
  int64_t first_different_round = -1;
  bool OutputIdentical() const { return first_different_token < 0; }
  bool LengthsIdentical() const { return first_different_round < 0; }
};
PromptComparison Compare(const GoldenPrompt& golden, const Replayed& replayed);

// All prompts of one kind. Lengths and means, over all rounds, the last ones included, are of those that were
// not cut.
struct KindReport {
  std::string kind;
  int64_t prompts = 0;
  int64_t cut = 0;  // of them
  int64_t identical_outputs = 0;
  int64_t identical_lengths = 0;
  int64_t rounds = 0;
  double mean_length = 0;
  double golden_mean_length = 0;
};

// How far a kind's mean may lie from the golden one: last rounds that max_tokens cuts short count
// differently.
inline constexpr double kMeanTolerance = 0.05;

struct ReplayReport {
  bool compare_lengths = true;           // false without speculation: only outputs are compared
  std::vector<KindReport> kinds;         // in order of first appearance
  std::vector<std::string> differences;  // one line each
  std::string cuts;                      // what cut blocks (BlockCuts::Describe), where prompts were cut
  bool Passed() const { return differences.empty(); }
};

// Both vectors are parallel. A kind whose mean is off, or that saw no round at all, is a difference too,
// unless all its prompts were cut.
ReplayReport Report(const std::vector<GoldenPrompt>& golden, const std::vector<Replayed>& replayed,
                    bool compare_lengths);

// The report as a table, differences and verdict.
std::string Format(const ReplayReport& report);

}  // namespace dflash::ctl
