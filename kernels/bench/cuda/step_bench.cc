// A verification step of the 27B: 64 layers and the head with real shapes, in the order of
// worker/model/target.cc, with weights and states that no cache holds; and the same with kinds of operations
// left out, which shows what they cost where they stand.
#include <cstdio>
#include <numeric>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/batch/segments.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/draft_choice.h"
#include "kernels/swiglu/swiglu.h"

namespace dflash::bench {
namespace {

constexpr int kLayers = 64;
constexpr float kEps = 1e-6f;
constexpr int64_t kHidden = 5120, kInner = 17408, kVocabulary = 248320;
constexpr int64_t kHeads = 24, kKvHeads = 4, kDim = 256, kQ = kHeads * kDim, kKv = kKvHeads * kDim;
constexpr GatedDeltaNetShape kDelta = {16, 48, 128, 128};
constexpr int64_t kMaxRows = 16;

// Kinds of operations that a measurement leaves out.
enum Left : unsigned {
  kNothing = 0,
  kNorms = 1,
  kSwiGlus = 2,
  kMixers = 4,
  kAttentions = 8,
  kHeadNorms = 16
};

class Step {
 public:
  Step(int64_t sequences, int64_t rows, int64_t context, const Buffer& slab, const Stream& stream)
      : stream_(stream),
        slab_(slab),
        sequences_(sequences),
        rows_(sequences * rows),
        hidden_(Noise(rows_, kHidden, stream)),
        delta_(Noise(rows_, kHidden, stream)),
        normed_(Noise(rows_, kHidden, stream)),
        wide_(Noise(rows_, 2 * kInner, stream)),
        inner_(Noise(rows_, kInner, stream)),
        mixed_(Noise(rows_, kQ, stream)),
        convolved_(Noise(rows_, kDelta.QkvCols(), stream)),
        weight_(Noise(1, kHidden, stream)),
        taps_(Noise(kDelta.QkvCols(), 4, stream)),
        conv_state_(Noise(3 * sequences, kDelta.QkvCols(), stream)),
        logits_(Value(Matrix::Allocate(rows_, kVocabulary, DType::kF32, stream))),
        tokens_(Value(Buffer::Allocate(rows_ * 4, stream))),
        candidates_(Value(Buffer::Allocate(rows_ * static_cast<int64_t>(sizeof(DraftCandidate)), stream))),
        per_head_(OnDevice(std::vector<float>(48, -1.0f), stream)),
        segments_(EqualSegments(sequences, rows, context, stream)),
        buffer_(OnDevice(std::vector<int32_t>(static_cast<size_t>(sequences), 0), stream)),
        count_(OnDevice(std::vector<int32_t>(static_cast<size_t>(sequences), 7), stream)) {
    pages_per_slot_ = (context + rows + kPageTokens - 1) / kPageTokens;
    pool_ = {nullptr, sequences * pages_per_slot_, kKvHeads, kDim};
    std::vector<int32_t> order(static_cast<size_t>(pool_.page_count));
    std::iota(order.begin(), order.end(), 0);
    pages_ = OnDevice(order, stream);
    for (int layer = 0; layer < kLayers; ++layer) {
      const int64_t bytes =
          layer % 4 == 3 ? pool_.page_count * pool_.PageBytes()
                         : sequences * 4 * (kDelta.StateFloats() + 2 * kMaxRows * kDelta.RecordFloats());
      memory_.push_back(Value(Buffer::Allocate(bytes, stream)));
      Require(FillNormal(memory_.back().data(), bytes, 0.1f, static_cast<uint64_t>(layer), stream));
    }
  }

  Microseconds Time(unsigned left) {
    return TimeReplays(stream_, [&] { return Run(left); });
  }

 private:
  absl::Status Run(unsigned left) {
    absl::Status status;
    int64_t offset = 0;
    const auto linear = [&](ConstMatrixView x, int64_t N, MatrixView y,
                            LinearResult result = LinearResult::kSums) {
      PackedWeight weight = {nullptr, N, x.cols};
      if (result == LinearResult::kSwiGlu) weight.features = N / 2;
      if (offset + weight.Bytes() > slab_.bytes()) offset = 0;
      weight.data = slab_.As<uint8_t>() + offset;
      offset += (weight.Bytes() + 1023) / 1024 * 1024;
      status.Update(CudaStatus(LaunchLinearStream(x, weight, y, CudaOf(stream_), result), "linear"));
    };
    const auto add_norm = [&] {
      if ((left & kNorms) != 0) return;
      status.Update(AddRmsNorm(hidden_.view(), delta_.view(), weight_.view(), NormWeight::kOnePlus, kEps,
                               normed_.view(), stream_));
    };
    const SegmentList list = {segments_.As<Segment>(), sequences_};
    const ConstMatrixView dim = weight_.view().Cols(0, kDim), head = weight_.view().Cols(0, 128);
    for (int layer = 0; layer < kLayers; ++layer) {
      add_norm();
      void* memory = memory_[static_cast<size_t>(layer)].data();
      if (layer % 4 == 3) {
        linear(normed_.view(), 2 * kQ + 2 * kKv, wide_.view().Cols(0, 2 * kQ + 2 * kKv));
        const MatrixView q = wide_.view().Cols(0, kQ), k = wide_.view().Cols(2 * kQ, kKv),
                         v = wide_.view().Cols(2 * kQ + kKv, kKv);
        if ((left & kHeadNorms) == 0) {
          status.Update(
              NormAndRope(q, dim, k, dim, NormWeight::kOnePlus, kEps, {kDim, 64, 1e7}, list, stream_));
        }
        if ((left & kAttentions) == 0) {
          pool_.data = memory;
          status.Update(Attention(
              q, k, v, list, nullptr, {pages_.As<int32_t>(), sequences_, pages_per_slot_}, pool_, {}, 0.0625f,
              Phase::kVerify, mixed_.view(), stream_,
              (left & kHeadNorms) == 0 ? ContextWritten::kBeforeLastNormAndRope : ContextWritten::kAnyTime,
              wide_.view().Cols(kQ, kQ)));
        }
      } else {
        linear(normed_.view(), 16480, wide_.view().Cols(0, 16480));
        if ((left & kMixers) == 0) {
          auto* states = static_cast<float*>(memory);
          const GatedDeltaNetState state = {states, states + sequences_ * kDelta.StateFloats(), sequences_,
                                            kMaxRows};
          const MatrixView all = wide_.view();
          const int64_t channels = kDelta.QkvCols();
          status.Update(
              GatedDeltaNetMixerVerify(kDelta,
                                       {all.Cols(0, channels), all.Cols(16384, 48), all.Cols(16432, 48),
                                        per_head_.As<float>(), per_head_.As<float>()},
                                       {taps_.view(),
                                        {conv_state_.view().data, sequences_, 4, channels},
                                        head,
                                        all.Cols(channels, 6144),
                                        GateActivation::kSilu,
                                        kEps},
                                       list, {buffer_.As<int32_t>(), count_.As<int32_t>()}, state,
                                       convolved_.view(), mixed_.view(), stream_));
        }
      }
      linear(mixed_.view(), kHidden, delta_.view());
      add_norm();
      if ((left & kSwiGlus) == 0) {
        linear(normed_.view(), 2 * kInner, inner_.view(), LinearResult::kSwiGlu);
      } else {
        linear(normed_.view(), 2 * kInner, wide_.view());
      }
      linear(inner_.view(), kHidden, delta_.view());
    }
    add_norm();
    linear(normed_.view(), kVocabulary, logits_.view());
    status.Update(ListDrafts(logits_.view(), 0, kVocabulary, candidates_.As<DraftCandidate>(), stream_));
    status.Update(ChooseDrafts(candidates_.As<DraftCandidate>(), 1, logits_.view().rows,
                               tokens_.As<int32_t>(), nullptr, stream_));
    return status;
  }

  const Stream& stream_;
  const Buffer& slab_;
  int64_t sequences_, rows_, pages_per_slot_ = 0;
  Matrix hidden_, delta_, normed_, wide_, inner_, mixed_, convolved_, weight_, taps_, conv_state_, logits_;
  Buffer tokens_, candidates_, per_head_, segments_, buffer_, count_, pages_;
  std::vector<Buffer> memory_;
  KeyValuePool pool_;
};

}  // namespace

void RunStep(const Stream& stream) {
  constexpr int64_t kSlab = int64_t{8} << 30;
  const Buffer slab = Value(Buffer::Allocate(kSlab, stream));
  Require(FillNormal(slab.data(), kSlab, 0.02f, 1, stream));
  struct Case {
    int64_t sequences, rows, context;
    bool details;
  };
  std::printf("\nverification steps, ms (7 records to fold), and what leaving operations out saves:\n");
  for (const Case& c : {Case{1, 1, 1024, false},
                        {1, 16, 1024, true},
                        {4, 16, 1024, false},
                        {8, 16, 1024, true},
                        {1, 16, 32768, false},
                        {8, 16, 8192, false}}) {
    Step step(c.sequences, c.rows, c.context, slab, stream);
    const Microseconds all = step.Time(kNothing);
    Record("verification step, " + std::to_string(c.sequences) + " x " + std::to_string(c.rows) +
               " rows at " + std::to_string(c.context),
           all);
    std::printf("  %lld x %2lld rows at %5lld: %7.3f [%.3f %.3f]", static_cast<long long>(c.sequences),
                static_cast<long long>(c.rows), static_cast<long long>(c.context), all.median * 1e-3,
                all.low * 1e-3, all.high * 1e-3);
    if (c.details) {
      const auto saved = [&](const char* name, unsigned left) {
        std::printf(", %s %.3f", name, (all.median - step.Time(left).median) * 1e-3);
      };
      saved("add+norm", kNorms);
      saved("swiglu", kSwiGlus);
      saved("delta", kMixers);
      saved("attention", kAttentions);
      saved("head norms, rope", kHeadNorms);
      saved("all", kNorms | kSwiGlus | kMixers | kAttentions | kHeadNorms);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace dflash::bench
