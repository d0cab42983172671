#include "tools/dflash_bench/text_speed.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "text/tokenizer.h"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {

absl::Status MeasureText(const std::string& folder, const std::string& text, int repeats, Report& report) {
  DFLASH_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(folder));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text, AddedTokens::kAsText));
  const auto bytes = static_cast<double>(text.size());
  const double encode =
      TimeMedian([&] { DFLASH_CHECK(tokenizer.Encode(text, AddedTokens::kAsText).ok()); }, bytes, repeats);
  const double decode =
      TimeMedian([&] { DFLASH_CHECK(tokenizer.Decode(ids, SpecialTokens::kKeep).ok()); }, bytes, repeats);
  report.Section(
      absl::StrCat("tokenizer, one thread, ", text.size(), " bytes of text, ", ids.size(), " tokens"));
  report.Add({"encode", {{"MB/s", 1e-6 / encode}}});
  report.Add({"decode", {{"MB/s", 1e-6 / decode}}});
  return absl::OkStatus();
}

}  // namespace dflash::bench
