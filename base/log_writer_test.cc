#include "base/log_writer.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using Ends = std::array<int, 2>;  // to read from, to write to

Ends Pipe() {
  Ends ends;
  EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  return ends;
}

Ends SocketPair() {
  Ends ends;
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  return ends;
}

LogWriter* WriterTo(int descriptor) {
  return LogWriter::Create(descriptor, [](int64_t lost) { return absl::StrCat("lost ", lost, "\n"); });
}

// Lines of `descriptor` up to and including one that is `last`.
std::vector<std::string> ReadUpTo(int descriptor, const std::string& last) {
  FILE* file = fdopen(dup(descriptor), "r");
  std::vector<std::string> lines;
  for (char text[8192]; std::fgets(text, sizeof(text), file) != nullptr;) {
    lines.emplace_back(text);
    if (lines.back() == last) break;
  }
  std::fclose(file);
  return lines;
}

TEST(LogWriterTest, LinesReachAReaderThatReads) {
  for (const Ends& ends : {Pipe(), SocketPair()}) {
    LogWriter* writer = WriterTo(ends[1]);
    writer->Write("one\n");
    writer->Write("two\n");
    EXPECT_EQ(ReadUpTo(ends[0], "two\n"), (std::vector<std::string>{"one\n", "two\n"}));
  }
  char name[] = "/tmp/log_writer_testXXXXXX";
  const int file = mkstemp(name);
  unlink(name);
  WriterTo(file)->Write("to a file\n");
  char text[100];
  EXPECT_EQ(std::string(text, static_cast<size_t>(pread(file, text, sizeof(text), 0))), "to a file\n");
}

// Hangs if a writer ever waits.
TEST(LogWriterTest, NobodyWaitsForAReaderThatDoesNotRead) {
  constexpr int kThreads = 4, kLines = 5000;
  const std::string padding(200, '.');
  for (const Ends& ends : {Pipe(), SocketPair()}) {
    const int flags = fcntl(ends[1], F_GETFL);
    LogWriter* writer = WriterTo(ends[1]);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kLines; ++i) writer->Write(absl::StrCat(t, " ", i, " ", padding, "\n"));
      });
    }
    for (std::thread& thread : threads) thread.join();
    writer->Drain(absl::Milliseconds(1));  // gives up
    writer->Drain(absl::Hours(1));         // has given up already
    EXPECT_EQ(fcntl(ends[1], F_GETFL), flags) << "others have this descriptor, too";

    // Then it reads. All that was kept is there, whole, in order, and what was not is counted in its place.
    std::array<int, kThreads> next = {};
    int kept = 0, lost = 0;
    FILE* file = fdopen(ends[0], "r");
    for (char text[8192];
         kept + lost < kThreads * kLines && std::fgets(text, sizeof(text), file) != nullptr;) {
      int thread = 0, line = 0, lost_here = 0;
      if (std::sscanf(text, "lost %d\n", &lost_here) == 1) {
        lost += lost_here;
        continue;
      }
      ASSERT_EQ(std::sscanf(text, "%d %d ", &thread, &line), 2) << text;
      ASSERT_TRUE(std::string(text).ends_with(padding + "\n")) << text;
      ASSERT_GE(line, next[static_cast<size_t>(thread)]);
      next[static_cast<size_t>(thread)] = line + 1;
      ++kept;
    }
    EXPECT_EQ(kept + lost, kThreads * kLines);
    EXPECT_GT(kept, static_cast<int>(LogWriter::kMaxWaitingBytes / 220));
    EXPECT_GT(lost, 1000);
    writer->Write("as before\n");
    char text[100];
    EXPECT_STREQ(std::fgets(text, sizeof(text), file), "as before\n");
    std::fclose(file);
  }
}

TEST(LogWriterTest, WhatWaitsIsWrittenBeforeTheProcessEnds) {
  const Ends ends = Pipe();
  LogWriter* writer = WriterTo(ends[1]);
  const std::string line(1000, 'x');
  for (int i = 0; i < 500; ++i) writer->Write(line + "\n");  // more than a pipe holds
  writer->Write("last\n");
  std::thread reader([&] { EXPECT_EQ(ReadUpTo(ends[0], "last\n").size(), 501u); });
  writer->Drain(absl::Hours(1));
  close(ends[1]);
  reader.join();
}

// The reader that is gone costs lines and nothing else.
TEST(LogWriterTest, AReaderThatIsGone) {
  signal(SIGPIPE, SIG_IGN);
  for (const Ends& ends : {Pipe(), SocketPair()}) {
    LogWriter* writer = WriterTo(ends[1]);
    close(ends[0]);
    writer->Write("nowhere\n");
    writer->Drain(absl::Hours(1));
  }
}

}  // namespace
}  // namespace dflash
