#include "worker/model/safetensors.h"

#include <unistd.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/testing/safetensors_writer.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class SafetensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<SafetensorsFile> Open(const std::string& bytes) {
    folder_.Write("w.safetensors", bytes);
    return SafetensorsFile::Open(folder_.File("w.safetensors"));
  }
  // Every error has to name the file.
  std::string Message(const absl::Status& status) {
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder_.path()));
    return std::string(status.message());
  }
  TemporaryFolder folder_;
};

TEST_F(SafetensorsTest, ReadsTheTinyPair) {
  const std::string models = std::string(DFLASHD_SOURCE_DIR) + "/models/";
  const auto drafter = SafetensorsFolder::Open(models + "tiny-qwen3.6-dflash");
  ASSERT_TRUE(drafter.ok()) << drafter.status();
  EXPECT_THAT(drafter->tensors(), SizeIs(47));
  EXPECT_THAT(drafter->files(), SizeIs(1));
  const auto target = SafetensorsFolder::Open(models + "tiny-qwen3.6");
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_THAT(target->tensors(), SizeIs(124));
  EXPECT_THAT(target->files(), SizeIs(2));
  const auto a_log = target->tensors().at("model.language_model.layers.1.linear_attn.A_log");
  EXPECT_EQ(a_log.tensor->dtype, "F32");
  EXPECT_THAT(a_log.tensor->shape, ElementsAre(12));
  const auto conv = target->tensors().at("model.language_model.layers.1.linear_attn.conv1d.weight");
  EXPECT_THAT(conv.tensor->shape, ElementsAre(640, 1, 4));
  EXPECT_EQ(conv.tensor->rows(), 640);
  EXPECT_EQ(conv.tensor->cols(), 4);
  // The sum that the index file states.
  EXPECT_EQ(std::accumulate(target->tensors().begin(), target->tensors().end(), int64_t{0},
                            [](int64_t sum, const auto& entry) { return sum + entry.second.tensor->bytes; }),
            17550400);
}

TEST_F(SafetensorsTest, AcceptsEmptyTensorsScalarsPaddingAndAnyOrder) {
  const auto file = Open(RawSafetensors(R"({
    "late": {"dtype": "F32", "shape": [1, 2], "data_offsets": [3, 11]},
    "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [3, 3]},
    "first": {"shape": [3], "data_offsets": [0, 3], "dtype": "U8"},
    "scalar": {"dtype": "BF16", "shape": [], "data_offsets": [11, 13]},
    "__metadata__": {}}        )",
                                        "abcdefghijklm"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_THAT(file->tensors(), SizeIs(4));
  EXPECT_EQ(file->tensors()[0].name, "first");
  const StoredTensor* late = file->Find("late");
  ASSERT_NE(late, nullptr);
  EXPECT_EQ(file->Find("lat"), nullptr);
  std::string bytes(8, '\0');
  ASSERT_TRUE(file->Read(*late, {0, 1, 0, 2}, bytes.data(), 8).ok());  // begins at an odd offset
  EXPECT_EQ(bytes, "defghijk");
  const StoredTensor* scalar = file->Find("scalar");
  EXPECT_EQ(scalar->rows(), 1);
  EXPECT_EQ(scalar->cols(), 1);
  ASSERT_TRUE(file->Read(*scalar, {0, 1, 0, 1}, bytes.data(), 2).ok());
  EXPECT_EQ(bytes.substr(0, 2), "lm");
  EXPECT_TRUE(file->Read(*file->Find("none"), {0, 0, 0, 7}, nullptr, 0).ok());
  EXPECT_TRUE(Open(RawSafetensors("{}", "")).ok());
}

struct BrokenHeader {
  const char* header;
  int data_bytes;
  const char* message;
};

// 12 bytes of data unless the row says otherwise. Every row differs from a good header in one thing.
constexpr BrokenHeader kBrokenHeaders[] = {
    {R"( {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", 12, "does not begin with {"},
    {R"([])", 0, "does not begin with {"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]})", 12, "not valid JSON"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}} x)", 12, "not valid JSON"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12],}})", 12, "not valid JSON"},
    {"{\"\xff\": {\"dtype\": \"F32\", \"shape\": [3], \"data_offsets\": [0, 12]}}", 12, "not valid JSON"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "a": {"dtype": "F32", "shape": [0], "data_offsets": [12, 12]}})",
     12, "a: the key appears twice"},
    {R"({"a": {"dtype": "F32", "dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", 12,
     "a.dtype: the key appears twice"},
    {R"({"a": {"dtype": "F32", "shape": [[[[3]]]], "data_offsets": [0, 12]}})", 12, "nested deeper than 4"},
    {R"({"a": 12})", 12, "tensor a: expected an object, found an integer"},
    {R"({"a": null})", 0, "tensor a: expected an object, found null"},
    {R"({"a": ["F32", [3], [0, 12]]})", 12, "tensor a: expected an object"},
    {R"({"a": {"shape": [3], "data_offsets": [0, 12]}})", 12, "tensor a: dtype is missing"},
    {R"({"a": {"dtype": 32, "shape": [3], "data_offsets": [0, 12]}})", 12,
     "tensor a: dtype is missing or no string"},
    {R"({"a": {"dtype": "f32", "shape": [3], "data_offsets": [0, 12]}})", 12, "tensor a: unknown dtype f32"},
    {R"({"a": {"dtype": "", "shape": [3], "data_offsets": [0, 12]}})", 12, "tensor a: unknown dtype"},
    {R"({"a": {"dtype": "F128", "shape": [3], "data_offsets": [0, 48]}})", 48,
     "tensor a: unknown dtype F128"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], "x": 1}})", 12,
     "tensor a: unknown key x"},
    {R"({"a": {"dtype": "F32", "data_offsets": [0, 12]}})", 12, "tensor a: shape is missing"},
    {R"({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 12]}})", 12,
     "tensor a: shape is missing or no list"},
    {R"({"a": {"dtype": "F32", "shape": "3", "data_offsets": [0, 12]}})", 12,
     "tensor a: shape is missing or no list"},
    {R"({"a": {"dtype": "F32", "shape": [3.0], "data_offsets": [0, 12]}})", 12,
     "tensor a: shape is missing or no list"},
    {R"({"a": {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]}})", 12,
     "tensor a: shape is missing or no list"},
    {R"({"a": {"dtype": "F32", "shape": [-1, -3], "data_offsets": [0, 12]}})", 12,
     "tensor a: shape is missing"},
    {R"({"a": {"dtype": "F32", "shape": ["3"], "data_offsets": [0, 12]}})", 12, "tensor a: shape is missing"},
    {R"({"a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,3], "data_offsets": [0, 12]}})", 12,
     "at most 8 sizes"},
    {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}})", 12,
     "hold 12 bytes, but F32 [2] needs 8"},
    {R"({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}})", 12,
     "hold 12 bytes, but F32 [4] needs 16"},
    {R"({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 12]}})", 12, "but BF16 [3] needs 6"},
    {R"({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 12]}})", 12, "but F32 [0] needs 0"},
    {R"({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 12]}})", 12, "but F32 [] needs 4"},
    {R"({"a": {"dtype": "F32", "shape": [9223372036854775807], "data_offsets": [0, 12]}})", 12,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}})", 0,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}})", 0,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [0, 4294967296, 4294967296], "data_offsets": [0, 0]}})", 0,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [18446744073709551616], "data_offsets": [0, 0]}})", 0,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [3]}})", 12, "tensor a: data_offsets is missing"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": 12}})", 12,
     "tensor a: data_offsets is missing or no"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [12]}})", 12,
     "tensor a: data_offsets is missing or no"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 6, 12]}})", 12,
     "tensor a: data_offsets is missing or no"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [12, 0]}})", 12, "no ascending pair"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [-12, 0]}})", 12, "no ascending pair"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0.0, 12.0]}})", 12, "no ascending pair"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": ["0", "12"]}})", 12, "no ascending pair"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 9223372036854775808]}})", 12,
     "does not fit in 64 bits"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [9223372036854775795, 9223372036854775807]}})",
     12, "a hole"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}})", 16,
     "tensor a begins at 4, but the header ends at 0: a hole"},
    {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}})",
     12, "tensor b begins at 8, but tensor a ends at 4: a hole"},
    {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})",
     12, "tensor b begins at 4, but tensor a ends at 8: they overlap"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})",
     12, "they overlap"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "b": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}})",
     12, "they overlap"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", 11,
     "truncated: its tensors end at byte 12"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", 0,
     "truncated: its tensors end at byte 12"},
    {R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})", 13,
     "1 bytes after the data of the last tensor"},
    {R"({})", 1, "1 bytes after the data of the last tensor"},
    {R"({"__metadata__": "pt"})", 0, "__metadata__ is no object of strings"},
    {R"({"__metadata__": {"format": 1}})", 0, "__metadata__ is no object of strings"},
    {R"({"__metadata__": null})", 0, "__metadata__ is no object of strings"},
};

TEST_F(SafetensorsTest, RefusesBrokenHeaders) {
  const char* good = R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})";
  ASSERT_TRUE(Open(RawSafetensors(good, std::string(12, 'x'))).ok());
  for (const BrokenHeader& broken : kBrokenHeaders) {
    SCOPED_TRACE(broken.header);
    const auto file = Open(RawSafetensors(broken.header, std::string(broken.data_bytes, 'x')));
    EXPECT_THAT(Message(file.status()), HasSubstr(broken.message));
  }
}

TEST_F(SafetensorsTest, RefusesBrokenLengths) {
  const auto with_length = [](uint64_t length, const std::string& rest) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>((length >> (8 * i)) & 255));
    return bytes + rest;
  };
  EXPECT_THAT(Message(Open("").status()), HasSubstr("0 bytes; expected at least the 8 bytes"));
  EXPECT_THAT(Message(Open("1234567").status()), HasSubstr("7 bytes; expected"));
  EXPECT_THAT(Message(Open(with_length(0, "{}")).status()), HasSubstr("a header of 0 bytes"));
  EXPECT_THAT(Message(Open(with_length(1, "{}")).status()), HasSubstr("a header of 1 bytes"));
  EXPECT_THAT(Message(Open(with_length(3, "{}")).status()),
              HasSubstr("truncated: the header needs 11 bytes, the file has 10"));
  EXPECT_THAT(Message(Open(with_length(100'000'001, "{}")).status()),
              HasSubstr("a header of 100000001 bytes"));
  EXPECT_THAT(Message(Open(with_length(uint64_t{1} << 63, "{}")).status()),
              HasSubstr("a header of 9223372036854775808"));
  EXPECT_THAT(Message(Open(with_length(~uint64_t{0}, "{}")).status()),
              HasSubstr("a header of 18446744073709551615"));
  EXPECT_THAT(Message(Open("version https://git-lfs.github.com/spec/v1\n").status()),
              HasSubstr("is it a safetensors file?"));
}

// Every prefix of a good file is an error, and never a crash.
TEST_F(SafetensorsTest, RefusesEveryTruncation) {
  const std::string good = Safetensors({{"a", "F32", {3}, ""}, {"b", "BF16", {2, 2}, ""}});
  ASSERT_TRUE(Open(good).ok());
  for (size_t size = 0; size < good.size(); ++size) {
    SCOPED_TRACE(size);
    EXPECT_EQ(Open(good.substr(0, size)).status().code(), absl::StatusCode::kDataLoss);
  }
}

// Any single byte of the header may change: the result is an error or another well-formed file, and a
// well-formed file can be read to its end.
TEST_F(SafetensorsTest, SurvivesEveryChangedByte) {
  const std::string good = Safetensors({{"a", "F32", {3}, ""}, {"b", "BF16", {2, 2}, ""}});
  const size_t data_bytes = 20;
  std::string buffer(1 << 10, '\0');
  for (size_t i = 0; i < good.size() - data_bytes; ++i) {
    for (const char byte : {'9', '}', static_cast<char>(good[i] ^ 1)}) {
      std::string changed = good;
      changed[i] = byte;
      const auto file = Open(changed);
      if (!file.ok()) {
        Message(file.status());
        continue;
      }
      for (const StoredTensor& tensor : file->tensors()) {
        ASSERT_LE(tensor.bytes, static_cast<int64_t>(data_bytes));
        ASSERT_TRUE(
            file->Read(tensor, {0, tensor.rows(), 0, tensor.cols()}, buffer.data(), tensor.bytes).ok());
      }
    }
  }
}

TEST_F(SafetensorsTest, ReadsBlocks) {
  const auto file = Open(Safetensors({{"pad", "U8", {5}, ""}, {"m", "BF16", {4, 2, 3}, ""}}));  // m: 4 x 6
  ASSERT_TRUE(file.ok()) << file.status();
  const StoredTensor& m = *file->Find("m");
  const auto read = [&](const TensorBlock& block) {
    std::string bytes(block.row_count * block.col_count * 2, '\0');
    const absl::Status status = file->Read(m, block, bytes.data(), static_cast<int64_t>(bytes.size()));
    EXPECT_TRUE(status.ok()) << status;
    return std::vector<int>(bytes.begin(), bytes.end());
  };
  EXPECT_THAT(read({1, 1, 0, 6}), ElementsAre(12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23));
  EXPECT_THAT(read({0, 4, 5, 1}), ElementsAre(10, 11, 22, 23, 34, 35, 46, 47));
  EXPECT_THAT(read({2, 2, 1, 2}), ElementsAre(26, 27, 28, 29, 38, 39, 40, 41));
  EXPECT_THAT(read({4, 0, 0, 6}), ElementsAre());
  EXPECT_THAT(read({0, 4, 6, 0}), ElementsAre());

  std::string buffer(64, '\0');
  for (const TensorBlock& outside : std::vector<TensorBlock>{{0, 5, 0, 6},
                                                             {4, 1, 0, 6},
                                                             {-1, 1, 0, 6},
                                                             {0, -1, 0, 6},
                                                             {0, 1, 0, 7},
                                                             {0, 1, 6, 1},
                                                             {0, 1, -1, 1},
                                                             {0, 1, 0, -1},
                                                             {INT64_MAX, 1, 0, 6},
                                                             {1, INT64_MAX, 0, 6}}) {
    EXPECT_THAT(Message(file->Read(m, outside, buffer.data(), 12)), HasSubstr("are not inside 4 x 6"));
  }
  EXPECT_THAT(Message(file->Read(m, {0, 1, 0, 6}, buffer.data(), 11)),
              HasSubstr("a buffer of 11 bytes for 12"));
  EXPECT_THAT(Message(file->Read(m, {0, 1, 0, 6}, buffer.data(), 13)),
              HasSubstr("a buffer of 13 bytes for 12"));
}

TEST_F(SafetensorsTest, ReportsProgressInBytes) {
  const int64_t rows = 5, cols = int64_t{4} << 20;  // 20 MiB: more than two chunks
  const auto file = Open(Safetensors({{"a", "U8", {rows, cols}, std::string(rows * cols, 'x')}}));
  ASSERT_TRUE(file.ok()) << file.status();
  std::string buffer(rows * cols, '\0');
  std::vector<int64_t> calls;
  const ReadProgress progress = [&](int64_t bytes) { calls.push_back(bytes); };
  ASSERT_TRUE(file->Read(file->tensors()[0], {0, rows, 0, cols}, buffer.data(), rows * cols, progress).ok());
  EXPECT_THAT(calls, ElementsAre(8 << 20, 8 << 20, 4 << 20));
  calls.clear();
  ASSERT_TRUE(file->Read(file->tensors()[0], {0, rows, 0, 10}, buffer.data(), rows * 10, progress).ok());
  EXPECT_EQ(std::accumulate(calls.begin(), calls.end(), int64_t{0}), rows * 10);
}

TEST_F(SafetensorsTest, NoticesAFileThatShrinksWhileOpen) {
  const auto file = Open(Safetensors({{"a", "F32", {3}, ""}, {"b", "F32", {3}, ""}}));
  ASSERT_TRUE(file.ok()) << file.status();
  std::filesystem::resize_file(folder_.File("w.safetensors"),
                               std::filesystem::file_size(folder_.File("w.safetensors")) - 1);
  std::string buffer(12, '\0');
  EXPECT_TRUE(file->Read(*file->Find("a"), {0, 3, 0, 1}, buffer.data(), 12).ok());
  const absl::Status status = file->Read(*file->Find("b"), {0, 3, 0, 1}, buffer.data(), 12);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("tensor b"), HasSubstr("ends after 11 of them")));
}

// Offsets beyond 32 bits, in a file with a hole on disk.
TEST_F(SafetensorsTest, ReadsBeyondFourGibibytes) {
  const std::string header =
      R"({"big": {"dtype": "U8", "shape": [5368709120], "data_offsets": [0, 5368709120]},)"
      R"( "end": {"dtype": "BF16", "shape": [2], "data_offsets": [5368709120, 5368709124]}})";
  const std::string path = folder_.File("w.safetensors");
  folder_.Write("w.safetensors", RawSafetensors(header, ""));
  const int64_t end = 8 + static_cast<int64_t>(header.size()) + 5368709120;
  std::error_code error;
  std::filesystem::resize_file(path, end, error);
  if (error) GTEST_SKIP() << "no sparse files here: " << error.message();
  FILE* out = std::fopen(path.c_str(), "ab");
  std::fputs("WXYZ", out);
  std::fclose(out);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::string bytes(4, '\0');
  ASSERT_TRUE(file->Read(*file->Find("end"), {0, 2, 0, 1}, bytes.data(), 4).ok());
  EXPECT_EQ(bytes, "WXYZ");
  ASSERT_TRUE(file->Read(*file->Find("big"), {5368709118, 2, 0, 1}, bytes.data(), 2).ok());
  EXPECT_EQ(bytes, std::string("\0\0YZ", 4));
}

TEST_F(SafetensorsTest, RefusesWhatIsNoRegularFile) {
  EXPECT_EQ(SafetensorsFile::Open(folder_.path()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open(folder_.File("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
}

// --- Folders
// --------------------------------------------------------------------------------------------------------

class SafetensorsFolderTest : public SafetensorsTest {
 protected:
  void SetUp() override {
    folder_.Write("s1.safetensors", Safetensors({{"a", "F32", {3}, ""}, {"b", "BF16", {2, 2}, ""}}));
    folder_.Write("s2.safetensors", Safetensors({{"c", "U8", {4}, "wxyz"}}));
    WriteIndex({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", "s2.safetensors"}});
  }
  void WriteIndex(const std::map<std::string, std::string>& weight_map) {
    folder_.Write("model.safetensors.index.json", SafetensorsIndex(weight_map));
  }
  std::string Error() { return Message(SafetensorsFolder::Open(folder_.path()).status()); }
};

TEST_F(SafetensorsFolderTest, ReadsRowsThroughTheIndex) {
  auto opened = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const SafetensorsFolder weights = *std::move(opened);  // entries survive a move
  EXPECT_THAT(weights.tensors(), SizeIs(3));
  std::string bytes(2, '\0');
  ASSERT_TRUE(weights.ReadRows("c", 1, 2, bytes.data(), 2).ok());
  EXPECT_EQ(bytes, "xy");
  EXPECT_EQ(weights.ReadRows("d", 0, 1, bytes.data(), 1).code(), absl::StatusCode::kNotFound);
}

TEST_F(SafetensorsFolderTest, FollowsLinksToShards) {
  TemporaryFolder links;
  links.LinkAll(folder_.path());
  EXPECT_TRUE(SafetensorsFolder::Open(links.path()).ok());
}

TEST_F(SafetensorsFolderTest, IndexAndShardsHaveToAgree) {
  WriteIndex({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}});
  EXPECT_TRUE(SafetensorsFolder::Open(folder_.path()).ok());  // a shard that is not listed is not ours
  WriteIndex({{"a", "s1.safetensors"}, {"c", "s2.safetensors"}});
  EXPECT_THAT(Error(), AllOf(HasSubstr("index.json"),
                             HasSubstr("s1.safetensors holds tensor b, which weight_map lacks")));
  WriteIndex({{"a", "s1.safetensors"}, {"b", "s2.safetensors"}, {"c", "s2.safetensors"}});
  EXPECT_THAT(Error(),
              AllOf(HasSubstr("weight_map.b: s2.safetensors"), HasSubstr("s1.safetensors holds it")));
  WriteIndex(
      {{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", "s2.safetensors"}, {"d", "s2.safetensors"}});
  EXPECT_THAT(Error(), AllOf(HasSubstr("weight_map.d"), HasSubstr("s2.safetensors has no such tensor")));
  WriteIndex({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", "s3.safetensors"}});
  EXPECT_THAT(Error(),
              AllOf(HasSubstr("index.json"), HasSubstr("s3.safetensors"), HasSubstr("No such file")));
}

TEST_F(SafetensorsFolderTest, ATensorInTwoShardsIsRefused) {
  folder_.Write("s2.safetensors", Safetensors({{"b", "U8", {1}, ""}, {"c", "U8", {4}, ""}}));
  EXPECT_THAT(Error(),
              AllOf(HasSubstr("weight_map.b: s1.safetensors"), HasSubstr("s2.safetensors holds it")));
}

TEST_F(SafetensorsFolderTest, ABrokenShardIsNamed) {
  folder_.Write("s2.safetensors", "short");
  EXPECT_THAT(Error(), AllOf(HasSubstr("s2.safetensors"), HasSubstr("5 bytes")));
}

TEST_F(SafetensorsFolderTest, FileNamesStayInTheFolder) {
  TemporaryFolder outside;
  outside.Write("c.safetensors", Safetensors({{"c", "U8", {4}, ""}}));
  for (const std::string& name :
       {outside.File("c.safetensors"), std::string("../") + folder_.path().substr(5) + "/s2.safetensors",
        std::string("./s2.safetensors"), std::string("sub/s2.safetensors"),
        std::string("..\\\\s2.safetensors"), std::string(".safetensors"), std::string("..safetensors"),
        std::string(""), std::string("s2.bin"), std::string("s2.safetensors\\u0000"),
        std::string("s2\\n.safetensors"), std::string(300, 'x') + ".safetensors"}) {
    SCOPED_TRACE(name);
    WriteIndex({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", name}});
    EXPECT_THAT(Error(), AllOf(HasSubstr("weight_map.c"),
                               HasSubstr("is no name of a .safetensors file in this folder")));
  }
}

TEST_F(SafetensorsFolderTest, RefusesBrokenIndexes) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"[]", "weight_map is missing"},
      {"{}", "weight_map is missing"},
      {R"({"metadata": {}})", "weight_map is missing"},
      {R"({"weight_map": []})", "weight_map is missing or no object"},
      {R"({"weight_map": {}})", "weight_map is empty"},
      {R"({"weight_map": {"a": 1}})", "weight_map.a"},
      {R"({"weight_map": {"a": null}})", "weight_map.a"},
      {R"({"weight_map": {"a": ["s1.safetensors"]}})", "weight_map.a"},
      {R"({"weight_map": {"a": "s1.safetensors", "a": "s1.safetensors"}})",
       "weight_map.a: the key appears twice"},
      {R"({"weight_map": {"a": "s1.safetensors"}, "weightmap": 1})", "unknown key weightmap"},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(text);
    folder_.Write("model.safetensors.index.json", text);
    EXPECT_THAT(Error(), AllOf(HasSubstr("model.safetensors.index.json"), HasSubstr(message)));
  }
}

TEST_F(SafetensorsFolderTest, OneSourceOfWeightsOnly) {
  folder_.Write("model.safetensors", Safetensors({{"a", "F32", {3}, ""}}));
  EXPECT_THAT(Error(), HasSubstr("both model.safetensors and model.safetensors.index.json"));
  std::filesystem::remove(folder_.File("model.safetensors.index.json"));
  EXPECT_TRUE(SafetensorsFolder::Open(folder_.path()).ok());
  std::filesystem::remove(folder_.File("model.safetensors"));
  EXPECT_THAT(Error(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  EXPECT_EQ(SafetensorsFolder::Open(folder_.File("none")).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace dflash
