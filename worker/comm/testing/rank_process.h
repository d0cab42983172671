// One rank of a group as a forked process.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "base/shared_segment.h"
#include "base/status.h"
#include "worker/comm/host_communicator.h"

namespace dflash::testing {

// Joins through the parent's descriptor, works, and ends with 0 when its work was OK.
class RankProcess {
 public:
  RankProcess(const SharedSegment& segment, int rank, const HostCommunicator::Options& options,
              const std::function<absl::Status(std::unique_ptr<Communicator>, const Stream&)>& work) {
    const int parent = getpid(), fd = segment.fd();
    const int64_t bytes = segment.bytes();
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const absl::Status result = [&] {
      DFLASH_ASSIGN_OR_RETURN(SharedSegment opened, SharedSegment::Open(parent, fd, bytes));
      DFLASH_ASSIGN_OR_RETURN(
          auto comm,
          HostCommunicator::Join(std::make_shared<SharedSegment>(std::move(opened)), rank, options));
      DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = 1}));
      return work(std::move(comm), stream);
    }();
    if (!result.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, result.ToString().c_str());
    _exit(result.ok() ? 0 : 1);
  }
  ~RankProcess() {
    kill(pid_, SIGKILL);
    Wait();
  }
  void Signal(int number) { kill(pid_, number); }
  // Exit code, or 128 + signal.
  int Wait() {
    if (ended_) return code_;
    int status = 0;
    waitpid(pid_, &status, 0);
    ended_ = true;
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_;
  }

 private:
  pid_t pid_ = -1;
  bool ended_ = false;
  int code_ = -1;
};

}  // namespace dflash::testing
