#include "daemon/rpc/credentials.h"

#include <grpc/grpc.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/support/server_interceptor.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <ctime>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

constexpr int64_t kMaxPemBytes = 1 << 20;

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Bio = std::unique_ptr<BIO, Deleter<BIO, BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;

absl::StatusOr<Bio> Open(const std::string& path, std::string* text) {
  DFLASH_ASSIGN_OR_RETURN(*text, ReadFile(path, kMaxPemBytes));
  return Bio(BIO_new_mem_buf(text->data(), static_cast<int>(text->size())));
}

absl::StatusOr<Certificate> ReadCertificate(const std::string& path) {
  std::string text;
  DFLASH_ASSIGN_OR_RETURN(const Bio bio, Open(path, &text));
  Certificate certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  if (certificate == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, ": no PEM certificate"));
  return certificate;
}

// gRPC itself says nothing when files are bad: every handshake fails.
absl::Status CheckFiles(const TlsFiles& files) {
  DFLASH_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate(files.certificate));
  std::string text;
  DFLASH_ASSIGN_OR_RETURN(const Bio bio, Open(files.key, &text));
  char no_passphrase[] = "";  // instead of asking on the terminal
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, no_passphrase));
  const bool match = key != nullptr && X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (key == nullptr)
    return absl::InvalidArgumentError(absl::StrCat(files.key, ": no PEM key without passphrase"));
  if (!match) {
    return absl::InvalidArgumentError(absl::StrCat(files.key, ": is not the key of ", files.certificate));
  }
  return files.client_ca.empty() ? absl::OkStatus() : ReadCertificate(files.client_ca).status();
}

// "ipv4:10.0.0.1:1234", "ipv6:%5B::1%5D:1234" -> without the port: all connections of one host are one
// client.
std::string PeerHost(const std::string& peer) {
  const size_t colon = peer.rfind(':');
  return peer.rfind("ip", 0) == 0 && colon != std::string::npos ? peer.substr(0, colon) : peer;
}

// Ends a call with a status before its handler can answer: one of grpc.reflection, which is not ours.
class ReflectionRefusal final : public grpc::experimental::Interceptor {
 public:
  ReflectionRefusal(grpc::experimental::ServerRpcInfo* info, const ReflectionPolicy& policy, Role role)
      : info_(info), policy_(policy), role_(role) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      const absl::Status allowed = Check();
      if (!allowed.ok()) {
        // TryCancel with a status of our own; gRPC copies the text.
        grpc_call_cancel_with_status(info_->server_context()->c_call(),
                                     static_cast<grpc_status_code>(allowed.code()),
                                     std::string(allowed.message()).c_str(), nullptr);
      }
    }
    methods->Proceed();
  }

 private:
  absl::Status Check() const {
    if (!policy_.open) return absl::UnimplementedError("reflection is off");
    return Authorize(policy_.tokens, *info_->server_context(), role_).status();
  }

  grpc::experimental::ServerRpcInfo* const info_;
  const ReflectionPolicy policy_;
  const Role role_;
};

class ReflectionGuard final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  ReflectionGuard(const ReflectionPolicy& policy, Role role) : policy_(policy), role_(role) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    const bool reflection = std::string_view(info->method()).starts_with("/grpc.reflection.");
    // gRPC owns it; other calls have none.
    return reflection ? new ReflectionRefusal(info, policy_, role_) : nullptr;
  }

 private:
  const ReflectionPolicy policy_;
  const Role role_;
};

// As HTTP/2 counts them (RFC 9113, 6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE).
size_t MetadataBytes(const grpc::ServerContextBase& context) {
  constexpr size_t kEntryBytes = 32;
  size_t bytes = 0;
  for (const auto& [key, value] : context.client_metadata()) bytes += key.size() + value.size() + kEntryBytes;
  return bytes;
}

}  // namespace

void GuardReflection(grpc::ServerBuilder* builder, const ReflectionPolicy& policy, Role role) {
  if (policy.open && policy.tokens == nullptr) return;
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<ReflectionGuard>(policy, role));
  builder->experimental().SetInterceptorCreators(std::move(factories));
}

void SetMetadataLimits(grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytesOfConnection);
#ifdef GRPC_ARG_ABSOLUTE_MAX_METADATA_SIZE  // newer versions refuse at random between the two
  builder->AddChannelArgument(GRPC_ARG_ABSOLUTE_MAX_METADATA_SIZE, kMaxMetadataBytesOfConnection);
#endif
}

absl::StatusOr<absl::Time> CertificateExpiry(const std::string& path) {
  DFLASH_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate(path));
  std::tm end = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &end) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError(absl::StrCat(path, ": the certificate has no end"));
  }
  return absl::FromTM(end, absl::UTCTimeZone());
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const TlsFiles& files) {
  if (files.certificate.empty() && files.key.empty() && files.client_ca.empty()) {
    return grpc::InsecureServerCredentials();
  }
  if (files.certificate.empty() || files.key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key go together, and --tls-client-ca needs both");
  }
  DFLASH_RETURN_IF_ERROR(CheckFiles(files));
  namespace tls = grpc::experimental;
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.client_ca, files.refresh_seconds));
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(options);
}

absl::StatusOr<std::string> Authorize(const TokenStore* tokens, const grpc::ServerContextBase& context,
                                      Role role) {
  if (const size_t bytes = MetadataBytes(context); bytes > kMaxMetadataBytes) {
    return WithDetails(
        absl::ResourceExhaustedError(absl::StrCat("the call's metadata have ", bytes, " bytes, at most ",
                                                  kMaxMetadataBytes, " are allowed")),
        {.reason = "METADATA_TOO_LARGE", .field = "", .retry_after = {}, .metadata = {}});
  }
  if (tokens != nullptr) {
    const auto found = context.client_metadata().find("authorization");
    const std::string_view authorization = found == context.client_metadata().end()
                                               ? std::string_view()
                                               : std::string_view(found->second.data(), found->second.size());
    return tokens->Check(authorization, role, absl::Now());
  }
  const auto names = context.auth_context()->FindPropertyValues("x509_common_name");
  if (!names.empty()) return absl::StrCat("cn:", std::string(names[0].data(), names[0].size()));
  return PeerHost(context.peer());
}

}  // namespace dflash
