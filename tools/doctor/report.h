// What the doctor found: one finding per interface at which target and drafter can diverge, in the order in
// which they are walked, and a verdict. The interfaces and their numbers are those of docs/spec/dflash.md
// "Interfaces at which an integration can diverge"; docs/diagnosing-acceptance.md explains how to read it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dflash::doctor {

// What a finding was held against.
enum class Oracle : uint8_t {
  kOwnPath,  // our double-precision path, which reads weights as stored and shares no code with the serving
             // path but the readers of files
  kBundle,   // a golden bundle: literals and tensors of another implementation
  kLiteral,  // what must hold whatever the model
  kSelf      // the serving path itself, run another way: the results must be the same bits
};

enum class Outcome : uint8_t {
  kPass,
  kFail,
  kSkipped,     // does not apply here: one rank, a part that is not built, weights that were never recorded
  kNotChecked,  // needs a golden bundle, or was not reached
};

// Whose fault a failure is.
enum class Blame : uint8_t {
  kIntegration,
  kModel,
  kEither,     // nothing tells: the weights could not be compared
  kInput,      // a file that cannot be read as what it should be
  kUnsettled,  // what weights can cause as well as an integration; Report::Settle decides
};

// The weights of a model beside those of the bundle.
enum class Weights : uint8_t {
  kUnknown,
  kSampled,   // what fingerprints sample of every tensor is as recorded: a change between samples hides there
  kRecorded,  // every byte is
  kOther
};

// What the target says to the golden prompts.
enum class TargetText : uint8_t {
  kUnknown,
  kRecorded,  // what was recorded, where tokens per round are counted
  kOther      // something else, which nothing but another target explains: float32
};

// An interface, whatever was found there.
struct Interface {
  const char* id;
  const char* numbers;  // of the list in docs/spec/dflash.md
  const char* title;
  Oracle oracle;
  const char* meaning;  // of a failure
  const char* look_at;  // setting or code
};

// All of them, in order.
std::span<const Interface> Interfaces();

struct Finding {
  const Interface* interface = nullptr;
  Outcome outcome = Outcome::kNotChecked;
  Blame blame = Blame::kIntegration;  // of a failure
  // The measured number; NaN: there is none.
  double measured = std::numeric_limits<double>::quiet_NaN();
  double limit = std::numeric_limits<double>::quiet_NaN();
  std::string compared;                // with what
  std::string detail;                  // what was seen
  std::string cause;                   // of a failure: the most probable one
  std::string look_at;                 // of a failure; empty: the interface's
  std::optional<Oracle> held_against;  // where that is another oracle than the interface's

  Oracle oracle() const { return held_against.value_or(interface->oracle); }
};

enum class VerdictKind : uint8_t {
  kHealthy,      // everything passed or does not apply
  kIncomplete,   // nothing failed, but not everything was checked
  kModel,        // the integration is right, the drafter is bad at this target's text
  kIntegration,  // the first failing interface says where to look
  kEither,       // integration or model: what would tell was not there
  kBadInput,     // nothing could be examined
};

struct Verdict {
  VerdictKind kind = VerdictKind::kIncomplete;
  const Finding* first_failure = nullptr;
  std::string text;  // one paragraph
};

class Report {
 public:
  Report();  // every interface kNotChecked, "not reached"

  // The finding of an interface; its id must be one of Interfaces().
  Finding& Of(std::string_view id);
  const Finding& Of(std::string_view id) const;
  // Each of these replaces what was found before, figures included.
  void Pass(std::string_view id, double measured, double limit, std::string compared, std::string detail);
  // Passes when measured <= limit, and fails with `cause` otherwise.
  bool Judge(std::string_view id, double measured, double limit, std::string compared, std::string detail,
             std::string cause);
  void Fail(std::string_view id, std::string detail, std::string cause, Blame blame = Blame::kIntegration);
  void Skip(std::string_view id, std::string why);
  void NotChecked(std::string_view id, std::string why);

  // A file that cannot be examined: `where` names it for the reader.
  void FailInput(std::string_view id, const std::string& error, std::string where);

  // Decides who is to blame for the failures that weights can cause as well (kUnsettled). Once, when all is
  // examined. The first line that applies; the weights are the target's for "target", else both models':
  //
  //   an interface above it failed                   integration: this follows from it
  //   other weights than recorded                    model
  //   weights not compared, or not all               either
  //   "target", or behind it; or another text of
  //   the target. Of its weights
  //     every byte is the recorded one               integration: configuration or arithmetic of the target
  //     samples are                                  either: or weights that nobody sampled
  //   every interface agrees                         model: the drafter, the text, weights nobody sampled
  //   not all were checked; tokens per round are
  //     fewer than recorded, with every byte of
  //       the drafter, and every byte or the text
  //       of the target as recorded                  integration: the same weights did better
  //     fewer than recorded otherwise                either
  //     as recorded                                  model: the recorded pair drafts as badly. But numbers
  //                                                  that were recorded, and are others: either
  //     not recorded                                 either
  void Settle();

  const std::vector<Finding>& findings() const { return findings_; }
  bool broken() const;  // an interface failed that is the integration's whatever the weights
  const Verdict verdict() const;

  // Facts for the heading: model folders, backend, ranks, bundle.
  std::vector<std::pair<std::string, std::string>> facts;
  double seconds = 0;
  // What would check what was not checked, for a verdict in which nothing failed.
  std::string advice =
      "What reads the same configuration with the same code shares its mistakes: give a golden bundle of "
      "another implementation (--golden DIR).";
  // What would settle a verdict that may be either.
  std::string what_tells =
      "a golden bundle with fingerprints (docs/golden-bundle.md), of a running server with --admin-address; "
      "and the doctor of the pair, --model DIR --draft-model DIR";
  // As far as fingerprints and digests tell (revisions.h).
  Weights target_weights = Weights::kUnknown, drafter_weights = Weights::kUnknown;
  TargetText target_text = TargetText::kUnknown;

  std::string ToText(bool colours) const;
  std::string ToJson() const;
  // 0: nothing failed. 1: the integration is broken. 2: a file is none. 5: the drafter is bad. 6: the
  // integration or the drafter.
  int ExitCode() const;

 private:
  // Every interface between files and draft logits agrees with its oracle.
  bool EveryInterfaceAgrees() const;
  Finding& Anew(std::string_view id);
  std::vector<Finding> findings_;
};

// What stands in a report's place where there is none, for whoever reads JSON: the error, and the exit code
// that goes with it.
std::string ErrorJson(std::string_view error, int exit_code);

const char* Name(Blame blame);
const char* Name(Outcome outcome);
const char* Name(Oracle oracle);
const char* Name(VerdictKind kind);

}  // namespace dflash::doctor
