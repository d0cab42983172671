// Nobody gets anywhere without what the server asks for, on any port and with any call; and what it asks for
// can be changed while it serves.
#include <openssl/sha.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/integration/certificates.h"
#include "tests/integration/raw_call.h"
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

// CallEmpty with a bearer token; an empty one is not sent.
grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& token) {
  return token.empty() ? CallEmpty(channel, method)
                       : CallEmpty(channel, method, {"authorization", "Bearer " + token});
}

std::shared_ptr<grpc::Channel> Plain(const std::string& address) {
  return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
}

namespace reflection = grpc::reflection::v1alpha;

// What reflection answers; nothing when it is closed.
std::optional<reflection::ServerReflectionResponse> Reflect(
    const std::shared_ptr<grpc::Channel>& channel, const reflection::ServerReflectionRequest& request) {
  const auto stub = reflection::ServerReflection::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  const auto stream = stub->ServerReflectionInfo(&context);
  reflection::ServerReflectionResponse response;
  const bool answered = stream->Write(request) && stream->Read(&response);
  stream->WritesDone();
  EXPECT_EQ(stream->Finish().ok(), answered);
  return answered ? std::optional(response) : std::nullopt;
}
bool IsReflectionOpen(const std::shared_ptr<grpc::Channel>& channel) {
  reflection::ServerReflectionRequest request;
  request.set_list_services("");
  return Reflect(channel, request).has_value();
}

// Every method of a port by its service, as the server itself says: one that is added is among them.
std::map<std::string, std::vector<std::string>> MethodsOf(const std::shared_ptr<grpc::Channel>& channel) {
  std::map<std::string, std::vector<std::string>> methods;
  reflection::ServerReflectionRequest request;
  request.set_list_services("");
  const auto list = Reflect(channel, request);
  if (!list.has_value()) return methods;
  for (const auto& service : list->list_services_response().service()) {
    if (service.name() == "grpc.health.v1.Health") {  // gRPC's own, without a description
      methods[service.name()] = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"};
      continue;
    }
    request.set_file_containing_symbol(service.name());
    const auto answer = Reflect(channel, request);
    if (!answer.has_value()) return {};
    for (const std::string& bytes : answer->file_descriptor_response().file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto file;
      EXPECT_TRUE(file.ParseFromString(bytes));
      for (const auto& found : file.service()) {
        if (absl::StrCat(file.package(), ".", found.name()) != service.name()) continue;
        for (const auto& method : found.method())
          methods[service.name()].push_back(absl::StrCat("/", service.name(), "/", method.name()));
      }
    }
    EXPECT_FALSE(methods[service.name()].empty()) << service.name();
  }
  return methods;
}
// Open to everybody: state and nothing else; and what reflection itself is, where it is open.
bool IsOpen(const std::string& service) {
  return service == "grpc.health.v1.Health" || service.starts_with("grpc.reflection.");
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
  const Folder folder;
  const std::string tokens =
      TokenLine("user", "infer-token", "inference") + TokenLine("root", "admin-token", "admin") +
      TokenLine("scraper", "metrics-token", "metrics") +
      TokenLine("gone", "old-token", "inference,admin,metrics expires=2020-01-01T00:00:00Z");
  // Reflection says what there is to scan.
  GuardedServer server({"--token-file", folder.Write("tokens", tokens), "--reflection", "on"}, "0.0.0.0");
  const std::map<std::string, std::string> token_of = {{"dflash.v1.InferenceService", "infer-token"},
                                                       {"dflash.v1.AdminService", "admin-token"}};
  std::set<std::string> scanned;
  for (const std::string& address : {server.address, server.admin_address}) {
    const auto channel = Plain(address);
    for (const auto& [service, methods] : MethodsOf(channel)) {
      if (IsOpen(service)) continue;
      const auto known = token_of.find(service);
      ASSERT_NE(known, token_of.end()) << service << ": which role does it need?";
      const std::string& token = known->second;
      scanned.insert(service);
      ASSERT_GE(methods.size(), 5u);
      for (const std::string& method : methods) {
        for (const std::string wrong :
             {"", "no-token", "old-token", "infer-toke", "infer-token2", "Infer-token"}) {
          EXPECT_EQ(Call(channel, method, wrong).error_code(), grpc::StatusCode::UNAUTHENTICATED)
              << method << wrong;
        }
        for (const std::string& wrong :
             std::vector<std::string>{token, "Basic " + token, "Bearer", "Bearer " + token + ",Bearer x"}) {
          EXPECT_EQ(CallEmpty(channel, method, {"authorization", wrong}).error_code(),
                    grpc::StatusCode::UNAUTHENTICATED)
              << method << wrong;
        }
        EXPECT_EQ(CallEmpty(channel, method, {"x-authorization", "Bearer " + token}).error_code(),
                  grpc::StatusCode::UNAUTHENTICATED)
            << method;
        for (const std::string other : {"infer-token", "admin-token", "metrics-token"}) {
          if (other == token) continue;
          EXPECT_EQ(Call(channel, method, other).error_code(), grpc::StatusCode::PERMISSION_DENIED)
              << method << other;
        }
        if (method == "/dflash.v1.AdminService/Drain") continue;  // it would
        const grpc::StatusCode allowed = Call(channel, method, token).error_code();
        EXPECT_NE(allowed, grpc::StatusCode::UNAUTHENTICATED) << method;
        EXPECT_NE(allowed, grpc::StatusCode::PERMISSION_DENIED) << method;
      }
      // A service is not on the other's port.
      const std::string& elsewhere = address == server.address ? server.admin_address : server.address;
      EXPECT_EQ(Call(Plain(elsewhere), methods[0], token).error_code(), grpc::StatusCode::UNIMPLEMENTED);
    }
    // Probes are open and say nothing but state.
    EXPECT_TRUE(Call(channel, "/grpc.health.v1.Health/Check", "").ok());
  }
  EXPECT_EQ(scanned.size(), token_of.size()) << "not every service was found";
  EXPECT_EQ(HttpStatus(server.ops_address, "/livez", ""), 200);
  EXPECT_EQ(HttpStatus(server.ops_address, "/readyz", ""), 200);
  EXPECT_EQ(HttpStatus(server.ops_address, "/startupz", ""), 200);
  for (const std::string page :
       {"/metrics", "/version", "/metrics?x", "/readyz?verbose", "/livez?x&verbose=1"}) {
    for (const std::string wrong : {"", "no-token", "old-token"})
      EXPECT_EQ(HttpStatus(server.ops_address, page, wrong), 401) << page << wrong;
    for (const std::string other : {"infer-token", "admin-token"})
      EXPECT_EQ(HttpStatus(server.ops_address, page, other), 403) << page << other;
    EXPECT_EQ(HttpStatus(server.ops_address, page, "metrics-token"), 200) << page;
  }

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

TEST(TokensTest, ReflectionNeedsATokenTooUnlessItIsOpened) {
  const Folder folder;
  const std::string tokens = TokenLine("a", "one", "inference") + TokenLine("b", "two", "admin") +
                             TokenLine("c", "three", "metrics");
  const auto reflect = [](const std::string& address, const std::string& token) {
    return Call(Plain(address), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", token)
        .error_code();
  };
  {
    GuardedServer server({"--token-file", folder.Write("tokens", tokens)});
    for (const bool admin : {false, true}) {
      const std::string& address = admin ? server.admin_address : server.address;
      EXPECT_EQ(reflect(address, ""), grpc::StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(reflect(address, "four"), grpc::StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(reflect(address, "three"), grpc::StatusCode::PERMISSION_DENIED);
      EXPECT_EQ(reflect(address, admin ? "one" : "two"), grpc::StatusCode::PERMISSION_DENIED);
      EXPECT_EQ(reflect(address, admin ? "two" : "one"), grpc::StatusCode::OK);
      EXPECT_FALSE(IsReflectionOpen(Plain(address))) << "and says nothing before it refuses";
    }
    EXPECT_EQ(HttpStatus(server.ops_address, "/metrics", ""), 200) << "this machine alone may see them";
    EXPECT_EQ(HttpStatus(server.ops_address, "/readyz?verbose", ""), 200);
    EXPECT_TRUE(CallEmpty(Plain(server.address), "/dflash.v1.InferenceService/GetLoad",
                          {"authorization", "bearer one"})
                    .ok())
        << "schemes have no case";
  }
  GuardedServer server({"--reflection", "off"});
  for (const std::string& address : {server.address, server.admin_address}) {
    EXPECT_EQ(reflect(address, ""), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_FALSE(IsReflectionOpen(Plain(address)));
  }
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
  // What is only tokenized counts, too.
  const auto tokenize = [&](const char* token) {
    grpc::ClientContext tokenizing;
    tokenizing.AddMetadata("authorization", std::string("Bearer ") + token);
    v1::TokenizeRequest text;
    text.set_text("x");
    v1::TokenizeResponse response;
    return stub->Tokenize(&tokenizing, text, &response);
  };
  EXPECT_THAT(ctl::Describe(tokenize("two")), HasSubstr("(CLIENT_LIMIT, retry in "));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(tokenize("three").ok()) << "each gives its share back";
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

// A connection of its own.
std::shared_ptr<grpc::Channel> OverTls(const std::string& address, const std::string& ca,
                                       const CertificatePair& own = {}) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::SslCredentials({ca, own.key, own.certificate}), arguments);
}
grpc::Status CallOverTls(const std::string& address, const std::string& ca, const CertificatePair& own = {}) {
  return CallEmpty(OverTls(address, ca, own), "/dflash.v1.InferenceService/GetLoad");
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
  EXPECT_TRUE(server.process().WaitForLine("certificates were read again").has_value());
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
  // Every method of every port, each over a connection of its own.
  const CertificatePair none, stranger = other.Issue("stranger"),
                              late = authority.Issue("late", /*expired=*/true),
                              ally = authority.Issue("friend");
  for (const std::string& address : {server.address, server.admin_address}) {
    const auto dial = [&](const CertificatePair& own) {
      return OverTls(address, authority.certificate(), own);
    };
    const auto methods = MethodsOf(dial(ally));
    ASSERT_GE(methods.size(), 3u);
    for (const auto& [service, names] : methods) {
      for (const std::string& method : names) {
        EXPECT_EQ(CallEmpty(Plain(address), method).error_code(), grpc::StatusCode::UNAVAILABLE)
            << method << " in plain text";
        for (const CertificatePair* wrong : {&none, &stranger, &late}) {
          EXPECT_EQ(CallEmpty(dial(*wrong), method).error_code(), grpc::StatusCode::UNAVAILABLE)
              << method
              << (wrong == &none       ? " nobody"
                  : wrong == &stranger ? " stranger"
                                       : " expired");
        }
      }
    }
  }
  EXPECT_TRUE(CallOverTls(server.address, authority.certificate(), ally).ok());
}

// Clients that come and go, and one that stays, while both kinds of secrets are replaced again and again.
TEST(TlsTest, CertificatesAndTokensRotateUnderLoadWithoutAnError) {
  const Folder folder;
  const Authority authorities[] = {Authority("first"), Authority("second")};
  const std::string both = authorities[0].certificate() + authorities[1].certificate();
  // Certificate and key change together: the folder that they lie in is a link, as Kubernetes does it.
  int generation = 0;
  const auto install = [&](const Authority& authority) {
    const CertificatePair pair = authority.Issue("server");
    const std::string name = absl::StrCat("generation.", ++generation);
    fs::create_directory(folder.Path(name));
    folder.Write(name + "/cert", pair.certificate);
    folder.Write(name + "/key", pair.key);
    fs::create_directory_symlink(name, folder.Path("new"));
    fs::rename(folder.Path("new"), folder.Path("current"));
  };
  install(authorities[0]);
  const auto tokens_text = [](int number) {
    return TokenLine("user", absl::StrCat("token-", number), "inference") +
           TokenLine("user", absl::StrCat("token-", number + 1), "inference");
  };
  GuardedServer server({"--tls-cert", folder.Path("current/cert"), "--tls-key", folder.Path("current/key"),
                        "--tls-refresh-seconds", "1", "--token-file",
                        folder.Write("tokens", tokens_text(0))});
  std::atomic<int> token = 1;
  std::atomic<bool> over = false;
  std::atomic<int64_t> calls = 0;
  std::mutex mutex;
  std::vector<std::string> errors;
  const auto record = [&](const grpc::Status& status) {
    ++calls;
    if (status.ok()) return;
    std::lock_guard lock(mutex);
    errors.push_back(ctl::Describe(status));
  };
  const auto generate = [&](const std::shared_ptr<grpc::Channel>& channel, const v1::GenerateRequest& request,
                            ctl::Generation* result) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    context.AddMetadata("authorization", absl::StrCat("Bearer token-", token.load()));
    return ctl::ReadGeneration(*v1::InferenceService::NewStub(channel), &context, request, nullptr, result);
  };
  ctl::Generation expected, stayed;
  ASSERT_TRUE(generate(OverTls(server.address, both), EndlessRequest(), &expected).ok());
  grpc::Status stayed_status;
  std::thread stays(
      [&] { stayed_status = generate(OverTls(server.address, both), EndlessRequest(), &stayed); });
  std::vector<std::thread> come_and_go;
  for (int i = 0; i < 4; ++i) {
    come_and_go.emplace_back([&, i] {
      while (!over) {
        const auto channel = OverTls(server.address, both);
        if (i % 2 == 0) {
          record(Call(channel, "/dflash.v1.InferenceService/GetLoad", absl::StrCat("token-", token.load())));
        } else {
          ctl::Generation generated;
          record(generate(channel, ShortRequest(), &generated));
        }
      }
    });
  }
  for (int rotation = 1; rotation <= 4; ++rotation) {
    const Authority& next = authorities[rotation % 2];
    install(next);
    // Until new connections get the new one.
    EXPECT_TRUE(PollUntil([&] {
      return Call(OverTls(server.address, next.certificate()), "/grpc.health.v1.Health/Check", "").ok();
    }));
    const size_t before = server.process().output().size();
    folder.Write("tokens", tokens_text(rotation));
    EXPECT_TRUE(server.process().WaitForLine("tokens were read again: 2", kPatience, before).has_value());
    token = rotation + 1;
    // What has begun with the token before may still be on its way: it is good for another round.
  }
  over = true;
  for (std::thread& client : come_and_go) client.join();
  stays.join();
  EXPECT_EQ(errors, std::vector<std::string>());
  EXPECT_GT(calls, 4);
  EXPECT_TRUE(stayed_status.ok()) << ctl::Describe(stayed_status);
  EXPECT_EQ(stayed.token_ids, expected.token_ids);
  EXPECT_EQ(
      Call(OverTls(server.address, both), "/dflash.v1.InferenceService/GetLoad", "token-1").error_code(),
      grpc::StatusCode::UNAUTHENTICATED);
  std::printf("%ld calls, %d certificates\n", static_cast<long>(calls), generation);
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
