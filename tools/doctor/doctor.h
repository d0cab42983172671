// The doctor: walks the interfaces at which target and drafter can diverge and says which is the first to
// fail, and why.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "tools/doctor/report.h"
#include "worker/golden/golden_bundle.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {

struct DoctorOptions {
  std::string model;        // folder of the target
  std::string draft_model;  // folder of the drafter
  std::string golden;       // folder of a golden bundle; empty: none
  int ranks = 1;            // threads of this process that share the target
  int threads = 0;          // of the CPU backend, per rank; 0: one per core
  int device = 0;
  int64_t max_context_tokens = 0;  // 0: 4096, or as many as the target has positions for
  int64_t max_prompts = 64;        // golden prompts that are generated
  bool allow_unlisted_keys = false;
  std::string defect;                           // to be planted; builds with defects only
  bool stop_at_first_failure = false;           // leaves out what is expensive once an interface has failed
  std::function<void(const std::string&)> log;  // progress and warnings; may be empty
};

// --max-context-tokens, or its default for this target. InvalidArgument naming the flag where the target has
// positions for less.
absl::StatusOr<int64_t> ContextTokens(const DoctorOptions& options, const TargetConfig& target);

// A pair that cannot be loaded is a finding ("files", "config"), not an error. Errors: InvalidArgument for
// options and the golden bundle; NotFound; Unavailable, ResourceExhausted of the device; Unimplemented for a
// defect in a build without them.
absl::StatusOr<Report> RunDoctor(const DoctorOptions& options);

}  // namespace dflash::doctor
