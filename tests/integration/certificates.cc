#include "tests/integration/certificates.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "base/check.h"

namespace dflash::integration {
namespace {

EVP_PKEY* MakeKey() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  DFLASH_CHECK(key != nullptr);
  return key;
}

std::string TakeText(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

std::string Pem(X509* certificate) {
  BIO* bio = BIO_new(BIO_s_mem());
  DFLASH_CHECK(PEM_write_bio_X509(bio, certificate) == 1);
  return TakeText(bio);
}

std::string Pem(EVP_PKEY* key) {
  BIO* bio = BIO_new(BIO_s_mem());
  DFLASH_CHECK(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return TakeText(bio);
}

void AddExtension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
  DFLASH_CHECK(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1, value);
  X509_EXTENSION_free(extension);
}

X509* MakeCertificate(const std::string& name, EVP_PKEY* key, X509* issuer, bool expired) {
  static long serial = 1;
  X509* certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate), expired ? -7200 : -60);
  X509_gmtime_adj(X509_getm_notAfter(certificate), expired ? -3600 : 3600);
  X509_NAME* subject = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.data()),
                             static_cast<int>(name.size()), -1, 0);
  X509_set_issuer_name(certificate, issuer == nullptr ? subject : X509_get_subject_name(issuer));
  X509_set_pubkey(certificate, key);
  return certificate;
}

}  // namespace

struct Authority::State {
  EVP_PKEY* key = nullptr;
  X509* certificate = nullptr;
};

Authority::Authority(const std::string& name) : state_(std::make_unique<State>()) {
  state_->key = MakeKey();
  state_->certificate = MakeCertificate(name, state_->key, nullptr, false);
  AddExtension(state_->certificate, state_->certificate, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(state_->certificate, state_->certificate, NID_key_usage, "critical,keyCertSign,cRLSign");
  DFLASH_CHECK(X509_sign(state_->certificate, state_->key, EVP_sha256()) > 0);
  certificate_ = Pem(state_->certificate);
}

Authority::~Authority() {
  X509_free(state_->certificate);
  EVP_PKEY_free(state_->key);
}

CertificatePair Authority::Issue(const std::string& common_name, bool expired) const {
  EVP_PKEY* key = MakeKey();
  X509* certificate = MakeCertificate(common_name, key, state_->certificate, expired);
  AddExtension(certificate, state_->certificate, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
  DFLASH_CHECK(X509_sign(certificate, state_->key, EVP_sha256()) > 0);
  CertificatePair pair = {Pem(certificate), Pem(key)};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pair;
}

}  // namespace dflash::integration
