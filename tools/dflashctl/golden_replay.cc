#include "tools/dflashctl/golden_replay.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace dflash::ctl {
namespace {

using Json = nlohmann::json;

template <typename T>
absl::Status ReadNumbers(const Json& prompt, const char* key, uint64_t min, std::vector<T>* numbers) {
  const auto field = prompt.find(key);
  if (field == prompt.end() || !field->is_array())
    return absl::InvalidArgumentError(absl::StrCat(key, ": no such list"));
  for (const Json& entry : *field) {
    // Token ids and lengths both fit 32 bits.
    if (!entry.is_number_unsigned() || entry.get<uint64_t>() > std::numeric_limits<uint32_t>::max() ||
        entry.get<uint64_t>() < min) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": ", entry.dump(), " is out of range"));
    }
    numbers->push_back(static_cast<T>(entry.get<uint64_t>()));
  }
  if (numbers->empty()) return absl::InvalidArgumentError(absl::StrCat(key, ": empty"));
  return absl::OkStatus();
}

absl::StatusOr<GoldenPrompt> ParsePrompt(const Json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("not an object");
  GoldenPrompt prompt;
  const auto kind = json.find("kind");
  if (kind == json.end() || !kind->is_string()) return absl::InvalidArgumentError("kind: no such string");
  prompt.kind = kind->get<std::string>();
  DFLASH_RETURN_IF_ERROR(ReadNumbers(json, "prompt_ids", 0, &prompt.prompt_ids));
  DFLASH_RETURN_IF_ERROR(ReadNumbers(json, "output_ids", 0, &prompt.output_ids));
  DFLASH_RETURN_IF_ERROR(ReadNumbers(json, "acceptance_lengths", 1, &prompt.acceptance_lengths));
  return prompt;
}

// Index of the first of the leading `count` entries that differ or that one side lacks; -1 for none.
template <typename T>
int64_t FirstDifference(const std::vector<T>& a, const std::vector<T>& b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (i >= a.size() || i >= b.size() || a[i] != b[i]) return static_cast<int64_t>(i);
  }
  return -1;
}

template <typename T>
std::string EntryText(const std::vector<T>& numbers, int64_t index) {
  const size_t i = static_cast<size_t>(index);
  return i < numbers.size() ? absl::StrCat(numbers[i]) : std::string("none");
}

}  // namespace

absl::StatusOr<std::vector<GoldenPrompt>> ParseGolden(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return absl::InvalidArgumentError("not JSON");
  if (!json.is_array() || json.empty()) return absl::InvalidArgumentError("not a list of prompts");
  std::vector<GoldenPrompt> prompts;
  for (size_t i = 0; i < json.size(); ++i) {
    absl::StatusOr<GoldenPrompt> prompt = ParsePrompt(json[i]);
    if (!prompt.ok()) return Annotate(prompt.status(), absl::StrCat("prompt ", i));
    prompts.push_back(*std::move(prompt));
  }
  return prompts;
}

PromptComparison Compare(const GoldenPrompt& golden, const Replayed& replayed) {
  PromptComparison comparison;
  comparison.first_different_token = FirstDifference(
      golden.output_ids, replayed.output_ids, std::max(golden.output_ids.size(), replayed.output_ids.size()));
  const size_t rounds = std::max(golden.acceptance_lengths.size(), replayed.acceptance_lengths.size());
  comparison.first_different_round =
      FirstDifference(golden.acceptance_lengths, replayed.acceptance_lengths, rounds - 1);
  // As many rounds on both sides, too: the loop above skips the last entry of the longer list.
  if (comparison.first_different_round < 0 &&
      golden.acceptance_lengths.size() != replayed.acceptance_lengths.size()) {
    comparison.first_different_round = static_cast<int64_t>(rounds) - 1;
  }
  return comparison;
}

ReplayReport Report(const std::vector<GoldenPrompt>& golden, const std::vector<Replayed>& replayed,
                    bool compare_lengths) {
  DFLASH_CHECK(golden.size() == replayed.size());
  ReplayReport report;
  report.compare_lengths = compare_lengths;
  std::vector<int64_t> golden_rounds;
  for (size_t i = 0; i < golden.size(); ++i) {
    size_t k = 0;
    while (k < report.kinds.size() && report.kinds[k].kind != golden[i].kind) ++k;
    if (k == report.kinds.size()) {
      report.kinds.push_back({.kind = golden[i].kind});
      golden_rounds.push_back(0);
    }
    KindReport& kind = report.kinds[k];
    const PromptComparison comparison = Compare(golden[i], replayed[i]);
    ++kind.prompts;
    kind.identical_outputs += comparison.OutputIdentical() ? 1 : 0;
    const std::string name = absl::StrCat("prompt ", i, " (", kind.kind, "): ");
    if (!comparison.OutputIdentical()) {
      const int64_t at = comparison.first_different_token;
      report.differences.push_back(absl::StrCat(name, "token ", at, " is ",
                                                EntryText(replayed[i].output_ids, at), ", golden ",
                                                EntryText(golden[i].output_ids, at)));
    }
    if (replayed[i].cut) {
      ++kind.cut;
      continue;
    }
    kind.identical_lengths += comparison.LengthsIdentical() ? 1 : 0;
    kind.rounds += static_cast<int64_t>(replayed[i].acceptance_lengths.size());
    golden_rounds[k] += static_cast<int64_t>(golden[i].acceptance_lengths.size());
    for (int64_t length : replayed[i].acceptance_lengths) kind.mean_length += static_cast<double>(length);
    for (int64_t length : golden[i].acceptance_lengths)
      kind.golden_mean_length += static_cast<double>(length);
    if (compare_lengths && !comparison.LengthsIdentical()) {
      const int64_t at = comparison.first_different_round;
      report.differences.push_back(absl::StrCat(name, "acceptance length of round ", at, " is ",
                                                EntryText(replayed[i].acceptance_lengths, at), ", golden ",
                                                EntryText(golden[i].acceptance_lengths, at)));
    }
  }
  for (size_t k = 0; k < report.kinds.size(); ++k) {
    KindReport& kind = report.kinds[k];
    if (kind.cut == kind.prompts) continue;
    if (kind.rounds > 0) kind.mean_length /= static_cast<double>(kind.rounds);
    kind.golden_mean_length /= static_cast<double>(golden_rounds[k]);
    if (compare_lengths && !(std::abs(kind.mean_length - kind.golden_mean_length) <= kMeanTolerance)) {
      report.differences.push_back(absl::StrFormat("%s: %.3f tokens per round, golden %.3f", kind.kind,
                                                   kind.mean_length, kind.golden_mean_length));
    }
  }
  return report;
}

std::string Format(const ReplayReport& report) {
  std::string text = absl::StrFormat("%-12s %17s %20s %16s %8s\n", "kind", "outputs identical",
                                     "lengths identical", "tokens per round", "golden");
  KindReport total;
  for (const KindReport& kind : report.kinds) {
    const int64_t whole = kind.prompts - kind.cut;
    const auto mean = [&](double length) {
      return whole == 0 ? std::string("-") : absl::StrFormat("%.3f", length);
    };
    absl::StrAppend(&text, absl::StrFormat("%-12s %17s %20s %16s %8s\n", kind.kind,
                                           absl::StrCat(kind.identical_outputs, "/", kind.prompts),
                                           report.compare_lengths && whole > 0
                                               ? absl::StrCat(kind.identical_lengths, "/", whole)
                                               : std::string("not compared"),
                                           mean(kind.mean_length), mean(kind.golden_mean_length)));
    total.prompts += kind.prompts;
    total.cut += kind.cut;
    total.identical_outputs += kind.identical_outputs;
    total.identical_lengths += kind.identical_lengths;
  }
  for (const std::string& difference : report.differences)
    absl::StrAppend(&text, "difference: ", difference, "\n");
  absl::StrAppend(&text, total.identical_outputs, "/", total.prompts, " outputs identical");
  if (report.compare_lengths) {
    absl::StrAppend(&text, ", ", total.identical_lengths, "/", total.prompts - total.cut,
                    " prompts with all acceptance lengths identical (last rounds are not compared)");
    if (total.cut > 0) absl::StrAppend(&text, ", ", total.cut, " left out: ", report.cuts);
  }
  absl::StrAppend(&text, report.Passed() ? ": as golden\n" : ": DIFFERENT\n");
  return text;
}

}  // namespace dflash::ctl
