// JSON schemas of clients: each is refused by name or becomes a grammar whose texts are JSON, within bounds.
// Input: a schema, a zero byte, then choices for a walk over the grammar.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "text/grammar/json_grammar.h"

namespace dflash {
namespace {

void Run(std::string_view input) {
  const size_t end = input.find('\0');
  const std::string schema(input.substr(0, end));
  std::string_view choices = end == std::string_view::npos ? "" : input.substr(end + 1);
  absl::StatusOr<Grammar> grammar = ConformsTo(schema);
  if (!grammar.ok()) {
    const absl::StatusCode code = grammar.status().code();
    DFLASH_CHECK(code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kUnimplemented,
                 grammar.status().ToString().c_str());
    DFLASH_CHECK(!grammar.status().message().empty());
    return;
  }
  GrammarAutomaton automaton(*std::move(grammar));
  auto state = automaton.start();
  std::string text;
  for (const char choice : choices) {
    if (state < 0 || !automaton.GoesOn(state)) break;
    std::vector<uint8_t> possible;
    for (int byte = 0; byte < 256; ++byte) {
      const auto next = automaton.Step(state, static_cast<uint8_t>(byte));
      if (next == GrammarAutomaton::kTooMany) return;
      if (next >= 0) possible.push_back(static_cast<uint8_t>(byte));
    }
    DFLASH_CHECK(!possible.empty(), "a place from which nothing leads on");
    text += static_cast<char>(possible[static_cast<uint8_t>(choice) % possible.size()]);
    state = automaton.Step(state, static_cast<uint8_t>(text.back()));
  }
  if (state >= 0 && automaton.IsText(state)) DFLASH_CHECK(nlohmann::json::accept(text), text.c_str());
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
