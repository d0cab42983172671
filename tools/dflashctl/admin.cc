// dflashctl drain, resume, speculation, log-level: what an operator does to a running server.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "dflash/v1/admin.grpc.pb.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/request_flags.h"
#include "tools/dflashctl/round_view.h"

namespace dflash::ctl {
namespace {

// What the commands share: the address of the operators' port, and a call that Ctrl-C cancels.
class AdminCall {
 public:
  AdminCall(const char* program, std::string summary) : parser_(program, std::move(summary)) {
    endpoint_flags_.Register(&parser_, /*admin=*/true);
  }
  FlagParser& parser() { return parser_; }

  // Parses, and calls `call` with a stub and a context.
  template <typename Call>
  int Run(int argc, const char* const* argv, Interrupt* interrupt, const Call& call) {
    if (const std::optional<int> exit_code = ParseCommandLine(&parser_, argc, argv)) return *exit_code;
    const absl::StatusOr<Endpoint> endpoint = endpoint_flags_.Read();
    if (!endpoint.ok()) return UsageError(endpoint.status());
    const auto stub = v1::AdminService::NewStub(endpoint->Dial());
    grpc::ClientContext context;
    endpoint->Prepare(&context);
    const Interrupt::Scope scope(interrupt, &context);
    const grpc::Status status = call(*stub, &context, *endpoint);
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
      return ServerError({status.error_code(), absl::StrCat("nobody at ", endpoint->address,
                                                            " takes operators' calls; they go to the port or "
                                                            "socket that dflashd has with --admin-listen")},
                         *interrupt);
    }
    return status.ok() ? kSuccess : ServerError(status, *interrupt);
  }

 private:
  FlagParser parser_;
  EndpointFlags endpoint_flags_;
};

void PrintSpeculation(const v1::SpeculationSettings& settings, uint64_t revision) {
  std::printf("mode %s%s, at most %s drafts a round, revision %llu\n",
              settings.mode() == v1::SPECULATION_MODE_UNSPECIFIED ? "server" : Name(settings.mode()).c_str(),
              settings.for_all() ? " for all" : "",
              settings.max_draft_tokens() == 0 ? "all" : absl::StrCat(settings.max_draft_tokens()).c_str(),
              static_cast<unsigned long long>(revision));
}

}  // namespace

int RunDrain(int argc, const char* const* argv, Interrupt* interrupt) {
  AdminCall call(
      argv[0],
      "Lets a server finish what it has and take nothing new; shows how far it is. Ctrl-C ends the\n"
      "watching, not the draining.");
  std::optional<double> timeout;
  bool exit = false;
  call.parser().Number("timeout", "SECONDS", "after which the rest is ended; default: the server's", 0, 86400,
                       &timeout);
  call.parser().Switch("exit", "the server ends when it is done", &exit);
  return call.Run(argc, argv, interrupt,
                  [&](v1::AdminService::Stub& stub, grpc::ClientContext* context, const Endpoint&) {
                    v1::DrainRequest request;
                    if (timeout) request.set_timeout_seconds(*timeout);
                    request.set_exit_when_done(exit);
                    const auto stream = stub.Drain(context, request);
                    v1::DrainResponse progress;
                    while (stream->Read(&progress)) {
                      std::printf("%u running, %u waiting, %u ended%s\n", progress.running(),
                                  progress.waiting(), progress.cancelled(), progress.done() ? ", done" : "");
                      std::fflush(stdout);
                    }
                    return stream->Finish();
                  });
}

int RunResume(int argc, const char* const* argv, Interrupt* interrupt) {
  AdminCall call(argv[0], "Lets a drained server take requests again.");
  return call.Run(argc, argv, interrupt,
                  [](v1::AdminService::Stub& stub, grpc::ClientContext* context, const Endpoint&) {
                    v1::ResumeResponse response;
                    return stub.Resume(context, {}, &response);
                  });
}

int RunSpeculation(int argc, const char* const* argv, Interrupt* interrupt) {
  AdminCall call(argv[0], "Shows, or with flags changes, what speculation new requests get.");
  std::string mode = "keep";
  std::optional<int64_t> max_draft_tokens;
  bool for_all = false;
  call.parser().Choice("mode", {"keep", "server", "off", "dflash"}, "of requests that do not choose", &mode);
  call.parser().Integer("max-draft-tokens", "N", "drafts per round of any request; 0: no bound", 0, 65536,
                        &max_draft_tokens);
  call.parser().Switch("for-all", "with --mode off: also for requests that choose otherwise", &for_all);
  return call.Run(
      argc, argv, interrupt,
      [&](v1::AdminService::Stub& stub, grpc::ClientContext* context, const Endpoint& endpoint) {
        v1::GetSpeculationResponse current;
        const grpc::Status status = stub.GetSpeculation(context, {}, &current);
        if (!status.ok()) return status;
        if (mode == "keep" && !max_draft_tokens) {
          PrintSpeculation(current.settings(), current.revision());
          return status;
        }
        v1::SetSpeculationRequest request;
        *request.mutable_settings() = current.settings();
        request.set_if_revision(current.revision());  // not what somebody else has changed meanwhile
        if (mode != "keep") {
          request.mutable_settings()->set_mode(ParseSpeculation(mode));
          request.mutable_settings()->set_for_all(for_all);
        }
        if (max_draft_tokens) {
          request.mutable_settings()->set_max_draft_tokens(static_cast<uint32_t>(*max_draft_tokens));
        }
        grpc::ClientContext second;
        endpoint.Prepare(&second);
        const Interrupt::Scope scope(interrupt, &second);
        v1::SetSpeculationResponse response;
        const grpc::Status set = stub.SetSpeculation(&second, request, &response);
        if (set.ok()) PrintSpeculation(response.settings(), response.revision());
        return set;
      });
}

int RunLogLevel(int argc, const char* const* argv, Interrupt* interrupt) {
  AdminCall call(argv[0], "Changes how much a server logs.");
  std::string level;
  call.parser().Positional("LEVEL", "debug, info, warn or error", &level);
  return call.Run(argc, argv, interrupt,
                  [&](v1::AdminService::Stub& stub, grpc::ClientContext* context, const Endpoint&) {
                    v1::SetLogLevelRequest request;
                    for (const auto& [name, value] :
                         {std::pair("debug", v1::LOG_LEVEL_DEBUG), std::pair("info", v1::LOG_LEVEL_INFO),
                          std::pair("warn", v1::LOG_LEVEL_WARN), std::pair("error", v1::LOG_LEVEL_ERROR)}) {
                      if (level == name) request.set_level(value);
                    }
                    v1::SetLogLevelResponse response;
                    return stub.SetLogLevel(context, request, &response);
                  });
}

}  // namespace dflash::ctl
