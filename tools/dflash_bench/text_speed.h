// Speed of the tokenizer on ordinary text.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "tools/dflash_bench/report.h"

namespace dflash::bench {

// Encodes `text` and decodes it again with the tokenizer of a model folder. Errors: those of the tokenizer.
absl::Status MeasureText(const std::string& folder, const std::string& text, int repeats, Report& report);

}  // namespace dflash::bench
