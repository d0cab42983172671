// Everything that can be set in dflashd. Each key is a flag ("--max-queued-requests 8"), an environment
// variable
// ("DFLASHD_MAX_QUEUED_REQUESTS=8") and a line of the configuration file ("max-queued-requests: 8"); a flag
// counts for more than the environment, the environment for more than the file, the file for more than the
// default. Secrets are never values: keys name the files that hold them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dflash {

struct Settings {
  std::string config;  // the file
  bool print_config = false;
  std::string model, draft_model;
  std::string listen = "127.0.0.1:8500";
  std::string ops_listen = "127.0.0.1:8503";
  std::string admin_listen;  // empty: none
  std::string tls_cert, tls_key, tls_client_ca;
  int64_t tls_refresh_seconds = 10;
  std::string token_file;
  std::string reflection = "auto";
  bool open_metrics = false;
  std::string log_format = "text", log_level = "info";
  std::string otlp_endpoint;  // empty: no traces
  double otlp_sample_ratio = 1;
  double drain_grace_seconds = 0;
  double drain_seconds = 120;
  int64_t tp = 1;
  int64_t rank_timeout_seconds = 60;
  int64_t formation_timeout_seconds = 60;
  int64_t load_timeout_seconds = 600;
  int64_t silence_timeout_seconds = 5;
  int64_t max_restart_delay_seconds = 60;
  std::string communicator = "auto";
  std::string all_reduce = "auto";
  std::string draft_placement = "rank0";
  bool share_device = false;
  std::string connect;  // leaders of groups on other hosts, comma-separated
  std::string group_secret_file;
  std::string backend = "auto";
  std::string speculation = "dflash";
  bool speculation_given = false;  // not the default
  std::string worker;              // empty: beside this program
  std::string model_name;
  int64_t max_queued_requests = 256;
  int64_t max_queued_tokens = 1 << 20;
  double max_queue_seconds = 120;
  double replay_seconds = 120;
  int64_t max_client_requests = 0;
  double max_client_rate = 0;
  int64_t groups = 1;  // of this host; with `connect` none, unless said otherwise
  // Handed to the worker.
  std::string instruction_set = "auto";
  int64_t threads = 0, max_sequences = 8, max_context_tokens = 0, cache_tokens = 0;
  int64_t max_prefill_tokens = 0, max_verify_rows = 0;
  std::string block_length = "by-load";
  double memory_fraction = 0;
  std::optional<int64_t> prefix_checkpoints;  // unset: the worker's own choice
  bool allow_unlisted_keys = false;
  std::string self_test = "auto";
  std::string golden;  // bundle for the self-test; empty: beside the drafter
  std::string defect = "none";
};

struct CommandLine {
  Settings settings;
  std::optional<std::string> text;         // to print instead of running: help, version, --print-config
  std::vector<std::string> warnings = {};  // for the log
};

// Reads the flags, the environment, and the file that --config or DFLASHD_CONFIG names, and checks all that
// can be checked without looking at files or the network: all values, also those that another source
// overrides, and whether they fit together (CheckSettings). `environment`: the process's variables; those
// that do not begin with DFLASHD_ are nobody's business here. One that does and names no key is an error
// where it is nearly a key's, and else a warning; but what Kubernetes makes for services called dflashd or
// dflashd-...
// (_SERVICE_HOST, _SERVICE_PORT..., _PORT, _PORT_...) is let be. InvalidArgument: names flag, variable, or
// file and line; a key that does not exist; errors of ParseConfig and ReadFile.
absl::StatusOr<CommandLine> ReadSettings(int argc, const char* const* argv,
                                         const std::map<std::string, std::string>& environment);

// What --log-format is to be for errors of ReadSettings: what a flag, the environment or the file says, the
// first of them that says something, as far as it can be read before anything is known to be right. Empty:
// nothing is said. It need not be one of the formats.
std::string EarlyLogFormat(int argc, const char* const* argv,
                           const std::map<std::string, std::string>& environment);

// The addresses of --connect.
std::vector<std::string> LeadersOf(const Settings& settings);

// InvalidArgument, naming the flag: what is missing, what does not go together, addresses that cannot be.
// Whether folders, files and addresses are there is not asked.
absl::Status CheckSettings(const Settings& settings);

}  // namespace dflash
