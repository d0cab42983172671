// DFLASH_CHECK(condition) or DFLASH_CHECK(condition, "context"): a broken invariant is our bug and ends the
// process with its place. Never use it on bytes from outside: those get a Status.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace dflash::internal {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition,
                                     const char* context = "") {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, condition, context);
  std::abort();
}
}  // namespace dflash::internal

#define DFLASH_CHECK(condition, ...)                                                              \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      ::dflash::internal::CheckFailed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
