#include "daemon/routing/model_agreement.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const ModelIdentity kGroup = {.target_revision = "t0000000000000000",
                              .drafter_revision = "d0000000000000000",
                              .target_config = "tc",
                              .drafter_config = "dc",
                              .tokenizer = "tok"};
const ModelIdentity kOwn = {.target_revision = "",
                            .drafter_revision = "",
                            .target_config = "tc",
                            .drafter_config = "dc",
                            .tokenizer = "tok"};

constexpr GroupPlace kLocal = GroupPlace::kLocal, kRemote = GroupPlace::kRemote;

std::string Why(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  return std::string(status.message());
}

TEST(ModelAgreement, AGroupHasToHaveTheFilesOfTheServer) {
  ModelAgreement agreement(kOwn, kRemote);
  ModelIdentity other = kGroup;
  other.tokenizer = "kot";
  EXPECT_THAT(Why(agreement.Admit(other, kRemote)),
              AllOf(HasSubstr("this server's files"), HasSubstr("tokenizer (kot, not tok)")));
  other = kGroup;
  other.target_config = "ct";
  other.drafter_config = "cd";
  EXPECT_THAT(Why(agreement.Admit(other, kRemote)),
              AllOf(HasSubstr("target's config.json"), HasSubstr("drafter's config.json"),
                    Not(HasSubstr("tokenizer"))));
  EXPECT_TRUE(agreement.Admit(kGroup, kRemote).ok()) << "those that were refused decide nothing";
}

TEST(ModelAgreement, WhatOneSideDoesNotHaveIsNotCompared) {
  ModelIdentity no_drafter = kOwn;
  no_drafter.drafter_config = "";
  EXPECT_TRUE(ModelAgreement(no_drafter, kRemote).Admit(kGroup, kRemote).ok());
  ModelIdentity plain = kGroup;
  plain.drafter_revision = plain.drafter_config = "";
  EXPECT_TRUE(ModelAgreement(kOwn, kRemote).Admit(plain, kRemote).ok());
  EXPECT_TRUE(ModelAgreement({}, kRemote).Admit(kGroup, kRemote).ok());
}

TEST(ModelAgreement, TheFirstGroupDecidesAboutWeights) {
  ModelAgreement agreement(kOwn, kRemote);
  ASSERT_TRUE(agreement.Admit(kGroup, kRemote).ok());
  EXPECT_TRUE(agreement.Admit(kGroup, kRemote).ok()) << "its next life";
  ModelIdentity other = kGroup;
  other.target_revision = "x0000000000000000";
  EXPECT_THAT(Why(agreement.Admit(other, kRemote)),
              AllOf(HasSubstr("the first group"), HasSubstr("target's weights (x00000000000, not t0")));
  other = kGroup;
  other.drafter_revision = "";
  EXPECT_THAT(Why(agreement.Admit(other, kRemote)), HasSubstr("drafter's weights (none, not d00000000000)"));
  EXPECT_TRUE(agreement.Admit(kGroup, kRemote).ok());
}

TEST(ModelAgreement, LocalGroupsDecideWhereThereAreAny) {
  ModelAgreement agreement(kOwn, kLocal);
  ModelIdentity stale = kGroup;
  stale.target_revision = "x0000000000000000";
  EXPECT_THAT(Why(agreement.Admit(stale, kRemote)), HasSubstr("waits"));
  EXPECT_THAT(Why(agreement.Admit(kGroup, kRemote)), HasSubstr("waits"));
  EXPECT_TRUE(agreement.Admit(kGroup, kLocal).ok());
  EXPECT_THAT(Why(agreement.Admit(stale, kRemote)), HasSubstr("the first group"));
  EXPECT_TRUE(agreement.Admit(kGroup, kRemote).ok());
}

}  // namespace
}  // namespace dflash
