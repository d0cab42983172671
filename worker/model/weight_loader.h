// From a checkpoint's tensors to weights on the device, at the speed of the files: some threads read, the
// device copies what they have read and brings it into its layout. Random weights are made on the device.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"
#include "worker/model/checkpoint.h"
#include "worker/model/tensor_slice.h"

namespace dflash {

// Takes a list of weights, then loads them all. Nothing is allocated or read before Run, and what does not
// fit is known before the first byte is read. Names are those of ExpectedTensors.
class WeightLoader {
 public:
  struct Options {
    // Large enough for the device's copies to run at full rate, small enough to stay in the processor's
    // caches between a reader and the copy.
    int64_t piece_bytes = int64_t{8} << 20;  // read at a time; rows are never cut
    int64_t buffers = 16;                    // pieces under way
  };
  // Neither checkpoint nor stream is owned.
  WeightLoader(const Checkpoint& checkpoint, TensorSlices slices, const Stream& stream)
      : WeightLoader(checkpoint, std::move(slices), stream, Options()) {}
  WeightLoader(const Checkpoint& checkpoint, TensorSlices slices, const Stream& stream,
               const Options& options)
      : checkpoint_(checkpoint), slices_(std::move(slices)), stream_(stream), options_(options) {}

  // Rows of a tensor's matrix form.
  struct Part {
    std::string name;
    int64_t first = 0;
    int64_t count = 0;
  };
  Part Whole(const std::string& name) const { return {name, 0, SliceOf(name).rows()}; }
  Part Rows(const std::string& name, int64_t first, int64_t count) const { return {name, first, count}; }

  // Each names what is wanted and where it goes: `to` is filled by Run and must stay where it is until then.
  // A tensor as stored, [rows, cols]; a vector becomes one row.
  void Plain(const std::string& name, Matrix* to) { plain_.push_back({name, to}); }
  // A vector widened to float32.
  void Float32(const std::string& name, Buffer* to) { float32_.push_back({name, to}); }
  // Parts of equal width and dtype, stacked along their output rows.
  void Linear(std::vector<Part> parts, LinearWeight* to, LinearUse use = LinearUse::kAny) {
    stacked_.push_back({std::move(parts), to, use});
  }

  // Allocates, loads and waits until all is there. `progress` is called on this thread. Errors: those of
  // Checkpoint::Read; ResourceExhausted; InvalidArgument when stacked parts differ in width or dtype.
  absl::Status Run(const ReadProgress& progress);

 private:
  // What is loaded at a time: at most one buffer full of rows.
  struct Piece {
    const TensorInfo* tensor = nullptr;
    TensorBlock block;
    MatrixView plain;                // where it goes: here, if it has data,
    LinearWeight* linear = nullptr;  // or here
    int64_t first_output = 0;

    int64_t bytes() const { return block.row_count * block.col_count * SizeOf(tensor->dtype); }
  };
  struct PlainWeight {
    std::string name;
    Matrix* to;
  };
  struct Float32Weight {
    std::string name;
    Buffer* to;
  };
  struct StackedWeight {
    std::vector<Part> parts;
    LinearWeight* to;
    LinearUse use;
  };

  const TensorSlice& SliceOf(const std::string& name) const;
  absl::Status Allocate();
  // Cuts a part into pieces; `to` says where the part's first row goes.
  void AddPieces(const Part& part, const Piece& to);
  absl::Status LoadFloat32(const Float32Weight& weight, const ReadProgress& progress);
  absl::Status MakePieces(const ReadProgress& progress);  // random weights
  absl::Status ReadPieces(const ReadProgress& progress);  // files

  const Checkpoint& checkpoint_;
  const TensorSlices slices_;
  const Stream& stream_;
  const Options options_;
  std::vector<PlainWeight> plain_;
  std::vector<Float32Weight> float32_;
  std::vector<StackedWeight> stacked_;
  std::vector<Piece> pieces_;
};

}  // namespace dflash
