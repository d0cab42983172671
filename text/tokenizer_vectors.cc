#include "text/tokenizer_vectors.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/check.h"

namespace dflash {
namespace {

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

}  // namespace

TokenizerVectors ReadTokenizerVectors(const std::string& name) {
  using Ids = std::vector<int32_t>;
  std::ifstream file(std::string(DFLASHD_SOURCE_DIR "/tests/vectors/") + name);
  DFLASH_CHECK(file.is_open(), name.c_str());
  TokenizerVectors vectors;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json json = nlohmann::json::parse(line);
    if (json.contains("decode")) {
      vectors.decoding.push_back({json.at("decode").get<Ids>(), json.at("keep"), json.at("drop")});
      continue;
    }
    Ids ids = json.at("ids").get<Ids>();
    if (json.contains("segments")) {
      vectors.segments.push_back(
          {json["segments"].get<decltype(SegmentsVector::segments)>(), std::move(ids)});
    } else if (json.contains("hex")) {
      vectors.encoding.push_back({FromHex(json["hex"]), std::move(ids), {}, false});
    } else {
      Ids parsed = json.contains("parsed") ? json["parsed"].get<Ids>() : ids;
      vectors.encoding.push_back({json.at("text"), std::move(ids), std::move(parsed), true});
    }
  }
  return vectors;
}

}  // namespace dflash
