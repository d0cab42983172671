// The flags that say how to generate, shared by the commands, and the request that they make.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/flag_parser.h"
#include "dflash/v1/generation.pb.h"

namespace dflash::ctl {

// Unset values are the server's to choose.
struct RequestFlags {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<uint64_t> seed;
  std::optional<int64_t> max_tokens;
  std::string speculation = "server";
  std::optional<int64_t> max_draft_tokens;
  std::optional<double> timeout_seconds;

  // Adds the flags to `parser`; this object must outlive it.
  void Register(FlagParser* parser);
  // Copies what is set into `request`.
  void Apply(v1::GenerateRequest* request) const;
  absl::Duration timeout() const;
};

// "off", "dflash" or "server" (the server's own choice) as on the wire.
v1::SpeculationMode ParseSpeculation(std::string_view name);

// "1,2 3\n4" -> ids, one comma or white space between them. InvalidArgument names the entry that is not a
// token id (an empty one too: ",," and a comma at either end); also when there is none.
absl::StatusOr<v1::TokenIds> ParseTokenIds(std::string_view text);

// InvalidArgument, naming `what`, when `text` is not valid UTF-8: it cannot travel in a string field.
absl::Status CheckUtf8(std::string_view text, std::string_view what);

}  // namespace dflash::ctl
