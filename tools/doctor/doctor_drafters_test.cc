// The doctor over drafters with other weights than recorded: random, of another target, with outliers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/testing/changed_pair.h"
#include "worker/model/safetensors.h"

namespace dflash::doctor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Ids of a random but fixed subset are of no matter here: `names` says which matrices are made anew.
void MakeRandom(const fs::path& folder, const std::function<bool(const std::string& name)>& names) {
  std::mt19937 random(1);
  WriteDrafter(folder, [&](const StoredTensor& tensor, bf16* elements, int64_t count) {
    if (tensor.shape.size() < 2 || !names(tensor.name)) return;  // norms stay
    std::normal_distribution<float> normal(0, 0.05f);
    for (int64_t i = 0; i < count; ++i) elements[i] = bf16(normal(random));
  });
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

// Weights that were changed where no fingerprint samples them: every interface agrees all the same.
TEST(BadDrafterTest, OutliersBetweenTheSamplesAreTheModels) {
  const Folder folder("doctor_unsampled_drafter");
  WriteDrafter(folder.path(), [](const StoredTensor& tensor, bf16* values, int64_t count) {
    Plant({{"layers.1.mlp.down_proj.weight", 1e6f, {20, 30}, {}}}, tensor, values, count);
  });
  const Report sampled = Judged(folder.path(), "", Bundle::kWithoutDigests, VerdictKind::kModel);
  EXPECT_EQ(sampled.Of("revisions").outcome, Outcome::kPass);
  EXPECT_THAT(
      sampled.Of("end-to-end").cause,
      HasSubstr("accepts less than recorded: weights that were changed where no fingerprint samples"));
  ExpectModelProblem(folder.path(), "", "drafter layers.1.mlp.down_proj.weight (1 of 47 tensors)");
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

}  // namespace
}  // namespace dflash::doctor
