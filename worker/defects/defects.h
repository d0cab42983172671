// The classic integration defects, to be planted on purpose: each is known from a real engine, and the
// acceptance that it costs is in tests/golden/README.md. Two libraries implement this header: worker_defects
// (tests, preset `defects`) and worker_no_defects (every other build), whose only answer is Unimplemented.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/drafter.h"
#include "worker/model/feature_contract.h"

namespace dflash {

// Names: "offset0" (tap ids one too low), "noswa" (windows dropped, still causal), "noncausal" (sliding
// layers bidirectional in the block), "vllm0201" (these three together), "dropprefix" (the drafter's context
// of the first half of the prompt is hidden). Empty outside the defects build.
std::vector<std::string> DefectNames();

// Mutates a loaded contract. "dropprefix" changes nothing here. InvalidArgument: unknown name. Unimplemented:
// a build without defects.
absl::Status PlantDefect(const std::string& name, FeatureContract& contract);

// The drafter as the defect leaves it: `drafter` itself, or a wrapper around it for "dropprefix". `table` is
// not owned. Errors as PlantDefect.
absl::StatusOr<std::unique_ptr<Drafter>> PlantDefect(const std::string& name,
                                                     std::unique_ptr<Drafter> drafter, SequenceTable* table);

}  // namespace dflash
