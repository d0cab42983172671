#include "worker/model/safetensors.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/json_value.h"
#include "base/sha256.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own bound
constexpr size_t kMaxDimensions = 8;
constexpr size_t kMaxShards = 4096;
constexpr int64_t kReadChunkBytes = int64_t{8} << 20;  // between two calls of the progress function

struct DTypeSize {
  const char* name;
  int64_t bytes;
};
constexpr DTypeSize kDTypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},
};

// The number of elements, or -1 when it, or the product of any of the sizes without the zeros, overflows.
int64_t ElementCount(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    empty = empty || size == 0;
    if (__builtin_mul_overflow(count, std::max<int64_t>(size, 1), &count)) return -1;
  }
  return empty ? 0 : count;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Reads a list of at most `max` non-negative integers.
bool ReadSizes(const JsonValue& value, size_t max, std::vector<int64_t>* sizes) {
  if (value.kind != JsonValue::Kind::kArray || value.elements.size() > max) return false;
  for (const JsonValue& element : value.elements) {
    if (element.kind != JsonValue::Kind::kInt || element.integer < 0) return false;
    sizes->push_back(element.integer);
  }
  return true;
}

// `where` begins every message. Offsets stay relative to the data.
absl::StatusOr<StoredTensor> ParseTensor(const std::string& where, const JsonMember& member) {
  const auto bad = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(where, what));
  };
  if (member.value.kind != JsonValue::Kind::kObject) {
    return bad(absl::StrCat("expected an object, found ", Name(member.value.kind)));
  }
  for (const JsonMember& entry : member.value.members) {
    if (entry.key != "dtype" && entry.key != "shape" && entry.key != "data_offsets") {
      return bad(absl::StrCat("unknown key ", Printable(entry.key)));
    }
  }
  const JsonValue* dtype = member.value.Find("dtype");
  const JsonValue* shape = member.value.Find("shape");
  const JsonValue* offsets = member.value.Find("data_offsets");
  if (dtype == nullptr || dtype->kind != JsonValue::Kind::kString)
    return bad("dtype is missing or no string");
  StoredTensor tensor;
  tensor.name = member.key;
  tensor.dtype = dtype->string;
  for (const DTypeSize& known : kDTypes) {
    if (tensor.dtype == known.name) tensor.element_bytes = known.bytes;
  }
  if (tensor.element_bytes == 0) {
    return absl::UnimplementedError(absl::StrCat(where, "unknown dtype ", Printable(tensor.dtype)));
  }
  if (shape == nullptr || !ReadSizes(*shape, kMaxDimensions, &tensor.shape)) {
    return bad(absl::StrCat("shape is missing or no list of at most ", kMaxDimensions, " sizes"));
  }
  std::vector<int64_t> range;
  if (offsets == nullptr || !ReadSizes(*offsets, 2, &range) || range.size() != 2 || range[0] > range[1]) {
    return bad("data_offsets is missing or no ascending pair of offsets");
  }
  const int64_t elements = ElementCount(tensor.shape);
  if (elements < 0 || __builtin_mul_overflow(elements, tensor.element_bytes, &tensor.bytes)) {
    return bad(
        absl::StrCat("the size of ", tensor.dtype, " ", ShapeText(tensor.shape), " does not fit in 64 bits"));
  }
  if (range[1] - range[0] != tensor.bytes) {
    return bad(absl::StrCat("data_offsets [", range[0], ", ", range[1], "] hold ", range[1] - range[0],
                            " bytes, but ", tensor.dtype, " ", ShapeText(tensor.shape), " needs ",
                            tensor.bytes));
  }
  tensor.offset = range[0];
  return tensor;
}

absl::Status CheckMetadata(const std::string& path, const JsonValue& metadata) {
  bool texts = metadata.kind == JsonValue::Kind::kObject;
  for (const JsonMember& member : metadata.members)
    texts = texts && member.value.kind == JsonValue::Kind::kString;
  if (texts) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, ": __metadata__ is no object of strings"));
}

// A name of a file in the folder itself, so that an index cannot make us open anything else.
bool IsPlainFileName(const std::string& name) {
  constexpr std::string_view kSuffix = ".safetensors";
  if (name.size() <= kSuffix.size() || name.size() > 255 || !name.ends_with(kSuffix) || name[0] == '.')
    return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

// Reads the weight map: tensor name -> file name.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxHeaderBytes));
  DFLASH_ASSIGN_OR_RETURN(const JsonValue root, ParseJson(text, path, {kMaxHeaderBytes, 8, 1 << 20}));
  for (const JsonMember& member : root.members) {
    // `metadata` holds sums that some exporters get wrong; the headers say it all.
    if (member.key != "weight_map" && member.key != "metadata") {
      return absl::InvalidArgumentError(absl::StrCat(path, ": unknown key ", Printable(member.key)));
    }
  }
  const JsonValue* weight_map = root.Find("weight_map");
  if (weight_map == nullptr || weight_map->kind != JsonValue::Kind::kObject) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is missing or no object"));
  }
  std::map<std::string, std::string> files;
  for (const JsonMember& member : weight_map->members) {
    const std::string& file = member.value.string;
    if (member.value.kind != JsonValue::Kind::kString || !IsPlainFileName(file)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map.", Printable(member.key), ": \"",
                                                     Printable(file),
                                                     "\" is no name of a .safetensors file in this folder"));
    }
    files.emplace(member.key, file);
  }
  if (files.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is empty"));
  return files;
}

}  // namespace

int64_t StoredTensor::cols() const {
  int64_t cols = 1;
  for (size_t i = 1; i < shape.size(); ++i) cols *= shape[i];
  return cols;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(RegularFile opened, RegularFile::Open(path));
  SafetensorsFile file(std::move(opened));
  const int64_t size = file.file_.size();
  if (size < kLengthBytes) {
    return absl::DataLossError(absl::StrCat(path, ": ", size, " bytes; expected at least the ", kLengthBytes,
                                            " bytes of the header's length"));
  }
  unsigned char length_bytes[kLengthBytes];
  DFLASH_RETURN_IF_ERROR(file.file_.ReadAt(0, kLengthBytes, length_bytes));
  uint64_t length = 0;
  for (int i = 0; i < kLengthBytes; ++i) length |= static_cast<uint64_t>(length_bytes[i]) << (8 * i);
  if (length < 2 || length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a header of ", length, " bytes; expected 2 to ",
                                                   kMaxHeaderBytes, " (is it a safetensors file?)"));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > size - kLengthBytes) {
    return absl::DataLossError(absl::StrCat(path, ": truncated: the header needs ",
                                            kLengthBytes + header_bytes, " bytes, the file has ", size));
  }
  std::string header(length, '\0');
  DFLASH_RETURN_IF_ERROR(file.file_.ReadAt(kLengthBytes, header_bytes, header.data()));
  if (header[0] != '{') {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the header does not begin with {"));
  }
  DFLASH_RETURN_IF_ERROR(file.ParseHeader(header));
  file.header_digest_ = Sha256().Add(header).HexDigest();
  return file;
}

absl::Status SafetensorsFile::ParseHeader(std::string_view header) {
  DFLASH_ASSIGN_OR_RETURN(const JsonValue root, ParseJson(header, path(), {kMaxHeaderBytes, 4, 1 << 21}));
  std::vector<StoredTensor> tensors;
  for (const JsonMember& member : root.members) {
    if (member.key == "__metadata__") {
      DFLASH_RETURN_IF_ERROR(CheckMetadata(path(), member.value));
      continue;
    }
    DFLASH_ASSIGN_OR_RETURN(
        StoredTensor tensor,
        ParseTensor(absl::StrCat(path(), ": tensor ", Printable(member.key), ": "), member));
    tensors.push_back(std::move(tensor));
  }
  // In the order of their data the tensors have to follow each other without overlap or hole, up to the
  // file's end.
  const auto data_start = kLengthBytes + static_cast<int64_t>(header.size());
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  int64_t end = 0;
  const std::string* before = nullptr;
  for (StoredTensor& tensor : tensors) {
    if (tensor.offset != end) {
      const std::string neighbour =
          before == nullptr ? "the header" : absl::StrCat("tensor ", Printable(*before));
      return absl::InvalidArgumentError(
          absl::StrCat(path(), ": tensor ", Printable(tensor.name), " begins at ", tensor.offset, ", but ",
                       neighbour, " ends at ", end, tensor.offset < end ? ": they overlap" : ": a hole"));
    }
    end = tensor.offset + tensor.bytes;  // no overflow: both offsets came from the header as int64
    before = &tensor.name;
    tensor.offset += data_start;
  }
  const int64_t data_bytes = file_.size() - data_start;
  if (end > data_bytes) {
    return absl::DataLossError(absl::StrCat(path(), ": truncated: its tensors end at byte ", end,
                                            " of the data (", before == nullptr ? "" : Printable(*before),
                                            "), the file holds ", data_bytes));
  }
  if (end < data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": ", data_bytes - end, " bytes after the data of the last tensor"));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
  tensors_ = std::move(tensors);
  return absl::OkStatus();
}

const StoredTensor* SafetensorsFile::Find(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const StoredTensor& tensor, std::string_view n) { return tensor.name < n; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::Status SafetensorsFile::Read(const StoredTensor& tensor, const TensorBlock& block, void* to,
                                   int64_t to_bytes, const ReadProgress& progress) const {
  const int64_t rows = tensor.rows();
  const int64_t cols = tensor.cols();
  const auto inside = [](int64_t first, int64_t count, int64_t size) {
    return first >= 0 && count >= 0 && first <= size && count <= size - first;
  };
  if (!inside(block.first_row, block.row_count, rows) || !inside(block.first_col, block.col_count, cols)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path(), ": tensor ", Printable(tensor.name), ": rows ", block.first_row, " + ", block.row_count,
        ", columns ", block.first_col, " + ", block.col_count, " are not inside ", rows, " x ", cols));
  }
  const int64_t row_bytes = block.col_count * tensor.element_bytes;
  if (to_bytes != block.row_count * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path(), ": tensor ", Printable(tensor.name),
                                                   ": a buffer of ", to_bytes, " bytes for ",
                                                   block.row_count * row_bytes));
  }
  if (to_bytes == 0) return absl::OkStatus();
  // Whole rows lie next to each other: one long run. A part of each row: one run a row.
  const bool whole_rows = block.col_count == cols;
  const int64_t runs = whole_rows ? 1 : block.row_count;
  const int64_t run_bytes = whole_rows ? to_bytes : row_bytes;
  int64_t unreported = 0;
  auto* out = static_cast<char*>(to);
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t start =
        tensor.offset + ((block.first_row + run) * cols + block.first_col) * tensor.element_bytes;
    for (int64_t done = 0; done < run_bytes; done += kReadChunkBytes) {
      const int64_t bytes = std::min(kReadChunkBytes, run_bytes - done);
      DFLASH_RETURN_IF_ERROR(
          Annotate(file_.ReadAt(start + done, bytes, out), absl::StrCat("tensor ", Printable(tensor.name))));
      out += bytes;
      unreported += bytes;
      if (progress && unreported >= kReadChunkBytes) progress(std::exchange(unreported, 0));
    }
  }
  if (progress && unreported > 0) progress(unreported);
  return absl::OkStatus();
}

absl::Status SafetensorsFile::ReadBytes(const StoredTensor& tensor, int64_t offset, int64_t bytes,
                                        void* to) const {
  DFLASH_CHECK(offset >= 0 && bytes >= 0 && offset <= tensor.bytes && bytes <= tensor.bytes - offset);
  return Annotate(file_.ReadAt(tensor.offset + offset, bytes, to),
                  absl::StrCat("tensor ", Printable(tensor.name)));
}

absl::StatusOr<SafetensorsFolder> SafetensorsFolder::Open(const std::string& folder) {
  const std::string single_path = absl::StrCat(folder, "/", kSingleFile);
  const std::string index_path = absl::StrCat(folder, "/", kIndexFile);
  absl::StatusOr<SafetensorsFile> single = SafetensorsFile::Open(single_path);
  const absl::StatusOr<RegularFile> index = RegularFile::Open(index_path);
  SafetensorsFolder weights;
  if (absl::IsNotFound(index.status())) {
    if (absl::IsNotFound(single.status())) {
      return absl::NotFoundError(absl::StrCat(folder, ": neither ", kSingleFile, " nor ", kIndexFile));
    }
    DFLASH_RETURN_IF_ERROR(single.status());
    weights.source_ = single_path;
    weights.files_.push_back(*std::move(single));
    for (const StoredTensor& tensor : weights.files_[0].tensors()) {
      weights.tensors_.emplace(tensor.name, Entry{&tensor, &weights.files_[0]});
    }
    return weights;
  }
  DFLASH_RETURN_IF_ERROR(index.status());
  if (!absl::IsNotFound(single.status())) {
    return absl::InvalidArgumentError(absl::StrCat(folder, ": both ", kSingleFile, " and ", kIndexFile));
  }

  weights.source_ = index_path;
  DFLASH_ASSIGN_OR_RETURN(const auto weight_map, ReadIndex(index_path));
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  if (names.size() > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_path, ": ", names.size(), " files; at most ", kMaxShards));
  }
  weights.files_.reserve(names.size());  // entries point into it
  for (const std::string& name : names) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(absl::StrCat(folder, "/", name));
    if (!file.ok()) return Annotate(file.status(), absl::StrCat(index_path, ": weight_map"));
    weights.files_.push_back(*std::move(file));
  }
  for (const SafetensorsFile& file : weights.files_) {
    for (const StoredTensor& tensor : file.tensors()) {
      const auto listed = weight_map.find(tensor.name);
      if (listed == weight_map.end()) {
        return absl::InvalidArgumentError(absl::StrCat(index_path, ": ", file.path(), " holds tensor ",
                                                       Printable(tensor.name), ", which weight_map lacks"));
      }
      if (absl::StrCat(folder, "/", listed->second) != file.path()) {
        return absl::InvalidArgumentError(absl::StrCat(index_path, ": weight_map.", Printable(tensor.name),
                                                       ": ", listed->second, ", but ", file.path(),
                                                       " holds it"));
      }
      weights.tensors_.emplace(tensor.name, Entry{&tensor, &file});
    }
  }
  for (const auto& [tensor, file] : weight_map) {
    if (!weights.tensors_.contains(tensor)) {
      return absl::InvalidArgumentError(absl::StrCat(index_path, ": weight_map.", Printable(tensor), ": ",
                                                     folder, "/", file, " has no such tensor"));
    }
  }
  return weights;
}

absl::Status SafetensorsFolder::ReadRows(std::string_view name, int64_t first_row, int64_t row_count,
                                         void* to, int64_t to_bytes, const ReadProgress& progress) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    return absl::NotFoundError(absl::StrCat(source_, ": no tensor ", Printable(name)));
  const Entry& entry = found->second;
  return entry.file->Read(*entry.tensor, {first_row, row_count, 0, entry.tensor->cols()}, to, to_bytes,
                          progress);
}

}  // namespace dflash
