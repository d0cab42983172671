// Reads the conversations in tests/vectors/chat_template_*.jsonl, which
// tools/vectors/make-chat-template-vectors.py wrote.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "text/chat_template.h"

namespace dflash {

struct ChatVector {
  nlohmann::ordered_json messages, tools;
  ChatOptions options;
  std::optional<std::string> text;  // what Jinja2 renders
  std::string raises;               // else the template's own words, empty for other errors
};

// `name`: a file of tests/vectors. Ends the test program when it cannot be read.
std::vector<ChatVector> ReadChatVectors(const std::string& name);

}  // namespace dflash
