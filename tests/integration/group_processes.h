// What the processes of a running worker group look like from outside: who they are, what they hold, what
// their threads wait for; and breaking their connections.
#pragma once

#include <string>
#include <vector>

#include "tests/integration/process.h"

namespace dflash::integration {

// Process ids of the ranks of one life of the group, from the daemon's log; empty when it has not begun.
std::vector<int> RankPids(const Process& daemon, int epoch, int ranks);

// The same, of all groups that live, from /proc: whatever the log says, or nobody hears.
struct RankProcess {
  int pid = 0;
  std::string group;  // empty: of one rank
  int rank = 0;
};
std::vector<RankProcess> RanksOf(int daemon);
// Processes that run `program` with `word` somewhere in their command line.
std::vector<int> FindProcesses(const std::string& program, const std::string& word);

bool IsGone(int pid);
// Whether a process stands still after SIGSTOP.
bool IsStopped(int pid);
// Whether a process runs `program`, and not something else in its place.
bool Runs(int pid, const std::string& program);
// Whether a thread of the process waits in a collective of the host communicator.
bool IsInCollective(int pid);
// Whether the process has a connection at the socket file whose name contains `name`; and breaks one, as if
// the kernel had lost it (false: it has none).
bool IsConnected(int pid, const std::string& name);
bool DropConnection(int pid, const std::string& name);

// What a daemon and its group hold. Equal in every life that serves and does nothing.
struct Holdings {
  int children = 0;
  int zombies = 0;          // children that have ended and were not waited for
  int socket_files = 0;     // in the group's folder
  int shared_memories = 0;  // of ranks, different ones
  int descriptors = 0;      // of the daemon
  int threads = 0;          // of the daemon
  std::string ToString() const;
};
Holdings HoldingsOf(int daemon);
// The folder of the sockets of the group that rank 0 with this pid belongs to; empty: unknown.
std::string SocketFolder(int rank0);

}  // namespace dflash::integration
