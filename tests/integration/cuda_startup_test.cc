// dflash-worker-cuda where no GPU is: it says so itself, and the daemon does what --backend asks for.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/process.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::HasSubstr;

constexpr int kNoDevice = 69;  // EX_UNAVAILABLE

class CudaStartup : public ::testing::Test {
 protected:
  void SetUp() override {
    probe_ = RunProgram({DFLASH_WORKER_CUDA_PATH, "--probe"});
    if (probe_.exit_code == 0) GTEST_SKIP() << "this machine has a GPU: " << probe_.output;
  }
  Ran probe_;
};

TEST_F(CudaStartup, TheWorkerSaysThatThereIsNoGpu) {
  EXPECT_EQ(probe_.exit_code, kNoDevice);
  EXPECT_THAT(probe_.output, HasSubstr("no usable NVIDIA GPU or driver"));
  const Ran worker = RunProgram(
      {DFLASH_WORKER_CUDA_PATH, "--model", SourcePath("models/tiny-qwen3.6"), "--listen", "127.0.0.1:0"});
  EXPECT_EQ(worker.exit_code, kNoDevice);
  EXPECT_THAT(worker.output, HasSubstr("no usable NVIDIA GPU or driver"));
}

TEST_F(CudaStartup, BackendCudaEndsAtOnce) {
  const Ran daemon = RunProgram(ServerCommand({"--backend", "cuda"}));
  EXPECT_EQ(daemon.exit_code, kNoDevice);
  EXPECT_THAT(daemon.output, HasSubstr("no usable NVIDIA GPU or driver"));
  EXPECT_THAT(daemon.output, HasSubstr("--backend cuda"));
}

TEST_F(CudaStartup, BackendAutoServesOnTheCpu) {
  Server server({"--backend", "auto"});
  ASSERT_NE(server.channel(), nullptr);
  EXPECT_EQ(server.ModelInfo().backend(), "cpu");
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

}  // namespace
}  // namespace dflash::integration
