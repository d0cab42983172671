// dflashctl status: what is served and how busy it is.
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/util/json_util.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/round_view.h"
#include "tools/dflashctl/status_view.h"

namespace dflash::ctl {

std::string HealthText(const v1::SpeculationHealth& health) {
  if (health.verdict().empty()) return {};
  const bool bad = health.verdict() == "broken" || health.verdict() == "refused";
  std::string text = bad ? absl::AsciiStrToUpper(health.verdict()) : health.verdict();
  if (health.reason() != "none") absl::StrAppend(&text, ": ", health.reason());
  if (health.rounds() > 0) {
    absl::StrAppend(
        &text, absl::StrFormat("; first drafts: %.0f%% accepted where the drafter expected %.0f%%, "
                               "last %d rounds",
                               100 * health.first_draft_acceptance(), 100 * health.first_draft_confidence(),
                               health.rounds()));
  }
  if (!health.self_test().empty()) {
    absl::StrAppend(&text, "; self-test ", health.self_test());
    if (!health.self_test_detail().empty()) absl::StrAppend(&text, ": ", health.self_test_detail());
  }
  if (bad) absl::StrAppend(&text, "; what to do: dflashctl doctor");
  return text;
}

std::string StatusText(const v1::GetModelInfoResponse& model, const v1::GetLoadResponse& load) {
  std::string text;
  const auto line = [&text](const char* label, const std::string& value) {
    absl::StrAppend(&text, absl::StrFormat("%-18s%s\n", label, value));
  };
  line("model", absl::StrCat(model.model(), " (", model.backend(), ", ", model.tensor_parallel_size(),
                             model.tensor_parallel_size() == 1 ? " rank" : " ranks", ", dflashd ",
                             model.server_version(), ")"));
  line("serving", load.serving() ? std::string("yes") : absl::StrCat("NO: ", load.detail()));
  line("limits", absl::StrCat(model.max_context_tokens(), " tokens of context, ", model.max_sequences(),
                              " sequences at once, ", model.vocabulary_size(), " token ids, end tokens ",
                              absl::StrJoin(model.eos_token_ids(), " ")));
  const v1::Sampling& sampling = model.default_sampling();
  line("default sampling",
       absl::StrFormat("temperature %g, top_p %g, top_k %d, min_p %g", sampling.temperature(),
                       sampling.top_p(), sampling.top_k(), sampling.min_p()));
  line("drafter", model.has_drafter()
                      ? absl::StrCat(model.drafter().name(), " (", Name(model.drafter().mode()),
                                     ", block of ", model.drafter().block_size(), ")")
                      : std::string("none"));
  line("speculation", absl::StrCat("default ", Name(model.default_speculation())));
  line("same text", model.same_text_rows() == 0
                        ? std::string("not promised")
                        : absl::StrCat("bit-equal up to ", model.same_text_rows(), " verify rows in a step"));
  line("feature contract", model.feature_contract());
  line("load",
       absl::StrFormat("%d running, %d of %d waiting, %d of %d prompt tokens waiting, up %.0f s",
                       load.running(), load.waiting(), load.max_waiting(), load.waiting_prompt_tokens(),
                       load.max_waiting_prompt_tokens(), load.uptime_seconds()));
  for (const v1::GroupLoad& group : load.groups()) {
    std::string state = v1::GroupState_Name(group.state()).substr(std::string("GROUP_STATE_").size());
    std::string value = state;
    if (group.cache_pages_total() > 0) {  // else it has not been ready yet
      absl::StrAppend(&value, ", leader pid ", group.leader_pid(), ", ", group.running(), " of ",
                      group.state_slots(), " slots, ", group.cache_pages_total() - group.cache_pages_free(),
                      " of ", group.cache_pages_total(), " pages");
    }
    if (group.speculation_rounds() > 0) {
      const auto rounds = static_cast<double>(group.speculation_rounds());
      absl::StrAppend(&value, absl::StrFormat(", %d rounds of %.2f tokens, %.1f%% of %d drafts accepted",
                                              group.speculation_rounds(),
                                              1 + static_cast<double>(group.accepted_tokens()) / rounds,
                                              100.0 * static_cast<double>(group.accepted_tokens()) /
                                                  static_cast<double>(group.drafted_tokens()),
                                              group.drafted_tokens()));
    }
    if (!group.detail().empty()) absl::StrAppend(&value, ": ", group.detail());
    line(absl::StrCat("group ", group.name()).c_str(), value);
    const std::string health = HealthText(group.speculation_health());
    if (!health.empty()) line(absl::StrCat("speculation ", group.name()).c_str(), health);
  }
  return text;
}

int RunStatus(int argc, const char* const* argv, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  bool as_json = false;
  FlagParser parser(
      argv[0],
      "Prints model, limits, feature contract, load and speculation. Exit code 3 also when the server "
      "answers but cannot serve.");
  endpoint_flags.Register(&parser);
  parser.Switch("json", "prints GetModelInfoResponse and GetLoadResponse as one JSON object", &as_json);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;

  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  v1::GetModelInfoResponse model;
  v1::GetLoadResponse load;
  grpc::Status status = connection.GetLoad(&load);
  if (status.ok()) status = connection.GetModelInfo(&model);
  if (!status.ok()) {
    if (!load.detail().empty()) std::fprintf(stderr, "not serving: %s\n", load.detail().c_str());
    return ServerError(status, *interrupt);
  }
  if (as_json) {
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    std::string model_json, load_json;
    // Cannot fail: neither message holds an Any.
    (void)google::protobuf::util::MessageToJsonString(model, &model_json, options);
    (void)google::protobuf::util::MessageToJsonString(load, &load_json, options);
    std::printf("{\"model\":%s,\"load\":%s}\n", model_json.c_str(), load_json.c_str());
  } else {
    std::fputs(StatusText(model, load).c_str(), stdout);
  }
  return load.serving() ? kSuccess : kServerError;
}

}  // namespace dflash::ctl
