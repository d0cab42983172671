#include "daemon/settings.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <regex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/defect_names.h"
#include "base/flag_parser.h"
#include "base/host_port.h"
#include "base/json_object.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "daemon/config/config_file.h"
#include "daemon/traces/trace_exporter.h"

namespace dflash {
namespace {

FlagParser MakeParser(Settings& settings) {
  FlagParser parser("dflashd", "Serves a large language model with DFlash speculative decoding over gRPC.");
  parser.Text("config", "FILE", "YAML or JSON file with values for these flags", &settings.config);
  parser.Switch("print-config", "prints all values and where they come from, and ends",
                &settings.print_config);
  parser.Text("model", "DIR", "folder of the target's checkpoint; required", &settings.model);
  parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint; empty: plain decoding",
              &settings.draft_model);
  parser.Address("listen", "where gRPC clients connect; port 0 takes a free one", 0, &settings.listen);
  parser.Address("ops-listen", "where /metrics, /livez, /readyz are served over HTTP", 0,
                 &settings.ops_listen);
  parser.AddressOrSocket(
      "admin-listen",
      "where operators connect with gRPC: HOST:PORT, or unix:PATH for this user only; empty: nowhere",
      &settings.admin_listen);
  parser.Text("tls-cert", "FILE",
              "PEM chain of the gRPC ports; it and the next two are watched and may change",
              &settings.tls_cert);
  parser.Text("tls-key", "FILE", "PEM key for it", &settings.tls_key);
  parser.Text("tls-client-ca", "FILE", "PEM certificates, of which clients must have one's",
              &settings.tls_client_ca);
  parser.Integer("tls-refresh-seconds", "S", "how often these files are looked at", 1, 86400,
                 &settings.tls_refresh_seconds);
  parser.Text(
      "token-file", "FILE",
      "hashed bearer tokens with roles, one a line: NAME sha256:HEX ROLE[,ROLE] [expires=TIME]; watched",
      &settings.token_file);
  parser.Choice("reflection", {"auto", "on", "off"},
                "gRPC reflection; auto: for those who have a token, where calls need one; on: for everybody",
                &settings.reflection);
  parser.Switch("open-metrics",
                "/metrics and /version need no token; they never do where --ops-listen is loopback",
                &settings.open_metrics);
  parser.Choice(
      "log-format", {"text", "json"},
      "of the log on standard error, the workers' too; standard output has two lines for scripts alone: "
      "where it\nlistens, and that it is ready",
      &settings.log_format);
  parser.Choice("log-level", {"debug", "info", "warn", "error"}, "least that is logged", &settings.log_level);
  parser.Text("otlp-endpoint", "URL",
              "where a collector takes traces, OTLP over HTTP in JSON: http://HOST[:4318][/v1/traces]; "
              "empty: nowhere",
              &settings.otlp_endpoint);
  parser.Number("otlp-sample-ratio", "X",
                "share of traces that begin here that are recorded; in others the caller's decision counts",
                0, 1, &settings.otlp_sample_ratio);
  parser.Number("drain-grace-seconds", "S",
                "on SIGTERM, time in which requests are still taken while probes already say no", 0, 3600,
                &settings.drain_grace_seconds);
  parser.Number("drain-seconds", "S",
                "then, time in which requests may finish before they are ended; a second signal ends it", 0,
                86400, &settings.drain_seconds);
  parser.Integer("tp", "N", "tensor-parallel ranks of the worker group", 1, 8, &settings.tp);
  parser.Integer("groups", "N", "worker groups, each with a whole copy of the model and its own devices", 1,
                 8, &settings.groups);
  parser.Text(
      "connect", "HOST:PORT,...",
      "leaders of worker groups on other hosts (dflash-worker --launch); no local groups then, unless "
      "--groups says so",
      &settings.connect);
  parser.Text("group-secret-file", "FILE", "its first line is the secret of the groups of --connect",
              &settings.group_secret_file);
  parser.Choice("communicator", {"auto", "host", "nccl"},
                "how ranks exchange data; auto: nccl with CUDA, host (shared memory) without",
                &settings.communicator);
  parser.Choice(
      "all-reduce", {"auto", "peer", "communicator"},
      "how few rows are summed over the ranks: in one step through memory that all ranks reach, or by\n"
      "the communicator; auto: peer where devices reach each other and none is shared",
      &settings.all_reduce);
  parser.Choice("draft-placement", {"rank0", "sharded"}, "which ranks run the drafter",
                &settings.draft_placement);
  parser.Switch("share-device", "all ranks use one GPU (tests; needs --communicator host)",
                &settings.share_device);
  parser.Integer("rank-timeout", "SECONDS", "after which a rank that makes no progress ends its group", 1,
                 3600, &settings.rank_timeout_seconds);
  parser.Integer("formation-timeout", "SECONDS", "until all ranks of a group have found each other", 1, 3600,
                 &settings.formation_timeout_seconds);
  parser.Integer("load-timeout", "SECONDS",
                 "until a started worker group serves; one that does not is killed and started again", 1,
                 86400, &settings.load_timeout_seconds);
  parser.Integer("silence-timeout", "SECONDS",
                 "after which a group, or a rank, that says nothing counts as dead", 1, 3600,
                 &settings.silence_timeout_seconds);
  parser.Integer("max-restart-delay", "SECONDS", "longest wait before a lost group is started again", 1, 3600,
                 &settings.max_restart_delay_seconds);
  parser.Choice("backend", {"auto", "cpu", "cuda"}, "what the worker runs on", &settings.backend);
  parser.Choice("speculation", {"dflash", "off"}, "what requests get that do not choose",
                &settings.speculation);
  parser.Choice(
      "self-test", {"auto", "off", "warn"},
      "golden prompts through the worker before it serves; auto: if there is a golden bundle, and no "
      "speculation\nwhere they fail; warn: speculation all the same",
      &settings.self_test);
  parser.Text("golden", "DIR", "golden bundle for self-test; default: DRAFT-MODEL/golden, if there is one",
              &settings.golden);
  parser.Text("model-name", "NAME", "served name; default: the last part of --model", &settings.model_name);
  parser.Integer("max-queued-requests", "N", "requests that may wait", 1, 1 << 20,
                 &settings.max_queued_requests);
  parser.Integer("max-queued-tokens", "N", "prompt tokens of the requests that wait", 1, int64_t{1} << 40,
                 &settings.max_queued_tokens);
  parser.Number("max-queue-seconds", "SECONDS", "a request that would wait longer, or has, is refused", 0.001,
                1e6, &settings.max_queue_seconds);
  parser.Number("replay-seconds", "SECONDS",
                "requests of a lost worker group wait so long to go on in a new one; 0: they fail at once", 0,
                1e6, &settings.replay_seconds);
  parser.Integer(
      "max-client-requests", "N",
      "requests of one client at a time, waiting and running, texts to tokenize included; 0: no bound", 0,
      1 << 20, &settings.max_client_requests);
  parser.Number("max-client-rate", "N", "requests of one client a second, counted alike; 0: no bound", 0, 1e6,
                &settings.max_client_rate);
  parser.Integer("threads", "N", "CPU threads of the worker; 0: one per core that it may use", 0, 256,
                 &settings.threads);
  parser.Choice("instruction-set", {"auto", "scalar", "avx2", "avx512"},
                "instructions of the CPU worker; auto: the best that this machine has",
                &settings.instruction_set);
  parser.Integer("max-sequences", "N", "requests that run at a time", 1, 1024, &settings.max_sequences);
  parser.Integer("max-context-tokens", "N", "prompt and output of one request; 0: what the target allows", 0,
                 int64_t{1} << 30, &settings.max_context_tokens);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches; 0: max-sequences whole contexts", 0,
                 int64_t{1} << 40, &settings.cache_tokens);
  parser.Number(
      "memory-fraction", "X",
      "share of the device's memory for the worker in all; without cache-tokens the caches take what "
      "is left of it. 0: not said",
      0, 1, &settings.memory_fraction);
  parser.IntegerOrZero("max-prefill-tokens", "N",
                       "prompt tokens in one step, at least 64; 0: what suits the backend", 64, 65536,
                       &settings.max_prefill_tokens);
  parser.Choice(
      "block-length", {"by-load", "whole"},
      "by-load: a round verifies as many drafts as give most tokens a second, whole: all of a block",
      &settings.block_length);
  parser.Integer("max-verify-rows", "N",
                 "anchors and drafts in one step above which blocks get shorter in any case; 0: no limit", 0,
                 65536, &settings.max_verify_rows);
  parser.Integer(
      "prefix-checkpoints", "N",
      "copies of recurrent states that the prefix cache keeps; 0: no prefix cache. Default: two for "
      "each of max-sequences, at most 32",
      0, 1 << 20, &settings.prefix_checkpoints);
  parser.Switch("allow-unlisted-config-keys",
                "accept keys of config.json that docs/config-keys.md does not list",
                &settings.allow_unlisted_keys);
  parser.Text("worker", "PATH", "worker program; default: dflash-worker beside this program",
              &settings.worker);
  std::vector<std::string> defects = {"none"};
  defects.insert(defects.end(), std::begin(kDefectNames), std::end(kDefectNames));
  parser.Choice("inject-defect", std::move(defects),
                "a known integration defect for the worker to plant (test builds only)", &settings.defect);
  return parser;
}

constexpr char kVariablePrefix[] = "DFLASHD_";

std::string VariableOf(const std::string& key) {
  std::string name = kVariablePrefix;
  for (const char c : key)
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// These say what to do once, and are no part of a configuration.
bool IsForOneRun(const std::string& key) { return key == "config" || key == "print-config"; }

absl::Status ReadConfigFile(const std::string& path, FlagParser* parser) {
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConfigBytes));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<ConfigEntry> entries, ParseConfig(text, path));
  for (const ConfigEntry& entry : entries) {
    const absl::Status set =
        IsForOneRun(entry.key)
            ? absl::InvalidArgumentError(absl::StrCat(entry.key, " has no place in a file"))
            : parser->Set(FlagParser::Source::kFile, entry.key, entry.value);
    if (!set.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(entry.place, ": ", std::string(set.message())));
    }
  }
  return absl::OkStatus();
}

// What Kubernetes tells every pod about services, here of one called dflashd or dflashd-...:
// DFLASHD_SERVICE_HOST, DFLASHD_SERVICE_PORT_GRPC, DFLASHD_PORT, DFLASHD_PORT_8500_TCP_ADDR, ...
bool IsServiceLink(const std::string& variable) {
  static const std::regex pattern("DFLASHD(_.+)?_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_.+)?)");
  return std::regex_match(variable, pattern);
}

absl::Status ReadEnvironment(const std::map<std::string, std::string>& environment, FlagParser* parser,
                             std::vector<std::string>* warnings) {
  std::map<std::string, std::string> keys;  // by variable
  std::vector<std::string> variables;
  for (const FlagParser::Value& known : parser->Values()) {
    variables.push_back(VariableOf(known.name));
    keys.emplace(variables.back(), known.name);
  }
  for (const auto& [variable, value] : environment) {
    if (variable.rfind(kVariablePrefix, 0) != 0) continue;
    const auto key = keys.find(variable);
    if (key == keys.end()) {
      if (IsServiceLink(variable)) continue;
      const std::string nearest = NearestName(variable, variables);
      if (!nearest.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("unknown environment variable ", variable, " (did you mean ", nearest, "?)"));
      }
      warnings->push_back(absl::StrCat("the environment variable ", variable, " is no setting"));
      continue;
    }
    if (IsForOneRun(key->second)) continue;
    if (const absl::Status set = parser->Set(FlagParser::Source::kEnvironment, key->second, value); !set.ok())
      return absl::InvalidArgumentError(absl::StrCat(variable, ": ", set.message()));
  }
  return absl::OkStatus();
}

const char* Words(FlagParser::Source source) {
  switch (source) {
    case FlagParser::Source::kDefault:
      return "default";
    case FlagParser::Source::kFile:
      return "file";
    case FlagParser::Source::kEnvironment:
      return "environment";
    case FlagParser::Source::kFlag:
      return "flag";
  }
  return "";
}

// As a YAML string, in quotes.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "''" : std::string(1, c);
  return quoted + "'";
}

// A configuration file that says the same.
std::string PrintConfig(const FlagParser& parser) {
  std::string text = "# dflashd " DFLASHD_VERSION
                     ". A flag counts for more than the environment (DFLASHD_NAME), that for more than the "
                     "file, that for more\n"
                     "# than the default; behind each value stands which of them it comes from.\n";
  for (const FlagParser::Value& value : parser.Values()) {
    if (IsForOneRun(value.name) || !value.value.has_value()) continue;
    absl::StrAppend(&text, value.name, ": ", value.is_text ? Quoted(*value.value) : *value.value, "  # ",
                    Words(value.source), "\n");
  }
  return text;
}

}  // namespace

absl::Status CheckSettings(const Settings& settings) {
  const auto wrong = [](std::string text) { return absl::InvalidArgumentError(std::move(text)); };
  if (settings.model.empty()) return wrong("--model is required");
  if (settings.draft_model.empty() && settings.speculation_given && settings.speculation != "off")
    return wrong("--speculation dflash needs --draft-model");
  if (settings.tls_cert.empty() != settings.tls_key.empty() ||
      (settings.tls_cert.empty() && !settings.tls_client_ca.empty()))
    return wrong("--tls-cert and --tls-key go together, and --tls-client-ca needs both");
  if (!settings.otlp_endpoint.empty()) {
    DFLASH_RETURN_IF_ERROR(Annotate(ParseOtlpEndpoint(settings.otlp_endpoint).status(), "--otlp-endpoint"));
  }
  const std::vector<std::string> leaders = LeadersOf(settings);
  for (const std::string& leader : leaders)
    DFLASH_RETURN_IF_ERROR(Annotate(SplitHostPort(leader).status(), "--connect"));
  if (!leaders.empty() && settings.group_secret_file.empty())
    return wrong("--connect needs --group-secret-file");
  if (leaders.empty() && settings.groups == 0) return wrong("--connect names nobody");
  return absl::OkStatus();
}

std::vector<std::string> LeadersOf(const Settings& settings) {
  return absl::StrSplit(settings.connect, ',', absl::SkipEmpty());
}

std::string EarlyLogFormat(int argc, const char* const* argv,
                           const std::map<std::string, std::string>& environment) {
  const auto said = [&](const std::string& key) {
    const auto variable = environment.find(VariableOf(key));
    std::optional<std::string> value = EarlyValue(argc, argv, key);
    return value.has_value() || variable == environment.end() ? value : variable->second;
  };
  const std::string key = "log-format";
  if (const auto format = said(key); format.has_value()) return *format;
  const absl::StatusOr<std::string> text = ReadFile(said("config").value_or(""), kMaxConfigBytes);
  if (!text.ok()) return "";
  if (const auto entries = ParseConfig(*text, ""); entries.ok()) {
    for (const ConfigEntry& entry : *entries) {
      if (entry.key == key) return entry.value;
    }
    return "";
  }
  // A file with an error somewhere, but hardly in this entry.
  const auto bare = [](absl::string_view word) {
    constexpr char kAround[] = " \t\r\"'";
    const size_t begin = std::min(word.find_first_not_of(kAround), word.size());
    return word.substr(begin, word.find_last_not_of(kAround) + 1 - begin);
  };
  for (const absl::string_view entry : absl::StrSplit(*text, absl::ByAnyChar("\n,{}"))) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits(':', 1));
    if (bare(parts.first) == key) return std::string(bare(parts.second.substr(0, parts.second.find('#'))));
  }
  return "";
}

absl::StatusOr<CommandLine> ReadSettings(int argc, const char* const* argv,
                                         const std::map<std::string, std::string>& environment) {
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  std::string path;
  {
    // By themselves first: they name the file, and help is there whatever else is wrong.
    Settings flags_only;
    FlagParser parser = MakeParser(flags_only);
    DFLASH_RETURN_IF_ERROR(parser.Parse(argc, argv, &outcome));
    if (outcome == FlagParser::Outcome::kHelp) return CommandLine{{}, parser.Help()};
    if (outcome == FlagParser::Outcome::kVersion) return CommandLine{{}, "dflashd " DFLASHD_VERSION "\n"};
    const auto named = environment.find(VariableOf("config"));
    path = flags_only.config.empty() && named != environment.end() ? named->second : flags_only.config;
  }
  CommandLine result;
  FlagParser parser = MakeParser(result.settings);
  if (!path.empty()) DFLASH_RETURN_IF_ERROR(ReadConfigFile(path, &parser));
  DFLASH_RETURN_IF_ERROR(ReadEnvironment(environment, &parser, &result.warnings));
  DFLASH_RETURN_IF_ERROR(parser.Parse(argc, argv, &outcome));
  result.settings.config = path;
  result.settings.speculation_given = parser.Given("speculation");
  if (!result.settings.connect.empty() && !parser.Given("groups")) result.settings.groups = 0;
  if (result.settings.draft_model.empty() && !result.settings.speculation_given)
    result.settings.speculation = "off";
  DFLASH_RETURN_IF_ERROR(CheckSettings(result.settings));
  if (result.settings.print_config) result.text = PrintConfig(parser);
  return result;
}

}  // namespace dflash
