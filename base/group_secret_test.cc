#include "base/group_secret.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "base/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

class GroupSecretTest : public ::testing::Test {
 protected:
  ~GroupSecretTest() override { std::remove(path_.c_str()); }
  void Write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path_) << text;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
  }
  std::string Error() const { return std::string(ReadGroupSecret(path_).status().message()); }
  const std::string path_ = ::testing::TempDir() + "group_secret_test." + std::to_string(getpid());
};

TEST_F(GroupSecretTest, IsTheFirstLine) {
  Write("0123456789abcdef0\nand a remark\n");
  EXPECT_EQ(ReadGroupSecret(path_).value(), "0123456789abcdef0");
  Write("0123456789abcdef");
  EXPECT_EQ(ReadGroupSecret(path_).value(), "0123456789abcdef");
}

TEST_F(GroupSecretTest, RefusesWhatIsNoSecret) {
  EXPECT_EQ(ReadGroupSecret(path_).status().code(), absl::StatusCode::kNotFound);
  Write("0123456789abcde\n0123456789abcdef\n");
  EXPECT_THAT(Error(), HasSubstr("15 bytes"));
  for (const mode_t mode : {0604, 0620, 0601}) {
    Write("0123456789abcdef\n", mode);
    EXPECT_THAT(Error(), HasSubstr("others may read")) << mode;
  }
}

TEST_F(GroupSecretTest, MayBeReadByTheGroupOfWhatRootGivesIt) {
  Write("0123456789abcdef\n", 0640);
  if (geteuid() == 0) {
    EXPECT_TRUE(ReadGroupSecret(path_).ok()) << Error();
    ASSERT_EQ(chown(path_.c_str(), 1, 1), 0);
  }
  EXPECT_THAT(Error(), HasSubstr("others may read"));
}

// RFC 4231, test case 2; and the proof is made with it.
TEST(CoordinatorProofTest, IsAnHmac) {
  EXPECT_EQ(ToHex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(CoordinatorProof("0123456789abcdef"), ToHex(HmacSha256("0123456789abcdef", "coordinator")));
}

}  // namespace
}  // namespace dflash
