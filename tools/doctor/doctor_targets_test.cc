// The doctor over targets with other weights than recorded.
#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/draft_reference.h"
#include "tools/doctor/testing/changed_pair.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {
namespace {

using ::testing::HasSubstr;

// A merged adapter: the final norm is the recorded one, matrices are not. Where nothing tells that, it may be
// the integration as well, but neither the choice nor the order of the taps is.
TEST(BadTargetTest, AnotherTargetIsAModelProblem) {
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

// Weights that were changed where no fingerprint samples them are the model's where digests of all bytes were
// recorded. Where they were not, it may be the integration as well.
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
      {"lm_head.weight",
       [&](bf16* elements) { scale(elements + 100 * kWidth, kWidth, 1e6f); },
       {"target", "calibration", "draft-logits", "end-to-end"}},
      {"layers.2.mlp.down_proj.weight",
       [&](bf16* elements) { scale(elements + 20 * 512, 512, 1e8f); },
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

}  // namespace
}  // namespace dflash::doctor
