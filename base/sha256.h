// SHA-256 of byte sequences, for revisions and plan hashes.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace dflash {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  // Appends the length of `bytes` and then `bytes`, so that two different lists of parts never hash alike.
  Sha256& Add(std::string_view bytes);
  // Appends `bytes` alone: of the parts of a file the digest is the file's, as any other program has it.
  Sha256& Append(std::string_view bytes);
  // 64 lower-case hexadecimal digits. Ends the use of the object.
  std::string HexDigest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// HMAC-SHA256, 32 bytes.
std::string HmacSha256(std::string_view key, std::string_view text);

// The same digits for the same bytes: 64 lower-case ones for a digest.
std::string ToHex(std::string_view bytes);

}  // namespace dflash
