// The golden prompts with their texts, for tests that render and tokenize.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dflash::integration {

struct GoldenText {
  std::string kind;
  std::string text;  // rendered prompt
  std::vector<uint32_t> prompt_ids;
  std::vector<uint32_t> output_ids;
  std::string output_text;  // special tokens kept
};

// Ends the test program when tests/golden/golden.json cannot be read.
std::vector<GoldenText> GoldenTexts();

}  // namespace dflash::integration
