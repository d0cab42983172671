#include "text/normalizer.h"

#include <utf8proc.h>

#include <random>

#include "gtest/gtest.h"
#include "text/tokenizer.h"
#include "text/tokenizer_vectors.h"
#include "text/utf8.h"

namespace dflash {
namespace {

TEST(NormalizerTest, Literals) {
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"plain", "plain"},
      {"e\u0301", "\u00E9"},
      {"\u00E9", "\u00E9"},
      {"\u212B", "\u00C5"},                                         // Angstrom sign: singleton
      {"q\u0307\u0323", "q\u0323\u0307"},                           // canonical order
      {"s\u0307\u0323", "\u1E69"},                                  // order, then compose twice
      {"a\u0315\u0300\u05AE\u0300b", "\u00E0\u05AE\u0300\u0315b"},  // from Unicode's NormalizationTest.txt
      {"a\u0334\u0301", "\u00E1\u0334"},                            // a mark of a lower class does not block
      {"a\u0302\u0301", "\u1EA5"},                                  // composes with what was composed
      {"a\u0301\u0302", "\u00E1\u0302"},
      {"\u1100\u1161\u11A8", "\uAC01"},  // Hangul
      {"\uAC00\u11A8", "\uAC01"},
      {"\u1FBE\u0308\u0301", "\u0390"},  // what shrinks most
      {"\u0958", "\u0915\u093C"},        // composition exclusion
      {"<\u0338", "\u226E"},
      {"\u0301", "\u0301"},
      {"x\u0301\n\u0301", "x\u0301\n\u0301"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(NormalizeNfc(text), expected) << text;
}

// Byte-level tokens spell the normalized text, so the reference's ids tell what its normalizer answered.
TEST(NormalizerTest, AgreesWithTheReference) {
  const auto tokenizer = Tokenizer::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  size_t changed = 0;
  for (const EncodingVector& vector : ReadTokenizerVectors("tokenizer_tiny.jsonl").encoding) {
    const std::string text = ReplaceIllFormed(vector.text);
    EXPECT_EQ(NormalizeNfc(text), tokenizer->Decode(vector.ids, SpecialTokens::kKeep).value());
    changed += NormalizeNfc(text) != text;
  }
  EXPECT_GT(changed, 200u);
}

// utf8proc_map decomposes, orders and composes on its own path.
TEST(NormalizerTest, AgreesWithUtf8procOnRandomMarks) {
  std::mt19937 random(3);
  const std::u32string alphabet =
      U"aeo "
      U"s\u00E9\u01D5\u0300\u0301\u0308\u0323\u0327\u0334\u0345\u05B0\u093C\u3099\u304B\u1100\u1161\u11A8"
      U"\u1DFA\uFB2C";
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (size_t n = random() % 16; n > 0; --n) {
      utf8proc_uint8_t bytes[4];
      const auto length =
          utf8proc_encode_char(static_cast<utf8proc_int32_t>(alphabet[random() % alphabet.size()]), bytes);
      text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
    }
    utf8proc_uint8_t* mapped = nullptr;
    const utf8proc_ssize_t size = utf8proc_map(
        reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
        &mapped, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    ASSERT_GE(size, 0);
    EXPECT_EQ(NormalizeNfc(text), std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size)));
    std::free(mapped);
  }
}

}  // namespace
}  // namespace dflash
