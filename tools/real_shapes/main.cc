// Our side of the comparison with other implementations at real sizes
// (tools/reference/compare_real_shapes.py): runs target and drafter with random weights on inputs from files,
// and writes what every layer makes of them. Files are raw little-endian arrays in one folder; [..] are their
// shapes, D the hidden size, T the target's layers, B the drafter's block, V the vocabulary, A the activation
// dtype:
//   tokens       i32 [R]               a sequence; all cases are prefixes of it
//   states       bf16 [T, R, D]        hidden states 0..T-1 of the reference, the inputs of the layers
// For each case, a prompt of P tokens and then B verified rows:
//   forced_P.states A [T, P+B, D]      hidden states 1..T when every layer gets the reference's input
//   forced_P.logits f32 [1+B, V]       of the prompt's last row and of the verified rows
//   forced_P.features A [P, D]         context features of the drafter, made of the reference's taps
//   forced_P.draft_logits f32 [B-1, V] the drafter's block with anchor tokens[P]
//   free_P.states                      as forced_P.states, each layer on our own input
//   info.json                          dtype of activations, backend
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/flag_parser.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/random_weights/random_weights.h"
#include "tools/real_shapes/same_bits.h"
#include "worker/draft/dflash_drafter.h"
#include "worker/load_group.h"
#include "worker/model/random_weights.h"
#include "worker/model/target_weights.h"

namespace dflash {
namespace {

struct Flags {
  std::string model, draft_model, folder;
  int64_t seed = 1;
  std::string prefills = "1";
  std::string free_prefills;
  int64_t chunk = 1024;
  int64_t threads = 0;
  std::string checksums;
  bool load_only = false;
  bool memory = false;
  int64_t company = 0;
  int64_t max_sequences = 8;
  int64_t cache_tokens = 100000;
};

// A file that is written in pieces, in any order.
class OutputFile {
 public:
  static absl::StatusOr<OutputFile> Create(const std::string& path) {
    const int descriptor = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
    if (descriptor < 0) return absl::UnavailableError(absl::StrCat(path, ": cannot be created"));
    return OutputFile(path, descriptor);
  }
  OutputFile(OutputFile&& other) noexcept
      : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  // Dense rows on the device to a place in the file.
  absl::Status Write(ConstMatrixView rows, int64_t offset, const Stream& stream) {
    const int64_t row_bytes = rows.cols * SizeOf(rows.dtype);
    std::vector<char> host(static_cast<size_t>(rows.rows * row_bytes));
    if (rows.row_stride == rows.cols) {
      DFLASH_RETURN_IF_ERROR(CopyToHost(host.data(), rows.data, rows.rows * row_bytes, stream));
    } else {
      for (int64_t row = 0; row < rows.rows; ++row) {
        DFLASH_RETURN_IF_ERROR(
            CopyToHost(host.data() + row * row_bytes, rows.Rows(row, 1).data, row_bytes, stream));
      }
    }
    size_t done = 0;
    while (done < host.size()) {
      const ssize_t count =
          pwrite(descriptor_, host.data() + done, host.size() - done, offset + static_cast<int64_t>(done));
      if (count <= 0) return absl::UnavailableError(absl::StrCat(path_, ": cannot be written"));
      done += static_cast<size_t>(count);
    }
    return absl::OkStatus();
  }

 private:
  OutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  std::string path_;
  int descriptor_;
};

absl::StatusOr<std::vector<int64_t>> ParseList(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const auto piece : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(piece, &number) || number < 1) {
      return absl::InvalidArgumentError(absl::StrCat("not a list of positive numbers: ", text));
    }
    numbers.push_back(number);
  }
  return numbers;
}

class Comparison {
 public:
  static absl::StatusOr<std::unique_ptr<Comparison>> Create(const Flags& flags) {
    auto self = std::make_unique<Comparison>();
    self->folder_ = flags.folder + "/";
    self->chunk_ = flags.chunk;
    DFLASH_ASSIGN_OR_RETURN(RegularFile tokens, RegularFile::Open(self->folder_ + "tokens"));
    self->tokens_.resize(static_cast<size_t>(tokens.size()) / sizeof(int32_t));
    DFLASH_RETURN_IF_ERROR(
        tokens.ReadAt(0, static_cast<int64_t>(self->tokens_.size() * sizeof(int32_t)), self->tokens_.data()));
    DFLASH_ASSIGN_OR_RETURN(RegularFile states, RegularFile::Open(self->folder_ + "states"));
    self->states_ = std::make_unique<RegularFile>(std::move(states));
    const auto rows = static_cast<int64_t>(self->tokens_.size());

    GroupOptions options;
    options.model = flags.model;
    options.draft_model = flags.draft_model;
    options.random_weights = static_cast<uint64_t>(flags.seed);
    options.threads = static_cast<int>(flags.threads);
    options.max_sequences = 1;
    options.max_context_tokens = (rows + 127) / 64 * 64;
    options.max_prefill_tokens = flags.chunk;
    DFLASH_ASSIGN_OR_RETURN(self->group_, LoadGroup(options, [](const std::string& line) {
                              std::printf("%s\n", line.c_str());
                              std::fflush(stdout);
                            }));
    self->drafter_ = dynamic_cast<DFlashDrafter*>(self->group_.drafter.get());
    if (self->drafter_ == nullptr) return absl::InvalidArgumentError("a DFlash drafter is needed");
    const TargetConfig& config = self->target().config();
    if (self->states_->size() != config.num_layers() * rows * config.hidden_size * 2) {
      return absl::InvalidArgumentError(absl::StrCat(self->states_->path(), ": ", self->states_->size(),
                                                     " bytes do not hold ", config.num_layers(),
                                                     " states of ", rows, " rows of ", config.hidden_size));
    }
    std::ofstream info(self->folder_ + "info.json");
    info << "{\"activation\": \"" << Name(ActivationDType()) << "\", \"backend\": \"" << BackendName()
         << "\"}\n";
    return self;
  }

  absl::Status Run(int64_t prompt, bool forced) {
    const int64_t block = group_.contract.block_size;
    const int64_t total = prompt + block;
    if (total > static_cast<int64_t>(tokens_.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("a prompt of ", prompt, " and a block do not fit into ", tokens_.size(), " tokens"));
    }
    const std::string name = absl::StrCat(folder_, forced ? "forced_" : "free_", prompt, ".");
    DFLASH_ASSIGN_OR_RETURN(OutputFile states, OutputFile::Create(name + "states"));
    const int64_t row_bytes = config().hidden_size * SizeOf(ActivationDType());
    int64_t first = 0;  // position of the rows of the running forward
    absl::Status status;
    target().set_observer([&](HiddenStateIndex state, Phase, ConstMatrixView rows) {
      if (Number(state) == 0) return;
      status.Update(states.Write(rows, ((Number(state) - 1) * total + first) * row_bytes, *group_.stream));
    });
    if (forced) {
      target().set_forcing([&](HiddenStateIndex state, Phase, MatrixView rows) -> absl::StatusOr<bool> {
        DFLASH_RETURN_IF_ERROR(ReadState(Number(state), first, rows));
        return true;
      });
    }
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, group_.table->Open());
    DFLASH_RETURN_IF_ERROR(group_.table->Reserve(slot, total));
    DFLASH_RETURN_IF_ERROR(target().Open(slot));
    DFLASH_RETURN_IF_ERROR(drafter_->Open(slot, 0));
    DFLASH_ASSIGN_OR_RETURN(OutputFile logits, OutputFile::Create(name + "logits"));
    const int64_t logits_bytes = config().vocab_size * int64_t{sizeof(float)};
    while (first < total) {
      const bool verify = first >= prompt;
      const int64_t count = verify ? block : std::min(chunk_, prompt - first);
      SequenceRows rows;
      rows.slot = slot;
      rows.phase = verify ? Phase::kVerify : Phase::kPrefill;
      rows.start_position = first;
      rows.tokens.assign(tokens_.begin() + first, tokens_.begin() + first + count);
      rows.last_logits = !verify && first + count == prompt;
      DFLASH_ASSIGN_OR_RETURN(const ForwardResult result, target().Forward({.sequences = {rows}}));
      DFLASH_RETURN_IF_ERROR(status);
      if (result.logits.rows > 0) {
        DFLASH_RETURN_IF_ERROR(logits.Write(result.logits, verify ? logits_bytes : 0, *group_.stream));
      }
      first += count;
    }
    target().set_observer({});
    target().set_forcing({});
    DFLASH_RETURN_IF_ERROR(target().Commit({{.slot = slot, .rows = 1}}));
    if (forced) DFLASH_RETURN_IF_ERROR(RunDrafter(slot, prompt, name));
    return group_.table->Close(slot);
  }

  absl::Status Synchronize() { return group_.stream->Synchronize(); }

 private:
  Target& target() { return *group_.target; }
  const TargetConfig& config() { return group_.target->config(); }

  // Rows [first, first + rows.rows) of the reference's hidden state, to the device.
  absl::Status ReadState(int64_t state, int64_t first, MatrixView rows) {
    const int64_t cols = config().hidden_size;
    const auto total = static_cast<int64_t>(tokens_.size());
    std::vector<bf16> host(static_cast<size_t>(rows.rows * cols));
    DFLASH_RETURN_IF_ERROR(states_->ReadAt((state * total + first) * cols * int64_t{sizeof(bf16)},
                                           rows.rows * cols * int64_t{sizeof(bf16)}, host.data()));
    std::vector<float> wide;
    const void* from = host.data();
    if (rows.dtype == DType::kF32) {
      for (const bf16 value : host) wide.push_back(static_cast<float>(value));
      from = wide.data();
    }
    const int64_t width = SizeOf(rows.dtype);
    for (int64_t row = 0; row < rows.rows; ++row) {  // the rows may have a stride
      const int64_t count = rows.row_stride == cols ? rows.rows : 1;
      DFLASH_RETURN_IF_ERROR(CopyToDevice(rows.Rows(row, 1).data,
                                          static_cast<const char*>(from) + row * cols * width,
                                          count * cols * width, *group_.stream));
      row += count - 1;
    }
    return group_.stream->Synchronize();  // `host` goes
  }

  absl::Status RunDrafter(int32_t slot, int64_t prompt, const std::string& name) {
    const Stream& stream = *group_.stream;
    const std::vector<LayerIndex>& taps = group_.contract.taps;
    const int64_t cols = config().hidden_size;
    DFLASH_ASSIGN_OR_RETURN(OutputFile features, OutputFile::Create(name + "features"));
    DFLASH_ASSIGN_OR_RETURN(const Matrix tapped, Matrix::Allocate(std::min(chunk_, prompt),
                                                                  static_cast<int64_t>(taps.size()) * cols,
                                                                  ActivationDType(), stream));
    for (int64_t first = 0; first < prompt; first += chunk_) {
      const int64_t count = std::min(chunk_, prompt - first);
      for (size_t tap = 0; tap < taps.size(); ++tap) {
        DFLASH_RETURN_IF_ERROR(
            ReadState(Number(OutputOf(taps[tap])), first,
                      tapped.view().Block(0, count, static_cast<int64_t>(tap) * cols, cols)));
      }
      DFLASH_RETURN_IF_ERROR(drafter_->Ingest(tapped.Rows(count), {{.slot = slot,
                                                                    .phase = Phase::kPrefill,
                                                                    .first_row = 0,
                                                                    .row_count = count,
                                                                    .start_position = first}}));
      DFLASH_RETURN_IF_ERROR(features.Write(drafter_->last_context_features(),
                                            first * cols * SizeOf(ActivationDType()), stream));
    }
    DFLASH_RETURN_IF_ERROR(drafter_->ProposeAt(slot, tokens_[static_cast<size_t>(prompt)], prompt));
    DFLASH_ASSIGN_OR_RETURN(OutputFile logits, OutputFile::Create(name + "draft_logits"));
    return logits.Write(drafter_->last_draft_logits(), 0, stream);
  }

  std::string folder_;
  int64_t chunk_ = 0;
  std::vector<int32_t> tokens_;
  std::unique_ptr<RegularFile> states_;
  Group group_;
  DFlashDrafter* drafter_ = nullptr;
};

// Checksums of tensors that this backend makes: lines "target|drafter NAME" in, the same with the checksum in
// front out.
absl::Status WriteChecksums(const Flags& flags) {
  DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = static_cast<int>(flags.threads)}));
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig target_config, TargetConfig::Load(flags.model));
  DFLASH_ASSIGN_OR_RETURN(const DraftConfig draft_config, DraftConfig::Load(flags.draft_model));
  const auto seed = static_cast<uint64_t>(flags.seed);
  DFLASH_ASSIGN_OR_RETURN(const TargetCheckpoint target,
                          TargetCheckpoint::Random(flags.model, target_config, seed));
  DFLASH_ASSIGN_OR_RETURN(const DraftCheckpoint drafter,
                          DraftCheckpoint::Random(flags.draft_model, draft_config, seed));
  std::ifstream in(flags.folder + "/" + flags.checksums);
  std::ofstream out(flags.folder + "/" + flags.checksums + ".out");
  std::string role, name;
  while (in >> role >> name) {
    const Checkpoint& checkpoint =
        role == "target" ? static_cast<const Checkpoint&>(target) : static_cast<const Checkpoint&>(drafter);
    const TensorInfo* tensor = checkpoint.Find(name);
    if (tensor == nullptr) return absl::NotFoundError(absl::StrCat("no tensor ", name));
    const int64_t cols = tensor->cols();
    const int64_t rows_at_once = std::max<int64_t>(1, (int64_t{1} << 25) / cols);
    DFLASH_ASSIGN_OR_RETURN(const Matrix part, Matrix::Allocate(std::min(rows_at_once, tensor->rows()), cols,
                                                                DType::kBf16, stream));
    std::vector<uint16_t> bits;
    uint64_t sum = 0;
    for (int64_t row = 0; row < tensor->rows(); row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, tensor->rows() - row);
      DFLASH_RETURN_IF_ERROR(FillRandom(*tensor->random, cols, row, 0, part.Rows(rows), stream));
      bits.resize(static_cast<size_t>(rows * cols));
      DFLASH_RETURN_IF_ERROR(CopyToHost(bits.data(), part.view().data, rows * cols * 2, stream));
      sum = TensorChecksum(bits.data(), rows * cols, row * cols, sum);
    }
    out << absl::StrCat(absl::Hex(sum, absl::kZeroPad16), " ", role, " ", name, "\n");
  }
  return absl::OkStatus();
}

// How fast the target's weights get to the device: those of the folder's files, as dflash-worker loads them.
absl::Status LoadOnly(const Flags& flags) {
  DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = static_cast<int>(flags.threads)}));
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig config, TargetConfig::Load(flags.model));
  DFLASH_ASSIGN_OR_RETURN(const TargetCheckpoint checkpoint, TargetCheckpoint::Open(flags.model, config));
  for (int run = 0; run < 3; ++run) {
    const absl::Time start = absl::Now();
    DFLASH_RETURN_IF_ERROR(LoadTargetWeights(config, checkpoint, {}, stream, {}).status());
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    std::printf("loaded %.2f GB in %.2f s: %.2f GB/s\n", static_cast<double>(checkpoint.total_bytes()) / 1e9,
                seconds, static_cast<double>(checkpoint.total_bytes()) / 1e9 / seconds);
  }
  return absl::OkStatus();
}

// Loads target and drafter as dflash-worker does and tells what that takes of the device's memory.
absl::Status ShowMemory(const Flags& flags) {
  DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = static_cast<int>(flags.threads)}));
  DFLASH_ASSIGN_OR_RETURN(const int64_t free_before, FreeDeviceBytes(stream));
  GroupOptions options;
  options.model = flags.model;
  options.draft_model = flags.draft_model;
  options.random_weights = static_cast<uint64_t>(flags.seed);
  options.max_sequences = flags.max_sequences;
  options.cache_tokens = flags.cache_tokens;
  DFLASH_ASSIGN_OR_RETURN(const Group group, LoadGroup(options, [](const std::string& line) {
                            if (line.find("%") == std::string::npos) std::printf("%s\n", line.c_str());
                          }));
  DFLASH_RETURN_IF_ERROR(group.stream->Synchronize());
  DFLASH_ASSIGN_OR_RETURN(const int64_t free_after, FreeDeviceBytes(stream));
  std::printf("allocated: %.3f GB; free before: %.3f GB, after: %.3f GB, taken: %.3f GB\n",
              static_cast<double>(AllocatedDeviceBytes()) / 1e9, static_cast<double>(free_before) / 1e9,
              static_cast<double>(free_after) / 1e9, static_cast<double>(free_before - free_after) / 1e9);
  return absl::OkStatus();
}

absl::Status RunCompany(const Flags& flags) {
  GroupOptions options;
  options.model = flags.model;
  options.draft_model = flags.draft_model;
  options.random_weights = static_cast<uint64_t>(flags.seed);
  options.threads = static_cast<int>(flags.threads);
  options.max_sequences = 8;
  options.max_context_tokens = flags.company + 64;
  options.max_prefill_tokens = (flags.company + 63) / 64 * 64;
  DFLASH_ASSIGN_OR_RETURN(Group group, LoadGroup(options, [](const std::string&) {}));
  return CompareCompany(group, flags.company);
}

absl::Status Main(int argc, char** argv) {
  Flags flags;
  FlagParser parser("real-shapes",
                    "Runs random weights on given inputs, for tools/reference/compare_real_shapes.py.");
  parser.Text("model", "DIR", "folder with the target's config.json", &flags.model);
  parser.Text("draft-model", "DIR", "folder with the drafter's config.json", &flags.draft_model);
  parser.Text("folder", "DIR", "where inputs lie and outputs go", &flags.folder);
  parser.Integer("random-weights", "SEED", "seed of all weights", 0, int64_t{1} << 62, &flags.seed);
  parser.Text("prefills", "N,...", "prompt lengths with the reference's input in every layer",
              &flags.prefills);
  parser.Text("free-prefills", "N,...", "prompt lengths on our own", &flags.free_prefills);
  parser.Integer("chunk", "N", "prompt tokens in one step, a multiple of 64", 64, 65536, &flags.chunk);
  parser.Integer("threads", "N", "CPU threads; 0: one per core", 0, 256, &flags.threads);
  parser.Text("checksums", "FILE", "only write the checksums of the tensors that this file names",
              &flags.checksums);
  parser.Switch("load-only", "only load the weights of --model, three times, and print the rate",
                &flags.load_only);
  parser.Switch("memory", "only load both models and print what they take of the device's memory",
                &flags.memory);
  parser.Integer("company", "N",
                 "only compare the bits of rows after a prompt of N tokens, alone and in company", 0, 65536,
                 &flags.company);
  parser.Integer("max-sequences", "N", "with --memory", 1, 1024, &flags.max_sequences);
  parser.Integer("cache-tokens", "N", "with --memory", 1, int64_t{1} << 40, &flags.cache_tokens);
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  DFLASH_RETURN_IF_ERROR(parser.Parse(argc, argv, &outcome));
  if (outcome != FlagParser::Outcome::kRun) {
    std::fputs(parser.Help().c_str(), stdout);
    return absl::OkStatus();
  }
  if (flags.company > 0) return RunCompany(flags);
  if (flags.memory) return ShowMemory(flags);
  if (flags.load_only) return LoadOnly(flags);
  if (!flags.checksums.empty()) return WriteChecksums(flags);
  DFLASH_ASSIGN_OR_RETURN(const std::vector<int64_t> forced, ParseList(flags.prefills));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<int64_t> free, ParseList(flags.free_prefills));
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Comparison> comparison, Comparison::Create(flags));
  for (const int64_t prompt : forced) DFLASH_RETURN_IF_ERROR(comparison->Run(prompt, true));
  for (const int64_t prompt : free) DFLASH_RETURN_IF_ERROR(comparison->Run(prompt, false));
  return comparison->Synchronize();
}

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) {
  try {
    const absl::Status status = dflash::Main(argc, argv);
    if (!status.ok()) std::fprintf(stderr, "real-shapes: %s\n", std::string(status.message()).c_str());
    return status.ok() ? 0 : 1;
  } catch (const std::exception& error) {  // a library's exception that nobody converted
    std::fprintf(stderr, "real-shapes: unexpected exception: %s\n", error.what());
    return 1;
  }
}
