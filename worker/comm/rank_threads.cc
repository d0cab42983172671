#include "worker/comm/rank_threads.h"

#include <thread>
#include <vector>

#include "base/status.h"

namespace dflash {

absl::Status RunOnRanks(std::span<const std::unique_ptr<Communicator>> communicators,
                        const std::function<absl::Status(size_t rank)>& work) {
  std::vector<absl::Status> results(communicators.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = work(rank);
      if (!results[rank].ok()) communicators[rank]->Abort(results[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) {
    if (!result.ok() && !absl::IsUnavailable(result)) return result;
  }
  for (const absl::Status& result : results) DFLASH_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

}  // namespace dflash
