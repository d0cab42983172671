// Weight files and the index of a folder.
// Input: 'f', then a whole file; 'h', then edits (json_edits.h) of a good header; 'i', then an index over two
// good shards; 'e', then edits of a good index.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "tests/fuzz/file_of_bytes.h"
#include "tests/fuzz/json_edits.h"
#include "worker/model/safetensors.h"
#include "worker/model/testing/safetensors_writer.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

const std::vector<WrittenTensor> kFirst = {{"a", "BF16", {4, 3}, ""}, {"b", "F32", {2, 2, 2}, ""}};
const std::vector<WrittenTensor> kSecond = {{"c", "BF16", {8}, ""}, {"d", "F32", {}, ""}};

void CheckError(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnavailable:  // a name that the system does not take
    case absl::StatusCode::kPermissionDenied:
      return;
    default:
      DFLASH_CHECK(false, status.ToString().c_str());
  }
}

// Every tensor of an open file lies inside it and can be read.
void ReadAll(const SafetensorsFile& file, size_t file_bytes) {
  for (const StoredTensor& tensor : file.tensors()) {
    DFLASH_CHECK(tensor.offset >= 8 && tensor.bytes >= 0 &&
                 tensor.offset + tensor.bytes <= static_cast<int64_t>(file_bytes));
    DFLASH_CHECK(tensor.rows() * tensor.cols() * tensor.element_bytes == tensor.bytes);
    std::vector<char> bytes(static_cast<size_t>(tensor.bytes));
    const absl::Status read =
        file.Read(tensor, {0, tensor.rows(), 0, tensor.cols()}, bytes.data(), tensor.bytes);
    DFLASH_CHECK(read.ok(), read.ToString().c_str());
    // A block outside is refused, whatever its numbers.
    for (const TensorBlock& block :
         {TensorBlock{-1, 1, 0, 1}, TensorBlock{0, tensor.rows() + 1, 0, tensor.cols()},
          TensorBlock{INT64_MAX, INT64_MAX, 0, 1}, TensorBlock{0, 1, INT64_MAX, 2}}) {
      DFLASH_CHECK(!file.Read(tensor, block, bytes.data(), tensor.bytes).ok());
    }
  }
}

void RunFile(const std::string& bytes) {
  static fuzz::FileOfBytes file;
  file.Set(bytes);
  const absl::StatusOr<SafetensorsFile> opened = SafetensorsFile::Open(file.path());
  CheckError(opened.status());
  if (opened.ok()) ReadAll(*opened, bytes.size());
}

void RunIndex(std::string_view index) {
  static const TemporaryFolder* const folder = [] {
    auto* made = new TemporaryFolder;
    made->Write("1.safetensors", Safetensors(kFirst));
    made->Write("2.safetensors", Safetensors(kSecond));
    return made;
  }();
  folder->Write("model.safetensors.index.json", index);
  const absl::StatusOr<SafetensorsFolder> opened = SafetensorsFolder::Open(folder->path());
  CheckError(opened.status());
  if (!opened.ok()) return;
  // Only the shards' own tensors can be there, and all of a shard that is named.
  for (const auto& [name, entry] : opened->tensors()) {
    DFLASH_CHECK(name == "a" || name == "b" || name == "c" || name == "d");
    DFLASH_CHECK(entry.file->Find(name) == entry.tensor);
  }
  DFLASH_CHECK(opened->tensors().size() == 2 * opened->files().size());
}

void Run(char kind, std::string_view input) {
  static const std::string good = Safetensors(kFirst);
  static const size_t header_bytes =
      static_cast<uint8_t>(good[0]) | static_cast<size_t>(static_cast<uint8_t>(good[1])) << 8;
  static const Json header = Json::parse(good.substr(8, header_bytes));
  static const Json index = Json::parse(SafetensorsIndex(
      {{"a", "1.safetensors"}, {"b", "1.safetensors"}, {"c", "2.safetensors"}, {"d", "2.safetensors"}}));
  switch (kind) {
    case 'f':
      return RunFile(std::string(input));
    case 'h':
      return RunFile(RawSafetensors(fuzz::EditedJson(header, input), good.substr(8 + header_bytes)));
    case 'i':
      return RunIndex(input);
    default:
      return RunIndex(fuzz::EditedJson(index, input));
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  dflash::Run(static_cast<char>(data[0]),
              std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
