#include "worker/model/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/host_limits.h"
#include "base/status.h"
#include "kernels/device/upload_ring.h"
#include "kernels/random_weights/random_weights.h"

namespace dflash {
namespace {

constexpr int kMaxReaders = 12;

// Reads pieces in order on several threads, each as soon as its place in the ring is free.
class PieceReaders {
 public:
  using ReadPiece = std::function<absl::Status(size_t piece, void* to)>;

  PieceReaders(size_t pieces, const UploadRing& ring, ReadPiece read)
      : pieces_(pieces), ring_(ring), read_(std::move(read)), filled_(pieces, false) {
    const int count =
        std::min({AvailableCores(), kMaxReaders, static_cast<int>(std::min<size_t>(pieces, 64))});
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Main(); });
  }
  ~PieceReaders() {
    {
      absl::MutexLock lock(&mutex_);
      stop_ = true;
      changed_.SignalAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }
  PieceReaders(const PieceReaders&) = delete;
  PieceReaders& operator=(const PieceReaders&) = delete;

  // Blocks until the piece lies in buffer piece % buffers, or reading has failed.
  absl::Status WaitFor(size_t piece) {
    absl::MutexLock lock(&mutex_);
    while (!filled_[piece] && status_.ok()) changed_.Wait(&mutex_);
    return status_;
  }
  // The ring's buffer of this piece has been released.
  void Done(size_t piece) {
    absl::MutexLock lock(&mutex_);
    done_ = piece + 1;
    changed_.SignalAll();
  }

 private:
  void Main() {
    while (true) {
      const size_t piece = next_.fetch_add(1);
      if (piece >= pieces_) return;
      const auto buffers = static_cast<size_t>(ring_.buffers());
      {
        absl::MutexLock lock(&mutex_);
        while (!stop_ && piece >= done_ + buffers) changed_.Wait(&mutex_);
        if (stop_) return;
      }
      const auto buffer = static_cast<int64_t>(piece % buffers);
      absl::Status status = ring_.WaitUntilFree(buffer);
      if (status.ok()) status = read_(piece, ring_.host(buffer));
      absl::MutexLock lock(&mutex_);
      filled_[piece] = true;
      status_.Update(status);
      if (!status_.ok()) stop_ = true;
      changed_.SignalAll();
    }
  }

  const size_t pieces_;
  const UploadRing& ring_;
  const ReadPiece read_;
  std::atomic<size_t> next_{0};
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::vector<bool> filled_;
  size_t done_ = 0;
  bool stop_ = false;
  absl::Status status_;
  std::vector<std::thread> threads_;
};

}  // namespace

const TensorSlice& WeightLoader::SliceOf(const std::string& name) const {
  const auto slice = slices_.find(name);
  DFLASH_CHECK(slice != slices_.end(), name.c_str());
  return slice->second;
}

void WeightLoader::AddPieces(const Part& part, const Piece& to) {
  const TensorInfo& tensor = checkpoint_.Get(part.name);
  const TensorSlice& slice = SliceOf(part.name);
  const int64_t row_bytes = std::max<int64_t>(1, slice.cols() * SizeOf(tensor.dtype));
  const int64_t rows_at_once = std::max<int64_t>(1, options_.piece_bytes / row_bytes);
  const int64_t end = part.first + part.count;
  int64_t first_of_block = 0;  // row of the slice. Its rows of zeros come last: the memory is zeros already
  for (const TensorBlock& block : slice.blocks) {
    const int64_t end_of_block = first_of_block + block.row_count;
    for (int64_t row = std::max(part.first, first_of_block); row < std::min(end, end_of_block);) {
      Piece piece = to;
      piece.tensor = &tensor;
      piece.block = block;
      piece.block.first_row += row - first_of_block;
      piece.block.row_count = std::min({rows_at_once, end - row, end_of_block - row});
      if (piece.linear == nullptr) piece.plain = to.plain.Rows(row - part.first, piece.block.row_count);
      piece.first_output += row - part.first;
      row += piece.block.row_count;
      pieces_.push_back(piece);
    }
    first_of_block = end_of_block;
  }
}

absl::Status WeightLoader::Allocate() {
  for (const PlainWeight& weight : plain_) {
    const TensorInfo& tensor = checkpoint_.Get(weight.name);
    const Part whole = Whole(weight.name);
    const int64_t cols = SliceOf(weight.name).cols();
    const bool is_vector = tensor.shape().size() == 1;
    DFLASH_ASSIGN_OR_RETURN(*weight.to, is_vector
                                            ? Matrix::Allocate(1, whole.count, tensor.dtype, stream_)
                                            : Matrix::Allocate(whole.count, cols, tensor.dtype, stream_));
    Piece to;
    to.plain = MatrixView(weight.to->view().data, tensor.dtype, whole.count, cols, cols);
    AddPieces(whole, to);
  }
  for (const StackedWeight& weight : stacked_) {
    if (weight.parts.empty()) return absl::InvalidArgumentError("a linear weight of no tensors");
    const TensorInfo& first = checkpoint_.Get(weight.parts[0].name);
    const int64_t cols = SliceOf(first.name).cols();
    int64_t rows = 0;
    for (const Part& part : weight.parts) {
      const TensorInfo& tensor = checkpoint_.Get(part.name);
      if (SliceOf(part.name).cols() != cols || tensor.dtype != first.dtype) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", part.name, " (", SliceOf(part.name).cols(), " columns, ", Name(tensor.dtype),
            ") cannot be stacked under ", first.name, " (", cols, " columns, ", Name(first.dtype), ")"));
      }
      rows += part.count;
    }
    DFLASH_ASSIGN_OR_RETURN(*weight.to, LinearWeight::Allocate(rows, cols, first.dtype, stream_, weight.use));
    Piece to;
    to.linear = weight.to;
    for (const Part& part : weight.parts) {
      AddPieces(part, to);
      to.first_output += part.count;
    }
  }
  return absl::OkStatus();
}

absl::Status WeightLoader::LoadFloat32(const Float32Weight& weight, const ReadProgress& progress) {
  const TensorSlice& slice = SliceOf(weight.name);
  DFLASH_ASSIGN_OR_RETURN(HostTensor host, ReadSlice(checkpoint_, checkpoint_.Get(weight.name), slice, 0,
                                                     slice.rows(), progress));
  const ConstMatrixView view = host.view();
  std::vector<float> values;
  for (int64_t row = 0; row < view.rows; ++row) {
    for (int64_t col = 0; col < view.cols; ++col) {
      values.push_back(view.dtype == DType::kF32 ? view.Row<float>(row)[col]
                                                 : static_cast<float>(view.Row<bf16>(row)[col]));
    }
  }
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  DFLASH_ASSIGN_OR_RETURN(*weight.to, Buffer::Allocate(bytes, stream_));
  return CopyToDevice(weight.to->data(), values.data(), bytes, stream_);
}

absl::Status WeightLoader::MakePieces(const ReadProgress& progress) {
  int64_t staging_bytes = 0;
  for (const Piece& piece : pieces_) {
    if (piece.linear != nullptr) staging_bytes = std::max(staging_bytes, piece.bytes());
  }
  DFLASH_ASSIGN_OR_RETURN(Buffer staging, Buffer::Allocate(staging_bytes, stream_));
  for (const Piece& piece : pieces_) {
    const TensorBlock& block = piece.block;
    const MatrixView rows = piece.linear == nullptr
                                ? piece.plain
                                : MatrixView(staging.data(), piece.tensor->dtype, block.row_count,
                                             block.col_count, block.col_count);
    DFLASH_RETURN_IF_ERROR(FillRandom(*piece.tensor->random, piece.tensor->cols(), block.first_row,
                                      block.first_col, rows, stream_));
    if (piece.linear != nullptr)
      DFLASH_RETURN_IF_ERROR(piece.linear->PackRows(rows, piece.first_output, stream_));
    if (progress) progress(piece.bytes());
  }
  return stream_.Synchronize();
}

absl::Status WeightLoader::ReadPieces(const ReadProgress& progress) {
  if (pieces_.empty()) return absl::OkStatus();
  int64_t largest = 1;
  for (const Piece& piece : pieces_) largest = std::max(largest, piece.bytes());
  const int64_t buffers = std::min<int64_t>(options_.buffers, static_cast<int64_t>(pieces_.size()));
  DFLASH_ASSIGN_OR_RETURN(const UploadRing ring, UploadRing::Create(buffers, largest, stream_));
  absl::Status status;
  {
    PieceReaders readers(pieces_.size(), ring, [&](size_t i, void* to) {
      const Piece& piece = pieces_[i];
      return checkpoint_.ReadInto(*piece.tensor, piece.block, to, piece.bytes());
    });
    const auto upload = [&](const Piece& piece, int64_t buffer) -> absl::Status {
      if (piece.linear == nullptr) {
        return CopyToDevice(piece.plain.data, ring.host(buffer), piece.bytes(), stream_);
      }
      DFLASH_ASSIGN_OR_RETURN(const void* staged, ring.Stage(buffer, piece.bytes()));
      const ConstMatrixView rows(staged, piece.tensor->dtype, piece.block.row_count, piece.block.col_count,
                                 piece.block.col_count);
      return piece.linear->PackRows(rows, piece.first_output, stream_);
    };
    for (size_t i = 0; i < pieces_.size() && status.ok(); ++i) {
      const auto buffer = static_cast<int64_t>(i) % buffers;
      status = readers.WaitFor(i);
      if (status.ok()) status = upload(pieces_[i], buffer);
      if (status.ok()) status = ring.Release(buffer);
      readers.Done(i);
      if (status.ok() && progress) progress(pieces_[i].bytes());
    }
  }
  // Copies may be under way also after an error: the ring must not go before they are done.
  status.Update(stream_.Synchronize());
  return status;
}

absl::Status WeightLoader::Run(const ReadProgress& progress) {
  DFLASH_RETURN_IF_ERROR(Allocate());
  for (const Float32Weight& weight : float32_) DFLASH_RETURN_IF_ERROR(LoadFloat32(weight, progress));
  return checkpoint_.is_random() ? MakePieces(progress) : ReadPieces(progress);
}

}  // namespace dflash
