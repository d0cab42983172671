#include "base/regular_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

class RegularFileTest : public ::testing::Test {
 protected:
  RegularFileTest() {
    const int descriptor = mkstemp(path_.data());
    EXPECT_EQ(write(descriptor, "hello", 5), 5);
    close(descriptor);
  }
  ~RegularFileTest() override { unlink(path_.c_str()); }
  std::string path_ = ::testing::TempDir() + "dflashd-file-XXXXXX";
};

TEST_F(RegularFileTest, ReadsWholeAndByRanges) {
  EXPECT_EQ(*ReadFile(path_, 5), "hello");
  auto opened = RegularFile::Open(path_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  RegularFile file = *std::move(opened);
  EXPECT_EQ(file.size(), 5);
  EXPECT_EQ(file.path(), path_);
  char bytes[3];
  ASSERT_TRUE(file.ReadAt(1, 3, bytes).ok());
  EXPECT_EQ(std::string(bytes, 3), "ell");
  EXPECT_TRUE(file.ReadAt(5, 0, bytes).ok());
  const absl::Status status = file.ReadAt(3, 3, bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::string(status.message()),
            path_ + ": expected 3 bytes at offset 3, the file ends after 2 of them");
}

TEST_F(RegularFileTest, ErrorsNameThePath) {
  EXPECT_EQ(std::string(ReadFile(path_, 4).status().message()), path_ + ": 5 bytes; at most 4 are accepted");
  const absl::Status missing = ReadFile(path_ + "x", 4).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(missing.message()), path_ + "x: No such file or directory");
  EXPECT_EQ(ReadFile(path_ + "/x", 4).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(ReadFile("/", 4).status().message()), "/: not a regular file");
  const std::string loop = path_ + ".loop";
  ASSERT_EQ(symlink(loop.c_str(), loop.c_str()), 0);
  const absl::Status endless = ReadFile(loop, 4).status();
  unlink(loop.c_str());
  EXPECT_EQ(endless.code(), absl::StatusCode::kInvalidArgument) << "no fault of the device";
  EXPECT_EQ(std::string(endless.message()), loop + ": Too many levels of symbolic links");
}

TEST_F(RegularFileTest, APipeDoesNotHang) {
  const std::string pipe = path_ + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(RegularFile::Open(pipe).status().code(), absl::StatusCode::kInvalidArgument);
  unlink(pipe.c_str());
}

// SHA-256 over (8-byte length, bytes); the expected values come from `printf '\3\0\0\0\0\0\0\0abc' |
// sha256sum` and the like.
TEST(Sha256Test, HashesPartsWithTheirLengths) {
  EXPECT_EQ(Sha256().Add("abc").HexDigest(),
            "ce91dc5eec0139adf091900d225971d6ad246a845bad791b5693a9d0d55dd391");
  EXPECT_EQ(Sha256().Add("a").Add("bc").HexDigest(),
            "9a8acca1b6c6c0befd3fbc756aed625da998c998f7252e738c4ef061906b9b21");
  // Parts of a file, without their lengths.
  EXPECT_EQ(Sha256().Append("a").Append("bc").HexDigest(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().HexDigest(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

}  // namespace
}  // namespace dflash
