// DFLASH_CHECK: a broken invariant is our bug and ends the process with its place and values.
// Never use it on bytes from outside: those get a Status.
#pragma once

#include <cstdio>
#include <cstdlib>

#define DFLASH_CHECK(condition, ...)                                                              \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      std::fprintf(stderr, "%s:%d: check failed: %s ", __FILE__, __LINE__, #condition);           \
      std::fprintf(stderr, "" __VA_ARGS__);                                                       \
      std::fputc('\n', stderr);                                                                   \
      std::abort();                                                                               \
    }                                                                                             \
  } while (false)
