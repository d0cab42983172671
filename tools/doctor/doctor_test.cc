// The doctor over the tiny pair: healthy, with every known defect planted, and with drafters that are merely
// bad. Each defect must be the first failing interface, by its own name and with its own cause.
#include "tools/doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "worker/defects/defects.h"
#include "worker/model/safetensors.h"

namespace dflash::doctor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const fs::path kSource = DFLASHD_SOURCE_DIR;

DoctorOptions Options() {
  DoctorOptions options;
  options.model = kSource / "models/tiny-qwen3.6";
  options.draft_model = kSource / "models/tiny-qwen3.6-dflash";
  options.golden = kSource / "tests/golden";
  options.threads = 1;
  options.max_context_tokens = 1024;
  return options;
}

std::vector<std::string> Ids(const Report& report, Outcome outcome) {
  std::vector<std::string> ids;
  for (const Finding& finding : report.findings()) {
    if (finding.outcome == outcome) ids.emplace_back(finding.interface->id);
  }
  return ids;
}

// A folder of this process, gone when the test is.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(fs::path(::testing::TempDir()) / (name + "." + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(DoctorTest, HealthyPairPassesEverything) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    DoctorOptions options = Options();
    options.ranks = ranks;
    if (ranks == 2) options.max_prompts = 18;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const Verdict verdict = report->verdict();
    EXPECT_EQ(verdict.kind, VerdictKind::kHealthy) << report->ToText(false);
    EXPECT_EQ(report->ExitCode(), 0);
    EXPECT_THAT(Ids(*report, Outcome::kFail), IsEmpty());
    EXPECT_THAT(Ids(*report, Outcome::kNotChecked), IsEmpty());
    EXPECT_EQ(Ids(*report, Outcome::kSkipped),
              ranks == 1 ? std::vector<std::string>{"ranks"} : std::vector<std::string>{});
    // Nothing passes for want of a number.
    EXPECT_GT(report->Of("target").measured, 0);
    EXPECT_GT(report->Of("masks").measured, 0);
    EXPECT_GT(report->Of("window").measured, 0);
    EXPECT_THAT(report->Of("preemption").detail, Not(HasSubstr(" 0 preemptions")));
    EXPECT_THAT(report->Of("prefix").detail, Not(HasSubstr(" 0 of "))) << "nothing came from the cache";
    const auto json = nlohmann::json::parse(report->ToJson());
    EXPECT_EQ(json["verdict"]["kind"], "healthy");
    EXPECT_EQ(json["interfaces"].size(), Interfaces().size());
  }
}

struct Case {
  const char* defect;
  const char* interface;  // the first to fail
  const char* cause;
};

class PlantedDefect : public ::testing::TestWithParam<Case> {};

TEST_P(PlantedDefect, IsTheFirstFailingInterface) {
  DoctorOptions options = Options();
  options.defect = GetParam().defect;
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const Verdict verdict = report->verdict();
  ASSERT_EQ(verdict.kind, VerdictKind::kIntegration) << report->ToText(false);
  EXPECT_STREQ(verdict.first_failure->interface->id, GetParam().interface) << report->ToText(false);
  EXPECT_THAT(verdict.first_failure->cause, HasSubstr(GetParam().cause));
  EXPECT_EQ(report->ExitCode(), 1);
}

constexpr Case kCases[] = {
    {"offset0", "tap-layer", "layer ids are read one too low"},
    {"permuted-taps", "tap-order", "another order"},
    {"noswa", "window", "the sliding windows are dropped"},
    {"window-off-by-one", "window", "off by one"},
    {"noncausal", "masks", "sliding layers run bidirectional"},
    {"full-causal", "masks", "full layers run causal"},
    {"vllm0201", "tap-layer", "layer ids are read one too low"},
    {"target-norm", "fusion", "(1 + w)"},
    {"theta", "rope", "theta is read from the wrong place: 1e+07 instead of 1e+06"},
    {"partial-rotary", "rope", "partial_rotary_factor leaked"},
    {"dropprefix", "prefix", "restored without drafter context"},
    {"last-chunk", "chunked-prefill", "only the last prefill chunk's taps"},
    {"shifted-context", "context-update", "shifted by the number of rejected drafts"},
    {"rejected-kept", "context-update", "rows of rejected drafts stay"},
    {"zero-head", "head", "the drafter's head is zero"},
    {"mask-stripped", "mask-token", "stripped"},
    {"thinking-flag", "template", "the thinking flag"},
};
INSTANTIATE_TEST_SUITE_P(All, PlantedDefect, ::testing::ValuesIn(kCases), [](const auto& info) {
  std::string name = info.param.defect;
  std::erase(name, '-');
  return name;
});

TEST(DoctorTest, TheTableHasEveryDefect) {
  std::vector<std::string> names;
  for (const Case& entry : kCases) names.emplace_back(entry.defect);
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(DefectNames()));
}

TEST(DoctorTest, TheClassicThreeTogetherAreToldApart) {
  DoctorOptions options = Options();
  options.defect = "vllm0201";
  options.max_prompts = 4;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(Ids(*report, Outcome::kFail),
              AllOf(Contains("tap-layer"), Contains("masks"), Contains("window"), Contains("end-to-end"),
                    Not(Contains("target")), Not(Contains("rope")), Not(Contains("rollback"))));
  EXPECT_THAT(report->Of("masks").cause, HasSubstr("bidirectional"));
  EXPECT_THAT(report->Of("window").cause, HasSubstr("dropped"));
  EXPECT_THAT(report->verdict().text,
              AllOf(HasSubstr("one too low"), HasSubstr("masks"), HasSubstr("window")));
}

// What shares the reader of the configuration cannot judge it: without a bundle nothing about it passes.
TEST(DoctorTest, WithoutABundleConfigurationIsNotChecked) {
  for (const char* defect : {"", "noswa"}) {
    DoctorOptions options = Options();
    options.golden.clear();
    options.defect = defect;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->verdict().kind, VerdictKind::kIncomplete) << report->ToText(false);
    for (const char* id :
         {"revisions", "config", "tokenizer", "template", "target", "tap-layer", "tap-order", "rope",
          "embedding", "masks", "window", "positions", "block-size", "draft-logits", "end-to-end"}) {
      EXPECT_EQ(report->Of(id).outcome, Outcome::kNotChecked) << id;
    }
    for (const char* id :
         {"fusion", "injection", "head", "acceptance", "context-update", "chunked-prefill", "sampling"}) {
      EXPECT_EQ(report->Of(id).outcome, Outcome::kPass) << id;
    }
    EXPECT_THAT(report->Of("window").detail, HasSubstr(*defect == '\0' ? "window 64" : "causal, no window"));
  }
}

// --- drafters that are merely bad, and files that are wrong

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
void WriteAll(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
}

// A copy of the tiny drafter with other weights: `change` gets each tensor's name and elements.
void WriteDrafter(
    const fs::path& folder,
    const std::function<void(const StoredTensor& tensor, bf16* elements, int64_t count)>& change) {
  const fs::path source = kSource / "models/tiny-qwen3.6-dflash";
  fs::copy_file(source / "config.json", folder / "config.json");
  std::string bytes = ReadAll(source / "model.safetensors");
  const SafetensorsFile file = SafetensorsFile::Open(source / "model.safetensors").value();
  for (const StoredTensor& tensor : file.tensors()) {
    ASSERT_EQ(tensor.dtype, "BF16");
    std::vector<bf16> elements(static_cast<size_t>(tensor.bytes) / sizeof(bf16));
    std::memcpy(elements.data(), bytes.data() + tensor.offset, static_cast<size_t>(tensor.bytes));
    change(tensor, elements.data(), static_cast<int64_t>(elements.size()));
    std::memcpy(bytes.data() + tensor.offset, elements.data(), static_cast<size_t>(tensor.bytes));
  }
  WriteAll(folder / "model.safetensors", bytes);
}

void ExpectModelProblem(const fs::path& drafter, bool with_bundle) {
  DoctorOptions options = Options();
  options.draft_model = drafter;
  options.max_prompts = 5;
  if (!with_bundle) options.golden.clear();
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verdict().kind, VerdictKind::kModel) << report->ToText(false);
  EXPECT_EQ(report->ExitCode(), 5);
  std::vector<std::string> failed = {"end-to-end"};
  if (with_bundle) failed.insert(failed.begin(), "revisions");
  std::vector<std::string> actual = Ids(*report, Outcome::kFail);
  std::erase(actual, "calibration");  // such drafters may be sure of what they do not know, or not
  EXPECT_EQ(actual, failed);
  if (with_bundle && report->Of("calibration").outcome == Outcome::kFail) {
    EXPECT_EQ(report->Of("calibration").blame, Blame::kModel);
  }
  EXPECT_THAT(report->verdict().text, HasSubstr("problem of the model"));
}

TEST(BadDrafterTest, RandomWeightsAreAModelProblem) {
  const Folder folder("doctor_random_drafter");
  std::mt19937 random(1);
  WriteDrafter(folder.path(), [&](const StoredTensor& tensor, bf16* elements, int64_t count) {
    if (tensor.shape.size() < 2) return;  // norms stay
    std::normal_distribution<float> normal(0, 0.05f);
    for (int64_t i = 0; i < count; ++i) elements[i] = bf16(normal(random));
  });
  ExpectModelProblem(folder.path(), true);
  ExpectModelProblem(folder.path(), false);
}

// Every weight is a trained one, but fc expects the residual of another target: its channels in another
// order.
TEST(BadDrafterTest, ADrafterOfAnotherTargetIsAModelProblem) {
  const Folder folder("doctor_foreign_drafter");
  WriteDrafter(folder.path(), [&](const StoredTensor& tensor, bf16* elements, int64_t count) {
    if (tensor.name != "fc.weight") return;
    const int64_t width = 256;
    for (int64_t row = 0; row < count; row += width) std::reverse(elements + row, elements + row + width);
  });
  ExpectModelProblem(folder.path(), true);
}

TEST(BadFilesTest, AnEditedConfigurationFailsAtConfigReading) {
  const Folder folder("doctor_edited_config");
  WriteDrafter(folder.path(), [](const StoredTensor&, bf16*, int64_t) {});
  std::string config = ReadAll(folder.path() / "config.json");
  config.replace(config.find("\"sliding_window\": 64"), 20, "\"sliding_window\": 32");
  WriteAll(folder.path() / "config.json", config);
  DoctorOptions options = Options();
  options.draft_model = folder.path();
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->verdict().kind, VerdictKind::kIntegration);
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "config");
  EXPECT_THAT(report->verdict().first_failure->cause, HasSubstr("sliding:32:causal"));
}

TEST(BadFilesTest, AMissingFileIsAFinding) {
  DoctorOptions options = Options();
  const Folder folder("doctor_no_weights");
  fs::copy_file(kSource / "models/tiny-qwen3.6-dflash/config.json", folder.path() / "config.json");
  options.draft_model = folder.path();
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "files");
  EXPECT_EQ(report->Of("masks").outcome, Outcome::kNotChecked);
}

// --- builds

bool Holds(const fs::path& program, const std::string& text) {
  const std::string bytes = ReadAll(program);
  EXPECT_GT(bytes.size(), 100'000u) << program;
  return bytes.find(text) != std::string::npos;
}

TEST(DefectsTest, AreAbsentFromReleasePrograms) {
  // The name of a class in worker/defects/defects.cc, which its type information carries into every program
  // that can plant defects; in two halves, so that this test is not one that holds it anyway.
  const std::string name = std::string("KeepsRejected") + "Rows";
  EXPECT_TRUE(Holds("/proc/self/exe", name)) << "the search must be able to find it";
  for (const char* program : {DFLASH_DOCTOR, DFLASH_WORKER}) EXPECT_FALSE(Holds(program, name)) << program;

  const std::string arguments = " --model " + Options().model + " --draft-model " + Options().draft_model +
                                " --inject-defect noswa 2>&1";
  const std::string socket =
      " --listen unix:" + ::testing::TempDir() + "/doctor_test." + std::to_string(getpid());
  for (const std::string& command : {DFLASH_DOCTOR + arguments, DFLASH_WORKER + socket + arguments}) {
    FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    char buffer[4096];
    while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
    EXPECT_NE(pclose(pipe), 0);
    EXPECT_THAT(output, HasSubstr("only in builds of the preset `defects`"));
  }
}

}  // namespace
}  // namespace dflash::doctor
