#include "base/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <array>
#include <cstdint>

#include "base/check.h"

namespace dflash {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  DFLASH_CHECK(state_->context != nullptr && EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

Sha256& Sha256::Add(std::string_view bytes) {
  std::array<unsigned char, 8> length{};
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<unsigned char>(static_cast<uint64_t>(bytes.size()) >> (8 * i));
  }
  DFLASH_CHECK(EVP_DigestUpdate(state_->context, length.data(), length.size()) == 1);
  return Append(bytes);
}

Sha256& Sha256::Append(std::string_view bytes) {
  DFLASH_CHECK(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
  return *this;
}

std::string Sha256::HexDigest() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  DFLASH_CHECK(EVP_DigestFinal_ex(state_->context, digest.data(), &size) == 1);
  return ToHex(std::string_view(reinterpret_cast<const char*>(digest.data()), size));
}

std::string HmacSha256(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  DFLASH_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                    reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data(),
                    &size) != nullptr);
  return std::string(reinterpret_cast<const char*>(digest.data()), size);
}

std::string ToHex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text.push_back(kDigits[static_cast<unsigned char>(byte) >> 4]);
    text.push_back(kDigits[static_cast<unsigned char>(byte) & 15]);
  }
  return text;
}

}  // namespace dflash
