// Reads the vectors in tests/vectors/tokenizer_*.jsonl, which tools/vectors/make-tokenizer-vectors.mjs wrote.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace dflash {

struct EncodingVector {
  std::string text;                 // bytes, not always UTF-8
  std::vector<int32_t> ids;         // added tokens as text
  std::vector<int32_t> parsed_ids;  // added tokens parsed; only for UTF-8 texts
  bool utf8;
};

struct SegmentsVector {
  std::vector<std::pair<std::string, bool>> segments;  // text, parse added tokens?
  std::vector<int32_t> ids;
};

struct DecodingVector {
  std::vector<int32_t> ids;
  std::string keep, drop;  // text with and without special tokens
};

struct TokenizerVectors {
  std::vector<EncodingVector> encoding;
  std::vector<SegmentsVector> segments;
  std::vector<DecodingVector> decoding;
};

// `name`: a file of tests/vectors. Ends the test program when it cannot be read.
TokenizerVectors ReadTokenizerVectors(const std::string& name);

}  // namespace dflash
