// Certificates made for a test: an authority, and what it signs.
#pragma once

#include <memory>
#include <string>

namespace dflash::integration {

struct CertificatePair {
  std::string certificate, key;  // PEM
};

class Authority {
 public:
  explicit Authority(const std::string& name);
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  const std::string& certificate() const { return certificate_; }  // PEM
  // Valid for an hour, or until an hour ago, for the hosts localhost and 127.0.0.1.
  CertificatePair Issue(const std::string& common_name, bool expired = false) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::string certificate_;
};

}  // namespace dflash::integration
