// coordinator-bench: what dflashd itself costs a request and a chunk, with a worker that computes nothing
// (synthetic_worker.cc). Prints figures and judges nothing; fails when what it counts does not add up.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "base/flag_parser.h"
#include "dflash/v1/inference.grpc.pb.h"
#include "dflash/worker/v1/worker.grpc.pb.h"

namespace dflash::bench {
namespace {

namespace wire = ::dflash::worker::v1;

struct Flags {
  std::string model;
  int64_t requests = 500, prompt_tokens = 500, streams = 32, rate = 250;
  double seconds = 10;
};

int Fail(const std::string& what) {
  std::fprintf(stderr, "coordinator-bench: %s\n", what.c_str());
  return 1;
}

// Waits for a process of ours to answer on a socket.
bool AwaitConnected(const std::shared_ptr<grpc::Channel>& channel) {
  return channel->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
}

// Processor time that a process has used, all threads.
absl::Duration CpuTime(int pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream rest(text.substr(std::min(text.rfind(')') + 2, text.size())));
  std::vector<std::string> words;
  for (std::string word; rest >> word;) words.push_back(word);
  if (words.size() < 13) return absl::ZeroDuration();
  return absl::Seconds((std::stod(words[11]) + std::stod(words[12])) /
                       static_cast<double>(sysconf(_SC_CLK_TCK)));
}

struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0;
};
Percentiles Of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[std::min(values.size() - 1,
                           static_cast<size_t>(share * static_cast<double>(values.size())))];
  };
  return {at(0.5), at(0.9), at(0.99)};
}
void Print(const char* what, const Percentiles& ms) {
  std::printf("  %-46s p50 %.3f  p90 %.3f  p99 %.3f ms\n", what, ms.p50, ms.p90, ms.p99);
}

v1::GenerateRequest TokenRequest(int64_t prompt_tokens, uint32_t max_tokens) {
  v1::GenerateRequest request;
  for (int64_t i = 0; i < prompt_tokens; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(300 + i % 3000));
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_text(true);
  return request;
}

v1::GenerateRequest ChatRequest(int64_t words) {
  v1::GenerateRequest request;
  v1::ChatMessage* turn = request.mutable_chat()->add_messages();
  turn->set_role("user");
  std::string text;
  for (int64_t i = 0; i < words; ++i)
    absl::StrAppend(&text, i == 0 ? "" : " ", i % 7 == 0 ? "streaming" : "word");
  turn->set_content(text);
  request.mutable_stopping()->set_max_tokens(1);
  return request;
}

// The synthetic worker asked without a coordinator: Submit to Tokens.
bool MeasureDirect(const Flags& flags, std::vector<double>* ms) {
  const absl::StatusOr<PrivateDirectory> directory = PrivateDirectory::Create();
  if (!directory.ok()) return false;
  const std::string socket = directory->path() + "/worker.sock";
  auto worker =
      ChildProcess::Start({SYNTHETIC_WORKER_PATH, "--listen", "unix:" + socket}, [](const ExitReport&) {});
  if (!worker.ok()) return false;
  const auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  if (!AwaitConnected(channel)) return false;
  const auto stub = wire::WorkerService::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Serve(&context);
  const v1::GenerateRequest prompt = TokenRequest(flags.prompt_tokens, 1);
  for (int64_t i = 0; i < flags.requests; ++i) {
    wire::ServeRequest request;
    wire::Submit* submit = request.mutable_submit();
    submit->set_id(absl::StrCat(i));
    submit->mutable_prompt_tokens()->Assign(prompt.tokens().ids().begin(), prompt.tokens().ids().end());
    submit->set_max_tokens(1);
    const absl::Time begin = absl::Now();
    stream->Write(request);
    wire::ServeResponse response;
    bool seen = false;
    while (!seen && stream->Read(&response)) seen = response.has_tokens();
    if (!seen) return false;
    ms->push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
    while (!response.has_finished() && stream->Read(&response)) {
    }
  }
  wire::ServeRequest shutdown;
  shutdown.mutable_shutdown();
  stream->Write(shutdown);
  stream->WritesDone();
  wire::ServeResponse rest;
  while (stream->Read(&rest)) {
  }
  return stream->Finish().ok();
}

bool MeasureFirstTokens(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request, int64_t count,
                        std::vector<double>* ms) {
  for (int64_t i = 0; i < count; ++i) {
    grpc::ClientContext context;
    const absl::Time begin = absl::Now();
    const auto stream = stub.Generate(&context, request);
    v1::GenerateResponse response;
    bool seen = false;
    while (!seen && stream->Read(&response)) seen = response.has_chunk();
    if (!seen) return false;
    ms->push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
    while (stream->Read(&response)) {
    }
    if (!stream->Finish().ok()) return false;
  }
  return true;
}

struct Streamed {
  int64_t chunks = 0, tokens = 0;
  bool ok = false;
};
Streamed ReadStream(const std::string& address, uint32_t tokens) {
  grpc::ChannelArguments own;
  own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), own));
  grpc::ClientContext context;
  const auto stream = stub->Generate(&context, TokenRequest(100, tokens));
  Streamed streamed;
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    if (!response.has_chunk()) continue;
    ++streamed.chunks;
    streamed.tokens += response.chunk().token_ids_size();
  }
  streamed.ok = stream->Finish().ok();
  return streamed;
}

int Run(const Flags& flags) {
  std::vector<double> direct;
  if (!MeasureDirect(flags, &direct)) return Fail("the synthetic worker does not answer");

  const int64_t step_us = 1'000'000 / flags.rate;
  setenv("SYNTHETIC_STEP_US", absl::StrCat(step_us).c_str(), 1);
  std::random_device random;
  const std::string listen = absl::StrCat("127.0.0.1:", 20000 + random() % 12000);
  auto daemon = ChildProcess::Start({DFLASHD_PATH, "--model", flags.model, "--worker", SYNTHETIC_WORKER_PATH,
                                     "--backend", "cpu", "--listen", listen, "--ops-listen", "127.0.0.1:0",
                                     "--max-queued-requests", "4096", "--log-level", "warn"},
                                    [](const ExitReport&) {});
  if (!daemon.ok()) return Fail(std::string(daemon.status().message()));
  const auto channel = grpc::CreateChannel(listen, grpc::InsecureChannelCredentials());
  if (!AwaitConnected(channel)) return Fail("dflashd does not answer");
  const auto stub = v1::InferenceService::NewStub(channel);
  v1::GetLoadResponse load;
  while (!load.serving()) {
    grpc::ClientContext context;
    if (!stub->GetLoad(&context, {}, &load).ok() || (*daemon)->WaitExit(absl::Milliseconds(10)))
      return Fail("dflashd does not serve");
  }

  std::vector<double> tokens, chat;
  const v1::GenerateRequest token_prompt = TokenRequest(flags.prompt_tokens, 1);
  const v1::GenerateRequest chat_prompt = ChatRequest(flags.prompt_tokens);
  std::vector<double> warm;
  if (!MeasureFirstTokens(*stub, token_prompt, flags.requests / 10 + 1, &warm) ||
      !MeasureFirstTokens(*stub, token_prompt, flags.requests, &tokens) ||
      !MeasureFirstTokens(*stub, chat_prompt, flags.requests, &chat)) {
    return Fail("a request fails");
  }
  std::printf("time to first token, prompts of %ld tokens, %ld requests one after another\n",
              static_cast<long>(flags.prompt_tokens), static_cast<long>(flags.requests));
  Print("worker alone, without a coordinator", Of(direct));
  Print("through dflashd, token ids", Of(tokens));
  Print("through dflashd, chat to render and tokenize", Of(chat));
  std::printf("  dflashd adds %.3f ms at the median (token ids), %.3f ms (chat)\n",
              Of(tokens).p50 - Of(direct).p50, Of(chat).p50 - Of(direct).p50);

  const auto per_stream =
      static_cast<uint32_t>(std::max(1.0, flags.seconds * static_cast<double>(flags.rate)));
  std::vector<Streamed> streamed(static_cast<size_t>(flags.streams));
  const absl::Duration cpu_before = CpuTime((*daemon)->pid());
  const absl::Time begin = absl::Now();
  std::vector<std::thread> clients;
  for (Streamed& one : streamed) clients.emplace_back([&] { one = ReadStream(listen, per_stream); });
  for (std::thread& client : clients) client.join();
  const absl::Duration wall = absl::Now() - begin;
  const absl::Duration cpu = CpuTime((*daemon)->pid()) - cpu_before;
  Streamed all;
  for (const Streamed& one : streamed) {
    if (!one.ok || one.tokens != per_stream) return Fail("a stream lost tokens");
    all.chunks += one.chunks;
    all.tokens += one.tokens;
  }
  std::printf("streaming, %ld streams on connections of their own, a token each every %ld us\n",
              static_cast<long>(flags.streams), static_cast<long>(step_us));
  std::printf("  %ld tokens in %ld chunks (%.3f tokens a chunk) in %.2f s: %.0f chunks a second\n",
              static_cast<long>(all.tokens), static_cast<long>(all.chunks),
              static_cast<double>(all.tokens) / static_cast<double>(all.chunks), absl::ToDoubleSeconds(wall),
              static_cast<double>(all.chunks) / absl::ToDoubleSeconds(wall));
  std::printf("  dflashd used %.2f s of processor time: %.0f chunks a CPU-second, %.1f us a chunk\n",
              absl::ToDoubleSeconds(cpu), static_cast<double>(all.chunks) / absl::ToDoubleSeconds(cpu),
              absl::ToDoubleMicroseconds(cpu) / static_cast<double>(all.chunks));
  (*daemon)->Signal(SIGTERM);
  if (!(*daemon)->WaitExit(absl::Seconds(60))) return Fail("dflashd does not end");
  return 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  FlagParser parser("coordinator-bench", "Measures what dflashd itself costs a request and a chunk.");
  parser.Text("model", "DIR", "folder of a target, for its tokenizer; required", &flags.model);
  parser.Integer("requests", "N", "for the time to first token", 1, 1 << 20, &flags.requests);
  parser.Integer("prompt-tokens", "N", "of each of them", 1, 100000, &flags.prompt_tokens);
  parser.Integer("streams", "N", "at a time", 1, 1024, &flags.streams);
  parser.Integer("rate", "N", "tokens a second of each stream", 1, 100000, &flags.rate);
  parser.Number("seconds", "S", "of streaming", 0.1, 3600, &flags.seconds);
  FlagParser::Outcome outcome;
  if (const absl::Status parsed = parser.Parse(argc, argv, &outcome); !parsed.ok())
    return Fail(std::string(parsed.message()));
  if (outcome == FlagParser::Outcome::kHelp) return std::puts(parser.Help().c_str()) < 0;
  if (outcome == FlagParser::Outcome::kVersion) return std::puts(DFLASHD_VERSION) < 0;
  if (flags.model.empty()) return Fail("--model is required");
  return Run(flags);
}

}  // namespace
}  // namespace dflash::bench

int main(int argc, char** argv) { return dflash::bench::Main(argc, argv); }
