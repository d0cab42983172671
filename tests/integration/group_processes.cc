#include "tests/integration/group_processes.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;

std::string Proc(int pid, const std::string& name) { return absl::StrCat("/proc/", pid, "/", name); }

// Everything in a file of /proc; empty when the process is gone.
std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Entries of a folder whose names are numbers.
std::vector<int> Numbers(const std::string& folder) {
  std::vector<int> numbers;
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) return numbers;
  while (const dirent* entry = readdir(entries)) {
    int number = 0;
    if (absl::SimpleAtoi(entry->d_name, &number)) numbers.push_back(number);
  }
  closedir(entries);
  return numbers;
}

// State and parent of a process: "pid (name) S ppid ...".
struct ProcessStat {
  char state = 0;
  int parent = 0;
};
ProcessStat StatOf(int pid) {
  const std::string text = Read(Proc(pid, "stat"));
  ProcessStat stat;
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return stat;
  std::istringstream rest(text.substr(end + 1));
  rest >> stat.state >> stat.parent;
  return stat;
}

// Calls `use` with a copy of every connected Unix socket of the process that belongs to the file `name`,
// until it returns true.
bool ForConnections(int pid, const std::string& name, const std::function<bool(int)>& use) {
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return false;
  bool done = false;
  for (const int number : Numbers(Proc(pid, "fd"))) {
    const int fd = static_cast<int>(syscall(SYS_pidfd_getfd, pidfd, number, 0));
    if (fd < 0) continue;
    sockaddr_un own = {}, peer = {};
    socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
    // A listening socket has no peer.
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 && own.sun_family == AF_UNIX &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
        (std::string(own.sun_path).find(name) != std::string::npos ||
         std::string(peer.sun_path).find(name) != std::string::npos)) {
      done = use(fd);
    }
    close(fd);
    if (done) break;
  }
  close(pidfd);
  return done;
}

}  // namespace

std::vector<int> RankPids(const Process& daemon, int epoch, int ranks) {
  const std::string output = daemon.output();
  std::vector<int> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string head = absl::StrCat("epoch ", epoch, ": started ");
    const std::string tail = ranks == 1 ? "\n" : absl::StrCat(", rank ", rank, "\n");
    for (size_t at = output.find(head); at != std::string::npos; at = output.find(head, at + 1)) {
      const std::string line = output.substr(at, output.find('\n', at) + 1 - at);
      if (!line.ends_with(tail)) continue;
      const size_t begin = line.find("as process ") + 11;
      int pid = 0;
      if (absl::SimpleAtoi(line.substr(begin, line.find_first_of(",\n", begin) - begin), &pid))
        pids.push_back(pid);
      break;
    }
  }
  return static_cast<int>(pids.size()) == ranks ? pids : std::vector<int>();
}

std::vector<RankProcess> RanksOf(int daemon) {
  std::vector<RankProcess> ranks;
  for (const int pid : Numbers("/proc")) {
    const ProcessStat stat = StatOf(pid);
    if (stat.parent != daemon || stat.state == 'Z') continue;
    const std::vector<std::string> words = absl::StrSplit(Read(Proc(pid, "cmdline")), '\0');
    RankProcess rank = {.pid = pid, .group = "", .rank = 0};
    for (size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == "--group-id") rank.group = words[i + 1];
      if (words[i] == "--rank") (void)absl::SimpleAtoi(words[i + 1], &rank.rank);
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

std::vector<int> FindProcesses(const std::string& program, const std::string& word) {
  std::vector<int> found;
  for (const int pid : Numbers("/proc")) {
    if (Runs(pid, program) && Read(Proc(pid, "cmdline")).find(word) != std::string::npos)
      found.push_back(pid);
  }
  return found;
}

bool IsGone(int pid) { return kill(pid, 0) != 0; }
bool IsStopped(int pid) { return StatOf(pid).state == 'T'; }

bool Runs(int pid, const std::string& program) {
  std::error_code error;
  return fs::read_symlink(Proc(pid, "exe"), error) == fs::canonical(program, error);
}

// "NUMBER ARGUMENT..." of the system call that a thread is in. The communicator's are the only futexes here
// that processes share, which is said by the operation: FUTEX_WAIT without FUTEX_PRIVATE_FLAG.
bool IsInCollective(int pid) {
  for (const int thread : Numbers(Proc(pid, "task"))) {
    std::istringstream call(Read(Proc(pid, absl::StrCat("task/", thread, "/syscall"))));
    std::string number, address, operation;
    call >> number >> address >> operation;
    if (number == std::to_string(SYS_futex) && operation == "0x0") return true;
  }
  return false;
}

bool IsConnected(int pid, const std::string& name) {
  return ForConnections(pid, name, [](int) { return true; });
}
bool DropConnection(int pid, const std::string& name) {
  return ForConnections(pid, name, [](int fd) { return shutdown(fd, SHUT_RDWR) == 0; });
}

std::string SocketFolder(int rank0) {
  const std::string line = Read(Proc(rank0, "cmdline"));
  const std::string flag("--listen\0unix:", 14);
  const size_t at = line.find(flag);
  if (at == std::string::npos) return "";
  const std::string path =
      line.substr(at + flag.size(), line.find('\0', at + flag.size()) - at - flag.size());
  return fs::path(path).parent_path().string();
}

std::string Holdings::ToString() const {
  return absl::StrCat(children, " children, ", zombies, " zombies, ", socket_files, " socket files, ",
                      shared_memories, " shared memories, ", descriptors, " descriptors, ", threads,
                      " threads");
}

Holdings HoldingsOf(int daemon) {
  Holdings holdings;
  std::set<std::string> memories;
  for (const int pid : Numbers("/proc")) {
    const ProcessStat stat = StatOf(pid);
    if (stat.parent != daemon) continue;
    if (stat.state == 'Z') {
      ++holdings.zombies;
      continue;
    }
    ++holdings.children;
    std::error_code error;
    if (const std::string folder = SocketFolder(pid); !folder.empty()) {
      holdings.socket_files +=
          static_cast<int>(std::distance(fs::directory_iterator(folder, error), fs::directory_iterator()));
    }
    // "address perms offset device inode path": an inode is one memory, whoever maps it.
    std::istringstream maps(Read(Proc(pid, "maps")));
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:dflash-") == std::string::npos) continue;
      std::istringstream words(line);
      std::string address, permissions, offset, device, inode;
      words >> address >> permissions >> offset >> device >> inode;
      memories.insert(inode);
    }
  }
  holdings.shared_memories = static_cast<int>(memories.size());
  holdings.descriptors = static_cast<int>(Numbers(Proc(daemon, "fd")).size());
  holdings.threads = static_cast<int>(Numbers(Proc(daemon, "task")).size());
  return holdings;
}

}  // namespace dflash::integration
