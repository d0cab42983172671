#include "base/grpc_log.h"

#include <grpc/support/log.h>

#include <string_view>

#include "spdlog/spdlog.h"

namespace dflash {

void TakeGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    const spdlog::level::level_enum level = args->severity == GPR_LOG_SEVERITY_ERROR  ? spdlog::level::err
                                            : args->severity == GPR_LOG_SEVERITY_INFO ? spdlog::level::info
                                                                                      : spdlog::level::debug;
    const std::string_view file = args->file;
    spdlog::log(level, "grpc: {} ({}:{})", args->message, file.substr(file.rfind('/') + 1), args->line);
  });
}

}  // namespace dflash
