#include "tests/integration/group_gates.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>

#include "base/check.h"
#include "gtest/gtest.h"
#include "tests/integration/process.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;

constexpr char kHeldWeights[] = "model-00001-of-00002.safetensors";

fs::path NewFolder() {
  static std::atomic<int> count = 0;
  fs::path folder = fs::path(::testing::TempDir()) /
                    ("dflashd-gates." + std::to_string(getpid()) + "." + std::to_string(++count));
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

}  // namespace

GroupGates::GroupGates(int ranks) : folder_(NewFolder()), ranks_(ranks) {
  fs::create_directory_symlink(TinyTarget(), folder_ / "target");
  for (int rank = 0; rank < ranks; ++rank) {
    const fs::path own = folder_ / ("target." + std::to_string(rank));
    fs::create_directory(own);
    for (const fs::directory_entry& entry : fs::directory_iterator(TinyTarget())) {
      if (entry.path().filename() == kHeldWeights) {
        fs::copy_file(entry.path(), own / kHeldWeights);
      } else {
        fs::create_symlink(entry.path(), own / entry.path().filename());
      }
    }
  }
  // In place of dflash-worker, with its command line: finds its rank, waits at the gate of starting ranks,
  // takes the rank's own folder for the target, and becomes dflash-worker.
  std::ofstream script(worker());
  script << "#!/bin/sh\nhere='" << folder_.string() << "'\nrank=0\nbefore=\n"
         << "for word; do [ \"$before\" = --rank ] && rank=$word; before=$word; done\n"
         << "[ -p \"$here/start.$rank\" ] && read -r _ <\"$here/start.$rank\"\n"
         << "left=$#\n"
         << "while [ $left -gt 0 ]; do\n"
         << "  word=$1; shift; left=$((left - 1))\n"
         << "  [ \"$word\" = \"$here/target\" ] && word=$here/target.$rank\n"
         << "  set -- \"$@\" \"$word\"\n"
         << "done\n"
         << "exec '" << WorkerPath() << "' \"$@\"\n";
  script.close();
  fs::permissions(worker(), fs::perms::owner_all);
}

GroupGates::~GroupGates() {
  Release();
  fs::remove_all(folder_);
}

// Whoever opens a FIFO for reading waits for a writer.
void GroupGates::HoldStart(int rank) { DFLASH_CHECK(mkfifo(StartGate(rank).c_str(), 0600) == 0); }

// Whoever opens a file that another process holds a write lease on waits until that one gives it back (or for
// /proc/sys/fs/lease-break-time seconds, 45 unless somebody changed it).
bool GroupGates::HoldLoading(int rank) {
  DFLASH_CHECK(lease_ < 0);
  std::signal(SIGIO, SIG_IGN);  // what the kernel tells the holder; IsLoadingHeld asks instead
  const fs::path weights = folder_ / ("target." + std::to_string(rank)) / kHeldWeights;
  lease_ = open(weights.c_str(), O_RDWR | O_CLOEXEC);
  DFLASH_CHECK(lease_ >= 0);
  return PollUntil([this] { return fcntl(lease_, F_SETLEASE, F_WRLCK) == 0; });
}

bool GroupGates::IsLoadingHeld() const { return lease_ >= 0 && fcntl(lease_, F_GETLEASE) != F_WRLCK; }

void GroupGates::Release() {
  for (int rank = 0; rank < ranks_; ++rank) {
    const int gate = open(StartGate(rank).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);  // lets readers through
    if (gate < 0) continue;
    unlink(StartGate(rank).c_str());
    close(gate);
  }
  if (lease_ >= 0) close(lease_);  // and with it the lease
  lease_ = -1;
}

}  // namespace dflash::integration
