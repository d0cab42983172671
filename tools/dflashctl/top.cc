// dflashctl top: what a server is doing, again and again.
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/top_view.h"

namespace dflash::ctl {
namespace {

uint64_t Gained(uint64_t before, uint64_t now) { return now > before ? now - before : 0; }
double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

const v1::GroupLoad* FindGroup(const v1::GetLoadResponse& load, const std::string& name) {
  for (const v1::GroupLoad& group : load.groups()) {
    if (group.name() == name) return &group;
  }
  return nullptr;
}

std::string GroupText(const v1::GroupLoad& before, const v1::GroupLoad& now, double seconds) {
  std::string text = absl::StrFormat(
      "group %-4s %-8s %3d of %d slots, %d of %d pages in use\n", now.name(),
      v1::GroupState_Name(now.state()).substr(std::string("GROUP_STATE_").size()), now.running(),
      now.state_slots(), now.cache_pages_total() - now.cache_pages_free(), now.cache_pages_total());
  if (!now.detail().empty()) absl::StrAppend(&text, "  ", now.detail(), "\n");
  const uint64_t rounds = Gained(before.speculation_rounds(), now.speculation_rounds());
  const uint64_t drafted = Gained(before.drafted_tokens(), now.drafted_tokens());
  const uint64_t accepted = Gained(before.accepted_tokens(), now.accepted_tokens());
  if (rounds == 0) return text + "  no rounds with drafts\n";
  absl::StrAppend(&text,
                  absl::StrFormat("  %.0f rounds/s of %.2f tokens, %.1f%% of %.0f drafts/s accepted\n",
                                  static_cast<double>(rounds) / seconds, 1 + Share(accepted, rounds),
                                  100 * Share(accepted, drafted), static_cast<double>(drafted) / seconds));
  absl::StrAppend(&text, "  accepted by depth, %:");
  const int depths = std::min(now.drafted_per_position_size(), now.accepted_per_position_size());
  for (int i = 0; i < depths; ++i) {
    const uint64_t old_drafted = i < before.drafted_per_position_size() ? before.drafted_per_position(i) : 0;
    const uint64_t old_accepted =
        i < before.accepted_per_position_size() ? before.accepted_per_position(i) : 0;
    absl::StrAppend(&text,
                    absl::StrFormat(" %.0f", 100 * Share(Gained(old_accepted, now.accepted_per_position(i)),
                                                         Gained(old_drafted, now.drafted_per_position(i)))));
  }
  return text + "\n";
}

}  // namespace

std::string TopText(const v1::GetLoadResponse& before, const v1::GetLoadResponse& now, double seconds) {
  const auto per_second = [&](uint64_t old_count, uint64_t count) {
    return static_cast<double>(Gained(old_count, count)) / seconds;
  };
  std::string text = absl::StrFormat(
      "%s, up %.0f s\n%d running, %d of %d waiting with %d prompt tokens\n",
      now.serving() ? std::string("serving") : absl::StrCat("NOT SERVING: ", now.detail()),
      now.uptime_seconds(), now.running(), now.waiting(), now.max_waiting(), now.waiting_prompt_tokens());
  absl::StrAppend(
      &text, absl::StrFormat("%.1f output tokens/s, %.1f prompt tokens/s computed, %.1f/s from the cache\n",
                             per_second(before.generated_tokens(), now.generated_tokens()),
                             per_second(before.prompt_tokens(), now.prompt_tokens()),
                             per_second(before.cached_tokens(), now.cached_tokens())));
  absl::StrAppend(&text, "requests/s by end:");
  for (const char* outcome : {"stop", "length", "cancelled", "deadline", "rejected", "error"}) {
    const auto old_count = before.requests().find(outcome), count = now.requests().find(outcome);
    absl::StrAppend(&text,
                    absl::StrFormat(" %s %.1f", outcome,
                                    per_second(old_count == before.requests().end() ? 0 : old_count->second,
                                               count == now.requests().end() ? 0 : count->second)));
  }
  text += "\n";
  for (const v1::GroupLoad& group : now.groups()) {
    const v1::GroupLoad* old_group = FindGroup(before, group.name());
    text += GroupText(old_group == nullptr ? v1::GroupLoad() : *old_group, group, seconds);
  }
  return text;
}

int RunTop(int argc, const char* const* argv, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  double interval = 1;
  int64_t count = 0;
  FlagParser parser(argv[0], "Shows load, rates and acceptance until Ctrl-C.");
  endpoint_flags.Register(&parser);
  parser.Number("interval", "SECONDS", "time between two screens", 0.1, 3600, &interval);
  parser.Integer("count", "N", "ends after N screens; 0: goes on", 0, 1 << 30, &count);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;
  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  v1::GetLoadResponse before;
  absl::Time since = absl::Now();
  if (const grpc::Status status = connection.GetLoad(&before); !status.ok())
    return ServerError(status, *interrupt);
  for (int64_t shown = 0; count == 0 || shown < count; ++shown) {
    absl::SleepFor(absl::Seconds(interval));  // Ctrl-C ends the process: no call is running
    v1::GetLoadResponse now;
    const absl::Time asked = absl::Now();
    if (const grpc::Status status = connection.GetLoad(&now); !status.ok())
      return ServerError(status, *interrupt);
    std::printf("%s%s", terminal ? "\x1b[H\x1b[2J" : "",
                TopText(before, now, absl::ToDoubleSeconds(asked - since)).c_str());
    std::fflush(stdout);
    before = now;
    since = asked;
  }
  return kSuccess;
}

}  // namespace dflash::ctl
