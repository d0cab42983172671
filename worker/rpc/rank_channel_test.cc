// The rank channel: formation and its refusals, plans, the ends of a group, and what strangers can do.
#include "worker/rpc/rank_channel.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/rpc/frame_reader.h"
#include "worker/rpc/rank_messages.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kPatience = absl::Seconds(60);

// A fault that a thread may wait for.
class Fault {
 public:
  std::function<void(const absl::Status&)> Callback() {
    return [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      ++calls_;
      status_ = status;
    };
  }
  std::string Await() {
    absl::MutexLock lock(&mutex_);
    const auto called = [this] { return calls_ > 0; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&called), kPatience));
    return std::string(status_.message());
  }
  int calls() {
    absl::MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  absl::Mutex mutex_;
  int calls_ = 0;
  absl::Status status_;
};

RankChannelOptions Options(int size) {
  static int counter = 0;
  RankChannelOptions options;
  options.address = absl::StrCat("unix:/tmp/rank_channel_test.", getpid(), ".", counter++);
  options.group_id = "group";
  options.epoch = 3;
  options.size = size;
  options.build = "build-1";
  options.options = "--model m";
  options.formation_timeout = kPatience;
  options.heartbeat_period = absl::Milliseconds(20);
  options.silence_limit = kPatience;
  options.plan_timeout = kPatience;
  return options;
}

std::string Path(const RankChannelOptions& options) { return options.address.substr(5); }

struct RemoveSocket {
  explicit RemoveSocket(std::string path) : path_(std::move(path)) {}
  ~RemoveSocket() { unlink(path_.c_str()); }
  const std::string path_;
};

const RankTransport kTransport = {.host_pid = 11, .host_fd = 12, .host_bytes = 13, .nccl_id = ""};

// A whole group in this process.
struct Group {
  explicit Group(const RankChannelOptions& group_options) : options(group_options), socket(Path(options)) {
    hub = RankHub::Listen(options, kTransport, hub_fault.Callback()).value();
    faults.resize(static_cast<size_t>(options.size));
    for (int rank = 1; rank < options.size; ++rank) {
      faults[static_cast<size_t>(rank)] = std::make_unique<Fault>();
      auto link = RankLink::Join(options, rank, faults[static_cast<size_t>(rank)]->Callback());
      EXPECT_TRUE(link.ok()) << link.status();
      links.push_back(*std::move(link));
    }
    EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  }
  RankChannelOptions options;
  RemoveSocket socket;
  Fault hub_fault;
  std::vector<std::unique_ptr<Fault>> faults;  // by rank
  std::unique_ptr<RankHub> hub;
  std::vector<std::unique_ptr<RankLink>> links;
};

RankPlan SomePlan(uint64_t number) {
  RankPlan plan;
  plan.number = number;
  plan.hash = number * 0x123456789abcdefu;
  plan.draft_sequences = 2;
  plan.block_rows = 8;
  plan.slots = {
      {.kind = RankPlan::SlotChange::Kind::kOpen,
       .slot = 1,
       .pages = {},
       .sampling = {.temperature = 0.5f, .top_k = 20, .top_p = 0.9f, .min_p = 0.1f, .seed = ~uint64_t{0}},
       .begin = {.position = 64, .index = 0}},
      {.kind = RankPlan::SlotChange::Kind::kGrow, .slot = 1, .pages = {3, 0, 100000}, .sampling = {}},
      {.kind = RankPlan::SlotChange::Kind::kClose, .slot = 2, .pages = {}, .sampling = {}}};
  plan.rows = {{.slot = 1,
                .phase = Phase::kPrefill,
                .start_position = 64,
                .count = 3,
                .tokens = {7, 0, 248319},
                .last_logits = true,
                .checkpoints = {{.position = 64, .index = 3}, {.position = 128, .index = 0}}},
               {.slot = 0,
                .phase = Phase::kVerify,
                .start_position = 9,
                .count = 16,
                .tokens = {},
                .last_logits = false}};
  return plan;
}

TEST(RankChannel, PlansArriveWholeAndInOrder) {
  Group group(Options(4));
  for (const auto& link : group.links) {
    EXPECT_EQ(link->transport().host_pid, 11);
    EXPECT_EQ(link->transport().host_fd, 12);
    EXPECT_EQ(link->transport().host_bytes, 13);
  }
  const RankReady ready = {.feature_contract = "taps=1", .configuration = "c", .bytes_read = 5};
  for (const auto& link : group.links) EXPECT_EQ(link->SendReady(ready), absl::OkStatus());
  EXPECT_EQ(group.hub->AwaitReady(ready, absl::Now() + kPatience), absl::OkStatus());
  EXPECT_EQ(group.hub->Members()[2].bytes_read, 5);
  for (uint64_t number = 1; number <= 300; ++number) {
    RankPlan plan = SomePlan(number);
    // Some larger than what a socket takes at once.
    if (number % 100 == 0) plan.rows[0].tokens.assign(1000000, 42);
    ASSERT_EQ(group.hub->Send(plan), absl::OkStatus());
  }
  for (const auto& link : group.links) {
    for (uint64_t number = 1; number <= 300; ++number) {
      const auto plan = link->NextPlan().value();
      ASSERT_TRUE(plan.has_value());
      RankPlan expected = SomePlan(number);
      if (number % 100 == 0) expected.rows[0].tokens.assign(1000000, 42);
      ASSERT_EQ(plan->number, number);
      ASSERT_EQ(plan->hash, expected.hash);
      ASSERT_EQ(ChainHash(0, *plan), ChainHash(0, expected));
    }
    link->SetFinished(300);
  }
  absl::Time deadline = absl::Now() + kPatience;
  const auto finished = [&] {
    for (const RankHub::Member& member : group.hub->Members()) {
      if (member.plan != 300) return false;
    }
    return true;
  };
  while (!finished() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));  // heartbeats carry it
  EXPECT_TRUE(finished());
  group.hub->End(absl::OkStatus());
  for (const auto& link : group.links) EXPECT_EQ(link->NextPlan().value(), std::nullopt);
  group.hub.reset();
  for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(group.faults[static_cast<size_t>(rank)]->calls(), 0);
  EXPECT_EQ(group.hub_fault.calls(), 0);
}

TEST(RankChannel, ThePlanMustFitAFrame) {
  Group group(Options(2));
  RankPlan plan = SomePlan(1);
  plan.rows[0].tokens.assign(17 << 20, 1);
  EXPECT_EQ(group.hub->Send(plan).code(), absl::StatusCode::kResourceExhausted);
}

TEST(RankChannel, WhoDoesNotBelongIsRefusedAndSaysWhy) {
  const RankChannelOptions options = Options(3);
  const RemoveSocket socket(Path(options));
  Fault fault;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  struct Case {
    std::function<void(RankChannelOptions&, int&)> change;
    const char* words;
  };
  const Case cases[] = {
      {[](RankChannelOptions& o, int&) { o.epoch = 2; }, "this is epoch 3, not 2"},
      {[](RankChannelOptions& o, int&) { o.epoch = 4; }, "this is epoch 3, not 4"},
      {[](RankChannelOptions& o, int&) { o.group_id = "other"; }, "this is group 'group', not 'other'"},
      {[](RankChannelOptions& o, int&) { o.build = "build-2"; },
       "the leader is build build-1, the rank build-2"},
      {[](RankChannelOptions& o, int&) { o.options = "--model x"; }, "started with '--model x'"},
      {[](RankChannelOptions& o, int&) { o.size = 4; }, "rank 1 of 4 is none of them"},
      {[](RankChannelOptions&, int& rank) { rank = 0; }, "rank 0 of 3 is none of them"},
      {[](RankChannelOptions&, int& rank) { rank = 3; }, "rank 3 of 3 is none of them"},
      {[](RankChannelOptions&, int& rank) { rank = -1; }, "of 3 is none of them"},
      {[](RankChannelOptions& o, int&) { o.secret = "a secret of some bytes"; },
       "proof of the group secret is wrong"},
  };
  Fault unused;
  for (const Case& refused : cases) {
    RankChannelOptions changed = options;
    int rank = 1;
    refused.change(changed, rank);
    const auto link = RankLink::Join(changed, rank, unused.Callback());
    EXPECT_FALSE(link.ok());
    EXPECT_THAT(std::string(link.status().message()), HasSubstr(refused.words));
  }
  EXPECT_EQ(hub->refused_joins(), 10);
  // They harm nobody: the right ones still form the group.
  const auto first = RankLink::Join(options, 1, unused.Callback());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(RankLink::Join(options, 1, unused.Callback()).status().code(), absl::StatusCode::kAlreadyExists);
  const auto second = RankLink::Join(options, 2, unused.Callback());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  EXPECT_EQ(fault.calls(), 0);
  EXPECT_EQ(unused.calls(), 0);
}

TEST(RankChannel, OnlyTheUserMayUseTheSocket) {
  const Group group(Options(2));
  struct stat status = {};
  ASSERT_EQ(stat(Path(group.options).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST(RankChannel, TcpNeedsTheSecretOnBothSides) {
  RankChannelOptions options = Options(2);
  options.address = "tcp:127.0.0.1:0";
  Fault fault, unused;
  EXPECT_THAT(std::string(RankHub::Listen(options, kTransport, fault.Callback()).status().message()),
              HasSubstr("need a group secret"));
  options.secret = "short";
  EXPECT_THAT(std::string(RankHub::Listen(options, kTransport, fault.Callback()).status().message()),
              HasSubstr("16 bytes"));
  options.secret = "the secret of the group";
  auto hub = RankHub::Listen(options, {.host_pid = 0, .host_fd = -1, .host_bytes = 0, .nccl_id = "unique"},
                             fault.Callback())
                 .value();
  options.address = absl::StrCat("tcp:127.0.0.1:", hub->port());
  RankChannelOptions wrong = options;
  for (const char* secret : {"", "another secret of the group"}) {
    wrong.secret = secret;
    EXPECT_EQ(RankLink::Join(wrong, 1, unused.Callback()).status().code(),
              absl::StatusCode::kUnauthenticated);
  }
  const auto link = RankLink::Join(options, 1, unused.Callback());
  ASSERT_TRUE(link.ok()) << link.status();
  EXPECT_EQ((*link)->transport().nccl_id, "unique");
  EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  EXPECT_EQ(fault.calls(), 0);
}

TEST(RankChannel, BadAddresses) {
  Fault unused;
  for (const char* address : {"", "unix:", "tcp:", "tcp:host", "tcp::1", "host:1"}) {
    RankChannelOptions options = Options(2);
    options.address = address;
    EXPECT_EQ(RankHub::Listen(options, kTransport, unused.Callback()).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(RankLink::Join(options, 1, unused.Callback()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  RankChannelOptions options = Options(2);
  options.address = "unix:/nonexistent/folder/socket";
  EXPECT_EQ(RankHub::Listen(options, kTransport, unused.Callback()).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(RankChannel, FormationHasADeadline) {
  RankChannelOptions options = Options(4);
  options.formation_timeout = absl::Milliseconds(300);
  const RemoveSocket socket(Path(options));
  Fault unused;
  EXPECT_EQ(RankLink::Join(options, 1, unused.Callback()).status().code(),
            absl::StatusCode::kDeadlineExceeded)
      << "no leader listens";
  auto hub = RankHub::Listen(options, kTransport, unused.Callback()).value();
  const auto link = RankLink::Join(options, 2, unused.Callback()).value();
  const absl::Status status = hub->AwaitJoined();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("did not join within 300ms: 1, 3"));
  EXPECT_EQ(unused.calls(), 0);
}

TEST(RankChannel, RanksMustHaveLoadedTheSame) {
  Group group(Options(3));
  EXPECT_EQ(group.links[0]->SendReady({.feature_contract = "a", .configuration = "c", .bytes_read = 0}),
            absl::OkStatus());
  EXPECT_THAT(std::string(group.hub
                              ->AwaitReady({.feature_contract = "a", .configuration = "c", .bytes_read = 0},
                                           absl::Now() + absl::Milliseconds(50))
                              .message()),
              HasSubstr("not loaded in time: 2"));
  EXPECT_EQ(group.links[1]->SendReady({.feature_contract = "a", .configuration = "d", .bytes_read = 0}),
            absl::OkStatus());
  EXPECT_THAT(std::string(group.hub
                              ->AwaitReady({.feature_contract = "a", .configuration = "c", .bytes_read = 0},
                                           absl::Now() + kPatience)
                              .message()),
              HasSubstr("rank 2 has another configuration: 'd', the leader 'c'"));
  EXPECT_THAT(std::string(group.hub
                              ->AwaitReady({.feature_contract = "b", .configuration = "c", .bytes_read = 0},
                                           absl::Now() + kPatience)
                              .message()),
              HasSubstr("rank 1 has another feature contract"));
}

TEST(RankChannel, ALostMemberIsAFault) {
  Group group(Options(3));
  group.links[1].reset();
  EXPECT_THAT(group.hub_fault.Await(), HasSubstr("rank 2: the connection"));
  EXPECT_EQ(group.hub->Send(SomePlan(1)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(group.faults[1]->calls(), 0) << "the leader decides what becomes of the others";
  group.hub->End(absl::UnavailableError("rank 2 is gone"));
  EXPECT_EQ(group.faults[1]->Await(), "rank 2 is gone");
  EXPECT_EQ(group.links[0]->NextPlan().status().message(), "rank 2 is gone");
  EXPECT_EQ(group.hub_fault.calls(), 1);
}

TEST(RankChannel, ALostLeaderIsAFault) {
  Group group(Options(3));
  group.hub.reset();
  for (size_t rank : {1, 2}) {
    EXPECT_THAT(group.faults[rank]->Await(), HasSubstr("the leader: the connection"));
    EXPECT_EQ(group.links[rank - 1]->NextPlan().status().code(), absl::StatusCode::kUnavailable);
  }
}

TEST(RankChannel, AMemberMayGiveUp) {
  Group group(Options(2));
  group.links[0]->Abort(absl::InternalError("its device is lost"));
  EXPECT_EQ(group.hub_fault.Await(), "rank 1: its device is lost");
}

TEST(RankChannel, AMemberThatDoesNotFinishItsPlanIsAFault) {
  RankChannelOptions options = Options(2);
  options.plan_timeout = absl::Milliseconds(200);
  Group group(options);
  ASSERT_EQ(group.hub->Send(SomePlan(1)), absl::OkStatus());
  EXPECT_THAT(group.hub_fault.Await(), HasSubstr("rank 1 has not finished plan 1 within 200ms"));
}

TEST(RankChannel, AnIdleGroupIsNoFault) {
  RankChannelOptions options = Options(2);
  options.plan_timeout = absl::Milliseconds(100);
  options.silence_limit = absl::Seconds(5);
  Group group(options);
  ASSERT_EQ(group.hub->Send(SomePlan(1)), absl::OkStatus());
  group.links[0]->SetFinished(1);
  const absl::Time end = absl::Now() + absl::Milliseconds(500);
  while (absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));  // time itself is what is tested
  EXPECT_EQ(group.hub_fault.calls(), 0);
  EXPECT_EQ(group.faults[1]->calls(), 0);
}

// --- peers that do not follow the protocol
// --------------------------------------------------------------------

// A socket without a rank behind it.
class Stranger {
 public:
  explicit Stranger(const std::string& path) {
    fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
  }
  explicit Stranger(int fd) : fd_(fd), connected_(true) {}
  ~Stranger() { close(fd_); }
  bool connected() const { return connected_; }
  void Send(const std::string& bytes) { (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  void Send(const wire::RankFrame& frame) { Send(MakeFrame(frame.SerializeAsString()).value()); }
  // The next frame; nullopt at the end of the connection.
  std::optional<wire::RankFrame> Receive() {
    for (;;) {
      const auto body = reader_.Next();
      if (body.ok() && body->has_value()) {
        wire::RankFrame frame;
        EXPECT_TRUE(frame.ParseFromString(**body));
        return frame;
      }
      char bytes[4096];
      const ssize_t count = recv(fd_, bytes, sizeof(bytes), 0);
      if (count <= 0) return std::nullopt;
      reader_.Append({bytes, static_cast<size_t>(count)});
    }
  }

 private:
  int fd_;
  bool connected_ = false;
  FrameReader reader_;
};

wire::RankFrame JoinFrame(const RankChannelOptions& options, uint32_t rank) {
  wire::RankFrame frame;
  frame.set_epoch(options.epoch);
  wire::Join& join = *frame.mutable_join();
  join.set_group_id(options.group_id);
  join.set_rank(rank);
  join.set_size(static_cast<uint32_t>(options.size));
  join.set_build(options.build);
  join.set_options(options.options);
  return frame;
}

TEST(RankChannel, ASilentMemberIsAFault) {
  RankChannelOptions options = Options(2);
  options.silence_limit = absl::Milliseconds(300);
  const RemoveSocket socket(Path(options));
  Fault fault;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  Stranger member(Path(options));
  member.Send(JoinFrame(options, 1));
  ASSERT_TRUE(member.Receive()->has_challenge());
  ASSERT_TRUE(member.Receive()->has_welcome());
  EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  EXPECT_THAT(fault.Await(), HasSubstr("rank 1 said nothing for 300ms"));
}

// A leader's socket without a leader behind it; negative if there is none.
int ListenAt(const std::string& path) {
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  return listener;
}

TEST(RankChannel, ASilentLeaderIsAFault) {
  RankChannelOptions options = Options(2);
  options.silence_limit = absl::Milliseconds(300);
  const RemoveSocket path(Path(options));
  const int listener = ListenAt(Path(options));
  ASSERT_GE(listener, 0);
  std::thread leader([&] {
    Stranger rank(accept(listener, nullptr, nullptr));
    wire::RankFrame frame;
    frame.set_epoch(options.epoch);
    frame.mutable_challenge()->set_nonce("nonce");
    rank.Send(frame);
    EXPECT_TRUE(rank.Receive()->has_join());
    frame.mutable_welcome()->mutable_host()->set_pid(1);
    rank.Send(frame);
    while (rank.Receive().has_value()) {
    }  // its heartbeats, until it leaves
  });
  Fault fault;
  auto link = RankLink::Join(options, 1, fault.Callback()).value();
  EXPECT_THAT(fault.Await(), HasSubstr("the leader said nothing for 300ms"));
  link.reset();
  leader.join();
  close(listener);
}

// One that was sent away stays away, whatever lies behind its first frame.
TEST(RankChannel, ARefusedStrangerCannotJoinAgain) {
  const RankChannelOptions options = Options(2);
  const RemoveSocket socket(Path(options));
  Fault fault;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  {
    Stranger stranger(Path(options));
    wire::RankFrame wrong = JoinFrame(options, 1);
    wrong.mutable_join()->set_build("another");
    stranger.Send(MakeFrame(wrong.SerializeAsString()).value() +
                  MakeFrame(JoinFrame(options, 1).SerializeAsString()).value());
    ASSERT_TRUE(stranger.Receive()->has_challenge());
    ASSERT_TRUE(stranger.Receive()->has_abort());
    EXPECT_EQ(stranger.Receive(), std::nullopt);
  }
  EXPECT_FALSE(hub->Members()[0].joined);
  Fault unused;
  const auto link = RankLink::Join(options, 1, unused.Callback());
  EXPECT_TRUE(link.ok()) << link.status();
  EXPECT_EQ(fault.calls(), 0);
}

// Without a code it would look like a welcome.
TEST(RankChannel, ALeaderThatEndsTheGroupWelcomesNobody) {
  const RankChannelOptions options = Options(2);
  const RemoveSocket path(Path(options));
  const int listener = ListenAt(Path(options));
  ASSERT_GE(listener, 0);
  std::thread leader([&] {
    Stranger rank(accept(listener, nullptr, nullptr));
    wire::RankFrame frame;
    frame.set_epoch(options.epoch);
    frame.mutable_abort();
    rank.Send(frame);
    while (rank.Receive().has_value()) {
    }
  });
  Fault unused;
  const auto link = RankLink::Join(options, 1, unused.Callback());
  EXPECT_EQ(link.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(link.status().message()), HasSubstr("the leader ended the group"));
  leader.join();
  close(listener);
}

TEST(RankChannel, FramesOfAnotherEpochAreDropped) {
  const RankChannelOptions options = Options(2);
  const RemoveSocket socket(Path(options));
  Fault fault;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  Stranger member(Path(options));
  member.Send(JoinFrame(options, 1));
  ASSERT_TRUE(member.Receive()->has_challenge());
  ASSERT_TRUE(member.Receive()->has_welcome());
  wire::RankFrame frame;
  frame.set_epoch(options.epoch - 1);
  frame.mutable_abort()->set_message("of a former life");
  member.Send(frame);
  frame.set_epoch(options.epoch);
  frame.mutable_ready()->set_configuration("this life");
  member.Send(frame);
  EXPECT_EQ(hub->AwaitReady({.feature_contract = "", .configuration = "this life", .bytes_read = 0},
                            absl::Now() + kPatience),
            absl::OkStatus());
  EXPECT_EQ(hub->dropped_frames(), 1);
  EXPECT_EQ(fault.calls(), 0);
  // What no rank says is a fault, not a crash.
  frame.mutable_challenge();
  member.Send(frame);
  EXPECT_THAT(fault.Await(), HasSubstr("rank 1 sent a frame of kind 2"));
}

TEST(RankChannel, NonsenseOfAMemberIsAFault) {
  const RankChannelOptions options = Options(2);
  const RemoveSocket socket(Path(options));
  Fault fault;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  Stranger member(Path(options));
  member.Send(JoinFrame(options, 1));
  EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  member.Send(std::string(4, '\xff'));
  EXPECT_THAT(fault.Await(), HasSubstr("rank 1: a frame of 4294967295 bytes"));
}

// Noise, half messages and mutated Joins from anybody who can reach the socket: the group still forms, and
// nobody else becomes a member.
TEST(RankChannel, StrangersCannotDisturbAFormation) {
  const RankChannelOptions options = Options(2);
  const RemoveSocket socket(Path(options));
  Fault fault, unused;
  auto hub = RankHub::Listen(options, kTransport, fault.Callback()).value();
  std::mt19937 random(7);
  const std::string join = MakeFrame(JoinFrame(options, 1).SerializeAsString()).value();
  for (int round = 0; round < 400; ++round) {
    Stranger stranger(Path(options));
    if (!stranger.connected()) continue;
    std::string bytes;
    if (round % 2 == 0) {
      bytes.resize(random() % 200);
      for (char& c : bytes) c = static_cast<char>(random());
    } else {
      bytes = join;
      bytes.resize(kFrameHeaderBytes + random() % (bytes.size() - kFrameHeaderBytes));  // never the whole
    }
    stranger.Send(bytes);
  }
  const auto link = RankLink::Join(options, 1, unused.Callback());
  ASSERT_TRUE(link.ok()) << link.status();
  EXPECT_EQ(hub->AwaitJoined(), absl::OkStatus());
  EXPECT_EQ((*link)->SendReady({.feature_contract = "f", .configuration = "c", .bytes_read = 0}),
            absl::OkStatus());
  EXPECT_EQ(hub->AwaitReady({.feature_contract = "f", .configuration = "c", .bytes_read = 0},
                            absl::Now() + kPatience),
            absl::OkStatus());
  EXPECT_EQ(fault.calls(), 0);
}

// Not a test: --gtest_also_run_disabled_tests prints how long a plan takes from Send to NextPlan and back.
TEST(RankChannel, DISABLED_PlanLatency) {
  for (const int size : {2, 4, 8}) {
    Group group(Options(size));
    absl::Mutex mutex;
    int64_t arrived = 0;
    std::vector<std::thread> ranks;
    for (const auto& link : group.links) {
      ranks.emplace_back([&] {
        for (;;) {
          const auto plan = link->NextPlan();
          if (!plan.ok() || !plan->has_value()) return;
          absl::MutexLock lock(&mutex);
          ++arrived;
        }
      });
    }
    constexpr int kPlans = 5000;
    std::vector<double> send, all;
    for (int number = 1; number <= kPlans; ++number) {
      RankPlan plan = SomePlan(static_cast<uint64_t>(number));
      const absl::Time start = absl::Now();
      ASSERT_EQ(group.hub->Send(plan), absl::OkStatus());
      send.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
      const int64_t wanted = int64_t{number} * (size - 1);
      const auto there = [&] { return arrived >= wanted; };
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&there));
      all.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    }
    std::sort(send.begin(), send.end());
    std::sort(all.begin(), all.end());
    std::printf("%d ranks: send %.1f us (p99 %.1f), until the last rank has it %.1f us (p99 %.1f)\n", size,
                send[kPlans / 2], send[kPlans * 99 / 100], all[kPlans / 2], all[kPlans * 99 / 100]);
    group.hub->End(absl::OkStatus());
    for (std::thread& rank : ranks) rank.join();
  }
}

}  // namespace
}  // namespace dflash
