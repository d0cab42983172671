// Inputs of fuzzers for JSON files. Random bytes rarely get past a parser; edits of a good file do.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>

namespace dflash::fuzz {

// Edits a JSON document. Each line of `edits` is one: "POINTER VALUE" sets what lies at the JSON pointer
// (places on the way come into being), "POINTER" alone removes it. A line that makes no sense is left out.
inline std::string EditedJson(nlohmann::ordered_json json, std::string_view edits) {
  using Json = nlohmann::ordered_json;
  std::istringstream lines{std::string(edits)};
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' ');
    try {
      const Json::json_pointer pointer(line.substr(0, space));
      if (space == std::string::npos) {
        if (pointer.empty() || !json.contains(pointer)) continue;
        Json& parent = json[pointer.parent_pointer()];
        if (parent.is_object()) {
          parent.erase(pointer.back());
        } else {
          parent.erase(std::stoul(pointer.back()));
        }
        continue;
      }
      // A new place at the end of an array is fine, one at index 4 billion is not.
      bool is_far = false;
      for (Json::json_pointer at = pointer; !at.empty(); at.pop_back())
        is_far |= at.back().size() > 4 && at.back().find_first_not_of("0123456789") == std::string::npos;
      if (is_far) continue;
      json[pointer] = Json::parse(line.substr(space + 1));
    } catch (const std::exception&) {
    }
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dflash::fuzz
