// 24 clients at once that read, cancel, vanish, run into deadlines and send nonsense: nothing grows in the
// daemon or its worker, and every answer that ends well is the right one. How long: DFLASHD_SOAK_SECONDS
// (default 60).
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/raw_call.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;

constexpr int kClients = 24;

// What a process holds.
struct Holdings {
  int64_t resident_kib = 0;
  int64_t descriptors = 0;
  int64_t threads = 0;

  std::string ToString() const {
    return absl::StrCat(resident_kib / 1024, " MiB resident, ", descriptors, " descriptors, ", threads,
                        " threads");
  }
};

Holdings HoldingsOf(int pid) {
  Holdings holdings;
  const std::string folder = absl::StrCat("/proc/", pid);
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) holdings.resident_kib = std::stoll(line.substr(6));
    if (line.starts_with("Threads:")) holdings.threads = std::stoll(line.substr(8));
  }
  holdings.descriptors = std::distance(fs::directory_iterator(folder + "/fd"), fs::directory_iterator());
  return holdings;
}

std::string LastLines(const std::string& text) {
  return text.substr(text.size() - std::min<size_t>(text.size(), 4000));
}

class Clients {
 public:
  explicit Clients(Server* server) : server_(server), golden_(GoldenTexts()) {}

  // Runs all clients until `end`.
  void Run(absl::Time end) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kClients; ++i)
      threads.emplace_back([this, i, end] { Client(static_cast<uint32_t>(i), end); });
    for (std::thread& thread : threads) thread.join();
    ++rounds_;
  }

  void Print() const {
    for (const auto& [name, count] : counts_) std::printf("  %8d %s\n", count, name.c_str());
  }
  int count(const std::string& name) const {
    const auto it = counts_.find(name);
    return it == counts_.end() ? 0 : it->second;
  }

 private:
  void Count(const std::string& name) {
    std::lock_guard lock(mutex_);
    ++counts_[name];
  }

  // One client: a connection of its own now and then, and something else with it each time.
  void Client(uint32_t index, absl::Time end) {
    std::mt19937 random(1000 * static_cast<uint32_t>(rounds_) + index);
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::InferenceService::Stub> stub;
    while (absl::Now() < end) {
      if (channel == nullptr || random() % 8 == 0) {  // the old connection ends with whatever it carries
        grpc::ChannelArguments own;
        own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
        channel = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), own);
        stub = v1::InferenceService::NewStub(channel);
      }
      switch (random() % 10) {
        case 0:
        case 1:
        case 2:
          ReadAll(channel, golden_[random() % golden_.size()], random());
          break;
        case 3: {  // cancels in the middle
          OpenStream stream(*stub, EndlessRequest());
          if (stream.ReadFirstTokens()) Count("cancelled in the middle");
          stream.Cancel();
          EXPECT_FALSE(stream.Finish().ok());
          break;
        }
        case 4: {  // goes away before the first word
          OpenStream stream(*stub, EndlessRequest());
          Count("cancelled at once");
          break;
        }
        case 5: {  // a deadline in the middle
          ctl::Generation generation;
          const grpc::Status status =
              Generate(channel, EndlessRequest(), absl::Milliseconds(1 + random() % 300), &generation);
          EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ctl::Describe(status);
          Count("deadline");
          break;
        }
        case 6: {  // ended by another call
          v1::GenerateRequest request = EndlessRequest();
          request.set_request_id(absl::StrCat("client-", index));
          OpenStream stream(*stub, request);
          (void)stream.ReadFirstTokens();
          grpc::ClientContext context;
          v1::CancelRequest cancel;
          cancel.set_request_id(request.request_id());
          v1::CancelResponse response;
          EXPECT_TRUE(stub->Cancel(&context, cancel, &response).ok());
          EXPECT_FALSE(stream.Finish().ok());
          Count("cancelled by id");
          break;
        }
        case 7: {  // a program that is killed
          Process client({DflashctlPath(), "--address", server_->address(), "generate", "--tokens",
                          "4089,2341,198", "--ignore-eos", "--max-tokens", "3000"});
          (void)client.WaitForLine("never printed", absl::Milliseconds(random() % 200));
          client.Signal(SIGKILL);
          Count("killed");
          break;
        }
        case 8: {
          const RawAnswer answer = RawCall(channel, "Generate", "\x1a\x02\xff\xff");
          EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
              << answer.status.error_message();
          Count("nonsense");
          break;
        }
        default: {
          v1::TokenizeRequest request;
          request.set_text(golden_[random() % golden_.size()].text);
          v1::TokenizeResponse response;
          grpc::ClientContext context;
          EXPECT_TRUE(stub->Tokenize(&context, request, &response).ok());
          EXPECT_GT(response.token_ids_size(), 0);
          Count("tokenized");
        }
      }
    }
  }

  // A golden prompt to its golden end, with or without speculation.
  void ReadAll(const std::shared_ptr<grpc::Channel>& channel, const GoldenText& golden, uint32_t random) {
    v1::GenerateRequest request = TokenRequest(golden.prompt_ids, 128);
    request.mutable_output()->set_text(true);
    request.mutable_output()->set_special_tokens_in_text(true);
    if (random % 4 == 0) request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
    ctl::Generation generation;
    const grpc::Status status = Generate(channel, request, absl::Seconds(300), &generation);
    EXPECT_TRUE(status.ok()) << ctl::Describe(status);
    EXPECT_EQ(generation.token_ids, golden.output_ids);
    EXPECT_EQ(generation.text, golden.output_text);
    Count("read to the end");
  }

  Server* const server_;
  const std::vector<GoldenText> golden_;
  int rounds_ = 0;
  std::mutex mutex_;
  std::map<std::string, int> counts_;
};

constexpr int kSequences = 6;

// As many requests at once as there are slots, each as long as the context and none like another: afterwards
// every page of the caches has been written, so that the worker's memory cannot grow for that reason.
void FillCaches(Server& server) {
  const uint32_t context = server.ModelInfo().max_context_tokens();
  constexpr uint32_t kOutput = 16;
  std::vector<std::thread> threads;
  for (uint32_t sequence = 0; sequence < kSequences; ++sequence) {
    threads.emplace_back([&server, context, sequence] {
      std::vector<uint32_t> prompt(context - kOutput);
      for (uint32_t i = 0; i < prompt.size(); ++i) prompt[i] = 300 + 100 * sequence + i % 1000;
      v1::GenerateRequest request = TokenRequest(prompt, kOutput);
      request.mutable_stopping()->set_ignore_eos(true);
      server.GenerateOk(request);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Soak, NothingGrows) {
  const char* seconds = std::getenv("DFLASHD_SOAK_SECONDS");
  const absl::Duration duration = absl::Seconds(seconds == nullptr ? 60 : std::stoi(seconds));
  Server server({"--max-sequences", absl::StrCat(kSequences)});
  ASSERT_NE(server.channel(), nullptr);
  const int worker = server.Load().groups(0).leader_pid();
  const auto report = [&](const char* when) {
    std::printf("%s\n  dflashd       %s\n  dflash-worker %s\n", when,
                HoldingsOf(server.process().pid()).ToString().c_str(), HoldingsOf(worker).ToString().c_str());
    std::fflush(stdout);
  };
  report("at start");
  FillCaches(server);
  report("with full caches");
  Clients clients(&server);
  // Allocators, pools and gRPC's threads reach their size first.
  clients.Run(absl::Now() + duration / 5);
  ASSERT_TRUE(server.WaitUntilIdle());
  report("warm");
  ASSERT_EQ(server.Load().groups(0).leader_pid(), worker) << "another worker\n"
                                                          << LastLines(server.process().output());
  const auto settled = [&] { return std::pair(HoldingsOf(server.process().pid()), HoldingsOf(worker)); };
  const auto before = settled();

  clients.Run(absl::Now() + duration * 4 / 5);
  ASSERT_TRUE(server.WaitUntilIdle());
  const v1::GetLoadResponse load = server.Load();
  if (!load.serving()) {
    // The supervisor says how the worker ended a moment after its stream has.
    (void)server.process().WaitForLine(" is lost: ");
    FAIL() << load.detail() << "\n" << LastLines(server.process().output());
  }
  EXPECT_EQ(load.running(), 0u);
  EXPECT_EQ(load.waiting(), 0u);
  EXPECT_TRUE(PollUntil([&] {
    const v1::GroupLoad group = server.Load().groups(0);
    return group.cache_pages_free() == group.cache_pages_total() && group.running() == 0;
  })) << "pages are lost";
  EXPECT_THAT(server.Metrics(), ::testing::HasSubstr("dflashd_cache_blocks{pool=\"state\",state=\"used\""));
  // Connections of clients that vanished close when the server has noticed.
  EXPECT_TRUE(PollUntil([&] { return settled().first.descriptors <= before.first.descriptors; }))
      << before.first.ToString() << " before, " << settled().first.ToString() << " after";
  const auto after = settled();
  report("at the end");
  EXPECT_LE(after.second.descriptors, before.second.descriptors);
  // gRPC keeps a few threads more or less; requests have none of their own.
  EXPECT_LE(after.first.threads, before.first.threads + 4);
  EXPECT_LE(after.second.threads, before.second.threads + 4);
  constexpr int64_t kGrowthKib = 4 << 10;
  EXPECT_LE(after.first.resident_kib, before.first.resident_kib + kGrowthKib);
  EXPECT_LE(after.second.resident_kib, before.second.resident_kib + kGrowthKib);
  EXPECT_EQ(server.Load().groups(0).leader_pid(), worker) << "another worker\n"
                                                          << LastLines(server.process().output());
  clients.Print();
  for (const char* what : {"read to the end", "cancelled in the middle", "cancelled at once", "deadline",
                           "cancelled by id", "killed", "nonsense", "tokenized"}) {
    EXPECT_GT(clients.count(what), 0) << what;
  }
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

}  // namespace
}  // namespace dflash::integration
