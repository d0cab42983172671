// What sums through peer memory owe, as a program that each rank runs and that checks its own results.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "worker/comm/peer_communicator.h"

namespace dflash::testing {

inline constexpr float kEps = 1e-6f;
inline constexpr int64_t kCols = 72;
inline constexpr int64_t kAreaBytes = int64_t{16} << 20;

inline absl::StatusOr<std::unique_ptr<PeerCommunicator>> AddPeerMemory(std::unique_ptr<Communicator> base,
                                                                       const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(PeerMemory memory, PeerMemory::Create(base.get(), kAreaBytes, stream));
  return PeerCommunicator::Create(std::move(base), std::move(memory), /*device=*/0);
}

// Sums of changing numbers of rows, each beside the one that the communicator underneath makes of AllReduce
// and AddRmsNorm.
inline absl::Status CheckPeerSums(PeerCommunicator& comm, Communicator& base, const Stream& stream) {
  const HostMatrix<float> weight = RandomMatrix<float>(1, kCols, 3);
  struct Call {
    DeviceMatrix product, again, alone, expected_alone, residual, expected_residual, y, expected_y;
  };
  std::vector<Call> calls;
  const DeviceMatrix w = DeviceMatrix::Input(weight, stream);
  const int64_t most = comm.OneStepRows(kCols);
  const std::vector<int64_t> rows_of = {16, 1, most, 5, 16, 16, 1, 7, most + 1, 16};
  for (size_t i = 0; i < rows_of.size(); ++i) {
    const auto seed = static_cast<uint64_t>(100 * i) + static_cast<uint64_t>(comm.rank());
    const HostMatrix<float> product = RandomMatrix<float>(rows_of[i], kCols, seed);
    const HostMatrix<float> residual = RandomMatrix<float>(rows_of[i], kCols, 1000 + i);
    calls.push_back({DeviceMatrix::Activations(product, stream), DeviceMatrix::Activations(product, stream),
                     DeviceMatrix::Activations(product, stream), DeviceMatrix::Activations(product, stream),
                     DeviceMatrix::Activations(residual, stream), DeviceMatrix::Activations(residual, stream),
                     DeviceMatrix::Output(rows_of[i], kCols, ActivationDType(), stream),
                     DeviceMatrix::Output(rows_of[i], kCols, ActivationDType(), stream)});
  }
  for (Call& call : calls) {
    DFLASH_RETURN_IF_ERROR(base.AllReduceAddRmsNorm(call.again.view(), call.expected_residual.view(),
                                                    w.view(), NormWeight::kOnePlus, kEps,
                                                    call.expected_y.view(), stream));
    const MatrixView alone = call.expected_alone.view();
    DFLASH_RETURN_IF_ERROR(base.AllReduce(alone.data, alone.rows * alone.cols, alone.dtype, stream));
  }
  DFLASH_RETURN_IF_ERROR(comm.Barrier(stream));
  const int64_t sums_before = comm.peer_sums();
  for (Call& call : calls) {
    DFLASH_RETURN_IF_ERROR(comm.AllReduceAddRmsNorm(call.product.view(), call.residual.view(), w.view(),
                                                    NormWeight::kOnePlus, kEps, call.y.view(), stream));
    const MatrixView alone = call.alone.view();
    DFLASH_RETURN_IF_ERROR(comm.AllReduce(alone.data, alone.rows * alone.cols, alone.dtype, stream));
  }
  DFLASH_RETURN_IF_ERROR(stream.Synchronize());
  DFLASH_RETURN_IF_ERROR(comm.Check());
  DFLASH_RETURN_IF_ERROR(comm.Barrier(stream));  // whoever is through may leave
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].residual.ToHost().values != calls[i].expected_residual.ToHost().values ||
        calls[i].y.ToHost().values != calls[i].expected_y.ToHost().values ||
        calls[i].alone.ToHost().values != calls[i].expected_alone.ToHost().values)
      return absl::InternalError(absl::StrCat("other bits in call ", i));
  }
  if (comm.peer_sums() - sums_before != 2 * (static_cast<int64_t>(calls.size()) - 1))
    return absl::InternalError(absl::StrCat(comm.peer_sums(), " sums went through peer memory"));
  return absl::OkStatus();
}

}  // namespace dflash::testing
