// Nobody gets anywhere without what the server asks for, on any port and with any call; and what it asks for
// can be changed while it serves.
#include <openssl/sha.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "dflash/v1/admin.grpc.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "tests/integration/certificates.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::string TokenLine(const std::string& name, const std::string& token, const std::string& rest) {
  std::string hash(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(),
         reinterpret_cast<unsigned char*>(hash.data()));
  return absl::StrCat(name, " sha256:", absl::BytesToHexString(hash), " ", rest, "\n");
}

// A folder that goes with the test.
class Folder {
 public:
  Folder() : path_(fs::path(::testing::TempDir()) / absl::StrCat("security_test.", getpid())) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string Path(const std::string& name) const { return (path_ / name).string(); }
  // Replaces a file as a whole, as it is done where somebody may be reading it.
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name + ".new")) << text;
    fs::rename(Path(name + ".new"), Path(name));
    return Path(name);
  }

 private:
  const fs::path path_;
};

// A daemon, told with flags what to ask for; how to talk to it is the test's business.
class GuardedServer {
 public:
  explicit GuardedServer(const std::vector<std::string>& flags, const std::string& ops_host = "127.0.0.1")
      : process_(Command(flags, ops_host)) {
    const std::optional<std::string> line = process_.WaitForLine("dflashd: listening on ");
    if (!line || !process_.WaitForLine("dflashd: ready")) {
      ADD_FAILURE() << process_.output();
      return;
    }
    const auto port_after = [&](const std::string& before) {
      const size_t begin = line->find(':', line->find(before) + before.size()) + 1;
      return line->substr(begin, line->find_first_not_of("0123456789", begin) - begin);
    };
    address = "127.0.0.1:" + port_after("dflashd: listening on ");
    ops_address = "127.0.0.1:" + port_after("ops on ");
    admin_address = "127.0.0.1:" + port_after("admin on ");
  }
  ~GuardedServer() {
    process_.Signal(SIGTERM);
    EXPECT_TRUE(process_.WaitForExit().has_value());
  }
  Process& process() { return process_; }
  std::string address, ops_address, admin_address;

 private:
  static std::vector<std::string> Command(const std::vector<std::string>& flags,
                                          const std::string& ops_host) {
    std::vector<std::string> command = ServerCommand(flags);
    command[8] = ops_host + ":0";
    return command;
  }
  Process process_;
};

// Calls a method with an empty message and reads what comes until the end. An empty `token` sends none.
grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& token) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  const auto call = stub.PrepareCall(&context, method, &queue);
  const auto await = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  if (await()) {
    call->Write(grpc::ByteBuffer(nullptr, 0), grpc::WriteOptions().set_last_message(), nullptr);
    (void)await();
    for (grpc::ByteBuffer message;;) {
      call->Read(&message, nullptr);
      if (!await()) break;
    }
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  (void)await();
  queue.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue.Next(&tag, &ok);) {
  }
  return status;
}

std::shared_ptr<grpc::Channel> Plain(const std::string& address) {
  return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
}

// Services that reflection lists; -1 when it answers nothing.
int Reflect(const std::shared_ptr<grpc::Channel>& channel) {
  namespace reflection = grpc::reflection::v1alpha;
  const auto stub = reflection::ServerReflection::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  const auto stream = stub->ServerReflectionInfo(&context);
  reflection::ServerReflectionRequest request;
  request.set_list_services("");
  reflection::ServerReflectionResponse response;
  const bool answered = stream->Write(request) && stream->Read(&response);
  stream->WritesDone();
  EXPECT_EQ(stream->Finish().ok(), answered);
  return answered ? response.list_services_response().service_size() : -1;
}

std::vector<std::string> MethodsOf(const std::string& service) {
  const google::protobuf::ServiceDescriptor* found =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
  std::vector<std::string> methods;
  for (int i = 0; found != nullptr && i < found->method_count(); ++i) {
    methods.push_back(absl::StrCat("/", service, "/", found->method(i)->name()));
  }
  return methods;
}

// HTTP status of a page.
int HttpStatus(const std::string& address, const std::string& path, const std::string& token) {
  const Ran ran = RunProgram(
      {"/usr/bin/env", "bash", "-c",
       "exec 3<>/dev/tcp/${0%:*}/${0#*:}; printf 'GET %s HTTP/1.1\\r\\nHost: x\\r\\n"
       "Authorization: Bearer %s\\r\\nConnection: close\\r\\n\\r\\n' \"$1\" \"$2\" >&3; head -1 <&3",
       address, path, token});
  int status = 0;
  return std::sscanf(ran.output.c_str(), "HTTP/1.1 %d", &status) == 1 ? status : -1;
}

TEST(TokensTest, EveryCallOfEveryPortNeedsItsRole) {
  (void)v1::AdminService::NewStub(Plain("127.0.0.1:1"));  // links its descriptor
  const Folder folder;
  const std::string tokens =
      TokenLine("user", "infer-token", "inference") + TokenLine("root", "admin-token", "admin") +
      TokenLine("scraper", "metrics-token", "metrics") +
      TokenLine("gone", "old-token", "inference,admin,metrics expires=2020-01-01T00:00:00Z");
  GuardedServer server({"--token-file", folder.Write("tokens", tokens)}, "0.0.0.0");
  const struct {
    std::string service, address, token;
  } ports[] = {{"dflash.v1.InferenceService", server.address, "infer-token"},
               {"dflash.v1.AdminService", server.admin_address, "admin-token"}};
  for (const auto& port : ports) {
    const auto channel = Plain(port.address);
    const std::vector<std::string> methods = MethodsOf(port.service);
    ASSERT_GE(methods.size(), 5u);
    for (const std::string& method : methods) {
      for (const std::string wrong : {"", "no-token", "old-token", "infer-toke", "infer-token2"}) {
        EXPECT_EQ(Call(channel, method, wrong).error_code(), grpc::StatusCode::UNAUTHENTICATED)
            << method << wrong;
      }
      for (const std::string other : {"infer-token", "admin-token", "metrics-token"}) {
        if (other == port.token) continue;
        EXPECT_EQ(Call(channel, method, other).error_code(), grpc::StatusCode::PERMISSION_DENIED)
            << method << other;
      }
      if (method == "/dflash.v1.AdminService/Drain") continue;  // it would
      const grpc::StatusCode allowed = Call(channel, method, port.token).error_code();
      EXPECT_NE(allowed, grpc::StatusCode::UNAUTHENTICATED) << method;
      EXPECT_NE(allowed, grpc::StatusCode::PERMISSION_DENIED) << method;
    }
    // A service is not on the other's port.
    const std::string& elsewhere = port.address == server.address ? server.admin_address : server.address;
    EXPECT_EQ(Call(Plain(elsewhere), methods[0], port.token).error_code(), grpc::StatusCode::UNIMPLEMENTED);
    // Probes are open and say nothing but state; reflection is closed.
    EXPECT_TRUE(Call(channel, "/grpc.health.v1.Health/Check", "").ok());
    EXPECT_EQ(Reflect(channel), -1);
  }
  EXPECT_EQ(HttpStatus(server.ops_address, "/livez", ""), 200);
  EXPECT_EQ(HttpStatus(server.ops_address, "/readyz", ""), 200);
  EXPECT_EQ(HttpStatus(server.ops_address, "/metrics", ""), 401);
  EXPECT_EQ(HttpStatus(server.ops_address, "/metrics", "infer-token"), 403);
  EXPECT_EQ(HttpStatus(server.ops_address, "/metrics", "metrics-token"), 200);

  // The client of ours has a flag for it, and is who the token says.
  const std::string mine = folder.Write("mine", "admin-token\n");
  const Ran ran = RunProgram(
      {DflashctlPath(), "log-level", "info", "--address", server.admin_address, "--token-file", mine});
  EXPECT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;
  EXPECT_TRUE(server.process().WaitForLine("admin: SetLogLevel LOG_LEVEL_INFO by root from ").has_value());
  EXPECT_EQ(server.process().output().find("admin-token"), std::string::npos) << "a token is in the log";

  // Another file, while it serves.
  folder.Write("tokens", TokenLine("user", "second-token", "inference"));
  ASSERT_TRUE(server.process().WaitForLine("tokens were read again: 1").has_value());
  const auto channel = Plain(server.address);
  EXPECT_TRUE(Call(channel, "/dflash.v1.InferenceService/GetLoad", "second-token").ok());
  EXPECT_EQ(Call(channel, "/dflash.v1.InferenceService/GetLoad", "infer-token").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  folder.Write("tokens", "nonsense");
  ASSERT_TRUE(server.process().WaitForLine("tokens stay as they are: ").has_value());
  EXPECT_TRUE(Call(channel, "/dflash.v1.InferenceService/GetLoad", "second-token").ok());
}

TEST(TokensTest, ReflectionIsOpenOnDemand) {
  const Folder folder;
  GuardedServer server(
      {"--token-file", folder.Write("tokens", TokenLine("a", "one", "inference")), "--reflection", "on"});
  EXPECT_GE(Reflect(Plain(server.address)), 2);
}

TEST(TokensTest, LimitsAreThoseOfATokensName) {
  const Folder folder;
  const std::string tokens = TokenLine("a", "one", "inference") + TokenLine("a", "two", "inference") +
                             TokenLine("b", "three", "inference");
  GuardedServer server({"--token-file", folder.Write("tokens", tokens), "--max-client-requests", "1"});
  const auto stub = v1::InferenceService::NewStub(Plain(server.address));
  const auto generate = [&](const char* token, const v1::GenerateRequest& request,
                            ctl::Generation* generation) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    context.AddMetadata("authorization", std::string("Bearer ") + token);
    return ctl::ReadGeneration(*stub, &context, request, nullptr, generation);
  };
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer one");
  v1::GenerateRequest endless = EndlessRequest();
  endless.set_request_id("of-a");
  const auto stream = stub->Generate(&context, endless);
  v1::GenerateResponse message;
  ASSERT_TRUE(stream->Read(&message));
  ctl::Generation generation;
  const grpc::Status second = generate("two", ShortRequest(), &generation);
  EXPECT_EQ(second.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(ctl::Describe(second), HasSubstr("(CLIENT_LIMIT, retry in "));
  EXPECT_TRUE(generate("three", ShortRequest(), &generation).ok());
  // And nobody ends another's request.
  for (const bool own : {false, true}) {
    grpc::ClientContext cancelling;
    cancelling.AddMetadata("authorization", own ? "Bearer two" : "Bearer three");
    v1::CancelRequest cancel;
    cancel.set_request_id("of-a");
    v1::CancelResponse response;
    ASSERT_TRUE(stub->Cancel(&cancelling, cancel, &response).ok());
    EXPECT_EQ(response.found(), own);
  }
  while (stream->Read(&message)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// One call over a connection of its own.
grpc::Status CallOverTls(const std::string& address, const std::string& ca, const CertificatePair& own = {}) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel(address, grpc::SslCredentials({ca, own.key, own.certificate}), arguments);
  return Call(channel, "/dflash.v1.InferenceService/GetLoad", "");
}

TEST(TlsTest, PlaintextAndStrangersGetNowhereAndCertificatesRotate) {
  const Folder folder;
  const Authority first("first"), second("second");
  CertificatePair pair = first.Issue("server");
  GuardedServer server({"--tls-cert", folder.Write("cert", pair.certificate), "--tls-key",
                        folder.Write("key", pair.key), "--tls-refresh-seconds", "1"});
  for (const std::string& address : {server.address, server.admin_address}) {
    EXPECT_EQ(Call(Plain(address), "/grpc.health.v1.Health/Check", "").error_code(),
              grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_TRUE(CallOverTls(server.address, first.certificate()).ok());
  EXPECT_FALSE(CallOverTls(server.address, second.certificate()).ok()) << "it does not trust this server";
  const std::string ca = folder.Write("ca", first.certificate());
  const Ran ran = RunProgram({DflashctlPath(), "status", "--address", server.address, "--tls-ca", ca});
  EXPECT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;

  // A stream that runs meanwhile does not notice.
  const auto channel =
      grpc::CreateChannel(server.address, grpc::SslCredentials({first.certificate(), "", ""}));
  const auto stub = v1::InferenceService::NewStub(channel);
  OpenStream stream(*stub, EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());
  pair = second.Issue("server");
  folder.Write("key", pair.key);
  folder.Write("cert", pair.certificate);
  EXPECT_TRUE(PollUntil([&] { return CallOverTls(server.address, second.certificate()).ok(); }));
  EXPECT_FALSE(CallOverTls(server.address, first.certificate()).ok());
  ASSERT_TRUE(stream.ReadFirstTokens()) << "it goes on";
  stream.Cancel();
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST(TlsTest, ClientsNeedACertificateWhereTheServerAsksForOne) {
  const Folder folder;
  const Authority authority("ours"), other("theirs");
  const CertificatePair pair = authority.Issue("server");
  GuardedServer server({"--tls-cert", folder.Write("cert", pair.certificate), "--tls-key",
                        folder.Write("key", pair.key), "--tls-client-ca",
                        folder.Write("ca", authority.certificate())});
  EXPECT_FALSE(CallOverTls(server.address, authority.certificate()).ok());
  EXPECT_FALSE(CallOverTls(server.address, authority.certificate(), other.Issue("stranger")).ok());
  EXPECT_TRUE(CallOverTls(server.address, authority.certificate(), authority.Issue("friend")).ok());
}

TEST(TlsTest, FilesThatCannotWorkEndTheStart) {
  const Folder folder;
  const Authority authority("ours");
  const CertificatePair pair = authority.Issue("server"), another = authority.Issue("server");
  const std::string cert = folder.Write("cert", pair.certificate);
  const auto error = [&](const std::vector<std::string>& flags) {
    const Ran ran = RunProgram(ServerCommand(flags));
    EXPECT_EQ(ran.exit_code, 64);
    return ran.output;
  };
  EXPECT_THAT(error({"--tls-cert", cert}), HasSubstr("--tls-cert and --tls-key go together"));
  EXPECT_THAT(error({"--tls-cert", cert, "--tls-key", folder.Write("other", another.key)}),
              HasSubstr("other: is not the key of "));
  EXPECT_THAT(error({"--tls-cert", folder.Write("bad", "x"), "--tls-key", folder.Write("key", pair.key)}),
              HasSubstr("bad: no PEM certificate"));
  EXPECT_THAT(error({"--token-file", folder.Write("tokens", "a b c")}), HasSubstr("tokens:1: "));
}

}  // namespace
}  // namespace dflash::integration
