// Many clients of one engine, without a server: throughput of several against one, and how long short
// prompts wait for their first token beside long ones.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/dflash_bench/report.h"
#include "worker/load_group.h"

namespace dflash::bench {

struct LoadOptions {
  GroupOptions group;        // max_sequences: at least `clients`
  std::string prompts;       // JSON in the form of tests/golden/golden.json; those of kind "chat" are asked
  int64_t clients = 16;      // that ask at a time; each waits for its answer
  int64_t max_tokens = 128;  // of an answer
  bool speculates = true;
  int64_t long_prompt = 3000;  // tokens
  int passes = 3;              // of one and of many clients, of quiet and of company, in turn
};

// Adds tokens per second of one and of `clients` clients with their ratio, of one client with and without
// speculation, and the times to the first token of short prompts alone and while two clients ask nothing but
// long ones. Errors: those of LoadGroup and of the engine; InvalidArgument when the prompts cannot be read.
absl::Status MeasureLoad(const LoadOptions& options, Report& report);

}  // namespace dflash::bench
