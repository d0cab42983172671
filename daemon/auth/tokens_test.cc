#include "daemon/auth/tokens.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "daemon/auth/token_store.h"
#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// sha256sum of "abc" (FIPS 180-2, appendix B.1) and of the empty text.
constexpr char kAbc[] = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kEmpty[] = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);  // 2027-01-15

absl::StatusCode Code(const Tokens& tokens, std::string_view authorization, Role role) {
  return tokens.Check(authorization, role, kNow).status().code();
}

TEST(Tokens, ATokenAllowsItsRoles) {
  const auto tokens = Tokens::Parse(
      std::string("# ours\n\nteam-a ") + kAbc + " inference,metrics  # since may\r\nold " + kEmpty + " admin",
      "f");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->size(), 2u);
  EXPECT_EQ(tokens->Check("Bearer abc", Role::kInference, kNow).value_or(""), "team-a");
  EXPECT_EQ(Code(*tokens, "Bearer abc", Role::kMetrics), absl::StatusCode::kOk);
  for (const char* scheme : {"bearer abc", "BEARER abc", "bEARER abc"})
    EXPECT_EQ(Code(*tokens, scheme, Role::kInference), absl::StatusCode::kOk) << "schemes have no case";
  const absl::Status denied = tokens->Check("Bearer abc", Role::kAdmin, kNow).status();
  EXPECT_EQ(denied.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(DetailsOf(denied).reason, "PERMISSION_DENIED");
  for (const char* wrong : {"", "abc", "Bearer abd", "Bearer ab", "Bearer  abc", "Basic abc", "Bearer",
                            "Bearerabc", "bearer\tabc"}) {
    const absl::Status status = tokens->Check(wrong, Role::kInference, kNow).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << wrong;
    EXPECT_EQ(DetailsOf(status).reason, "UNAUTHENTICATED");
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("abc")));
  }
  EXPECT_EQ(Code(*tokens, "Bearer ", Role::kAdmin), absl::StatusCode::kOk) << "the empty token was asked for";
  EXPECT_EQ(Code(*tokens, "", Role::kAdmin), absl::StatusCode::kUnauthenticated) << "but has to be sent";
}

TEST(Tokens, ATokenExpires) {
  const auto tokens = Tokens::Parse(std::string("a ") + kAbc + " admin expires=2027-01-15T08:00:01Z", "f");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_TRUE(tokens->Check("Bearer abc", Role::kAdmin, kNow).ok());
  EXPECT_EQ(tokens->Check("Bearer abc", Role::kAdmin, kNow + absl::Seconds(1)).status().code(),
            absl::StatusCode::kUnauthenticated);
}

TEST(Tokens, NamesTheLineThatIsWrongAndNoHash) {
  const std::string hash = kAbc;
  const struct {
    std::string text, expected;
  } cases[] = {
      {"a", "f:1: behind the name"},
      {"\n\na/b " + hash + " admin", "f:3: the name"},
      {std::string(65, 'a') + " " + hash + " admin", "f:1: the name"},
      {"a md5:00 admin", "sha256: and 64"},
      {"a " + hash + "00 admin", "sha256: and 64"},
      {"a sha256:" + std::string(64, 'g') + " admin", "no hexadecimal digit"},
      {"a " + hash, "must stand roles"},
      {"a " + hash + " root", "must stand roles"},
      {"a " + hash + " admin,", "must stand roles"},
      {"a " + hash + " admin expires=tomorrow", "expires="},
      {"a " + hash + " admin later", "expires="},
      {"a " + hash + " admin expires=2027-01-15T08:00:01Z x", "something follows"},
      {"a " + hash + " admin\nb " + hash + " metrics", "f:2: the hash stands in another line"},
  };
  for (const auto& c : cases) {
    const absl::Status status = Tokens::Parse(c.text, "f").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.expected));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("ba7816")));
  }
}

TEST(TokenStore, FollowsItsFile) {
  const std::string path = ::testing::TempDir() + "tokens_test." + std::to_string(getpid());
  const auto write = [&](const std::string& text) {
    std::ofstream(path + ".new") << text;
    ASSERT_EQ(std::rename((path + ".new").c_str(), path.c_str()), 0);
  };
  EXPECT_FALSE(TokenStore::Open(path).ok());
  write(std::string("a ") + kAbc + " admin\n");
  const auto store = TokenStore::Open(path);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto works = [&] { return (*store)->Check("Bearer abc", Role::kAdmin, kNow).ok(); };
  EXPECT_TRUE(works());
  EXPECT_EQ((*store)->Refresh().value_or(true), false);
  write("nonsense\n");
  EXPECT_FALSE((*store)->Refresh().ok());
  EXPECT_TRUE(works()) << "a broken file changes nothing";
  EXPECT_EQ((*store)->Refresh().value_or(true), false) << "and is complained about once";
  ASSERT_EQ(std::remove(path.c_str()), 0);
  EXPECT_EQ((*store)->Refresh().value_or(true), false);
  EXPECT_TRUE(works());
  write("# nobody\n");
  EXPECT_EQ((*store)->Refresh().value_or(false), true);
  EXPECT_FALSE(works());
  std::remove(path.c_str());
}

}  // namespace
}  // namespace dflash
