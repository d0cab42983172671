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
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"
#include "tools/doctor/draft_reference.h"
#include "worker/defects/defects.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/safetensors.h"
#include "worker/model/target_config.h"

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
    for (const char* id :
         {"injection", "rope", "masks", "window", "paging", "draft-layers", "head", "positions"})
      EXPECT_EQ(report->Of(id).limit, GatesFor(DType::kF32).stage) << id;
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

// Ids of a random but fixed subset are of no matter here: `names` says which matrices are made anew.
void MakeRandom(const fs::path& folder, const std::function<bool(const std::string& name)>& names) {
  std::mt19937 random(1);
  WriteDrafter(folder, [&](const StoredTensor& tensor, bf16* elements, int64_t count) {
    if (tensor.shape.size() < 2 || !names(tensor.name)) return;  // norms stay
    std::normal_distribution<float> normal(0, 0.05f);
    for (int64_t i = 0; i < count; ++i) elements[i] = bf16(normal(random));
  });
}

// A copy of the golden bundle with other JSON, and with other tensors.
using Json = nlohmann::ordered_json;
std::string CopyBundle(const Folder& folder, const std::function<void(Json& bundle, Json& prompts)>& change) {
  const fs::path source = kSource / "tests/golden";
  fs::copy_file(source / "golden_tensors.safetensors", folder.path() / "golden_tensors.safetensors");
  Json bundle = Json::parse(ReadAll(source / "bundle.json")),
       prompts = Json::parse(ReadAll(source / "golden.json"));
  change(bundle, prompts);
  WriteAll(folder.path() / "bundle.json", bundle.dump());
  WriteAll(folder.path() / "golden.json", prompts.dump());
  return folder.path();
}

enum class Bundle { kWhole, kWithoutDigests, kWithoutFingerprints, kNone };

// The verdict on a pair; no interface may be blamed.
Report Judged(const std::string& drafter, const std::string& target, Bundle with, VerdictKind kind,
              bool stop = false) {
  DoctorOptions options = Options();
  options.stop_at_first_failure = stop;
  if (!drafter.empty()) options.draft_model = drafter;
  if (!target.empty()) options.model = target;
  options.max_prompts = 5;
  const Folder folder("doctor_bundle");
  if (with == Bundle::kNone) options.golden.clear();
  if (with == Bundle::kWithoutDigests || with == Bundle::kWithoutFingerprints) {
    options.golden = CopyBundle(folder, [&](Json& bundle, Json&) {
      for (const char* key : {"target_digests", "drafter_digests"}) bundle.erase(key);
      if (with == Bundle::kWithoutDigests) return;
      for (const char* key : {"target_weights", "drafter_weights"}) bundle.erase(key);
    });
  }
  absl::StatusOr<Report> report = RunDoctor(options);
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return Report();
  EXPECT_EQ(report->verdict().kind, kind) << report->ToText(false);
  for (const Finding& finding : report->findings()) {
    if (finding.outcome == Outcome::kFail) {
      EXPECT_NE(finding.blame, Blame::kIntegration) << finding.interface->id;
    }
  }
  return *std::move(report);
}

void ExpectModelProblem(const std::string& drafter, const std::string& target, const std::string& tensor) {
  const Report report = Judged(drafter, target, Bundle::kWhole, VerdictKind::kModel);
  EXPECT_EQ(report.ExitCode(), 5);
  EXPECT_EQ(report.Of("revisions").outcome, Outcome::kFail);
  EXPECT_THAT(report.Of("revisions").detail, HasSubstr(tensor));
  EXPECT_THAT(report.verdict().text, HasSubstr("problem of the model"));
}

// Random weights, all of them and single layers, and a drafter of another target, whose fc expects the
// channels of the residual in another order.
TEST(BadDrafterTest, OtherWeightsAreAModelProblem) {
  const struct {
    const char* words;
    std::function<void(const fs::path&)> make;
    const char* tensor;
  } cases[] = {{"random", [](const fs::path& to) { MakeRandom(to, [](const std::string&) { return true; }); },
                "fc.weight"},
               {"layer 3 random",
                [](const fs::path& to) {
                  MakeRandom(to, [](const std::string& name) { return name.starts_with("layers.3."); });
                },
                "layers.3.mlp.down_proj.weight"},
               {"another target",
                [](const fs::path& to) {
                  WriteDrafter(to, [](const StoredTensor& tensor, bf16* elements, int64_t count) {
                    if (tensor.name != "fc.weight") return;
                    const int64_t width = 256;
                    for (int64_t row = 0; row < count; row += width)
                      std::reverse(elements + row, elements + row + width);
                  });
                },
                "fc.weight (1 of 47 tensors)"}};
  for (const auto& [words, make, tensor] : cases) {
    SCOPED_TRACE(words);
    const Folder folder("doctor_other_drafter");
    make(folder.path());
    ExpectModelProblem(folder.path(), "", tensor);
  }
}

// Where weights cannot be compared the report says so, and that both are possible.
TEST(BadDrafterTest, WithoutFingerprintsItMayBeEither) {
  const Folder folder("doctor_random_drafter");
  MakeRandom(folder.path(), [](const std::string&) { return true; });
  for (const Bundle with : {Bundle::kWithoutFingerprints, Bundle::kNone}) {
    const Report report = Judged(folder.path(), "", with, VerdictKind::kEither);
    EXPECT_EQ(report.ExitCode(), 6);
    EXPECT_EQ(report.Of("revisions").outcome, Outcome::kNotChecked);
    EXPECT_THAT(report.verdict().text,
                AllOf(HasSubstr("both are possible"), HasSubstr("could not be compared")));
  }
}

// A copy of the tiny target in which `change` got the elements of all tensors in bfloat16 whose name ends
// like that.
void WriteTarget(const fs::path& folder, const std::string& name,
                 const std::function<void(bf16* elements, int64_t count)>& change) {
  for (const auto& entry : fs::directory_iterator(Options().model)) {
    const fs::path to = folder / entry.path().filename();
    fs::copy_file(entry.path(), to);
    if (to.extension() != ".safetensors") continue;
    std::string bytes = ReadAll(to);
    const SafetensorsFile file = SafetensorsFile::Open(entry.path()).value();
    for (const StoredTensor& tensor : file.tensors()) {
      if (!tensor.name.ends_with(name) || tensor.dtype != "BF16") continue;
      std::vector<bf16> elements(static_cast<size_t>(tensor.bytes) / sizeof(bf16));
      std::memcpy(elements.data(), bytes.data() + tensor.offset, static_cast<size_t>(tensor.bytes));
      change(elements.data(), static_cast<int64_t>(elements.size()));
      std::memcpy(bytes.data() + tensor.offset, elements.data(), static_cast<size_t>(tensor.bytes));
    }
    WriteAll(to, bytes);
  }
}

// A merged adapter: the final norm is the recorded one, matrices are not. Where nothing tells that, it may be
// the integration as well, but neither the choice nor the order of the taps is.
TEST(BadDrafterTest, AnotherTargetIsAModelProblem) {
  const Folder folder("doctor_other_target");
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.03f);
  WriteTarget(folder.path(), "mlp.down_proj.weight", [&](bf16* elements, int64_t count) {
    for (int64_t i = 0; i < count; ++i) elements[i] = bf16(static_cast<float>(elements[i]) + normal(random));
  });
  ExpectModelProblem("", folder.path(), "target layers.0.mlp.down_proj.weight");
  // And hides no tap of another layer.
  for (const auto& [defect, interface] :
       {std::pair("offset0", "tap-layer"), std::pair("permuted-taps", "tap-order")}) {
    DoctorOptions options = Options();
    options.model = folder.path();
    options.defect = defect;
    options.max_prompts = 1;
    options.stop_at_first_failure = true;  // which other weights alone are not
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const Verdict verdict = report->verdict();
    ASSERT_EQ(verdict.kind, VerdictKind::kIntegration) << report->ToText(false);
    EXPECT_STREQ(verdict.first_failure->interface->id, interface);
  }
  const Report report = Judged("", folder.path(), Bundle::kWithoutFingerprints, VerdictKind::kEither, true);
  EXPECT_EQ(report.ExitCode(), 6);
  EXPECT_STREQ(report.verdict().first_failure->interface->id, "target");
  EXPECT_EQ(report.Of("tap-layer").outcome, Outcome::kSkipped);
  EXPECT_EQ(report.Of("tap-order").outcome, Outcome::kSkipped);
  EXPECT_THAT(report.Of("tap-layer").detail, HasSubstr("own layers 1, 3, 5, as wanted"));
}

// Weights that round coarsely, or leave float32, fail no interface.
TEST(BadDrafterTest, ExtremeWeightsAreAModelProblem) {
  const auto scaled = [](const char* name, float factor, int64_t elements = 0) {
    return [=](const StoredTensor& tensor, bf16* values, int64_t count) {
      if (!tensor.name.ends_with(name)) return;
      const int64_t some = elements == 0 ? count : elements;
      for (int64_t i = 0; i < some; ++i) values[i] = bf16(static_cast<float>(values[i]) * factor);
    };
  };
  const struct {
    const char* words;
    std::function<void(const StoredTensor&, bf16*, int64_t)> change;
    const char* overflows;  // the interface that says so
  } cases[] = {{"sharp attention",
                [&](const StoredTensor& tensor, bf16* values, int64_t count) {
                  scaled("q_norm.weight", 30)(tensor, values, count);
                  scaled("k_norm.weight", 30)(tensor, values, count);
                },
                nullptr},
               {"an outlier", scaled("layers.0.mlp.down_proj.weight", 1e4f, 512), nullptr},
               {"huge feed-forward", scaled("layers.1.mlp.down_proj.weight", 1e20f), "draft-layers"},
               {"huge fc", scaled("fc.weight", 1e30f), "fusion"}};
  for (const auto& [words, change, overflows] : cases) {
    SCOPED_TRACE(words);
    const Folder folder("doctor_extreme_drafter");
    WriteDrafter(folder.path(), change);
    const Report report =
        Judged(folder.path(), "", Bundle::kWithoutFingerprints,
               overflows == nullptr ? VerdictKind::kEither : VerdictKind::kModel, overflows == nullptr);
    if (overflows == nullptr) {
      EXPECT_EQ(report.Of("masks").outcome, Outcome::kPass);
      EXPECT_EQ(report.Of("draft-layers").outcome, Outcome::kPass);
    } else {
      EXPECT_STREQ(report.verdict().first_failure->interface->id, overflows);
      EXPECT_THAT(report.verdict().text, HasSubstr("beyond float32's range"));
      EXPECT_EQ(report.Of("batching").outcome, Outcome::kNotChecked);
    }
  }
}

// One change of an outlier drafter.
struct Outliers {
  std::string tensors;              // this one, or those whose name ends in a dot and this
  float factor = 1;                 // of elements in...
  std::vector<int64_t> rows, cols;  // empty: all; a vector is a column
  enum class Form : uint8_t {
    kScaled,
    kTwins,    // every odd row is the one before it
    kOpposed,  // in `rows`, factor and -factor in turn, so that twins cancel
  } form = Form::kScaled;
};

void Plant(const std::vector<Outliers>& all, const StoredTensor& tensor, bf16* values, int64_t count) {
  const int64_t width = tensor.shape.size() == 1 ? 1 : tensor.shape.back();
  const auto has = [](const std::vector<int64_t>& list, int64_t index) {
    return list.empty() || std::find(list.begin(), list.end(), index) != list.end();
  };
  for (const Outliers& outliers : all) {
    if (tensor.name != outliers.tensors && !tensor.name.ends_with("." + outliers.tensors)) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = i / width, col = i % width;
      if (!has(outliers.rows, row) || !has(outliers.cols, col)) continue;
      switch (outliers.form) {
        case Outliers::Form::kScaled:
          values[i] = bf16(static_cast<float>(values[i]) * outliers.factor);
          break;
        case Outliers::Form::kTwins:
          if (row % 2 == 1) values[i] = values[i - width];
          break;
        case Outliers::Form::kOpposed:
          values[i] = bf16(col % 2 == 0 ? outliers.factor + static_cast<float>(values[i]) : -outliers.factor);
          break;
      }
    }
  }
}

// What single huge weights, or sums that cancel, make of rounding inside a stage is the model's, and hides no
// defect that numbers still show.
class OutlierDrafter : public ::testing::TestWithParam<std::pair<const char*, std::vector<Outliers>>> {};

TEST_P(OutlierDrafter, IsAModelProblem) {
  const Folder folder("doctor_outliers");
  WriteDrafter(folder.path(), [&](const StoredTensor& tensor, bf16* values, int64_t count) {
    Plant(GetParam().second, tensor, values, count);
  });
  Judged(folder.path(), "", Bundle::kWhole, VerdictKind::kModel, true);
}

constexpr auto kTwins = Outliers::Form::kTwins, kOpposed = Outliers::Form::kOpposed;
const std::pair<const char*, std::vector<Outliers>> kOutliers[] = {
    {"DownOfTwoLayers",
     {{"layers.0.mlp.down_proj.weight", 3e3f, {0, 1}, {}},
      {"layers.1.mlp.down_proj.weight", 1e5f, {5, 9}, {}}}},
    {"GateAndUp", {{"gate_proj.weight", 1e4f, {3, 40}, {}}, {"up_proj.weight", 1e4f, {3, 7}, {}}}},
    {"OutputProjection", {{"o_proj.weight", 1e6f, {3, 40}, {}}}},
    {"Fusion", {{"fc.weight", 1e8f, {3, 40}, {}}}},
    {"FusionOfTwoChannels", {{"fc.weight", 1e8f, {}, {3, 40}}}},
    {"QueryNorm", {{"q_norm.weight", 1e6f, {3, 40}, {}}}},
    {"KeyNorm", {{"k_norm.weight", 1e4f, {}, {}}}},
    {"FinalNorm", {{"norm.weight", 1e8f, {3, 40}, {}}}},
    {"Denormal", {{"v_proj.weight", 1e-38f, {}, {}}}},
    {"DownCancels",
     {{"gate_proj.weight", 1, {}, {}, kTwins},
      {"up_proj.weight", 1, {}, {}, kTwins},
      {"down_proj.weight", 1e4f, {}, {}, kOpposed}}},
    {"KeysCancel",
     {{"fc.weight", 1, {}, {}, kTwins},
      {"hidden_norm.weight", 1, {}, {}, kTwins},
      {"k_proj.weight", 1e4f, {}, {}, kOpposed}}}};
INSTANTIATE_TEST_SUITE_P(All, OutlierDrafter, ::testing::ValuesIn(kOutliers),
                         [](const auto& info) { return std::string(info.param.first); });

// With a defect on top the defect is named all the same.
TEST(BadDrafterTest, OutliersHideNoDefect) {
  const struct {
    std::vector<Outliers> outliers;
    const char *defect, *interface;
  } cases[] = {{kOutliers[0].second, "noncausal", "masks"},
               {kOutliers[0].second, "target-norm", "fusion"},
               {{{"o_proj.weight", 1e4f, {3, 40}, {}}}, "theta", "rope"},
               {{{"q_norm.weight", 1e2f, {3, 40}, {}}}, "noswa", "window"},
               // Of zeros any head makes the same; it is known by another output.
               {{{"norm.weight", 0, {}, {}}}, "zero-head", "head"},
               {{{"norm.weight", 0, {}, {}}}, "mask-stripped", "mask-token"}};
  for (const auto& [outliers, defect, interface] : cases) {
    SCOPED_TRACE(defect);
    const Folder folder("doctor_outliers_and_defect");
    WriteDrafter(folder.path(),
                 [&, &outliers = outliers](const StoredTensor& tensor, bf16* values, int64_t count) {
                   Plant(outliers, tensor, values, count);
                 });
    DoctorOptions options = Options();
    options.draft_model = folder.path();
    options.defect = defect;
    options.stop_at_first_failure = true;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const Verdict verdict = report->verdict();
    ASSERT_EQ(verdict.kind, VerdictKind::kIntegration) << report->ToText(false);
    EXPECT_STREQ(verdict.first_failure->interface->id, interface) << report->ToText(false);
  }
}

// Weights that were changed where no fingerprint samples them are the model's where digests of all bytes were
// recorded. Where they were not, the target's may be the integration as well; a drafter's are known by its
// interfaces.
TEST(BadTargetTest, OutliersBetweenTheSamplesAreNotTheIntegrations) {
  constexpr int64_t kWidth = 256;
  const auto scale = [](bf16* elements, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) elements[i] = bf16(static_cast<float>(elements[i]) * factor);
  };
  const struct {
    const char* tensor;
    std::function<void(bf16* elements)> change;
    std::vector<std::string> failing;  // of samples alone
  } cases[] = {
      {"lm_head.weight", [&](bf16* elements) { scale(elements + 100 * kWidth, kWidth, 1e6f); },
       {"target", "calibration", "draft-logits", "end-to-end"}},
      {"layers.2.mlp.down_proj.weight", [&](bf16* elements) { scale(elements + 20 * 512, 512, 1e8f); },
       {"target", "calibration", "draft-logits", "end-to-end"}},
      // A token that the prompts with tensors do not have.
      {"embed_tokens.weight",
       [&](bf16* elements) { std::copy_n(elements + 800 * kWidth, kWidth, elements + 290 * kWidth); },
       {"calibration", "end-to-end"}}};
  for (const auto& [tensor, change, failing] : cases) {
    SCOPED_TRACE(tensor);
    const Folder folder("doctor_unsampled_target");
    WriteTarget(folder.path(), tensor, [&, &change = change](bf16* elements, int64_t) { change(elements); });
    const Report sampled = Judged("", folder.path(), Bundle::kWithoutDigests, VerdictKind::kEither);
    EXPECT_EQ(sampled.ExitCode(), 6);
    EXPECT_EQ(sampled.Of("revisions").outcome, Outcome::kPass);
    EXPECT_EQ(Ids(sampled, Outcome::kFail), failing);
    EXPECT_THAT(sampled.verdict().text, HasSubstr("changed where no fingerprint samples them"));
    ExpectModelProblem("", folder.path(), absl::StrCat("target ", tensor, " (1 of 109 tensors)"));
  }
  const Folder folder("doctor_unsampled_drafter");
  WriteDrafter(folder.path(), [](const StoredTensor& tensor, bf16* values, int64_t count) {
    Plant({{"layers.1.mlp.down_proj.weight", 1e6f, {20, 30}, {}}}, tensor, values, count);
  });
  const Report sampled = Judged(folder.path(), "", Bundle::kWithoutDigests, VerdictKind::kModel);
  EXPECT_EQ(sampled.Of("revisions").outcome, Outcome::kPass);
  EXPECT_THAT(sampled.Of("end-to-end").cause,
              HasSubstr("accepts less than recorded: weights that were changed where no fingerprint samples"));
  ExpectModelProblem(folder.path(), "", "drafter layers.1.mlp.down_proj.weight (1 of 47 tensors)");
}

// A changed token shows nothing where the target reads the same of it: another one is taken, or none.
TEST(BadTargetTest, TokensWithOneEmbeddingAreNoMisalignment) {
  for (const bool all : {false, true}) {
    SCOPED_TRACE(all);
    const Folder folder("doctor_equal_embeddings");
    WriteTarget(folder.path(), "embed_tokens.weight", [&](bf16* elements, int64_t count) {
      constexpr int64_t kWidth = 256;
      for (int64_t row = 0; row < count / kWidth; ++row) {
        if (all || row % 8 != 0)
          std::copy_n(elements + (all ? 0 : row / 8 * 8 * kWidth), kWidth, elements + row * kWidth);
      }
    });
    DoctorOptions options = Options();
    options.model = folder.path();
    options.max_prompts = 1;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const Outcome expected = all ? Outcome::kNotChecked : Outcome::kPass;
    EXPECT_EQ(report->Of("tap-alignment").outcome, expected) << report->ToText(false);
    EXPECT_EQ(report->Of("next-token").outcome, expected);
    EXPECT_NE(report->verdict().kind, VerdictKind::kIntegration) << report->ToText(false);
  }
}

// Logits that leave float32 in a comparison of two runs of our own.
TEST(BadDrafterTest, InfiniteLogitsAreNoOtherPieces) {
  Report report;
  Subject subject;
  subject.report = &report;
  Rows finite(1, 2), infinite(1, 2);
  infinite.values[1] = HUGE_VAL;
  EXPECT_FALSE(JudgeFinite(subject, "chunked-prefill", finite));
  EXPECT_EQ(report.Of("chunked-prefill").outcome, Outcome::kNotChecked);
  EXPECT_TRUE(JudgeFinite(subject, "chunked-prefill", infinite));
  EXPECT_EQ(report.Of("chunked-prefill").outcome, Outcome::kFail);
  EXPECT_EQ(report.Of("chunked-prefill").blame, Blame::kModel);
}

// Columns and rows of the target's head, and logits beyond float32.
TEST(HeadTest, OutliersOfTheHeadAreTheModels) {
  const struct {
    int64_t stride, first;  // of elements, 256 a row
    float factor;
    bool fits;
  } cases[] = {{256, 3, 1e8f, true}, {100'000, 7, 1e8f, true}, {1, 0, 3e38f, false}};
  for (const auto& [stride, first, factor, fits] : cases) {
    SCOPED_TRACE(stride);
    const Folder folder("doctor_head_outliers");
    WriteTarget(folder.path(), "lm_head.weight",
                [&, stride = stride, first = first, factor = factor](bf16* elements, int64_t count) {
                  for (int64_t i = first; i < count; i += stride)
                    elements[i] = bf16(std::clamp(static_cast<float>(elements[i]) * factor, -1e38f, 1e38f));
                });
    const Report report = Judged("", folder.path(), Bundle::kWhole, VerdictKind::kModel, true);
    EXPECT_EQ(report.Of("head").outcome, fits ? Outcome::kPass : Outcome::kFail);
    EXPECT_THAT(report.Of("head").cause, HasSubstr(fits ? "" : "beyond float32's range"));
  }
}

// The output for which the head chooses the mask token: there is none where the mask token's row is zero.
TEST(HeadTest, WithoutTheMaskTokensRowThereIsNoOutputForIt) {
  for (const bool zero : {false, true}) {
    const Folder folder("doctor_mask_row");
    const DraftConfig draft_config = DraftConfig::Load(Options().draft_model, {}).value();
    WriteTarget(folder.path(), "lm_head.weight", [&](bf16* elements, int64_t) {
      if (zero) std::fill_n(elements + int64_t{256} * draft_config.mask_token_id, 256, bf16(0.0f));
    });
    const TargetConfig config = TargetConfig::Load(folder.path(), {}).value();
    const TargetCheckpoint target = TargetCheckpoint::Open(folder.path(), config).value();
    const DraftCheckpoint drafter = DraftCheckpoint::Open(Options().draft_model, draft_config).value();
    DraftReference reference(draft_config, drafter, target);
    const Subject subject = {.reference = &reference,
                             .own = golden::ContractOf(draft_config),
                             .gates = GatesFor(DType::kF32),
                             .vocabulary = config.vocab_size};
    const absl::StatusOr<std::optional<MaskOutput>> output = OutputForMask(subject);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->has_value(), !zero);
  }
}

TEST(HeadTest, AHeadOfZerosIsTheModels) {
  const Folder folder("doctor_zero_head");
  WriteTarget(folder.path(), "lm_head.weight",
              [](bf16* elements, int64_t count) { std::fill_n(elements, count, bf16(0.0f)); });
  const Report report = Judged("", folder.path(), Bundle::kNone, VerdictKind::kModel, true);
  EXPECT_STREQ(report.verdict().first_failure->interface->id, "head");
  EXPECT_THAT(report.verdict().text, HasSubstr("lm_head is zero"));
}

TEST(BadFilesTest, AnotherChatTemplateIsNotTheThinkingFlag) {
  const Folder folder("doctor_template");
  WriteTarget(folder.path(), "none", [](bf16*, int64_t) {});
  WriteAll(folder.path() / "chat_template.jinja", "{{ messages[0].content }}");
  DoctorOptions options = Options();
  options.model = folder.path();
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "template");
  EXPECT_THAT(report->verdict().first_failure->cause, HasSubstr("another chat template"));
}

TEST(BadDrafterTest, WeightsThatAreNoNumbersAreNamed) {
  const Folder folder("doctor_nan_drafter");
  WriteDrafter(folder.path(), [](const StoredTensor& tensor, bf16* elements, int64_t) {
    if (tensor.name == "fc.weight") elements[770] = bf16(std::numeric_limits<float>::quiet_NaN());
  });
  for (const Bundle with : {Bundle::kWhole, Bundle::kNone}) {
    const Report report = Judged(folder.path(), "", with, VerdictKind::kModel);
    EXPECT_STREQ(report.verdict().first_failure->interface->id, "weights");
    EXPECT_THAT(
        report.verdict().text,
        HasSubstr(
            "drafter are no numbers: fc.weight: 1 of 196608 elements are no finite numbers, the first in "
            "row 1, column 2"));
    EXPECT_EQ(report.Of("masks").outcome, Outcome::kNotChecked);
  }
}

// Every tensor counts, none differs: then it is not the recorded weights that draft badly. The bundle's
// acceptance is raised instead.
TEST(BadDrafterTest, IfEveryInterfaceAgreesItIsTheModel) {
  DoctorOptions options = Options();
  options.max_prompts = 5;
  const Folder folder("doctor_optimist");
  options.golden = CopyBundle(folder, [](Json&, Json& prompts) {
    for (Json& prompt : prompts) {
      for (Json& length : prompt["acceptance_lengths"]) length = 16;
    }
  });
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verdict().kind, VerdictKind::kModel) << report->ToText(false);
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "end-to-end");
  EXPECT_EQ(report->Of("revisions").outcome, Outcome::kPass);
}

// --- bundles that are damaged, or of another pair

TEST(BadBundleTest, IsAnErrorThatNamesTheFile) {
  const auto error = [](const std::function<void(Json & bundle, Json & prompts)>& change) {
    const Folder folder("doctor_bad_bundle");
    DoctorOptions options = Options();
    options.golden = CopyBundle(folder, change);
    options.stop_at_first_failure = true;
    const absl::StatusOr<Report> report = RunDoctor(options);
    EXPECT_TRUE(absl::IsInvalidArgument(report.status())) << report.status();
    return std::string(report.status().message());
  };
  EXPECT_THAT(
      error([](Json&, Json& prompts) { prompts[2]["output_ids"] = {5'000'000}; }),
      HasSubstr("golden.json: prompt 2: output_ids: token id 5000000, but the target's vocabulary has 4096"));
  EXPECT_THAT(error([](Json&, Json& prompts) {
                prompts[0]["prompt_ids"] = {1, 2, 4096};
              }),
              HasSubstr("golden_tensors.safetensors: p0."));
  EXPECT_THAT(
      error([](Json& bundle, Json&) { bundle["contract"]["mask_token_id"] = 99999; }),
      HasSubstr("bundle.json: contract: mask_token_id: token id 99999, but the target's vocabulary has"));
  EXPECT_THAT(error([](Json& bundle, Json&) { bundle["drafter_weights"]["no.such.weight"] = "00"; }),
              HasSubstr("bundle.json: drafter_weights: no.such.weight: the drafter has no such tensor"));
  EXPECT_THAT(error([](Json& bundle, Json&) { bundle["target_digests"]["no.such.weight"] = "00"; }),
              HasSubstr("bundle.json: target_digests: no.such.weight: the target has no such tensor"));
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

// Files that are none are bad input, not a broken integration; the hint is about the file in question.
TEST(BadFilesTest, AreBadInput) {
  const Folder folder("doctor_bad_files");
  const auto target = [&](const std::string& name, const std::function<void(const fs::path&)>& change) {
    const fs::path to = folder.path() / name;
    fs::copy(Options().model, to);
    change(to);
    return to.string();
  };
  const std::string truncated = target("truncated", [](const fs::path& to) {
    fs::resize_file(to / "model-00001-of-00002.safetensors", 100'000);
  });
  const std::string other_type = target("type", [](const fs::path& to) {
    std::string config = ReadAll(to / "config.json");
    config.replace(config.find("qwen3_5"), 7, "qwen9_9");
    WriteAll(to / "config.json", config);
  });
  const struct {
    std::string model, draft_model, where;
  } cases[] = {{"/nowhere", "", "--model /nowhere"},
               {"", "/nowhere", "--draft-model /nowhere"},
               {truncated, "", "--model " + truncated},
               {other_type, "", "--model " + other_type}};
  for (const auto& [model, draft_model, where] : cases) {
    SCOPED_TRACE(where);
    DoctorOptions options = Options();
    if (!model.empty()) options.model = model;
    if (!draft_model.empty()) options.draft_model = draft_model;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->verdict().kind, VerdictKind::kBadInput) << report->ToText(false);
    EXPECT_EQ(report->ExitCode(), 2);
    EXPECT_THAT(report->verdict().text, AllOf(HasSubstr(where), Not(HasSubstr("draft_config"))));
  }
}

// A chat that cannot be rendered, by whoever's fault, names template and prompt, and the rest is examined.
TEST(BadFilesTest, AChatThatCannotBeRendered) {
  const Folder model("doctor_throwing"), bundle("doctor_bad_chat");
  WriteTarget(model.path(), "none", [](bf16*, int64_t) {});
  WriteAll(model.path() / "chat_template.jinja", "{{ raise_exception('no') }}");
  DoctorOptions throwing = Options(), malformed = Options();
  throwing.model = model.path();
  malformed.golden = CopyBundle(bundle, [](Json& json, Json&) { json["chats"]["0"]["messages"] = {1}; });
  for (DoctorOptions& options : {std::ref(throwing), std::ref(malformed)}) {
    options.stop_at_first_failure = true;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->ExitCode(), 2);
    EXPECT_STREQ(report->verdict().first_failure->interface->id, "template");
    EXPECT_THAT(report->verdict().text, AllOf(HasSubstr("the chat of prompt 0 cannot be rendered"),
                                              HasSubstr(options.model), HasSubstr(options.golden)));
    EXPECT_EQ(report->Of("tokenizer").outcome, Outcome::kPass);
  }
}

// --- contexts that are too short

TEST(ContextTest, IsWhatTheTargetHasPositionsFor) {
  TargetConfig target;
  target.max_position_embeddings = 600;
  DoctorOptions options;
  EXPECT_EQ(ContextTokens(options, target).value(), 600);
  target.max_position_embeddings = 262144;
  EXPECT_EQ(ContextTokens(options, target).value(), 4096);
  options.max_context_tokens = 8192;
  EXPECT_EQ(ContextTokens(options, target).value(), 8192);
  target.max_position_embeddings = 600;
  EXPECT_THAT(ContextTokens(options, target).status().message(), HasSubstr("--max-context-tokens 8192"));
}

TEST(ContextTest, GoldenPromptsThatDoNotFitAreLeftOutAloud) {
  DoctorOptions options = Options();
  options.max_context_tokens = 512;
  const Folder folder("doctor_long_prompts");
  options.golden = CopyBundle(folder, [](Json& bundle, Json& prompts) {
    Json& ids = prompts[1]["prompt_ids"];
    for (size_t i = 0; ids.size() < 600; ++i) ids.push_back(Json(ids[i]));
    prompts[1].erase("text");
    prompts = {prompts[1]};
    bundle.erase("chats");
    bundle["tensors"] = "none.safetensors";
  });
  WriteAll(folder.path() / "none.safetensors", std::string("\2\0\0\0\0\0\0\0{}", 10));
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_NE(report->verdict().kind, VerdictKind::kIntegration) << report->ToText(false);
  EXPECT_EQ(report->Of("end-to-end").outcome, Outcome::kNotChecked);
  EXPECT_EQ(report->Of("sampling").outcome, Outcome::kPass);
  EXPECT_THAT(report->facts, Contains(::testing::Pair("left out", HasSubstr("1 of 1 golden prompts"))));
}

// --- exit codes

int ExitCodeOf(const std::string& arguments) {
  return WEXITSTATUS(std::system((DFLASH_DOCTOR " " + arguments + " 2> /dev/null").c_str()));
}

TEST(ExitCodeTest, TellsBadInputFromOutputThatIsLost) {
  const Folder folder("doctor_exit_codes");
  const std::string pair = "--model " + Options().model + " --draft-model " + Options().draft_model;
  const std::string golden = Options().golden, loop = folder.path() / "loop";
  fs::create_symlink("loop", loop);
  EXPECT_EQ(ExitCodeOf(pair + " --golden " + loop), 2);
  EXPECT_EQ(ExitCodeOf("record " + pair + " --golden " + loop + " --out " + loop + ".new"), 2);
  EXPECT_EQ(ExitCodeOf("record " + pair + " --golden " + golden + " --out " + folder.path().string()), 2);
  EXPECT_EQ(ExitCodeOf("record --model /nowhere --draft-model /nowhere --golden " + golden + " --out " +
                       loop + ".new"),
            2);
  EXPECT_EQ(ExitCodeOf("compare " + golden + " " + golden + " > /dev/full"), 4);
  EXPECT_EQ(ExitCodeOf("compare " + golden + " " + golden + " > /dev/null"), 0);
}

// Whoever reads JSON gets it, whatever went wrong.
TEST(ExitCodeTest, AnErrorIsJsonWhereThatWasAskedFor) {
  const Folder folder("doctor_json_errors");
  const std::string output = folder.path() / "output";
  const std::string pair = " --model " + Options().model + " --draft-model " + Options().draft_model;
  WriteAll(folder.path() / "bundle.json", "{}");
  const struct {
    std::string arguments, words;
  } cases[] = {{pair + " --golden " + folder.path().string(), "bundle.json: "},
               {pair + " --golden /nowhere", "/nowhere"},
               {pair + " --max-context-tokens 100000", "--max-context-tokens 100000"},
               {"", "--model and --draft-model are required"}};
  for (const auto& [arguments, words] : cases) {
    SCOPED_TRACE(arguments);
    EXPECT_EQ(ExitCodeOf("--json --quiet " + arguments + " > " + output), 2);
    const Json json = Json::parse(ReadAll(output), nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << ReadAll(output);
    EXPECT_EQ(json["exit_code"], 2);
    EXPECT_THAT(json["error"].get<std::string>(), HasSubstr(words));
    EXPECT_EQ(ExitCodeOf("--quiet " + arguments + " > " + output), 2);
    EXPECT_EQ(ReadAll(output), "");
  }
}

// A window that no context reaches is not checked, whatever agrees.
TEST(DoctorTest, AWindowOutOfReachIsNotChecked) {
  const Folder drafter("doctor_wide_window"), bundle("doctor_wide_bundle");
  WriteDrafter(drafter.path(), [](const StoredTensor&, bf16*, int64_t) {});
  Json config = Json::parse(ReadAll(drafter.path() / "config.json"));
  config["sliding_window"] = 2048;
  WriteAll(drafter.path() / "config.json", config.dump());
  DoctorOptions options = Options();
  options.draft_model = drafter.path();
  options.max_prompts = 2;
  options.golden = CopyBundle(bundle, [](Json& json, Json&) {
    for (Json& layer : json["contract"]["layers"]) {
      if (layer["window"] != 0) layer["window"] = 2048;
    }
  });
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->Of("window").outcome, Outcome::kNotChecked) << report->ToText(false);
  EXPECT_THAT(report->Of("window").detail, HasSubstr("does not reach the window of 2048"));
}

// With short golden prompts alone the prefix cache is reached all the same.
TEST(DoctorTest, ShortPromptsLeaveNothingOut) {
  const Folder bundle("doctor_short_bundle");
  DoctorOptions options = Options();
  options.golden = CopyBundle(bundle, [&](Json&, Json& prompts) {
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (prompts[i]["prompt_ids"].size() >= 64 && i > 3 && i != 16) prompts[i] = prompts[3];
    }
  });
  options.max_prompts = 2;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->Of("prefix").outcome, Outcome::kPass) << report->ToText(false);
  EXPECT_THAT(report->Of("prefix").detail, AllOf(Not(HasSubstr(" 0 of ")), HasSubstr("128 of 147")));
  EXPECT_THAT(report->Of("preemption").detail, HasSubstr("0 of 2 choices of one prompt"));
  EXPECT_THAT(report->Of("limits").detail, HasSubstr("stops inside an accepted run"));
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
