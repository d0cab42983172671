// Names of the integration defects that test builds of the worker plant on purpose, for programs that only
// hand them on. worker/defects/defects.h says what each does.
#pragma once

#include <string_view>

namespace dflash {

inline constexpr std::string_view kDefectNames[] = {
    "offset0",         "permuted-taps", "noswa",     "window-off-by-one", "noncausal",    "full-causal",
    "vllm0201",        "target-norm",   "theta",     "partial-rotary",    "dropprefix",   "last-chunk",
    "shifted-context", "rejected-kept", "zero-head", "mask-stripped",     "thinking-flag"};

}  // namespace dflash
