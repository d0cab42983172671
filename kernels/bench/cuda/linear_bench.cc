// Linear layers of the 27B: each shape alone, and all 257 of a forward pass in order.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "base/phase.h"
#include "base/status.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/bench/cuda/cublas.h"
#include "kernels/bench/cuda/energy_meter.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/linear/linear_cuda.h"

namespace dflash::bench {
namespace {

struct Shape {
  const char* name;
  int64_t N, K;
  int count;  // in one forward pass

  PackedWeight At(const void* data) const { return {data, N, K}; }
  double Bytes() const { return 2.0 * static_cast<double>(N) * static_cast<double>(K); }
};
constexpr Shape kShapes[] = {{"gdn qkvz b a", 16480, 5120, 48}, {"attention qkv", 14336, 5120, 16},
                             {"out", 5120, 6144, 64},           {"gate up", 34816, 5120, 64},
                             {"down", 5120, 17408, 64},         {"lm_head", 248320, 5120, 1}};
constexpr Shape kDrafterShapes[] = {
    {"drafter qkv", 6144, 5120, 5}, {"drafter out", 5120, 4096, 5}, {"drafter fc", 5120, 25600, 1}};
// A layer of the drafter's block pass.
constexpr Shape kDraftLayer[] = {{"drafter q", 4096, 5120, 5},
                                 {"drafter kv", 2048, 5120, 5},
                                 {"drafter out", 5120, 4096, 5},
                                 {"gate up", 34816, 5120, 5},
                                 {"down", 5120, 17408, 5}};
constexpr int64_t kDraftBlock = 16, kMaxDrafting = 64;
constexpr int64_t kMaxRows = 8192;
constexpr int64_t kSlabBytes = int64_t{8} << 30;

class LinearBench {
 public:
  explicit LinearBench(const Stream& stream)
      : stream_(stream),
        slab_(Value(Buffer::Allocate(kSlabBytes, stream))),
        x_(Value(Buffer::Allocate(kMaxRows * 25600 * 2, stream))),
        y_(Value(Buffer::Allocate(
            std::max(kMaxRows * 34816 * 2, kMaxDrafting * kDraftBlock * kShapes[5].N * 4), stream))),
        cublas_(Value(CublasLinear::Create(stream))) {
    Require(FillNormal(slab_.data(), slab_.bytes(), 0.02f, 1, stream));
    Require(FillNormal(x_.data(), x_.bytes(), 1, 2, stream));
  }

  static std::string Name(const char* kind, const Shape& shape, int64_t rows) {
    return std::string(kind) + ", " + shape.name + ", " + std::to_string(rows) + " rows";
  }

  // The next weight of a shape: so far from the last use of the same memory that no cache helps.
  const void* NextWeight(const Shape& shape) {
    const int64_t bytes = shape.At(nullptr).Bytes();
    if (offset_ + bytes > kSlabBytes) offset_ = 0;
    const void* weight = slab_.As<uint8_t>() + offset_;
    offset_ += (bytes + 1023) / 1024 * 1024;
    return weight;
  }

  absl::Status Streamed(const Shape& shape, int64_t rows) {
    const ConstMatrixView x(x_.data(), DType::kBf16, rows, shape.K, shape.K);
    const MatrixView y(y_.data(), DType::kBf16, rows, shape.N, shape.N);
    return CudaStatus(LaunchLinearStream(x, shape.At(NextWeight(shape)), y, CudaOf(stream_)), "stream");
  }
  absl::Status Tiled(const Shape& shape, int64_t rows) {
    const ConstMatrixView x(x_.data(), DType::kBf16, rows, shape.K, shape.K);
    const MatrixView y(y_.data(), DType::kBf16, rows, shape.N, shape.N);
    return CudaStatus(LaunchLinearTiled(x, shape.At(NextWeight(shape)), y, CudaOf(stream_)), "tiled");
  }

  absl::Status Cublas(const Shape& shape, int64_t rows, const CublasLinear::Algorithm& algorithm) {
    return cublas_.Launch(x_.data(), NextWeight(shape), y_.data(), rows, shape.N, shape.K, algorithm);
  }
  // Microseconds a call.
  double FastestOfCublas(const Shape& shape, int64_t rows, CublasLinear::Algorithm* fastest) {
    const int launches = static_cast<int>(std::max(1.0, 4e9 / shape.Bytes()));
    double least = std::numeric_limits<double>::infinity();
    for (const CublasLinear::Algorithm& algorithm : Value(cublas_.Algorithms(rows, shape.N, shape.K))) {
      const double us = MicrosecondsPerCall(Name("cuBLASLt", shape, rows), launches,
                                            [&] { return Cublas(shape, rows, algorithm); });
      if (us < least) *fastest = algorithm;
      least = std::min(least, us);
    }
    return least;
  }

  double MicrosecondsPerCall(const std::string& name, int launches,
                             const std::function<absl::Status()>& call) {
    const Microseconds time = TimeReplays(
        stream_,
        [&] {
          for (int i = 0; i < launches; ++i) DFLASH_RETURN_IF_ERROR(call());
          return absl::OkStatus();
        },
        5);
    Record(name, time, launches);
    return time.median / launches;
  }

  void Shapes() {
    std::printf("\nVERIFY: us (TB/s)\n%-16s", "rows");
    constexpr int64_t kRows[] = {1, 16, 32, 64, 128, 256};
    for (int64_t rows : kRows) std::printf("%16lld", static_cast<long long>(rows));
    std::printf("\n");
    const auto line = [&](const Shape& shape) {
      std::printf("%-16s", shape.name);
      const int launches = static_cast<int>(std::max(1.0, 4e9 / shape.Bytes()));
      for (int64_t rows : kRows) {
        const double us = MicrosecondsPerCall(Name("linear, verify", shape, rows), launches,
                                              [&] { return Streamed(shape, rows); });
        std::printf("%9.2f (%.2f)", us, shape.Bytes() / us * 1e-6);
      }
      std::printf("\n");
      std::fflush(stdout);
    };
    for (const Shape& shape : kShapes) line(shape);
    for (const Shape& shape : kDrafterShapes) line(shape);
  }

  // Ours and cuBLASLt's fastest algorithm for each shape, in turns, alone and in the order of a forward pass.
  void BesideCublas() {
    constexpr int64_t kRows = 16;
    std::printf("\nVERIFY beside cuBLASLt, %lld rows: us\n%-16s%10s%10s%8s\n", static_cast<long long>(kRows),
                "", "ours", "cuBLASLt", "ratio");
    CublasLinear::Algorithm fastest[std::size(kShapes)];
    for (const Shape& shape : kShapes) {
      const int launches = static_cast<int>(std::max(1.0, 4e9 / shape.Bytes()));
      const double ours = MicrosecondsPerCall(Name("linear, beside", shape, kRows), launches,
                                              [&] { return Streamed(shape, kRows); });
      const double theirs = FastestOfCublas(shape, kRows, &fastest[&shape - kShapes]);
      std::printf("%-16s%10.2f%10.2f%8.3f\n", shape.name, ours, theirs, theirs / ours);
      std::fflush(stdout);
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto all = [&](const char* name, const auto& launch) {
        const Microseconds time = TimeReplays(stream_, [&] { return All(launch); });
        Record(std::string(name) + ", all 257, 16 rows", time);
        return time.median;
      };
      const double ours = all("linear, beside", [&](const Shape& shape) { return Streamed(shape, kRows); });
      const double theirs = all(
          "cuBLASLt", [&](const Shape& shape) { return Cublas(shape, kRows, fastest[&shape - kShapes]); });
      std::printf("%-16s%10.0f%10.0f%8.3f\n", "all 257", ours, theirs, theirs / ours);
    }
  }

  template <typename Call>
  void ForEachLayer(const Call& call) {
    for (int layer = 0; layer < 64; ++layer) {
      call(kShapes[layer % 4 == 3 ? 1 : 0]);
      call(kShapes[2]);
      call(kShapes[3]);
      call(kShapes[4]);
    }
  }

  // Of the weights of all 257.
  static int64_t AllBytes() {
    int64_t bytes = 0;
    for (const Shape& shape : kShapes) bytes += shape.count * static_cast<int64_t>(shape.Bytes());
    return bytes;
  }
  // All 257, as a forward pass has them.
  template <typename Call>
  absl::Status All(const Call& call) {
    absl::Status status;
    ForEachLayer([&](const Shape& shape) { status.Update(call(shape)); });
    status.Update(call(kShapes[5]));
    return status;
  }

  // What the GPU draws while it reads as much as all 257 layers have, and while they run.
  void Energies() {
    const EnergyMeter meter = Value(EnergyMeter::Open());
    const auto line = [&](const std::string& name, const std::function<absl::Status()>& body) {
      const Energy energy = meter.Measure(stream_, body);
      std::printf("%-36s%8.2f ms %8.2f J %6.0f W %6.0f MHz\n", name.c_str(), energy.milliseconds,
                  energy.joules, energy.watts(), energy.megahertz);
      std::fflush(stdout);
    };
    line("copied into shared memory", [&] {
      absl::Status status;
      for (int64_t left = AllBytes(); left > 0; left -= kSlabBytes)
        status.Update(BulkCopy(slab_.data(), std::min(left, kSlabBytes) >> 14 << 14, stream_));
      return status;
    });
    for (int64_t rows : {1, 16, 32, 64, 96, 128, 192, 256}) {
      line("streamed, " + std::to_string(rows) + " rows",
           [&] { return All([&](const Shape& shape) { return Streamed(shape, rows); }); });
    }
    for (int64_t rows : {16, 128, 256}) {
      CublasLinear::Algorithm fastest[std::size(kShapes)];
      for (const Shape& shape : kShapes) FastestOfCublas(shape, rows, &fastest[&shape - kShapes]);
      line("cuBLASLt, " + std::to_string(rows) + " rows", [&] {
        return All([&](const Shape& shape) { return Cublas(shape, rows, fastest[&shape - kShapes]); });
      });
    }
  }

  void Sequence(const Ceilings& ceilings) {
    const auto bytes = static_cast<double>(AllBytes());
    for (int64_t rows : {1, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256}) {
      const Microseconds time = TimeReplays(
          stream_, [&] { return All([&](const Shape& shape) { return Streamed(shape, rows); }); });
      Record("linear, verify, all 257, " + std::to_string(rows) + " rows", time);
      std::printf("  %3lld rows: %6.3f [%.3f %.3f] %3.0f%%\n", static_cast<long long>(rows),
                  time.median * 1e-3, time.low * 1e-3, time.high * 1e-3,
                  100 * bytes / time.median * 1e6 / ceilings.read);
      std::fflush(stdout);
    }
  }

  void Prefill() {
    std::printf("\nPREFILL: us (TFLOP/s)\n%-16s", "rows");
    constexpr int64_t kRows[] = {16, 64, 128, 256, 512, 1024, 2048, 8192};
    for (int64_t rows : kRows) std::printf("%16lld", static_cast<long long>(rows));
    std::printf("\n");
    for (const Shape& shape : kShapes) {
      if (shape.count == 1) continue;
      std::printf("%-16s", shape.name);
      for (int64_t rows : kRows) {
        const double flop = shape.Bytes() * static_cast<double>(rows);
        const int launches = static_cast<int>(std::clamp(6e12 / flop, 2.0, 40.0));
        const double us = MicrosecondsPerCall(Name("linear, prefill", shape, rows), launches,
                                              [&] { return Tiled(shape, rows); });
        std::printf("%10.1f (%3.0f)", us, flop / us * 1e-6);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    std::printf("all but lm_head, ms (TFLOP/s):");
    for (int64_t rows : kRows) {
      double flop = 0;
      const Microseconds time = TimeReplays(
          stream_,
          [&] {
            absl::Status status;
            ForEachLayer([&](const Shape& shape) {
              flop += shape.Bytes() * static_cast<double>(rows);
              status.Update(Tiled(shape, rows));
            });
            return status;
          },
          3);
      Record("linear, prefill, all but lm_head, " + std::to_string(rows) + " rows", time);
      std::printf("  %lld: %.2f (%.0f)", static_cast<long long>(rows), time.median * 1e-3,
                  flop / time.median * 1e-6);
      std::fflush(stdout);
    }
    std::printf("\n");
  }

  // The linear layers of a draft in the arithmetic of either phase: blocks of 16 rows through the drafter's
  // layers, all but the anchors through the head.
  void Drafts() {
    std::printf("\ndraft's linear layers, ms, by the kernel of VERIFY and of PREFILL rows\n");
    for (int64_t sequences : {1, 4, 8, 10, 12, 14, 16, 32, 64}) {
      const int64_t rows = sequences * kDraftBlock, drafts = sequences * (kDraftBlock - 1);
      double ms[2];
      for (const Phase phase : {Phase::kVerify, Phase::kPrefill}) {
        const auto launch = [&](const Shape& shape, int64_t T, DType dtype) {
          const ConstMatrixView x(x_.data(), DType::kBf16, T, shape.K, shape.K);
          const MatrixView y(y_.data(), dtype, T, shape.N, shape.N);
          const auto kernel = phase == Phase::kVerify ? LaunchLinearStream : LaunchLinearTiled;
          return CudaStatus(kernel(x, shape.At(NextWeight(shape)), y, CudaOf(stream_), LinearResult::kSums),
                            "draft");
        };
        const Microseconds time = TimeReplays(stream_, [&] {
          absl::Status status;
          for (int layer = 0; layer < 5; ++layer) {
            for (const Shape& shape : kDraftLayer) status.Update(launch(shape, rows, DType::kBf16));
          }
          status.Update(launch(kShapes[5], drafts, DType::kF32));
          return status;
        });
        const char* name = phase == Phase::kVerify ? "verify" : "prefill";
        Record(std::string("linear, draft of ") + std::to_string(sequences) + " sequences, " + name, time);
        ms[phase == Phase::kVerify ? 0 : 1] = time.median * 1e-3;
      }
      std::printf("  %2lld sequences: %7.3f %7.3f\n", static_cast<long long>(sequences), ms[0], ms[1]);
      std::fflush(stdout);
    }
  }

 private:
  const Stream& stream_;
  Buffer slab_, x_, y_;
  CublasLinear cublas_;
  int64_t offset_ = 0;
};

}  // namespace

double GemmCeiling(const Stream& stream) {
  constexpr int64_t kRows = 8192, N = 34816, K = 5120;
  const CublasLinear cublas = Value(CublasLinear::Create(stream));
  const Matrix x = Noise(kRows, K, stream), w = Noise(N, K, stream), y = Noise(kRows, N, stream);
  double best = std::numeric_limits<double>::infinity();
  for (const CublasLinear::Algorithm& algorithm : Value(cublas.Algorithms(kRows, N, K))) {
    const Microseconds time = TimeReplays(stream, [&] {
      return cublas.Launch(x.view().data, w.view().data, y.view().data, kRows, N, K, algorithm);
    });
    best = std::min(best, time.median);
  }
  return 2e6 * static_cast<double>(kRows * N * K) / best;
}

void RunEnergy(const Stream& stream) {
  LinearBench bench(stream);
  std::printf("\nall 257 linear layers, energy of the whole device\n");
  bench.Energies();
}

void RunLinear(const Stream& stream, const Ceilings& ceilings) {
  LinearBench bench(stream);
  std::printf("\nall 257 linear layers, VERIFY, ms [low high] share of the read ceiling, by rows\n");
  bench.Sequence(ceilings);
  bench.BesideCublas();
  bench.Shapes();
  bench.Drafts();
  bench.Prefill();
}

}  // namespace dflash::bench
