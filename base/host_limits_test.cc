#include "base/host_limits.h"

#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace dflash {
namespace {

namespace fs = std::filesystem;

constexpr MemoryBound kMachine = {.total = 1000, .free = 800};

// A tree of groups as the kernel shows it.
class HostLimitsTest : public ::testing::Test {
 protected:
  void Write(const std::string& group, const std::string& file, const std::string& text) {
    fs::create_directories(mount_ / group);
    std::ofstream(mount_ / group / "cgroup.controllers") << "cpu memory\n";
    std::ofstream(mount_ / group / file) << text << "\n";
  }
  void Memory(const std::string& group, const std::string& max, const std::string& current,
              const std::string& stat = "") {
    Write(group, "memory.max", max);
    Write(group, "memory.current", current);
    Write(group, "memory.stat", stat);
  }
  std::vector<fs::path> Groups(const std::string& membership) {
    std::ofstream(folder_ / "membership") << membership;
    return ControlGroups(mount_, folder_ / "membership");
  }
  MemoryBound Bound(const std::string& membership) { return BoundByGroups(kMachine, Groups(membership)); }

  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(mount_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  const fs::path folder_ =
      fs::path(::testing::TempDir()) /
      (std::string("host_limits_test.") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const fs::path mount_ = folder_ / "mount";
};

TEST_F(HostLimitsTest, EveryGroupOnTheWayBoundsMemory) {
  Memory("pods", "600", "100");             // tightest
  Memory("pods/a", "700", "550");           // fullest
  Memory("pods/a/container", "max", "50");  // unbounded
  Memory("pods/b", "10", "10");             // somebody else's
  const MemoryBound bound = Bound("3:cpuset:/elsewhere\n0::/pods/a/container\n");
  EXPECT_EQ(bound.total, 600);
  EXPECT_EQ(bound.free, 150);
}

TEST_F(HostLimitsTest, CachedFilesAreFree) {
  Memory("a", "600", "590", "anon 90\nfile 500\ninactive_file 300\nactive_file 200\nfile_mapped 7\n");
  EXPECT_EQ(Bound("0::/a\n").free, 510);
}

TEST_F(HostLimitsTest, AContainerSeesItsGroupAtTheMount) {
  Memory("", "600", "550");
  Write("", "cpu.max", "200000 100000");
  for (const std::string membership : {"0::/\n", "0::/kubepods.slice/of-the-host\n"}) {
    EXPECT_EQ(Bound(membership).free, 50) << membership;
    EXPECT_EQ(CoresOfGroups(64, Groups(membership)), 2) << membership;
  }
}

TEST_F(HostLimitsTest, NeverMoreThanTheMachineAndNeverLessThanNothing) {
  Memory("wide", "5000", "10");
  EXPECT_EQ(Bound("0::/wide\n").total, kMachine.total);
  EXPECT_EQ(Bound("0::/wide\n").free, kMachine.free);
  Memory("over", "500", "510");
  EXPECT_EQ(Bound("0::/over\n").free, 0);
}

TEST_F(HostLimitsTest, WhatIsNotThereDoesNotBound) {
  for (const std::string membership : {"", "4:memory:/old\n", "0::/gone\n", "no line of it\n0:"}) {
    const MemoryBound bound = Bound(membership);
    EXPECT_EQ(bound.total, kMachine.total) << membership;
    EXPECT_EQ(bound.free, kMachine.free) << membership;
    EXPECT_EQ(CoresOfGroups(64, Groups(membership)), 64) << membership;
  }
}

TEST_F(HostLimitsTest, WholeCoresOfTheTightestQuota) {
  Write("pods", "cpu.max", "380000 100000");
  Write("pods/a", "cpu.max", "max 100000");
  EXPECT_EQ(CoresOfGroups(64, Groups("0::/pods/a\n")), 3);
  EXPECT_EQ(CoresOfGroups(2, Groups("0::/pods/a\n")), 2);
  Write("pods/a", "cpu.max", "50000 100000");
  EXPECT_EQ(CoresOfGroups(64, Groups("0::/pods/a\n")), 1) << "half a core";
}

TEST_F(HostLimitsTest, AffinityBoundsCores) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &all)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(AvailableCores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  EXPECT_GE(AvailableCores(), 1);
  EXPECT_LE(AvailableCores(), CPU_COUNT(&all));
}

}  // namespace
}  // namespace dflash
