#include "worker/comm/peer_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

// What every rank says of itself. Plain bytes.
struct Report {
  SharedBufferHandle handle;
  char problem[160] = {};  // empty: none
};

void SetProblem(Report& report, const absl::Status& status) {
  const std::string text(status.message());
  const size_t length = std::min(text.size(), sizeof(report.problem) - 1);
  std::memcpy(report.problem, text.data(), length);
  report.problem[length] = 0;
}

// All ranks' reports, in their order.
absl::StatusOr<std::vector<Report>> Exchange(Communicator& communicator, const Report& own,
                                             const Stream& stream) {
  const auto bytes = static_cast<int64_t>(sizeof(Report));
  std::vector<Report> all(static_cast<size_t>(communicator.size()));
  DFLASH_ASSIGN_OR_RETURN(const Buffer sent, Buffer::Allocate(bytes, stream));
  DFLASH_ASSIGN_OR_RETURN(const Buffer received, Buffer::Allocate(bytes * communicator.size(), stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(sent.data(), &own, bytes, stream));
  DFLASH_RETURN_IF_ERROR(communicator.AllGather(sent.data(), received.data(), bytes, stream));
  DFLASH_RETURN_IF_ERROR(CopyToHost(all.data(), received.data(), bytes * communicator.size(), stream));
  return all;
}

std::string ProblemsOf(const std::vector<Report>& reports) {
  std::string problems;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].problem[0] == 0) continue;
    absl::StrAppend(&problems, problems.empty() ? "" : "; ", "rank ", rank, ": ", reports[rank].problem);
  }
  return problems;
}

}  // namespace

absl::StatusOr<PeerMemory> PeerMemory::Create(Communicator* communicator, int64_t bytes,
                                              const Stream& stream) {
  PeerMemory memory;
  memory.bytes_ = bytes;
  Report own;
  absl::StatusOr<SharedBuffer> buffer = SharedBuffer::Allocate(bytes, stream);
  if (buffer.ok()) {
    memory.own_.push_back(*std::move(buffer));
    own.handle = memory.own_[0].handle();
  } else {
    SetProblem(own, buffer.status());
  }
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Report> reports, Exchange(*communicator, own, stream));
  memory.problem_ = ProblemsOf(reports);
  if (!memory.problem_.empty()) return memory;

  for (int rank = 0; rank < communicator->size(); ++rank) {
    const SharedBufferHandle& handle = reports[static_cast<size_t>(rank)].handle;
    if (rank == communicator->rank()) {
      memory.areas_.push_back(memory.own_[0].data());
      continue;
    }
    memory.shares_device_ |= ShareDevice(handle, own.handle);
    absl::StatusOr<MappedBuffer> mapped = MappedBuffer::Map(handle, stream);
    if (!mapped.ok()) {
      SetProblem(own, mapped.status());
      break;
    }
    memory.areas_.push_back(mapped->data());
    memory.mapped_.push_back(*std::move(mapped));
  }
  // Two ranks may share a device of which a third one knows nothing.
  if (memory.shares_device_) own.handle.pid = -1;
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Report> results, Exchange(*communicator, own, stream));
  memory.problem_ = ProblemsOf(results);
  for (const Report& result : results) memory.shares_device_ |= result.handle.pid == -1;
  // Zeroed everywhere before anybody writes.
  DFLASH_RETURN_IF_ERROR(communicator->Barrier(stream));
  return memory;
}

}  // namespace dflash
