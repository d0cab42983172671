// How an answer and its rounds look on a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dflash/v1/generation.pb.h"

namespace dflash::ctl {

// Where a token of the output came from.
enum class Origin : uint8_t {
  kPrefill,     // the first token: no round made it
  kDraft,       // an accepted draft
  kCorrection,  // the target's own token at the end of a round: correction or bonus
};

// A run of tokens with one origin, in one round.
struct Piece {
  Origin origin = Origin::kPrefill;
  std::vector<uint32_t> token_ids;
};

// Splits a chunk's tokens by its rounds. Tokens that no round claims are kPrefill.
std::vector<Piece> SplitByOrigin(const v1::Chunk& chunk);

// Writes pieces of text with their origins visible: in colours (drafts green, corrections yellow), or without
// colours with drafts between « and ». A colour never changes inside a character: bytes of one that is still
// incomplete wait for the rest, and what is not UTF-8 shows as U+FFFD.
class RoundPainter {
 public:
  explicit RoundPainter(bool colors) : colors_(colors) {}
  // `bytes`: detokenized piece, may begin or end inside a character. Returns what to print now.
  std::string Paint(Origin origin, std::string_view bytes);
  // The rest, and back to plain text.
  std::string Finish();

 private:
  std::string Switch(Origin origin);

  const bool colors_;
  Origin shown_ = Origin::kPrefill;
  std::string held_;  // the beginning of a character
};

// One line: tokens, rounds, tokens per round, tokens per second, time to first token, how it ended.
std::string AnswerSummary(const v1::Finished& finished);

// One line: the share of rounds that accepted the draft at each depth, of those that verified one there;
// empty without speculation.
std::string AcceptanceByDepth(const v1::SpeculationSummary& speculation);

// "a..b" lower-case words of the wire's enum names: "dflash", "stop_string".
std::string Name(v1::SpeculationMode mode);
std::string Name(v1::FinishReason reason);

}  // namespace dflash::ctl
