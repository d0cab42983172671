#include "base/host_port.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(SplitHostPortTest, TakesNamesAndBracketedAddresses) {
  EXPECT_EQ(SplitHostPort("localhost:80").value(), std::pair(std::string("localhost"), 80));
  EXPECT_EQ(SplitHostPort("[::1]:0").value(), std::pair(std::string("::1"), 0));
  for (const char* bad : {"", ":80", "host", "host:", "host:x", "host:-1", "host:65536", "host:80x"}) {
    EXPECT_FALSE(SplitHostPort(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace dflash
