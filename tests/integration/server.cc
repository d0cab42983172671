#include "tests/integration/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <random>
#include <regex>
#include <utility>

#include "boost/asio/connect.hpp"
#include "boost/asio/io_context.hpp"
#include "boost/asio/ip/tcp.hpp"
#include "boost/beast/core.hpp"
#include "boost/beast/http.hpp"
#include "gtest/gtest.h"

namespace dflash::integration {
namespace {

// "... on 127.0.0.1:1234, ..." -> "127.0.0.1:1234"; `before` is the text in front of it.
std::string AddressAfter(const std::string& line, const std::string& before) {
  const size_t begin = line.find(before);
  if (begin == std::string::npos) return "";
  const size_t host = begin + before.size();
  return line.substr(host, line.find_first_not_of("0123456789.:", host) - host);
}

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

}  // namespace

std::string SourcePath(const std::string& relative) {
  return std::string(DFLASHD_SOURCE_DIR) + "/" + relative;
}
std::string DflashctlPath() { return DFLASHCTL_PATH; }
std::string DflashdPath() { return DFLASHD_PATH; }
std::string LeavingWorkerPath() { return LEAVING_WORKER_PATH; }

std::string WorkerPath() { return DFLASH_WORKER_PATH; }
std::string TinyTarget() { return SourcePath("models/tiny-qwen3.6"); }

int FreePort() {
  std::random_device random;
  for (;;) {
    const int port = 20000 + static_cast<int>(random() % 12000);
    const int socket_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = bind(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(socket_fd);
    if (is_free) return port;
  }
}

double SumOfMetric(const std::string& page, const std::string& name, const std::string& label) {
  const std::regex line("(?:^|\n)" + name + "[{]([^}]*)[}] ([^\n]*)");
  double sum = 0;
  for (std::sregex_iterator it(page.begin(), page.end(), line), end; it != end; ++it) {
    if ((*it)[1].str().find(label) != std::string::npos) sum += std::stod((*it)[2]);
  }
  return sum;
}

std::vector<std::string> ServerCommand(const std::vector<std::string>& flags, const std::string& target) {
  std::vector<std::string> command = {
      DflashdPath(), "--model",     target,         "--draft-model", SourcePath("models/tiny-qwen3.6-dflash"),
      "--listen",    "127.0.0.1:0", "--ops-listen", "127.0.0.1:0",   "--admin-listen",
      "127.0.0.1:0"};
  const auto given = [&](const char* flag) {
    return std::find(flags.begin(), flags.end(), flag) != flags.end();
  };
  if (given("--listen")) command.erase(command.begin() + 5, command.begin() + 7);
  if (given("--draft-model")) command.erase(command.begin() + 3, command.begin() + 5);
  // Most tests look at rounds, which then do not depend on how busy the machine is.
  if (!given("--block-length")) command.insert(command.end(), {"--block-length", "whole"});
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

std::string HttpGet(const std::string& address, const std::string& target) {
  namespace http = boost::beast::http;
  const size_t colon = address.rfind(':');
  boost::beast::error_code error;
  boost::asio::io_context io;
  boost::asio::ip::tcp::resolver resolver(io);
  boost::beast::tcp_stream stream(io);
  stream.expires_after(std::chrono::seconds(30));
  const auto endpoints = resolver.resolve(address.substr(0, colon), address.substr(colon + 1), error);
  if (!error) stream.connect(endpoints, error);
  http::request<http::empty_body> request(http::verb::get, target, 11);
  request.set(http::field::host, address);
  if (!error) http::write(stream, request, error);
  boost::beast::flat_buffer buffer;
  http::response<http::string_body> response;
  if (!error) http::read(stream, buffer, response, error);
  return error || response.result() != http::status::ok ? std::string() : response.body();
}

Server::Server(const std::vector<std::string>& flags, const std::string& target, const std::string& log)
    : process_(ServerCommand(flags, target), "", log) {
  const std::optional<std::string> line = process_.WaitForLine("dflashd: listening on ");
  if (!line || !process_.WaitForLine("dflashd: ready")) {
    ADD_FAILURE() << "dflashd does not serve:\n" << process_.output();
    return;
  }
  address_ = AddressAfter(*line, "listening on ");
  ops_address_ = AddressAfter(*line, "ops on ");
  admin_address_ = AddressAfter(*line, "admin on ");
  channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
  stub_ = v1::InferenceService::NewStub(channel_);
}

Server::~Server() {
  process_.Signal(SIGTERM);
  EXPECT_TRUE(process_.WaitForExit().has_value()) << "dflashd does not end";
}

v1::GetLoadResponse Server::Load() {
  grpc::ClientContext context;
  SetDeadline(&context, kPatience);
  v1::GetLoadResponse response;
  const grpc::Status status = stub_->GetLoad(&context, {}, &response);
  EXPECT_TRUE(status.ok()) << ctl::Describe(status);
  return response;
}

v1::GetModelInfoResponse Server::ModelInfo() {
  grpc::ClientContext context;
  SetDeadline(&context, kPatience);
  v1::GetModelInfoResponse response;
  const grpc::Status status = stub_->GetModelInfo(&context, {}, &response);
  EXPECT_TRUE(status.ok()) << ctl::Describe(status);
  return response;
}

bool Server::WaitUntilIdle() {
  return PollUntil([this] {
    const v1::GetLoadResponse load = Load();
    bool idle = load.running() == 0 && load.waiting() == 0;
    for (const v1::GroupLoad& group : load.groups()) idle = idle && group.running() == 0;
    return idle;
  });
}

bool Server::WaitUntilServing() {
  return PollUntil([this] { return Load().serving(); });
}

bool Server::WaitUntilRunning(uint32_t count) {
  return PollUntil([&] { return Load().running() == count; });
}

std::string Server::Metrics() { return HttpGet(ops_address_, "/metrics"); }

ctl::Generation Server::GenerateOk(const v1::GenerateRequest& request) {
  ctl::Generation generation;
  const grpc::Status status = Generate(channel_, request, kPatience, &generation);
  EXPECT_TRUE(status.ok()) << ctl::Describe(status);
  return generation;
}

Ran Server::Dflashctl(std::vector<std::string> arguments, const std::string& input) {
  arguments.insert(arguments.begin(), {DflashctlPath(), "--address", address_});
  return RunProgram(arguments, input);
}

grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel, const v1::GenerateRequest& request,
                      absl::Duration timeout, ctl::Generation* result) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  return ctl::ReadGeneration(*v1::InferenceService::NewStub(channel), &context, request, nullptr, result);
}

OpenStream::OpenStream(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request,
                       absl::Duration timeout) {
  SetDeadline(&context_, timeout);
  reader_ = stub.Generate(&context_, request);
}

OpenStream::~OpenStream() {
  if (finished_) return;
  context_.TryCancel();
  (void)Finish();
}

bool OpenStream::ReadFirstTokens() {
  v1::GenerateResponse response;
  while (reader_->Read(&response)) {
    tokens_ += static_cast<uint64_t>(response.chunk().token_ids_size());
    if (tokens_ > 0) return true;
  }
  return false;
}

bool OpenStream::ReadStarted() {
  v1::GenerateResponse response;
  while (reader_->Read(&response)) {
    tokens_ += static_cast<uint64_t>(response.chunk().token_ids_size());
    if (response.has_started()) return true;
  }
  return false;
}

grpc::Status OpenStream::Finish() {
  v1::GenerateResponse response;
  while (reader_->Read(&response)) tokens_ += static_cast<uint64_t>(response.chunk().token_ids_size());
  finished_ = true;
  return reader_->Finish();
}

v1::GenerateRequest TokenRequest(const std::vector<uint32_t>& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  return request;
}

v1::GenerateRequest EndlessRequest() {
  v1::GenerateRequest request = TokenRequest({4089, 2341, 198}, 3000);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
  return request;
}

v1::GenerateRequest ShortRequest() { return TokenRequest({4089, 2341, 198, 1074, 552}, 4); }

v1::GenerateRequest ChatRequest(const std::string& message) {
  v1::GenerateRequest request;
  v1::ChatMessage* turn = request.mutable_chat()->add_messages();
  turn->set_role("user");
  turn->set_content(message);
  request.mutable_chat()->set_enable_thinking(false);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(128);
  return request;
}

}  // namespace dflash::integration
