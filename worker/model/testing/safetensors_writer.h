// Makes small weight files for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dflash {

struct WrittenTensor {
  std::string name;
  std::string dtype = "BF16";
  std::vector<int64_t> shape;
  std::string data;  // empty: byte i of the tensor is i modulo 251
};

inline int64_t ElementBytes(const std::string& dtype) {
  if (dtype == "F32") return 4;
  return dtype == "BF16" || dtype == "F16" ? 2 : 1;
}

// Length, header and data as one string; what a file is when its header is any text at all.
inline std::string RawSafetensors(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes.push_back(static_cast<char>((static_cast<uint64_t>(header.size()) >> (8 * i)) & 255));
  return bytes + header + data;
}

// A well-formed file with these tensors, in this order of data.
inline std::string Safetensors(const std::vector<WrittenTensor>& tensors) {
  std::vector<std::string> entries = {R"("__metadata__": {"format": "pt"})"};
  std::string data;
  for (const WrittenTensor& tensor : tensors) {
    int64_t bytes = ElementBytes(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= size;
    const size_t begin = data.size();
    if (tensor.data.empty()) {
      for (int64_t i = 0; i < bytes; ++i) data.push_back(static_cast<char>(i % 251));
    } else {
      data += tensor.data;
    }
    entries.push_back(absl::StrCat("\"", tensor.name, "\": {\"dtype\": \"", tensor.dtype, "\", \"shape\": [",
                                   absl::StrJoin(tensor.shape, ", "), "], \"data_offsets\": [", begin, ", ",
                                   data.size(), "]}"));
  }
  return RawSafetensors(absl::StrCat("{", absl::StrJoin(entries, ", "), "}"), data);
}

// An index that maps each tensor to a file.
inline std::string SafetensorsIndex(const std::map<std::string, std::string>& weight_map) {
  return absl::StrCat("{\"metadata\": {\"total_size\": 1}, \"weight_map\": {",
                      absl::StrJoin(weight_map, ", ",
                                    [](std::string* out, const auto& entry) {
                                      absl::StrAppend(out, "\"", entry.first, "\": \"", entry.second, "\"");
                                    }),
                      "}}");
}

}  // namespace dflash
