// What comes over a socket of the rank channel: from a stranger or a member to the leader, from a leader to a
// rank. Input: a kind, then
//   'r'  bytes, cut into frames however they arrive
//   'm'  bytes that a stranger sends to a leader
//   'h'  frames that a stranger sends to a leader
//   'l'  frames that a leader sends to a rank that has joined
//   'c'  frames that a leader sends to a rank that wants to join
// Frames are messages in a row, each behind two bytes, little endian, with its size; the last one is what is
// left when there is less. Leader and rank are the real ones, at real sockets.
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "dflash/worker/v1/rank.pb.h"
#include "worker/rpc/frame_reader.h"
#include "worker/rpc/rank_channel.h"
#include "worker/rpc/rank_messages.h"

namespace dflash {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

class SocketFolder {
 public:
  SocketFolder() { DFLASH_CHECK(mkdtemp(path_.data()) != nullptr); }
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  ~SocketFolder() {
    (void)unlink(socket().c_str());
    (void)rmdir(path_.c_str());
  }
  std::string socket() const { return path_ + "/ranks.sock"; }
  // Nobody listens there.
  std::string FreshSocket() const {
    (void)unlink(socket().c_str());
    return socket();
  }

 private:
  std::string path_ = "/tmp/rank_frame_fuzz.XXXXXX";
};

std::string FreshSocket() {
  static const SocketFolder folder;
  return folder.FreshSocket();
}

RankChannelOptions Options(const std::string& socket) {
  RankChannelOptions options;
  options.address = "unix:" + socket;
  options.group_id = "group";
  options.epoch = 7;
  options.size = 2;
  options.build = "build";
  options.options = "options";
  options.formation_timeout = kPatience;
  options.silence_limit = kPatience;
  options.plan_timeout = kPatience;
  return options;
}

sockaddr_un NameOf(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  DFLASH_CHECK(path.size() < sizeof(name.sun_path));
  std::memcpy(name.sun_path, path.data(), path.size());
  return name;
}

// libFuzzer looks at the clock in a signal handler.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Sends everything and says that nothing more comes. The other side may leave before.
void SendAll(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent =
        Uninterrupted([&] { return send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL); });
    if (sent <= 0) break;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  (void)shutdown(socket, SHUT_WR);
}

// Until the other side closes.
std::string ReceiveAll(int socket) {
  std::string all;
  char bytes[4096];
  for (;;) {
    const ssize_t count = Uninterrupted([&] { return recv(socket, bytes, sizeof(bytes), 0); });
    if (count <= 0) return all;
    all.append(bytes, static_cast<size_t>(count));
  }
}

struct Frames {
  std::vector<std::string> bodies;
  bool whole = true;  // no malformed header behind them
};

// In pieces of `size` bytes.
Frames Cut(std::string_view bytes, size_t size) {
  FrameReader reader;
  Frames frames;
  for (size_t at = 0; at < bytes.size(); at += size) {
    reader.Append(bytes.substr(at, size));
    for (;;) {
      absl::StatusOr<std::optional<std::string>> body = reader.Next();
      if (!body.ok()) {
        DFLASH_CHECK(body.status().code() == absl::StatusCode::kInvalidArgument);
        frames.whole = false;
        return frames;
      }
      if (!body->has_value()) break;
      DFLASH_CHECK(!(*body)->empty() && (*body)->size() <= kMaxFrameBytes);
      frames.bodies.push_back(**std::move(body));
    }
  }
  return frames;
}

std::vector<std::string> BodiesOf(std::string_view input) {
  std::vector<std::string> bodies;
  while (input.size() > 2) {
    const size_t size = static_cast<uint8_t>(input[0]) | size_t{static_cast<uint8_t>(input[1])} << 8;
    input.remove_prefix(2);
    bodies.emplace_back(input.substr(0, std::max<size_t>(size, 1)));
    input.remove_prefix(bodies.back().size());
  }
  return bodies;
}

std::string Wire(const std::vector<std::string>& bodies) {
  std::string wire;
  for (const std::string& body : bodies) wire += MakeFrame(body).value();
  return wire;
}

std::string BodyOf(const wire::RankFrame& frame) { return frame.SerializeAsString(); }

// The frames up to the first body that is none.
std::vector<wire::RankFrame> Parsed(const std::vector<std::string>& bodies) {
  std::vector<wire::RankFrame> frames;
  for (const std::string& body : bodies) {
    wire::RankFrame frame;
    if (!frame.ParseFromString(body)) break;
    frames.push_back(std::move(frame));
  }
  return frames;
}

// A plan that was read is one that can be sent, and arrives as it was.
void CheckPlan(const wire::RankPlan& message) {
  const RankPlan plan = FromMessage(message);
  wire::RankPlan sent;
  DFLASH_CHECK(sent.ParseFromString(ToMessage(plan).SerializeAsString()));
  DFLASH_CHECK(ChainHash(1, FromMessage(sent)) == ChainHash(1, plan));
  DFLASH_CHECK(sent.hash() == message.hash());
  DFLASH_CHECK(plan.rows.size() == static_cast<size_t>(message.rows_size()));
  DFLASH_CHECK(plan.slots.size() == static_cast<size_t>(message.slots_size()));
}

void Read(std::string_view bytes) {
  const Frames whole = Cut(bytes, bytes.size() + 1);
  for (const size_t size : {1u, 2u, 3u, 7u}) {
    const Frames cut = Cut(bytes, size);
    DFLASH_CHECK(cut.bodies == whole.bodies && cut.whole == whole.whole);
  }
  for (const wire::RankFrame& frame : Parsed(whole.bodies)) {
    if (frame.has_plan()) CheckPlan(frame.plan());
    if (frame.has_abort()) DFLASH_CHECK(FromAbort(frame.abort()).ok() == (frame.abort().code() == 0));
  }
}

// Is this the rank that the leader waits for?
bool Belongs(const wire::RankFrame& frame, const RankChannelOptions& options) {
  const wire::Join& join = frame.join();
  return frame.has_join() && frame.epoch() == options.epoch && join.group_id() == options.group_id &&
         join.build() == options.build && join.options() == options.options && join.size() == 2 &&
         join.rank() == 1 && join.proof().empty();
}

// A stranger sends `bytes`, in which lie `frames`, to a leader.
void Visit(std::string_view bytes, const std::vector<wire::RankFrame>& frames) {
  const RankChannelOptions options = Options(FreshSocket());
  std::atomic<int> faults = 0;
  absl::Notification fault;
  auto hub = RankHub::Listen(options, {.host_pid = 1, .host_fd = 2, .host_bytes = 3, .nccl_id = ""},
                             [&](const absl::Status& status) {
                               DFLASH_CHECK(!status.ok() && !status.message().empty());
                               if (++faults == 1) fault.Notify();
                             });
  DFLASH_CHECK(hub.ok(), hub.status().ToString().c_str());
  const int stranger = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un name = NameOf(options.address.substr(5));
  DFLASH_CHECK(connect(stranger, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0);
  SendAll(stranger, bytes);
  const std::string received = ReceiveAll(stranger);
  close(stranger);

  // The leader's words are well formed, and those that the protocol has for this.
  const Frames cut = Cut(received, received.size() + 1);
  const std::vector<wire::RankFrame> answers = Parsed(cut.bodies);
  DFLASH_CHECK(cut.whole && answers.size() == cut.bodies.size());
  DFLASH_CHECK(!answers.empty() && answers[0].has_challenge());
  const bool joins = !frames.empty() && Belongs(frames[0], options);
  if (frames.empty()) {
    DFLASH_CHECK(answers.size() == 1);
  } else if (joins) {
    DFLASH_CHECK(answers.size() >= 2 && answers[1].has_welcome() && answers[1].epoch() == options.epoch);
    DFLASH_CHECK(answers[1].welcome().host().pid() == 1);
  } else {
    DFLASH_CHECK(answers.size() == 2 && answers[1].has_abort() && answers[1].abort().code() != 0);
  }
  DFLASH_CHECK((*hub)->Members().at(0).joined == joins);
  DFLASH_CHECK((*hub)->refused_joins() == (!frames.empty() && !joins));
  if (joins) {
    // It is gone, at the latest now.
    DFLASH_CHECK(fault.WaitForNotificationWithTimeout(kPatience));
    DFLASH_CHECK((*hub)->AwaitReady({}, absl::Now()).code() != absl::StatusCode::kOk);
  }
  (*hub)->End(absl::OkStatus());
  hub->reset();
  DFLASH_CHECK(faults == joins);
}

// A leader that says what it is told to whoever comes first, and sends everybody else away.
class FakeLeader {
 public:
  FakeLeader(const std::string& path, std::string words)
      : listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_un name = NameOf(path);
    DFLASH_CHECK(bind(listener_, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0);
    DFLASH_CHECK(listen(listener_, 4) == 0);
    wire::RankFrame refusal;
    refusal.mutable_abort()->set_code(static_cast<int32_t>(absl::StatusCode::kFailedPrecondition));
    thread_ = std::thread([this, words = std::move(words), refused = Wire({BodyOf(refusal)})] {
      for (bool first = true;; first = false) {
        const int rank = Uninterrupted([&] { return accept(listener_, nullptr, nullptr); });
        if (rank < 0) return;
        SendAll(rank, first ? words : refused);
        (void)ReceiveAll(rank);
        close(rank);
      }
    });
  }
  FakeLeader(const FakeLeader&) = delete;
  FakeLeader& operator=(const FakeLeader&) = delete;
  ~FakeLeader() {
    (void)shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

 private:
  const int listener_;
  std::thread thread_;
};

// What a rank makes of a leader's frames once it has joined.
struct Orders {
  std::vector<uint64_t> plans;  // their hashes
  bool ends_well = false;
};
Orders OrdersIn(const std::vector<wire::RankFrame>& frames, uint64_t epoch) {
  Orders orders;
  bool over = false;
  for (const wire::RankFrame& frame : frames) {
    if (frame.epoch() != epoch) continue;
    if (frame.has_plan()) {
      orders.plans.push_back(ChainHash(1, FromMessage(frame.plan())));
    } else if (!over && !frame.has_heartbeat()) {
      over = true;
      orders.ends_well = frame.has_abort() && frame.abort().code() == 0;
    }
  }
  return orders;
}

void Lead(std::vector<std::string> bodies, bool joined) {
  const RankChannelOptions options = Options(FreshSocket());
  const std::vector<wire::RankFrame> frames = Parsed(bodies);
  if (joined) {
    wire::RankFrame challenge, welcome;
    challenge.set_epoch(options.epoch);
    challenge.mutable_challenge()->set_nonce("nonce");
    welcome.set_epoch(options.epoch);
    welcome.mutable_welcome()->mutable_host()->set_pid(11);
    bodies.insert(bodies.begin(), {BodyOf(challenge), BodyOf(welcome)});
  }
  const FakeLeader leader(options.address.substr(5), Wire(bodies));
  std::atomic<int> faults = 0;
  auto link = RankLink::Join(options, 1, [&](const absl::Status& status) {
    DFLASH_CHECK(!status.ok());
    ++faults;
  });
  if (!link.ok()) {
    DFLASH_CHECK(!joined, link.status().ToString().c_str());
    DFLASH_CHECK(faults == 0);
    return;
  }
  if (joined) {
    DFLASH_CHECK((*link)->transport().host_pid == 11);
  } else {
    DFLASH_CHECK(std::any_of(frames.begin(), frames.end(), [](const auto& f) { return f.has_welcome(); }),
                 "joined without welcome");
  }
  // Everything that was sent before the connection's end arrives, or what came before the group's end.
  std::vector<uint64_t> plans;
  absl::StatusOr<std::optional<RankPlan>> plan = (*link)->NextPlan();
  for (; plan.ok() && plan->has_value(); plan = (*link)->NextPlan()) plans.push_back(ChainHash(1, **plan));
  link->reset();
  if (!joined) return;
  const Orders orders = OrdersIn(frames, options.epoch);
  DFLASH_CHECK(plan.ok() == orders.ends_well, plan.status().ToString().c_str());
  DFLASH_CHECK(plans.size() <= orders.plans.size() &&
               std::equal(plans.begin(), plans.end(), orders.plans.begin()));
  DFLASH_CHECK(faults == !orders.ends_well);
}

void Run(char kind, std::string_view input) {
  switch (kind) {
    case 'r':
      return Read(input);
    case 'm':
      return Visit(input, Parsed(Cut(input, input.size() + 1).bodies));
    case 'h': {
      const std::vector<std::string> bodies = BodiesOf(input);
      return Visit(Wire(bodies), Parsed(bodies));
    }
    case 'l':
      return Lead(BodiesOf(input), true);
    case 'c':
      return Lead(BodiesOf(input), false);
    default:
      return;
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  dflash::Run(static_cast<char>(data[0]),
              std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
