#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/layering/layering_rules.h"

namespace dflash::layering {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Layering, EveryIncludeOfTheTreeFollowsTheArrows) {
  int files_read = 0;
  EXPECT_THAT(CheckTree(DFLASHD_SOURCE_DIR, &files_read), IsEmpty());
  EXPECT_GT(files_read, 20);  // a walk that reads nothing finds nothing
}

struct Edge {
  const char* from;
  const char* target;
};

TEST(Layering, AllowedEdges) {
  const Edge kAllowed[] = {
      {"base/status.h", "absl/status/status.h"},
      {"kernels/linear/linear.h", "base/matrix_view.h"},
      {"kernels/linear/linear_cpu.cc", "kernels/device/cpu/thread_pool.h"},
      {"kernels/linear/linear_cpu_body.h", "kernels/device/cpu/simd.h"},
      {"kernels/linear/linear_test.cc", "kernels/linear/linear_ref.h"},
      {"kernels/linear/linear.cu", "cuda_runtime.h"},
      {"kernels/linear/linear_test.cc", "gtest/gtest.h"},
      {"text/tokenizer.cc", "base/status.h"},
      {"worker/model/target.cc", "kernels/linear/linear.h"},
      {"worker/engine/text_stream.cc", "text/detokenizer.h"},
      {"worker/draft/dflash_drafter.h", "worker/model/target.h"},
      {"worker/engine/engine.cc", "worker/verify/walk.h"},
      {"worker/rpc/service.cc", "worker/engine/engine.h"},
      {"worker/rpc/service.cc", "dflash/worker/v1/worker.grpc.pb.h"},
      {"worker/rpc/service.cc", "grpcpp/server.h"},
      {"worker/main.cc", "worker/rpc/service.h"},
      {"worker/comm/nccl_communicator.cc", "nccl.h"},
      {"daemon/frontend/validation.cc", "text/chat_template.h"},
      {"daemon/rpc/inference_service.cc", "dflash/v1/inference.pb.h"},
      {"daemon/rpc/inference_service.cc", "daemon/routing/dispatcher.h"},
      {"daemon/metrics/exposer.cc", "prometheus/exposer.h"},
      {"tools/dflashctl/chat.cc", "dflash/v1/inference.grpc.pb.h"},
      {"tests/integration/serve_test.cc", "tools/dflashctl/replay.h"},
      {"worker/engine/engine_test.cc", "tests/golden/golden_data.h"},
      {"worker/engine/engine_test.cc", "worker/testing/tiny_pair.h"},
      {"worker/testing/tiny_pair.h", "worker/engine/engine.h"},
  };
  for (const Edge& edge : kAllowed)
    EXPECT_EQ(BrokenRule(edge.from, edge.target), "") << edge.from << " " << edge.target;
}

TEST(Layering, ForbiddenEdges) {
  const Edge kForbidden[] = {
      {"base/status.h", "kernels/device/stream.h"},
      {"base/status.h", "text/tokenizer.h"},
      {"base/log.cc", "sys/socket.h"},
      {"kernels/linear/linear.h", "text/tokenizer.h"},
      {"kernels/linear/linear.h", "worker/model/target.h"},
      {"kernels/linear/linear.h", "kernels/device/cpu/thread_pool.h"},
      {"kernels/linear/linear_cpu.cc", "kernels/linear/linear_ref.h"},
      {"kernels/linear/linear_cpu.cc", "kernels/device/cuda/stream_cuda.h"},
      {"kernels/linear/linear.cu", "kernels/device/cpu/thread_pool.h"},
      {"kernels/linear/linear_cpu.cc", "cuda_runtime.h"},
      {"kernels/linear/linear_cpu.cc", "kernels/testing/compare.h"},
      {"kernels/linear/linear.cc", "gtest/gtest.h"},
      {"text/tokenizer.cc", "kernels/linear/linear.h"},
      {"text/tokenizer.cc", "worker/engine/request.h"},
      {"text/tokenizer.cc", "daemon/frontend/validation.h"},
      {"text/tokenizer.cc", "boost/asio.hpp"},
      {"worker/model/target.cc", "daemon/frontend/validation.h"},
      {"worker/model/target.cc", "kernels/linear/linear_ref.h"},
      {"worker/model/target.cc", "kernels/device/cpu/thread_pool.h"},
      {"worker/model/target.cc", "cuda_runtime.h"},
      {"worker/model/target.cc", "worker/draft/drafter.h"},
      {"worker/cache/page_table.h", "worker/model/target.h"},
      {"worker/verify/walk.h", "worker/engine/engine.h"},
      {"worker/engine/engine.cc", "worker/rpc/service.h"},
      {"worker/engine/engine.cc", "dflash/worker/v1/worker.pb.h"},
      {"worker/engine/engine.cc", "grpcpp/grpcpp.h"},
      {"worker/engine/metrics.cc", "prometheus/exposer.h"},
      {"worker/engine/engine.cc", "worker/testing/tiny_pair.h"},
      {"worker/testing/tiny_pair.h", "daemon/frontend/validation.h"},
      {"worker/whim/whim.cc", "worker/engine/engine.h"},
      {"daemon/routing/dispatcher.cc", "daemon/rpc/generation.h"},
      {"daemon/admission/waiting_queue.h", "daemon/routing/dispatcher.h"},
      {"daemon/routing/router.cc", "worker/engine/request.h"},
      {"daemon/routing/router.cc", "kernels/sampling/sampling.h"},
      {"daemon/frontend/validation.cc", "dflash/v1/generation.pb.h"},
      {"daemon/frontend/validation.cc", "tests/golden/golden_data.h"},
      {"worker/model/target.cc", "tools/dflashctl/flags.h"},
      {"worker/model/target.cc", "../base/status.h"},
      {"worker/model/target.cc", ""},
      {"elsewhere/thing.cc", "base/status.h"},
  };
  for (const Edge& edge : kForbidden)
    EXPECT_NE(BrokenRule(edge.from, edge.target), "") << edge.from << " " << edge.target;
}

TEST(Layering, ReadsEveryFormOfInclude) {
  const std::string source =
      "#include \"base/a.h\"\n"
      "  #  include <vector>  // why\n"
      "int include;\n"
      "#if X\n"
      "#include \"text/b.h\"  // IWYU pragma: export\n"
      "#include MACRO\n";
  std::vector<std::string> found;
  for (const Include& include : ReadIncludes(source)) {
    found.push_back(std::to_string(include.line) + " " + include.target);
  }
  EXPECT_THAT(found, ElementsAre("1 base/a.h", "2 vector", "5 text/b.h", "6 "));
}

// The tree check itself must be able to fail: one good tree, then the same with bad lines in it.
TEST(Layering, FindsInjectedIncludes) {
  namespace fs = std::filesystem;
  const fs::path root = fs::path(::testing::TempDir()) / ("layering_test_tree." + std::to_string(getpid()));
  fs::remove_all(root);
  const auto write = [&root](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("base/status.h", "#include <string>\n");
  write("text/tokenizer.h", "#include \"base/status.h\"\n");
  write("worker/engine/engine.h", "#include \"text/tokenizer.h\"\n");
  write("build/cpu/generated.cc", "#include \"nowhere/x.h\"\n");
  int files_read = 0;
  EXPECT_THAT(CheckTree(root, &files_read), IsEmpty());
  EXPECT_EQ(files_read, 3);

  write("text/tokenizer.h", "#include \"base/status.h\"\n#include \"worker/engine/engine.h\"\n");
  write("daemon/admission/queue.cc", "#include \"worker/engine/engine.h\"\n#include \"base/gone.h\"\n");
  write("text/local.cc", "#include \"tokenizer.h\"\n");
  EXPECT_THAT(
      CheckTree(root, nullptr),
      ElementsAre("daemon/admission/queue.cc:1: worker/engine/engine.h: daemon/ may not include worker/",
                  "daemon/admission/queue.cc:2: base/gone.h: no such header",
                  "text/local.cc:1: tokenizer.h: includes are relative to the root of the repository",
                  "text/tokenizer.h:2: worker/engine/engine.h: text/ may not include worker/"));
  fs::remove_all(root);
}

}  // namespace
}  // namespace dflash::layering
