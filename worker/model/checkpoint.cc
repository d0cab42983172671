#include "worker/model/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/host_limits.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr size_t kNamesInMessage = 5;

std::string ListOf(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kNamesInMessage);
  std::string text = absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", ");
  if (names.size() > shown) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

bool SameShape(const std::vector<ExpectedSize>& expected, const std::vector<int64_t>& shape) {
  return std::equal(expected.begin(), expected.end(), shape.begin(), shape.end(),
                    [](const ExpectedSize& size, int64_t stored) { return size.size == stored; });
}

std::string ShapeText(const std::vector<ExpectedSize>& shape) {
  return absl::StrCat("[",
                      absl::StrJoin(shape, ", ",
                                    [](std::string* out, const ExpectedSize& size) {
                                      absl::StrAppend(out, size.size, " (", size.keys, ")");
                                    }),
                      "]");
}

// Random weights beside real ones would be taken for them, sooner or later.
absl::Status CheckHasNoWeights(const std::string& folder) {
  const absl::Status status = SafetensorsFolder::Open(folder).status();
  if (absl::IsNotFound(status)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "random weights: ", folder, " holds weights already; it needs a folder with config.json alone"));
}

}  // namespace

// What a kind of checkpoint consists of.
struct Checkpoint::Inventory {
  std::vector<ExpectedTensor> tensors;
  std::vector<std::string> prefixes;  // how exporters begin the names of `tensors`
  std::string probe;                  // the tensor that shows which prefix is used
  std::string no_prefix;              // the tensor that never has one, and is absent when embeddings are tied
  std::vector<std::string> skipped_prefixes;
  std::string config_origin;
  std::string config_digest;
};

absl::StatusOr<HostTensor> HostTensor::Allocate(DType dtype, int64_t rows, int64_t cols) {
  const int64_t bytes = rows * cols * SizeOf(dtype);
  auto* data = static_cast<std::byte*>(operator new[](static_cast<size_t>(bytes), kAlignment, std::nothrow));
  if (data == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("no memory for a tensor of ", bytes, " bytes"));
  return HostTensor(dtype, rows, cols, data);
}

// Takes every expected tensor out of the files.
absl::Status Checkpoint::Match(const Inventory& inventory, const std::string& prefix) {
  std::vector<std::string> missing;
  for (const ExpectedTensor& expected : inventory.tensors) {
    const std::string stored_name = (expected.name == inventory.no_prefix ? "" : prefix) + expected.name;
    const auto found = weights_.tensors().find(stored_name);
    if (found == weights_.tensors().end()) {
      missing.push_back(stored_name);
      continue;
    }
    const auto& [tensor, file] = found->second;
    const std::string where = absl::StrCat(file->path(), ": tensor ", stored_name);
    TensorInfo info;
    info.name = expected.name;
    if (tensor->dtype == "BF16") {
      info.dtype = DType::kBf16;
    } else if (tensor->dtype == "F32") {
      info.dtype = DType::kF32;
    } else {
      return absl::UnimplementedError(
          absl::StrCat(where, ": dtype ", tensor->dtype, "; only BF16 and F32 weights are built"));
    }
    if (!SameShape(expected.shape, tensor->shape)) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": shape [", absl::StrJoin(tensor->shape, ", "),
                                                     "], but ", inventory.config_origin, " calls for ",
                                                     ShapeText(expected.shape)));
    }
    info.stored = tensor;
    info.file = file;
    total_bytes_ += tensor->bytes;
    tensors_.emplace(expected.name, std::move(info));
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(weights_.source(), ": ", missing.size(),
                                                 " missing tensors that ", inventory.config_origin,
                                                 " calls for: ", ListOf(missing)));
}

// Accounts for every tensor that is not expected.
absl::Status Checkpoint::CheckRest(const Inventory& inventory, const std::string& prefix) {
  std::set<const StoredTensor*> expected;
  for (const auto& [name, info] : tensors_) expected.insert(info.stored);
  for (const std::string& skipped : inventory.skipped_prefixes) skipped_.push_back({skipped, 0, 0});
  std::vector<std::string> unknown;
  for (const auto& [name, entry] : weights_.tensors()) {
    if (expected.contains(entry.tensor)) continue;
    const auto group = std::find_if(
        skipped_.begin(), skipped_.end(),
        [&name = name](const SkippedTensors& skipped) { return name.starts_with(skipped.prefix); });
    if (group != skipped_.end()) {
      ++group->count;
      group->bytes += entry.tensor->bytes;
      continue;
    }
    const std::string plain = name.starts_with(prefix) ? name.substr(prefix.size()) : name;
    if (name == inventory.no_prefix) {
      return absl::InvalidArgumentError(absl::StrCat(entry.file->path(), ": tensor ", name, ", but ",
                                                     inventory.config_origin, " says tie_word_embeddings"));
    }
    if (plain == "d2t" || plain == "t2d") {
      return absl::UnimplementedError(absl::StrCat(entry.file->path(), ": tensor ", name,
                                                   ": drafters with a reduced vocabulary are not built"));
    }
    if (name.ends_with("weight_scale_inv") || name.ends_with("weight_scale")) {
      return absl::UnimplementedError(absl::StrCat(entry.file->path(), ": tensor ", Printable(name),
                                                   ": quantized weights are not built"));
    }
    unknown.push_back(Printable(name));
  }
  std::erase_if(skipped_, [](const SkippedTensors& skipped) { return skipped.count == 0; });
  if (unknown.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(weights_.source(), ": ", unknown.size(), " tensors that ",
                                                 inventory.config_origin,
                                                 " does not call for: ", ListOf(unknown)));
}

absl::Status Checkpoint::OpenFolder(const std::string& folder, const Inventory& inventory) {
  DFLASH_ASSIGN_OR_RETURN(weights_, SafetensorsFolder::Open(folder));
  source_ = weights_.source();
  std::vector<std::string> found;
  std::vector<std::string> probes;
  for (const std::string& prefix : inventory.prefixes) {
    probes.push_back(prefix + inventory.probe);
    if (weights_.tensors().contains(probes.back())) found.push_back(prefix);
  }
  if (found.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(weights_.source(),
                                                   ": expected exactly one of the tensors ",
                                                   absl::StrJoin(probes, ", "), "; found ", found.size()));
  }
  DFLASH_RETURN_IF_ERROR(Match(inventory, found[0]));
  DFLASH_RETURN_IF_ERROR(CheckRest(inventory, found[0]));

  // All is known to be there; now the first, small reads.
  return ReadSamples(inventory);
}

// The bytes of a tensor that count for the revision.
absl::StatusOr<std::string> Checkpoint::Sample(const TensorInfo& tensor) const {
  const int64_t bytes = tensor.stored->bytes;
  std::string sample(static_cast<size_t>(std::min(bytes, kSampledBytes)), '\0');
  if (bytes <= kSampledBytes) {
    DFLASH_RETURN_IF_ERROR(tensor.file->ReadBytes(*tensor.stored, 0, bytes, sample.data()));
    return sample;
  }
  for (int64_t i = 0; i < kSamples; ++i) {
    int64_t offset = i * ((bytes - kSampleBytes) / (kSamples - 1));
    if (i + 1 < kSamples) offset -= offset % kSampleBytes;
    if (i + 1 == kSamples) offset = bytes - kSampleBytes;
    DFLASH_RETURN_IF_ERROR(
        tensor.file->ReadBytes(*tensor.stored, offset, kSampleBytes, sample.data() + i * kSampleBytes));
  }
  return sample;
}

absl::Status Checkpoint::ReadSamples(const Inventory& inventory) {
  std::vector<const TensorInfo*> tensors;
  for (const auto& [name, tensor] : tensors_) tensors.push_back(&tensor);
  // Small reads take their time each, from a disk and more so from a network: many are under way at a time.
  std::vector<absl::StatusOr<std::string>> samples(tensors.size(), std::string());
  const size_t readers = std::min<size_t>(16, tensors.size());
  std::vector<std::thread> threads;
  for (size_t reader = 0; reader < readers; ++reader) {
    threads.emplace_back([&, reader] {
      for (size_t i = reader; i < tensors.size(); i += readers) samples[i] = Sample(*tensors[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Sha256 revision;
  revision.Add(inventory.config_digest);
  for (const SafetensorsFile& file : weights_.files()) revision.Add(file.header_digest());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!samples[i].ok()) return samples[i].status();
    revision.Add(tensors[i]->name).Add(*samples[i]);
    fingerprints_[tensors[i]->name] = Sha256().Add(*samples[i]).HexDigest();
  }
  revision_ = revision.HexDigest();
  return absl::OkStatus();
}

void Checkpoint::MakeRandom(const Inventory& inventory, ModelRole role, uint64_t seed) {
  is_random_ = true;
  random_tensors_.reserve(inventory.tensors.size());  // tensors_ points into it
  for (const ExpectedTensor& expected : inventory.tensors) {
    StoredTensor& stored = random_tensors_.emplace_back();
    stored.name = expected.name;
    stored.dtype = "BF16";
    stored.element_bytes = SizeOf(DType::kBf16);
    stored.bytes = stored.element_bytes;
    for (const ExpectedSize& size : expected.shape) {
      stored.shape.push_back(size.size);
      stored.bytes *= size.size;
    }
    TensorInfo info;
    info.name = expected.name;
    info.stored = &stored;
    info.random = RandomTensorOf(role, expected.name, stored.shape, seed);
    total_bytes_ += stored.bytes;
    tensors_.emplace(expected.name, std::move(info));
  }
  source_ = absl::StrCat(inventory.config_origin, ": random weights of seed ", seed);
  revision_ = Sha256().Add(inventory.config_digest).Add(absl::StrCat("random weights ", seed)).HexDigest();
}

const TensorInfo* Checkpoint::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const TensorInfo& Checkpoint::Get(std::string_view name) const {
  const TensorInfo* info = Find(name);
  DFLASH_CHECK(info != nullptr, std::string(name).c_str());
  return *info;
}

absl::StatusOr<HostTensor> Checkpoint::Read(const TensorInfo& tensor, const TensorBlock& block,
                                            const ReadProgress& progress) const {
  if (block.row_count < 0 || block.row_count > tensor.rows() || block.col_count < 0 ||
      block.col_count > tensor.cols()) {
    return absl::InvalidArgumentError(absl::StrCat(source_, ": tensor ", tensor.name, ": a block of ",
                                                   block.row_count, " x ", block.col_count, " of ",
                                                   tensor.rows(), " x ", tensor.cols()));
  }
  DFLASH_ASSIGN_OR_RETURN(HostTensor host,
                          HostTensor::Allocate(tensor.dtype, block.row_count, block.col_count));
  DFLASH_RETURN_IF_ERROR(ReadInto(tensor, block, host.data(), host.bytes(), progress));
  return host;
}

absl::Status Checkpoint::ReadInto(const TensorInfo& tensor, const TensorBlock& block, void* to,
                                  int64_t to_bytes, const ReadProgress& progress) const {
  if (!tensor.random) return tensor.file->Read(*tensor.stored, block, to, to_bytes, progress);
  auto* element = static_cast<bf16*>(to);
  DFLASH_CHECK(to_bytes == block.row_count * block.col_count * int64_t{sizeof(bf16)}, tensor.name.c_str());
  for (int64_t row = block.first_row; row < block.first_row + block.row_count; ++row) {
    for (int64_t col = block.first_col; col < block.first_col + block.col_count; ++col) {
      *element++ = bf16(RandomElement(*tensor.random, static_cast<uint64_t>(row * tensor.cols() + col)));
    }
  }
  if (progress) progress(to_bytes);
  return absl::OkStatus();
}

absl::Status Checkpoint::VisitAll(const std::function<void(const TensorInfo& tensor, int64_t first_row,
                                                           std::string_view bytes)>& visit) const {
  constexpr int64_t kBlockBytes = int64_t{8} << 20;
  const auto visit_tensor = [&](const TensorInfo& tensor) {
    const int64_t row_bytes = tensor.cols() * SizeOf(tensor.dtype);
    const int64_t block = std::max<int64_t>(1, kBlockBytes / row_bytes);
    std::string bytes;
    for (int64_t first = 0; first < tensor.rows(); first += block) {
      const int64_t count = std::min(block, tensor.rows() - first);
      bytes.resize(static_cast<size_t>(count * row_bytes));
      DFLASH_RETURN_IF_ERROR(ReadInto(tensor, tensor.Rows(first, count), bytes.data(), count * row_bytes));
      visit(tensor, first, bytes);
    }
    return absl::OkStatus();
  };
  std::vector<const TensorInfo*> tensors;
  for (const auto& [name, tensor] : tensors_) tensors.push_back(&tensor);
  std::vector<absl::Status> statuses(tensors.size());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < std::min(AvailableCores(), 16); ++i) {
    threads.emplace_back([&] {
      for (size_t t = next++; t < tensors.size(); t = next++) statuses[t] = visit_tensor(*tensors[t]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) DFLASH_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> Checkpoint::ReadDigests() const {
  std::map<std::string, std::string> digests;
  if (is_random_) return digests;
  std::map<std::string_view, Sha256> hashes;  // none is added while threads are at them
  for (const auto& [name, tensor] : tensors_) hashes[name];
  DFLASH_RETURN_IF_ERROR(VisitAll([&](const TensorInfo& tensor, int64_t, std::string_view bytes) {
    hashes.find(tensor.name)->second.Append(bytes);
  }));
  for (auto& [name, hash] : hashes) digests.emplace(name, hash.HexDigest());
  return digests;
}

std::string Checkpoint::Summary() const {
  std::map<std::string, int64_t> dtypes;
  for (const auto& [name, info] : tensors_) ++dtypes[Name(info.dtype)];
  std::string text = absl::StrCat(source_, ": ", tensors_.size(), " tensors, ", total_bytes_, " bytes (",
                                  absl::StrJoin(dtypes, ", ", absl::PairFormatter(": ")), ")");
  for (const SkippedTensors& skipped : skipped_) {
    absl::StrAppend(&text, "; skipped ", skipped.count, " tensors ", skipped.prefix, "*, ", skipped.bytes,
                    " bytes");
  }
  return text;
}

Checkpoint::Inventory Checkpoint::InventoryOf(const TargetConfig& config) {
  Inventory inventory;
  inventory.tensors = ExpectedTensors(config);
  inventory.prefixes = {"model.language_model.", "model."};
  inventory.probe = "embed_tokens.weight";
  inventory.no_prefix = "lm_head.weight";
  inventory.skipped_prefixes = {"model.visual.", "mtp."};
  inventory.config_origin = config.origin;
  inventory.config_digest = config.digest;
  return inventory;
}

Checkpoint::Inventory Checkpoint::InventoryOf(const DraftConfig& config) {
  Inventory inventory;
  inventory.tensors = ExpectedTensors(config);
  inventory.prefixes = {"", "model."};
  inventory.probe = "fc.weight";
  inventory.config_origin = config.origin;
  inventory.config_digest = config.digest;
  return inventory;
}

absl::StatusOr<TargetCheckpoint> TargetCheckpoint::Open(const std::string& folder,
                                                        const TargetConfig& config) {
  TargetCheckpoint checkpoint;
  DFLASH_RETURN_IF_ERROR(checkpoint.OpenFolder(folder, InventoryOf(config)));
  return checkpoint;
}

absl::StatusOr<TargetCheckpoint> TargetCheckpoint::Random(const std::string& folder,
                                                          const TargetConfig& config, uint64_t seed) {
  DFLASH_RETURN_IF_ERROR(CheckHasNoWeights(folder));
  TargetCheckpoint checkpoint;
  checkpoint.MakeRandom(InventoryOf(config), ModelRole::kTarget, seed);
  return checkpoint;
}

absl::StatusOr<DraftCheckpoint> DraftCheckpoint::Open(const std::string& folder, const DraftConfig& config) {
  const std::string mask_file = absl::StrCat(folder, "/mask_embedding.pt");
  if (RegularFile::Open(mask_file).ok()) {
    return absl::UnimplementedError(
        absl::StrCat(mask_file, ": drafters with their own mask embedding are not built"));
  }
  DraftCheckpoint checkpoint;
  DFLASH_RETURN_IF_ERROR(checkpoint.OpenFolder(folder, InventoryOf(config)));
  return checkpoint;
}

absl::StatusOr<DraftCheckpoint> DraftCheckpoint::Random(const std::string& folder, const DraftConfig& config,
                                                        uint64_t seed) {
  DFLASH_RETURN_IF_ERROR(CheckHasNoWeights(folder));
  DraftCheckpoint checkpoint;
  checkpoint.MakeRandom(InventoryOf(config), ModelRole::kDrafter, seed);
  return checkpoint;
}

}  // namespace dflash
