#include "tests/integration/golden_prompts.h"

#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/integration/server.h"

namespace dflash::integration {

std::vector<GoldenText> GoldenTexts() {
  std::ifstream file(SourcePath("tests/golden/golden.json"));
  std::vector<GoldenText> prompts;
  for (const nlohmann::json& entry : nlohmann::json::parse(file)) {
    prompts.push_back({entry.at("kind"), entry.at("text"), entry.at("prompt_ids"), entry.at("output_ids"),
                       entry.at("output_text")});
  }
  return prompts;
}

}  // namespace dflash::integration
