#include "daemon/probes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dflash {
namespace {

constexpr absl::Duration kMaxTickAge = absl::Seconds(10);

struct Condition {
  bool holds = false;
  std::string words;  // with its age
};

std::string Age(absl::Duration age) {
  return absl::FormatDuration(absl::Trunc(std::max(age, absl::ZeroDuration()), absl::Milliseconds(100)));
}

Condition TimerCondition(const ProbeFacts& facts) {
  return {facts.tick_age <= kMaxTickAge, absl::StrCat("timer: ran ", Age(facts.tick_age), " ago")};
}

Condition AdmissionCondition(const ProbeFacts& facts) {
  const Dispatcher::Stats& stats = facts.stats;
  return {!stats.draining, absl::StrCat("admission: ", stats.draining ? "draining" : "open", " for ",
                                        Age(stats.stage_age), ", ", stats.running, " run, ", stats.waiting,
                                        " of ", stats.limits.max_requests, " wait")};
}

bool IsGivenUp(const ProbeFacts& facts, const std::string& name) {
  const auto lives = facts.lives.find(name);
  return lives != facts.lives.end() && lives->second.given_up;
}

Condition GroupCondition(const ProbeFacts& facts, const Dispatcher::GroupStats& group) {
  using State = Dispatcher::GroupState;
  const char* state = group.state == State::kReady     ? "ready"
                      : group.state == State::kLoading ? "loading"
                                                       : "lost";
  std::string words = absl::StrCat("group ", group.name, ": ", state, " for ", Age(group.state_age));
  if (const auto lives = facts.lives.find(group.name); lives != facts.lives.end()) {
    absl::StrAppend(&words, ", life ", lives->second.epoch);
    if (group.state == State::kReady)
      absl::StrAppend(&words, ", heard ", Age(lives->second.heartbeat_age), " ago");
  }
  if (IsGivenUp(facts, group.name)) absl::StrAppend(&words, ", given up");
  if (group.state == State::kLost) absl::StrAppend(&words, ": ", group.why_lost);
  return {group.state == State::kReady, std::move(words)};
}

// Why it does not serve, for whoever asks.
std::string Brief(const Dispatcher::Stats& stats) {
  if (stats.draining) return "the server is going down";
  const bool loads = std::any_of(stats.groups.begin(), stats.groups.end(), [](const auto& group) {
    return group.state == Dispatcher::GroupState::kLoading;
  });
  return loads ? "the model is being loaded" : "no worker group serves";
}

bool AllGivenUp(const ProbeFacts& facts) {
  return !facts.lives.empty() && std::all_of(facts.lives.begin(), facts.lives.end(),
                                             [](const auto& entry) { return entry.second.given_up; });
}

}  // namespace

bool IsVerbose(const OpsRequest& request) {
  const std::vector<std::string> words = absl::StrSplit(request.query, '&');
  return std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word == "verbose" || word.rfind("verbose=", 0) == 0;
  });
}

std::optional<OpsReply> AnswerProbe(const OpsRequest& request, const ProbeFacts& facts) {
  const Dispatcher::Stats& stats = facts.stats;
  const bool verbose = IsVerbose(request);
  const std::string why = verbose && !stats.detail.empty() ? stats.detail : Brief(stats);
  std::string wrong;  // empty: nothing
  if (request.path == "/livez") {
    // A lost group comes back by itself, unless it was given up: then only a new process helps.
    if (!stats.draining && AllGivenUp(facts)) wrong = why;
    if (!TimerCondition(facts).holds) wrong = "the timer stands still";
  } else if (request.path == "/readyz") {
    if (!stats.serving) wrong = why;
  } else if (request.path == "/startupz") {
    if (!facts.has_been_ready) wrong = why;
  } else {
    return std::nullopt;
  }
  OpsReply reply;
  if (!wrong.empty()) reply.status = 503;
  if (verbose) {
    std::vector<Condition> conditions = {TimerCondition(facts), AdmissionCondition(facts)};
    for (const Dispatcher::GroupStats& group : stats.groups)
      conditions.push_back(GroupCondition(facts, group));
    for (const Condition& condition : conditions)
      absl::StrAppend(&reply.body, condition.holds ? "[+]" : "[-]", condition.words, "\n");
  }
  absl::StrAppend(&reply.body, wrong.empty() ? "ok" : wrong, "\n");
  return reply;
}

}  // namespace dflash
