// Which model a worker group has, and a coordinator's files belong to: as digests, to be compared.
#pragma once

#include <string>

namespace dflash {

// SHA-256, hexadecimal; empty where there is no such thing (no drafter, weights without a tokenizer), or
// where whoever says it does not know.
struct ModelIdentity {
  // Of weights and configuration (worker/model/checkpoint.h, Checkpoint::revision).
  std::string target_revision, drafter_revision;
  // Of the files config.json.
  std::string target_config, drafter_config;
  // Of tokenizer.json and tokenizer_config.json (text/tokenizer_file.h).
  std::string tokenizer;

  bool operator==(const ModelIdentity&) const = default;
};

}  // namespace dflash
