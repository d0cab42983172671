#include "base/grpc_log.h"

#include <grpc/support/log.h>

#include <string_view>

#include "spdlog/spdlog.h"

namespace dflash {

void TakeGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    spdlog::level::level_enum level = args->severity == GPR_LOG_SEVERITY_ERROR  ? spdlog::level::err
                                      : args->severity == GPR_LOG_SEVERITY_INFO ? spdlog::level::info
                                                                                : spdlog::level::debug;
    const std::string_view file = args->file;
    const std::string_view message = args->message;
    // Whoever wanted to listen says so itself, with the flag and the reason.
    if (message.starts_with("UNKNOWN:No address added")) level = spdlog::level::debug;
    spdlog::log(level, "grpc: {} ({}:{})", message, file.substr(file.rfind('/') + 1), args->line);
  });
}

}  // namespace dflash
