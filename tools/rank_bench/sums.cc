#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/graph.h"
#include "tools/dflash_bench/timing.h"
#include "tools/rank_bench/rank.h"

namespace dflash::bench {
namespace {

constexpr int kCalls = 64;  // in a row, as in a forward pass
constexpr float kEps = 1e-6f;

// Values of ordinary size: zeros would be too easy to move.
absl::StatusOr<Matrix> Filled(int64_t rows, int64_t cols, const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(Matrix matrix, Matrix::Allocate(rows, cols, ActivationDType(), stream));
  std::vector<char> bytes(static_cast<size_t>(rows * cols * SizeOf(ActivationDType())));
  uint32_t state = 12345;
  // Small exponents whatever the type: the top byte of an element lies in [0x3c, 0x3f] or is its negative.
  const auto width = static_cast<size_t>(SizeOf(ActivationDType()));
  for (size_t i = 0; i < bytes.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    bytes[i] = static_cast<char>(i % width == width - 1 ? 0x3c + (state >> 30) : state >> 24);
  }
  DFLASH_RETURN_IF_ERROR(
      CopyToDevice(matrix.view().data, bytes.data(), static_cast<int64_t>(bytes.size()), stream));
  return matrix;
}

// Seconds of one call, many in a row. All ranks run the same passes.
absl::StatusOr<double> TimeCalls(Communicator& communicator, int64_t repeats, const Stream& stream,
                                 const std::function<absl::Status()>& call) {
  const auto body = [&] {
    for (int i = 0; i < kCalls; ++i) DFLASH_RETURN_IF_ERROR(call());
    return absl::OkStatus();
  };
  DFLASH_RETURN_IF_ERROR(body());  // connections and kernels are there before anything is captured
  DFLASH_RETURN_IF_ERROR(communicator.Barrier(stream));
  std::optional<Graph> graph;
  if (communicator.capturable()) {
    DFLASH_ASSIGN_OR_RETURN(graph, Graph::Capture(stream, body));
  }
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeats + 2; ++i) {
    DFLASH_RETURN_IF_ERROR(communicator.Barrier(stream));
    const absl::Time begin = absl::Now();
    DFLASH_RETURN_IF_ERROR(graph.has_value() ? graph->Launch(stream) : body());
    DFLASH_RETURN_IF_ERROR(stream.Synchronize());
    if (i >= 2) seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin) / kCalls);
  }
  DFLASH_RETURN_IF_ERROR(communicator.Check());
  return Median(seconds);
}

}  // namespace

absl::Status MeasureSums(SwitchedCommunicator& communicator, int64_t cols, int64_t repeats,
                         const Stream& stream, Report& report) {
  const bool is_first = communicator.rank() == 0;
  if (is_first) {
    report.Section(absl::StrCat("sums over ", communicator.size(), " ranks, ", cols, " columns, ", kCalls,
                                " in a row, us each"));
  }
  for (const int64_t rows : {1, 4, 16, 32, 64, 128, 512, 2048}) {
    DFLASH_ASSIGN_OR_RETURN(const Matrix product, Filled(rows, cols, stream));
    DFLASH_ASSIGN_OR_RETURN(const Matrix residual, Filled(rows, cols, stream));
    DFLASH_ASSIGN_OR_RETURN(const Matrix y, Filled(rows, cols, stream));
    DFLASH_ASSIGN_OR_RETURN(const Matrix w, Filled(1, cols, stream));
    const auto fused = [&] {
      return communicator.AllReduceAddRmsNorm(product.view(), residual.view(), w.view(), NormWeight::kOnePlus,
                                              kEps, y.view(), stream);
    };
    Row row = {absl::StrCat("rows ", rows), {}};
    communicator.UsePeer(false);
    DFLASH_ASSIGN_OR_RETURN(const double sum, TimeCalls(communicator, repeats, stream, [&] {
                              return communicator.AllReduce(product.view().data, rows * cols,
                                                            ActivationDType(), stream);
                            }));
    row.figures.push_back({absl::StrCat(communicator.name(), " sum"), 1e6 * sum});
    DFLASH_ASSIGN_OR_RETURN(const double apart, TimeCalls(communicator, repeats, stream, fused));
    row.figures.push_back({"with residual and norm", 1e6 * apart});
    // The other layout of the residual: every rank sums and norms its share of the rows.
    const int64_t share = rows / communicator.size();
    if (share * communicator.size() == rows) {
      const auto share_of = [&](const Matrix& matrix) {
        return matrix.view().Rows(share * communicator.rank(), share);
      };
      DFLASH_ASSIGN_OR_RETURN(
          const double sharded, TimeCalls(communicator, repeats, stream, [&] {
            DFLASH_RETURN_IF_ERROR(communicator.ReduceScatter(product.view().data, share_of(product).data,
                                                              share * cols, ActivationDType(), stream));
            DFLASH_RETURN_IF_ERROR(AddRmsNorm(share_of(residual), share_of(product), w.view(),
                                              NormWeight::kOnePlus, kEps, share_of(y), stream));
            return communicator.AllGather(share_of(y).data, y.view().data,
                                          share * cols * SizeOf(ActivationDType()), stream);
          }));
      row.figures.push_back({"sharded", 1e6 * sharded});
    }
    communicator.UsePeer(true);
    if (rows <= communicator.OneStepRows(cols)) {
      DFLASH_ASSIGN_OR_RETURN(const double together, TimeCalls(communicator, repeats, stream, fused));
      row.figures.push_back({"peer memory", 1e6 * together});
      DFLASH_ASSIGN_OR_RETURN(const double alone, TimeCalls(communicator, repeats, stream, [&] {
                                return communicator.AllReduce(product.view().data, rows * cols,
                                                              ActivationDType(), stream);
                              }));
      row.figures.push_back({"sum alone", 1e6 * alone});
    }
    if (is_first) report.Add(row);
  }
  return absl::OkStatus();
}

}  // namespace dflash::bench
