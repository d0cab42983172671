// What probes are told: whether the process lives, takes requests, has ever been ready. They may be asked by
// anybody, so they say nothing but state; what they say with "verbose" is for whoever may see the metrics.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "daemon/group_lives.h"
#include "daemon/ops/ops_server.h"
#include "daemon/routing/dispatcher.h"

namespace dflash {

struct ProbeFacts {
  Dispatcher::Stats stats;
  std::map<std::string, GroupLives> lives;  // of groups, by name
  bool has_been_ready = false;
  absl::Duration tick_age;  // since the timer of the process has last run
};

// Does it ask a probe for the list of conditions?
bool IsVerbose(const OpsRequest& request);

// /livez, /readyz, /startupz: 200 or 503, and in one line why. With "verbose" in the query every condition is
// listed with its age, "[+]" where it holds and "[-]" where it does not. nullopt: another page.
std::optional<OpsReply> AnswerProbe(const OpsRequest& request, const ProbeFacts& facts);

}  // namespace dflash
