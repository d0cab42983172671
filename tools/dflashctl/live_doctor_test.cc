// What the doctor reads out of a server's feature contract.
#include "tools/dflashctl/live_doctor.h"

#include <string>

#include "gtest/gtest.h"
#include "tools/doctor/recorded_acceptance.h"

namespace dflash::ctl {
namespace {

constexpr char kLine[] =
    "target_revision=aaa drafter_revision=bbb taps=1,3,5 tap_meaning=layer_output "
    "norm_order=project_then_norm "
    "mask_token_id=4095 block_size=16 "
    "layers=sliding:64:causal,sliding:64:causal,sliding:64:causal,full:unlimited:bidirectional "
    "rope_theta=1e+06 "
    "rotary_fraction=1 norm_weight=plain rms_norm_eps=1e-06";

std::string Replaced(const std::string& from, const std::string& to) {
  std::string line = kLine;
  return line.replace(line.find(from), from.size(), to);
}

TEST(LiveDoctorTest, ContractDifferencesAreNamed) {
  const golden::GoldenBundle bundle =
      golden::GoldenBundle::Open(std::string(DFLASHD_SOURCE_DIR) + "/tests/golden").value();
  const auto differences = [&](const std::string& line) {
    return ContractDifferences(line, bundle.contract());
  };
  EXPECT_EQ(differences(kLine), "");
  EXPECT_EQ(differences(Replaced("aaa", "ccc")), "") << "revisions are not literals";
  EXPECT_EQ(differences(Replaced("taps=1,3,5", "taps=0,2,4")), "taps=0,2,4 instead of taps=1,3,5");
  EXPECT_EQ(differences(Replaced("plain", "one_plus")), "norm_weight=one_plus instead of norm_weight=plain");
  EXPECT_EQ(differences(Replaced(" rotary_fraction=1", "")),
            "rotary_fraction=nothing instead of rotary_fraction=1");
  EXPECT_NE(differences(Replaced("sliding:64", "sliding:unlimited")), "");
}

// 16-bit activations leave nearer ties than float32, and the limit is another.
TEST(LiveDoctorTest, TheLimitOfAcceptanceIsThatOfTheBackend) {
  EXPECT_EQ(doctor::LargestAcceptanceLoss(ActivationsOf("cpu")), 0.05);
  EXPECT_EQ(doctor::LargestAcceptanceLoss(ActivationsOf("cuda")), 0.1);
}

}  // namespace
}  // namespace dflash::ctl
