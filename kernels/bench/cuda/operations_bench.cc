// The small operations at the 27B's shapes.
#include <cstdio>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/embedding/embedding.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/draft_choice.h"
#include "kernels/sampling/sampling.h"
#include "kernels/swiglu/swiglu.h"

namespace dflash::bench {
namespace {

constexpr float kEps = 1e-6f;

// Activations of one step of up to `rows` rows, filled with noise.
struct Activations {
  Activations(int64_t rows, const Stream& stream) : stream(stream) {
    for (Matrix* matrix : {&hidden, &delta, &normed}) *matrix = New(rows, 5120);
    wide = New(rows, 34816);
    inner = New(rows, 17408);
    conv = New(rows, 10240);
    mixed = New(rows, 6144);
    weight = New(1, 5120);
    taps = New(10240, 4);
    state = New(8 * 3, 10240);
    const Segment one = {0, 0, static_cast<int32_t>(rows), 1000};
    segment = Value(Buffer::Allocate(sizeof(one), stream));
    Require(CopyToDevice(segment.data(), &one, sizeof(one), stream));
    Require(stream.Synchronize());
  }
  Matrix New(int64_t rows, int64_t cols) {
    Matrix matrix = Value(Matrix::Allocate(rows, cols, DType::kBf16, stream));
    Require(FillNormal(matrix.view().data, rows * cols * 2, 1, 3, stream));
    return matrix;
  }
  SegmentList segments() const { return {segment.As<Segment>(), 1}; }
  ConvState conv_state() const { return {state.view().data, 8, 4, 10240}; }

  const Stream& stream;
  Matrix hidden, delta, normed, wide, inner, conv, mixed, weight, taps, state;
  Buffer segment;
};

void Report(const char* name, double bytes, const Microseconds& time, int calls, const Ceilings& ceilings) {
  const double us = time.median / calls;
  Record(name, time, calls);
  std::printf("  %-34s %8.2f us  %5.2f TB/s (%.0f%% of copy)\n", name, us, bytes / us * 1e-6,
              100 * bytes / us * 1e6 / ceilings.copy);
  std::fflush(stdout);
}

void Elementwise(int64_t rows, const Stream& stream, const Ceilings& ceilings) {
  std::printf("\n%lld rows, one after the other in one graph:\n", static_cast<long long>(rows));
  Activations a(rows, stream);
  const auto measure = [&](const char* name, double bytes_per_row,
                           const std::function<absl::Status()>& call) {
    constexpr int kCalls = 20;
    const Microseconds time = TimeReplays(stream, [&] {
      absl::Status status;
      for (int i = 0; i < kCalls; ++i) status.Update(call());
      return status;
    });
    Report((std::to_string(rows) + " rows, " + name).c_str(), bytes_per_row * static_cast<double>(rows), time,
           kCalls, ceilings);
  };
  const ConstMatrixView head_weight = a.weight.view().Cols(0, 128), wide_head = a.weight.view().Cols(0, 256);
  measure("RmsNorm 5120", 2 * 5120 * 2, [&] {
    return RmsNorm(a.hidden.view(), a.weight.view(), NormWeight::kOnePlus, kEps, a.normed.view(), stream);
  });
  measure("AddRmsNorm 5120", 4 * 5120 * 2, [&] {
    return AddRmsNorm(a.hidden.view(), a.delta.view(), a.weight.view(), NormWeight::kOnePlus, kEps,
                      a.normed.view(), stream);
  });
  measure("GatedRmsNorm 48 x 128", 3 * 6144 * 2, [&] {
    return GatedRmsNorm(a.mixed.view(), head_weight, a.wide.view().Cols(10240, 6144), GateActivation::kSilu,
                        kEps, a.mixed.view(), stream);
  });
  measure("RmsNorm 24 x 256", 2 * 6144 * 2, [&] {
    return RmsNorm(a.wide.view().Cols(0, 6144), wide_head, NormWeight::kOnePlus, kEps, a.mixed.view(),
                   stream);
  });
  measure("rope 24 x 64 of 256", 2 * 24 * 64 * 2, [&] {
    return ApplyRope(a.mixed.view(), {256, 64, 1e7}, a.segments(), stream);
  });
  measure("SigmoidGate 6144", 3 * 6144 * 2,
          [&] { return SigmoidGate(a.mixed.view(), a.wide.view().Cols(6144, 6144), stream); });
  measure("SwiGlu 17408", 3 * 17408 * 2, [&] { return SwiGlu(a.wide.view(), a.inner.view(), stream); });
  measure("CausalConv 10240 x 4", 2 * 10240 * 2, [&] {
    return CausalConv(a.wide.view().Cols(0, 10240), a.taps.view(), a.segments(), a.conv_state(),
                      a.conv.view(), stream);
  });
  measure("AdvanceConvState", 0, [&] {
    return AdvanceConvState(a.wide.view().Cols(0, 10240), a.segments(), nullptr, a.conv_state(), stream);
  });
}

void Sampling(const Stream& stream, const Ceilings& ceilings) {
  constexpr int64_t kVocabulary = 248320;
  std::printf("\nsampling, vocabulary %lld:\n", static_cast<long long>(kVocabulary));
  for (int64_t rows : {1, 16, 128}) {
    Matrix narrow = Value(Matrix::Allocate(rows, 2 * kVocabulary, DType::kBf16, stream));
    Matrix logits = Value(Matrix::Allocate(rows, kVocabulary, DType::kF32, stream));
    // Noise in bf16 read as pairs is no float32 of sense; widen on the host.
    Require(FillNormal(narrow.view().data, rows * kVocabulary * 2, 2.5f, 5, stream));
    std::vector<uint16_t> bits(static_cast<size_t>(rows * kVocabulary));
    std::vector<uint32_t> wide(bits.size());
    Require(CopyToHost(bits.data(), narrow.view().data, rows * kVocabulary * 2, stream));
    for (size_t i = 0; i < bits.size(); ++i) wide[i] = static_cast<uint32_t>(bits[i]) << 16;
    Require(CopyToDevice(logits.view().data, wide.data(), rows * kVocabulary * 4, stream));
    const Buffer tokens = Value(Buffer::Allocate(rows * 4, stream)),
                 positions = Value(Buffer::Allocate(rows * 8, stream));
    const Buffer params =
        Value(Buffer::Allocate(rows * static_cast<int64_t>(sizeof(SamplingParams)), stream));
    const auto measure = [&](const std::string& name, const SamplingParams& p) {
      const std::vector<SamplingParams> all(static_cast<size_t>(rows), p);
      Require(CopyToDevice(params.data(), all.data(), params.bytes(), stream));
      Require(stream.Synchronize());
      const Microseconds time = TimeReplays(stream, [&] {
        return SampleRows(logits.view(), params.As<SamplingParams>(), positions.As<int64_t>(), kVocabulary,
                          tokens.As<int32_t>(), stream);
      });
      Report((std::to_string(rows) + " rows, " + name).c_str(), static_cast<double>(rows * kVocabulary * 4),
             time, 1, ceilings);
    };
    const Buffer candidates =
        Value(Buffer::Allocate(rows * static_cast<int64_t>(sizeof(DraftCandidate)), stream));
    const Buffer confidences = Value(Buffer::Allocate(rows * static_cast<int64_t>(sizeof(float)), stream));
    const auto choose = [&]() -> absl::Status {
      DFLASH_RETURN_IF_ERROR(
          ListDrafts(logits.view(), 0, kVocabulary, candidates.As<DraftCandidate>(), stream));
      return ChooseDrafts(candidates.As<DraftCandidate>(), 1, rows, tokens.As<int32_t>(),
                          confidences.As<float>(), stream);
    };
    Report((std::to_string(rows) + " rows, draft choice").c_str(),
           static_cast<double>(rows * kVocabulary * 4), TimeReplays(stream, choose), 1, ceilings);
    measure("greedy", {});
    measure("T 0.7 top-k 20 top-p 0.95", {0.7f, 20, 0.95f, 0, 1});
    measure("T 1 unfiltered", {1, 0, 1, 0, 1});
    measure("T 1 top-p 0.5 alone (large)", {1, 0, 0.5f, 0, 1});
  }
}

}  // namespace

void RunOperations(const Stream& stream, const Ceilings& ceilings) {
  Elementwise(16, stream, ceilings);
  Elementwise(8192, stream, ceilings);
  Sampling(stream, ceilings);
}

}  // namespace dflash::bench
