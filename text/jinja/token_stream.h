// The tokens of a template with a place in them, and what both parsers need to report errors and bound their
// recursion.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/lexer.h"
#include "text/jinja/runtime.h"

namespace dflash::jinja {

class TokenStream {
 public:
  // `tokens` ends with kEnd. `limits` must outlive the stream.
  TokenStream(std::vector<Token> tokens, const Limits& limits)
      : tokens_(std::move(tokens)), limits_(limits) {}
  TokenStream(const TokenStream&) = delete;
  TokenStream& operator=(const TokenStream&) = delete;

  const Token& Current() const { return tokens_[position_]; }
  const Token& Next() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  const Token& Take() {
    const Token& token = tokens_[position_];
    if (position_ + 1 < tokens_.size()) ++position_;
    return token;
  }
  static bool Is(const Token& token, Token::Kind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  bool AtOperator(std::string_view text) const { return Is(Current(), Token::Kind::kOperator, text); }
  bool AtName(std::string_view text) const { return Is(Current(), Token::Kind::kName, text); }
  bool SkipOperator(std::string_view text) { return AtOperator(text) && (Take(), true); }
  bool SkipName(std::string_view text) { return AtName(text) && (Take(), true); }

  template <typename... Parts>
  static absl::Status Error(int line, const Parts&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", parts...));
  }
  template <typename... Parts>
  static absl::Status Unsupported(int line, const Parts&... parts) {
    return absl::UnimplementedError(absl::StrCat("line ", line, ": ", parts...));
  }

  static std::string Describe(const Token& token) {
    switch (token.kind) {
      case Token::Kind::kData:
        return "text";
      case Token::Kind::kBlockBegin:
        return "'{%'";
      case Token::Kind::kBlockEnd:
        return "'%}'";
      case Token::Kind::kVariableBegin:
        return "'{{'";
      case Token::Kind::kVariableEnd:
        return "'}}'";
      case Token::Kind::kName:
      case Token::Kind::kOperator:
        return absl::StrCat("'", token.text, "'");
      case Token::Kind::kString:
        return "a string";
      case Token::Kind::kInteger:
      case Token::Kind::kFloat:
        return "a number";
      case Token::Kind::kEnd:
        return "the end of the template";
    }
    return "?";
  }
  absl::Status Unexpected(std::string_view expected) const {
    return Error(Current().line, "expected ", View(expected), ", got ", Describe(Current()));
  }
  absl::Status ExpectOperator(std::string_view text) {
    return SkipOperator(text) ? absl::OkStatus() : Unexpected(absl::StrCat("'", View(text), "'"));
  }
  absl::Status ExpectName(std::string_view text) {
    return SkipName(text) ? absl::OkStatus() : Unexpected(absl::StrCat("'", View(text), "'"));
  }
  absl::StatusOr<std::string> ExpectIdentifier() {
    if (Current().kind != Token::Kind::kName) return Unexpected("a name");
    return Take().text;
  }
  absl::Status Expect(Token::Kind kind) {
    if (Current().kind != kind) return Unexpected(Describe(Token{.kind = kind, .line = 0, .text = {}}));
    Take();
    return absl::OkStatus();
  }

  absl::Status CheckNesting(int depth) const {
    if (depth <= limits_.max_nesting) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        "line ", Current().line, ": the template nests deeper than max_nesting = ", limits_.max_nesting));
  }

  // Counts one level of recursion while it lives; `status` says whether there was room for it.
  class Level {
   public:
    explicit Level(TokenStream& stream) : status(stream.CheckNesting(++stream.depth_)), stream_(stream) {}
    ~Level() { --stream_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

    const absl::Status status;

   private:
    TokenStream& stream_;
  };

 private:
  const std::vector<Token> tokens_;
  const Limits& limits_;
  size_t position_ = 0;
  int depth_ = 0;
};

}  // namespace dflash::jinja
