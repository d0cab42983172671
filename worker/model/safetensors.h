// Weight files in the safetensors format: an 8-byte little-endian length, a JSON header (per tensor `dtype`,
// `shape` and `data_offsets` relative to the end of the header), then raw little-endian data that the tensors
// cover without holes. Opening reads and checks headers only, so that every defect of a file is known before
// the first weight is read. Headers and weights are read with pread, never mapped: a file that is truncated
// while it is open then gives an error, not a signal. Source: the format's description at
// github.com/huggingface/safetensors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/regular_file.h"

namespace dflash {

// A tensor as its file's header describes it.
struct StoredTensor {
  std::string name;
  std::string dtype;  // as in the header: "BF16", "F32", "F8_E4M3", ...
  int64_t element_bytes = 0;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // in the file; may have any alignment
  int64_t bytes = 0;   // element_bytes times the product of the shape

  // The tensor as a matrix: the first dimension times the product of the others. A scalar is 1 x 1.
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t cols() const;
};

// Called while weights are read, with the number of bytes that were read since the last call; on the reading
// thread.
using ReadProgress = std::function<void(int64_t bytes)>;

// The half-open block [first_row, first_row + row_count) x [first_col, first_col + col_count) of a tensor
// seen as a matrix.
struct TensorBlock {
  int64_t first_row = 0;
  int64_t row_count = 0;
  int64_t first_col = 0;
  int64_t col_count = 0;
};

class SafetensorsFile {
 public:
  // Errors, each naming the file and, where there is one, the tensor: those of RegularFile::Open;
  // InvalidArgument for a header that breaks the format (length, JSON, a key missing or unknown, offsets that
  // do not match dtype and shape, overlaps, holes, bytes after the last tensor); DataLoss for a file that
  // ends before its data does; Unimplemented for an unknown dtype.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // sorted by name
  const StoredTensor* Find(std::string_view name) const;
  const std::string& header_digest() const { return header_digest_; }  // SHA-256 of the header, hexadecimal

  // Copies a block of one of this file's tensors to `to`, densely, row after row, in the stored dtype; reads
  // nothing else from the file. Any thread. InvalidArgument when the block is not inside the tensor or
  // `to_bytes` is not exactly its size; DataLoss when the file was truncated meanwhile.
  absl::Status Read(const StoredTensor& tensor, const TensorBlock& block, void* to, int64_t to_bytes,
                    const ReadProgress& progress = {}) const;
  // The same of the tensor's stored bytes [offset, offset + bytes), which must be inside it.
  absl::Status ReadBytes(const StoredTensor& tensor, int64_t offset, int64_t bytes, void* to) const;

 private:
  explicit SafetensorsFile(RegularFile file) : file_(std::move(file)) {}
  absl::Status ParseHeader(std::string_view header);
  RegularFile file_;
  std::vector<StoredTensor> tensors_;
  std::string header_digest_;
};

// All weights of a model folder: `model.safetensors`, or the shards that `model.safetensors.index.json`
// lists.
class SafetensorsFolder {
 public:
  struct Entry {
    const StoredTensor* tensor = nullptr;
    const SafetensorsFile* file = nullptr;
  };

  // Errors, besides those of SafetensorsFile::Open: NotFound when the folder has neither file;
  // InvalidArgument when it has both, when the index names a file outside the folder, or when index and
  // shards disagree in either direction (a tensor that its shard lacks, or a tensor that the index lacks or
  // maps to another shard).
  static absl::StatusOr<SafetensorsFolder> Open(const std::string& folder);

  const std::string& source() const {
    return source_;
  }  // path of the single file or of the index, for messages
  const std::map<std::string, Entry, std::less<>>& tensors() const { return tensors_; }
  // Files in ascending order of their names.
  const std::vector<SafetensorsFile>& files() const { return files_; }

  // Reads rows [first_row, first_row + row_count) of the tensor `name` (NotFound when there is none), as
  // SafetensorsFile::Read.
  absl::Status ReadRows(std::string_view name, int64_t first_row, int64_t row_count, void* to,
                        int64_t to_bytes, const ReadProgress& progress = {}) const;

 private:
  std::string source_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Entry, std::less<>> tensors_;  // points into files_
};

}  // namespace dflash
