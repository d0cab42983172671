// What poisoned_worker dies of.
#pragma once

#include <cstdint>

namespace dflash::integration {

inline constexpr int32_t kPoison = 3999;  // a token of the small pair that no other test's prompt has

}  // namespace dflash::integration
