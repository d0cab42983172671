#include "worker/rpc/frame_reader.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dflash {
namespace {

std::string Bytes(std::initializer_list<int> values) {
  std::string text;
  for (int value : values) text.push_back(static_cast<char>(value));
  return text;
}

TEST(FrameReader, SizesOfFrames) {
  EXPECT_EQ(MakeFrame("abc").value(), Bytes({3, 0, 0, 0}) + "abc");
  EXPECT_EQ(MakeFrame(std::string(0x010203, 'x')).value().substr(0, 4), Bytes({3, 2, 1, 0}));
  EXPECT_EQ(MakeFrame("").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(MakeFrame(std::string(kMaxFrameBytes, 'x')).ok());
  EXPECT_EQ(MakeFrame(std::string(kMaxFrameBytes + 1, 'x')).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(FrameReader, RefusesSizesOutOfRange) {
  const std::pair<std::string, bool> headers[] = {
      {Bytes({0, 0, 0, 0}), false},   {Bytes({1, 0, 0, 1}), false}, {Bytes({255, 255, 255, 255}), false},
      {Bytes({0, 0, 0, 128}), false}, {Bytes({0, 0, 0, 1}), true},  {Bytes({1, 0, 0, 0}), true}};
  for (const auto& [header, usable] : headers) {
    FrameReader reader;
    reader.Append(header);
    EXPECT_EQ(reader.Next().ok(), usable);
  }
  FrameReader small;
  small.set_limit(2);
  small.Append(MakeFrame("ab").value() + MakeFrame("abc").value());
  EXPECT_EQ(small.Next().value(), "ab");
  EXPECT_FALSE(small.Next().ok());
}

// Any frames, cut into any pieces, come out whole and in order.
TEST(FrameReader, AnyPieces) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> frames;
    std::string stream;
    for (unsigned i = 0; i < 1 + random() % 6; ++i) {
      std::string body(1 + random() % (round % 10 == 0 ? 100000 : 40), 0);
      for (char& c : body) c = static_cast<char>(random());
      stream += MakeFrame(body).value();
      frames.push_back(std::move(body));
    }
    FrameReader reader;
    std::vector<std::string> read;
    for (size_t at = 0; at < stream.size();) {
      const size_t n = std::min<size_t>(stream.size() - at, 1 + random() % (random() % 2 == 0 ? 3 : 5000));
      reader.Append(std::string_view(stream).substr(at, n));
      at += n;
      for (;;) {
        const auto frame = reader.Next();
        ASSERT_TRUE(frame.ok());
        if (!frame->has_value()) break;
        read.push_back(**frame);
      }
    }
    EXPECT_EQ(read, frames);
  }
}

// Noise never makes the reader hand out what cannot be a frame, nor hold more than it was given.
TEST(FrameReader, Noise) {
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    FrameReader reader;
    size_t given = 0, taken = 0;
    for (int piece = 0; piece < 8; ++piece) {
      std::string bytes(random() % 12, 0);
      for (char& c : bytes) c = static_cast<char>(random() % 4 == 0 ? random() : 0);
      given += bytes.size();
      reader.Append(bytes);
      const auto frame = reader.Next();
      if (!frame.ok()) break;
      if (!frame->has_value()) continue;
      taken += kFrameHeaderBytes + (*frame)->size();
      ASSERT_GE((*frame)->size(), 1u);
      ASSERT_LE(taken, given);
    }
  }
}

}  // namespace
}  // namespace dflash
