#include "text/chat_template_vectors.h"

#include <fstream>

#include "base/check.h"

namespace dflash {

std::vector<ChatVector> ReadChatVectors(const std::string& name) {
  std::ifstream file(std::string(DFLASHD_SOURCE_DIR "/tests/vectors/") + name);
  DFLASH_CHECK(file.is_open(), "no such vectors");
  std::vector<ChatVector> vectors;
  std::string line;
  while (std::getline(file, line)) {
    const auto json = nlohmann::ordered_json::parse(line);
    ChatVector vector;
    vector.messages = json.at("messages");
    vector.tools = json.at("tools");
    for (const auto& [option, value] : json.at("options").items()) {
      if (option == "add_generation_prompt") {
        vector.options.add_generation_prompt = value.get<bool>();
      } else if (option == "enable_thinking") {
        vector.options.enable_thinking = value.get<bool>();
      } else {
        vector.options.variables[option] = value;
      }
    }
    if (json.contains("text")) vector.text = json["text"].get<std::string>();
    vector.raises = json.value("raises", "");
    vectors.push_back(std::move(vector));
  }
  return vectors;
}

}  // namespace dflash
