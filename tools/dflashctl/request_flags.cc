#include "tools/dflashctl/request_flags.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "absl/strings/str_cat.h"
#include "text/utf8.h"

namespace dflash::ctl {

void RequestFlags::Register(FlagParser* parser) {
  parser->Number("temperature", "X", "0 takes the most probable token", 0, 100, &temperature);
  parser->Number("top-p", "X", "keeps the most probable tokens up to this sum; 1 is off", 0, 1, &top_p);
  parser->Integer("top-k", "N", "keeps the N most probable tokens; 0 is off", 0,
                  std::numeric_limits<int32_t>::max(), &top_k);
  parser->Number("min-p", "X", "drops tokens less probable than X times the best; 0 is off", 0, 1, &min_p);
  parser->Integer("seed", "N", "same seed, same text", uint64_t{0}, std::numeric_limits<uint64_t>::max(),
                  &seed);
  parser->Integer("max-tokens", "N", "at most this many tokens of output", 1,
                  std::numeric_limits<uint32_t>::max(), &max_tokens);
  parser->Choice("speculation", {"server", "off", "dflash"},
                 "how to draft; 'server' leaves it to the server; never changes the text", &speculation);
  parser->Integer("max-draft-tokens", "N", "verifies at most N drafts per round", 1,
                  std::numeric_limits<uint32_t>::max(), &max_draft_tokens);
  parser->Number("timeout", "SECONDS", "deadline of one generation", 0.001, 1e6, &timeout_seconds);
}

void RequestFlags::Apply(v1::GenerateRequest* request) const {
  v1::Sampling* sampling = request->mutable_sampling();
  if (temperature) sampling->set_temperature(static_cast<float>(*temperature));
  if (top_p) sampling->set_top_p(static_cast<float>(*top_p));
  if (top_k) sampling->set_top_k(static_cast<uint32_t>(*top_k));
  if (min_p) sampling->set_min_p(static_cast<float>(*min_p));
  if (seed) sampling->set_seed(*seed);
  if (max_tokens) request->mutable_stopping()->set_max_tokens(static_cast<uint32_t>(*max_tokens));
  request->mutable_speculation()->set_mode(ParseSpeculation(speculation));
  if (max_draft_tokens) {
    request->mutable_speculation()->set_max_draft_tokens(static_cast<uint32_t>(*max_draft_tokens));
  }
}

absl::Duration RequestFlags::timeout() const {
  return timeout_seconds ? absl::Seconds(*timeout_seconds) : absl::InfiniteDuration();
}

v1::SpeculationMode ParseSpeculation(std::string_view name) {
  if (name == "off") return v1::SPECULATION_MODE_OFF;
  if (name == "dflash") return v1::SPECULATION_MODE_DFLASH;
  return v1::SPECULATION_MODE_UNSPECIFIED;
}

absl::StatusOr<v1::TokenIds> ParseTokenIds(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n", kSeparators = ", \t\r\n";
  v1::TokenIds tokens;
  size_t at = std::min(text.find_first_not_of(kSpace), text.size());
  for (bool another = false; at < text.size() || another;) {
    const size_t end = std::min(text.find_first_of(kSeparators, at), text.size());
    const std::string entry(text.substr(at, end - at));
    uint32_t id = 0;
    const auto [stop, error] = std::from_chars(entry.data(), entry.data() + entry.size(), id);
    if (error != std::errc() || stop != entry.data() + entry.size()) {
      return absl::InvalidArgumentError(absl::StrCat("'", entry, "' is not a token id"));
    }
    tokens.add_ids(id);
    at = std::min(text.find_first_not_of(kSpace, end), text.size());
    another = at < text.size() && text[at] == ',';  // a comma calls for one more
    if (another) at = std::min(text.find_first_not_of(kSpace, at + 1), text.size());
  }
  if (tokens.ids_size() == 0) return absl::InvalidArgumentError("no token ids");
  return tokens;
}

absl::Status CheckUtf8(std::string_view text, std::string_view what) {
  if (ReplaceIllFormed(text) == text) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(std::string(what), " is not valid UTF-8"));
}

}  // namespace dflash::ctl
