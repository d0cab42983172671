// Watches a stream of text for stop strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace dflash {

// The matcher of one output. The match is the stop string that is complete first; of several that are
// complete with the same byte, the longest. (Not the one that begins first: "bcd" inside "abcde" ends the
// output at "d", without waiting for "e".) So the result depends on the text alone and not on how it is cut
// into chunks. Not thread-safe.
class StopMatcher {
 public:
  static constexpr size_t kMaxStrings = 16;
  static constexpr size_t kMaxStringBytes = 256;

  // Errors, naming the string by its place: InvalidArgument for more than kMaxStrings strings, an empty one,
  // one longer than kMaxStringBytes, or one that is not well-formed UTF-8 (no output could contain it). No
  // strings: everything passes.
  static absl::StatusOr<StopMatcher> Create(std::vector<std::string> strings);

  struct Match {
    size_t string;    // place in the list given to Create
    uint64_t begin;   // of the stop string in the whole text, in bytes: all text before it has been returned
    size_t consumed;  // bytes of the chunk up to the end of the stop string, at least 1
  };
  struct Result {
    std::string text;            // may be sent now
    std::optional<Match> match;  // this chunk completes a stop string
  };

  // Takes the next chunk. Text that could be the beginning of a stop string is held back, at most 255 bytes.
  // If every chunk ends at a character's end, so does every returned text. To know which token completes a
  // stop string, feed the text of one token at a time. After a match: drops the chunk and returns nothing.
  Result Feed(std::string_view chunk);

  // Ends the output without a match: returns what is held back (nothing after a match). Then only destroy it.
  std::string Finish();

 private:
  struct Pattern {
    std::string string;
    std::vector<uint16_t>
        borders;         // by length of a prefix: its longest proper prefix that is also its suffix
    size_t matched = 0;  // longest prefix that the text ends with
  };

  std::vector<Pattern> patterns_;
  std::string held_;       // not yet returned
  uint64_t returned_ = 0;  // bytes
  bool stopped_ = false;
};

}  // namespace dflash
