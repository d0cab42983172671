// Gates that hold one rank of a worker group in a phase of its start, so that a test meets it there: no hook
// in the program under test, only files. Every rank reads its target from a folder of its own.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace dflash::integration {

class GroupGates {
 public:
  explicit GroupGates(int ranks);
  ~GroupGates();
  GroupGates(const GroupGates&) = delete;
  GroupGates& operator=(const GroupGates&) = delete;

  std::string target() const { return (folder_ / "target").string(); }  // for --model
  std::string worker() const { return (folder_ / "worker").string(); }  // for --worker

  // Ranks that start from now on as this one wait before they are dflash-worker.
  void HoldStart(int rank);
  // Ranks that start from now on as this one wait when they open their weights. Waits until nobody has them
  // open; false when that does not happen.
  bool HoldLoading(int rank);
  // Whether a rank waits for its weights.
  bool IsLoadingHeld() const;
  // Opens all gates.
  void Release();

 private:
  std::filesystem::path StartGate(int rank) const { return folder_ / ("start." + std::to_string(rank)); }

  const std::filesystem::path folder_;
  const int ranks_;
  int lease_ = -1;  // descriptor of the weights that are held
};

}  // namespace dflash::integration
