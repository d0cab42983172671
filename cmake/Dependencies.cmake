# Everything comes from Debian 12 packages; tools/install-packages lists them.
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Protobuf REQUIRED)  # module mode: Debian ships no protobuf CMake config
find_package(absl CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(simdjson CONFIG REQUIRED)  # for big files
find_package(GTest CONFIG REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
find_package(spdlog CONFIG REQUIRED)
if(DFLASHD_WITH_RPC)
  find_package(gRPC CONFIG REQUIRED)  # after Protobuf; a "Could NOT find c-ares" line is harmless
  find_package(prometheus-cpp CONFIG REQUIRED)
  find_package(yaml-cpp CONFIG REQUIRED)
  find_package(Boost 1.74 CONFIG REQUIRED COMPONENTS headers)
endif()
