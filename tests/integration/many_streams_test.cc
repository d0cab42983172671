// A thousand clients at once, each with a connection of its own, and nobody loses a token.
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/connection.h"

namespace dflash::integration {
namespace {

constexpr int kStreams = 1000;
constexpr uint32_t kTokens = 12;

// Files that this process, and what it starts from now on, may have open, unless the system allows fewer.
rlim_t AllowFiles(rlim_t count) {
  rlimit limit = {};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min(count, limit.rlim_max);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit.rlim_cur;
}

// Reads one stream without a thread of its own.
class Reader final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Reader(std::shared_ptr<grpc::Channel> channel, v1::GenerateRequest request)
      : stub_(v1::InferenceService::NewStub(std::move(channel))), request_(std::move(request)) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + 10 * kPatience));
    stub_->async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  ~Reader() override {
    context_.TryCancel();
    (void)Await();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (!broken_) broken_ = checker_.See(response_);
    tokens_.insert(tokens_.end(), response_.chunk().token_ids().begin(), response_.chunk().token_ids().end());
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    status_ = status;
  }
  // How it ended; OK when the stream has kept all its promises.
  std::string Await() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return status_.has_value(); };
    mutex_.Await(absl::Condition(&done));
    if (!status_->ok()) return ctl::Describe(*status_);
    if (!broken_) broken_ = checker_.AtEnd();
    return broken_.value_or("OK");
  }
  const std::vector<uint32_t>& tokens() const { return tokens_; }

 private:
  const std::unique_ptr<v1::InferenceService::Stub> stub_;
  const v1::GenerateRequest request_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  ctl::StreamChecker checker_;
  std::optional<std::string> broken_;
  std::vector<uint32_t> tokens_;
  absl::Mutex mutex_;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

TEST(ManyStreamsTest, AThousandAtOnceLoseNothing) {
  const std::vector<GoldenText> golden = GoldenTexts();
  // The daemon starts with few files, as from a shell, and takes what it needs.
  AllowFiles(256);
  Server server({"--max-sequences", absl::StrCat(kStreams), "--max-context-tokens", "1024", "--cache-tokens",
                 "262144", "--silence-timeout", "600", "--max-queued-requests", absl::StrCat(kStreams),
                 "--max-queue-seconds", "3600", "--block-length", "by-load"});
  const rlim_t files = AllowFiles(kStreams * 4);
  ASSERT_NE(server.channel(), nullptr);
  const int connections = files >= kStreams * 2 ? kStreams : 50;

  // The group stands still until all are there: so nobody has ended when the last one comes.
  const int leader = server.Load().groups(0).leader_pid();
  ASSERT_EQ(kill(leader, SIGSTOP), 0);
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < connections; ++i) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channels.push_back(grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), own));
  }
  std::vector<std::unique_ptr<Reader>> readers;
  for (size_t i = 0; i < kStreams; ++i) {
    readers.push_back(std::make_unique<Reader>(channels[i % channels.size()],
                                               TokenRequest(golden[i % golden.size()].prompt_ids, kTokens)));
  }
  const bool all_there = PollUntil([&] {
    const v1::GetLoadResponse load = server.Load();
    return load.running() + load.waiting() == kStreams;
  });
  ASSERT_EQ(kill(leader, SIGCONT), 0);
  EXPECT_TRUE(all_there) << server.Load().DebugString();

  for (size_t i = 0; i < readers.size(); ++i) {
    ASSERT_EQ(readers[i]->Await(), "OK") << i;
    std::vector<uint32_t> expected = golden[i % golden.size()].output_ids;
    expected.resize(std::min<size_t>(expected.size(), kTokens));
    ASSERT_EQ(readers[i]->tokens(), expected) << i;
  }
  EXPECT_TRUE(server.WaitUntilIdle());
  const std::string page = server.Metrics();
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_total"), kStreams);
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_total", "outcome=\"stop\"") +
                SumOfMetric(page, "dflashd_requests_total", "outcome=\"length\""),
            kStreams);
  EXPECT_EQ(server.Load().groups(0).leader_pid(), leader);
}

}  // namespace
}  // namespace dflash::integration
