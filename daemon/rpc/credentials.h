// Who may connect, and who calls: TLS of the listening ports, tokens of the calls.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/auth/token_store.h"

namespace dflash {

// PEM files. They are watched: new connections use what the files hold then, those that exist stay.
struct TlsFiles {
  std::string certificate;  // chain, the server's own first; empty: no TLS
  std::string key;
  std::string client_ca;  // clients must have a certificate from one of these; empty: they need none
  unsigned refresh_seconds = 10;
};

// What may be said about a port. Tokens are not owned; null: calls need none.
struct Access {
  std::shared_ptr<grpc::ServerCredentials> credentials;
  const TokenStore* tokens = nullptr;
};

// InvalidArgument or NotFound, naming the file: one is missing, is no PEM of its kind, or the key is another
// certificate's.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const TlsFiles& files);

// The end of the first certificate in a PEM file. NotFound, InvalidArgument, naming it: there is none.
absl::StatusOr<absl::Time> CertificateExpiry(const std::string& path);

// Who may ask grpc.reflection, which gRPC adds to every server of a program that links it.
struct ReflectionPolicy {
  bool open = true;                    // else nobody: UNIMPLEMENTED, as if it were not there
  const TokenStore* tokens = nullptr;  // not owned; not null: whoever has a token with the role of the port
};
void GuardReflection(grpc::ServerBuilder* builder, const ReflectionPolicy& policy, Role role);

// Most metadata of a call, as HTTP/2 counts it (32 bytes more for every entry): a call with more is
// RESOURCE_EXHAUSTED, by itself. gRPC's own limit is far above that, because what breaks it ends the whole
// connection and with it everybody's streams (gRPC 1.51: a header block is not read to its end, and its
// compression is lost).
inline constexpr size_t kMaxMetadataBytes = 16 << 10;
inline constexpr int kMaxMetadataBytesOfConnection = 1 << 20;
void SetMetadataLimits(grpc::ServerBuilder* builder);

// Who calls: the token's name, or without tokens the name in the client's certificate, or its host. Errors of
// Tokens::Check; ResourceExhausted, reason METADATA_TOO_LARGE: more than kMaxMetadataBytes.
absl::StatusOr<std::string> Authorize(const TokenStore* tokens, const grpc::ServerContextBase& context,
                                      Role role);

}  // namespace dflash
