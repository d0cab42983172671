#include "text/jinja/parser.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/expression_parser.h"
#include "text/jinja/lexer.h"
#include "text/jinja/token_stream.h"

namespace dflash::jinja {

namespace {

using Kind = Token::Kind;

constexpr std::array<std::string_view, 11> kUnsupportedTags = {
    "autoescape", "block", "call", "extends", "filter", "from", "import", "include", "print", "raw", "with"};

class StatementParser {
 public:
  StatementParser(std::vector<Token> tokens, const Limits& limits)
      : tokens_(std::move(tokens), limits), expressions_(tokens_) {}

  absl::StatusOr<Body> Run() { return ParseBody({}); }

 private:
  // Statements up to a tag named in `ends`, whose name becomes the current token; with no ends, up to the
  // end.
  absl::StatusOr<Body> ParseBody(const std::vector<std::string_view>& ends) {
    const TokenStream::Level level(tokens_);
    DFLASH_RETURN_IF_ERROR(level.status);
    Body body;
    const int first_line = tokens_.Current().line;
    while (tokens_.Current().kind != Kind::kEnd) {
      const Token& token = tokens_.Take();
      if (token.kind == Kind::kData) {
        body.push_back(Make(token.line, TextStatement{MarkedText::FromTemplate(token.text)}));
      } else if (token.kind == Kind::kVariableBegin) {
        DFLASH_ASSIGN_OR_RETURN(ExpressionPtr value, expressions_.ParseTuple(/*with_conditional=*/true));
        DFLASH_RETURN_IF_ERROR(tokens_.Expect(Kind::kVariableEnd));
        body.push_back(Make(token.line, PrintStatement{std::move(value)}));
      } else {
        if (tokens_.Current().kind == Kind::kName &&
            std::find(ends.begin(), ends.end(), tokens_.Current().text) != ends.end()) {
          return body;
        }
        DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<const Statement> statement, ParseStatement());
        DFLASH_RETURN_IF_ERROR(tokens_.Expect(Kind::kBlockEnd));
        body.push_back(std::move(statement));
      }
    }
    if (!ends.empty())
      return TokenStream::Error(tokens_.Current().line, "no '", View(ends.back()), "' for the block of line ",
                                first_line);
    return body;
  }

  // The rest of an opening tag, then the body up to one of `ends`, whose name becomes the current token.
  absl::StatusOr<Body> ParseBlock(const std::vector<std::string_view>& ends) {
    tokens_.SkipOperator(":");
    DFLASH_RETURN_IF_ERROR(tokens_.Expect(Kind::kBlockEnd));
    return ParseBody(ends);
  }
  // The same, and drops the name of the end tag.
  absl::StatusOr<Body> ParseWholeBlock(std::string_view end) {
    DFLASH_ASSIGN_OR_RETURN(Body body, ParseBlock({end}));
    tokens_.Take();
    return body;
  }

  template <typename Node>
  static std::unique_ptr<const Statement> Make(int line, Node node) {
    return std::make_unique<const Statement>(Statement{line, std::move(node)});
  }

  absl::StatusOr<std::unique_ptr<const Statement>> ParseStatement() {
    if (tokens_.Current().kind != Kind::kName) return tokens_.Unexpected("the name of a tag");
    const int line = tokens_.Current().line;
    const std::string tag = tokens_.Take().text;
    if (tag == "if") return ParseIf(line);
    if (tag == "for") return ParseFor(line);
    if (tag == "set") return ParseSet(line);
    if (tag == "macro") return ParseMacro(line);
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) return TokenStream::Error(line, "'", tag, "' outside of a loop");
      return Make(line, LoopControl{tag == "break"});
    }
    if (tag == "generation") {
      const int loops = std::exchange(loops_, 0);  // a break does not leave the block, as in transformers
      ++scopes_;
      DFLASH_ASSIGN_OR_RETURN(Body body, ParseWholeBlock("endgeneration"));
      --scopes_;
      loops_ = loops;
      return Make(line, GenerationStatement{std::move(body)});
    }
    if (std::find(kUnsupportedTags.begin(), kUnsupportedTags.end(), tag) != kUnsupportedTags.end()) {
      return TokenStream::Unsupported(line, "the tag '", tag, "' is not supported");
    }
    return TokenStream::Error(line, "unknown tag '", tag, "'");
  }

  absl::StatusOr<std::unique_ptr<const Statement>> ParseIf(int line) {
    IfStatement statement;
    while (true) {
      DFLASH_ASSIGN_OR_RETURN(ExpressionPtr test, expressions_.ParseTuple(/*with_conditional=*/false));
      DFLASH_ASSIGN_OR_RETURN(Body body, ParseBlock({"elif", "else", "endif"}));
      statement.branches.emplace_back(std::move(test), std::move(body));
      const std::string& end = tokens_.Take().text;
      if (end == "elif") continue;
      if (end == "else") {
        DFLASH_ASSIGN_OR_RETURN(statement.otherwise, ParseWholeBlock("endif"));
      }
      return Make(line, std::move(statement));
    }
  }

  absl::StatusOr<std::unique_ptr<const Statement>> ParseFor(int line) {
    ForStatement statement;
    DFLASH_ASSIGN_OR_RETURN(statement.target, ParseTarget(/*is_loop=*/true));
    DFLASH_RETURN_IF_ERROR(tokens_.ExpectName("in"));
    DFLASH_ASSIGN_OR_RETURN(statement.iterable, expressions_.ParseTuple(/*with_conditional=*/false));
    if (tokens_.SkipName("if")) {
      DFLASH_ASSIGN_OR_RETURN(statement.condition, expressions_.ParseExpression());
    }
    if (tokens_.AtName("recursive"))
      return TokenStream::Unsupported(line, "recursive loops are not supported");
    ++loops_;
    ++scopes_;
    DFLASH_ASSIGN_OR_RETURN(statement.body, ParseBlock({"else", "endfor"}));
    --loops_;
    if (tokens_.Take().text == "else") {
      DFLASH_ASSIGN_OR_RETURN(statement.otherwise, ParseWholeBlock("endfor"));
    }
    --scopes_;
    return Make(line, std::move(statement));
  }

  absl::StatusOr<std::unique_ptr<const Statement>> ParseSet(int line) {
    DFLASH_ASSIGN_OR_RETURN(Target target, ParseTarget(/*is_loop=*/false));
    if (tokens_.SkipOperator("=")) {
      DFLASH_ASSIGN_OR_RETURN(ExpressionPtr value, expressions_.ParseTuple(/*with_conditional=*/true));
      return Make(line, SetStatement{std::move(target), std::move(value)});
    }
    if (tokens_.AtOperator("|"))
      return TokenStream::Unsupported(line, "a filter on a block assignment is not supported");
    const int loops = std::exchange(loops_, 0);
    ++scopes_;
    DFLASH_ASSIGN_OR_RETURN(Body body, ParseWholeBlock("endset"));
    --scopes_;
    loops_ = loops;
    return Make(line, SetBlockStatement{std::move(target), std::move(body)});
  }

  absl::StatusOr<std::unique_ptr<const Statement>> ParseMacro(int line) {
    // A macro sees the variables of the place where it is defined; only one such place is supported.
    if (scopes_ > 0)
      return TokenStream::Unsupported(line, "a macro inside another block than 'if' is not supported");
    MacroStatement macro;
    DFLASH_ASSIGN_OR_RETURN(macro.name, tokens_.ExpectIdentifier());
    DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator("("));
    while (!tokens_.AtOperator(")")) {
      if (!macro.parameters.empty()) DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator(","));
      DFLASH_ASSIGN_OR_RETURN(std::string name, tokens_.ExpectIdentifier());
      ExpressionPtr value;
      if (tokens_.SkipOperator("=")) {
        DFLASH_ASSIGN_OR_RETURN(value, expressions_.ParseExpression());
      } else if (!macro.parameters.empty() && macro.parameters.back().second != nullptr) {
        return TokenStream::Error(line, "a parameter without default follows one with a default");
      }
      for (const auto& parameter : macro.parameters) {
        if (parameter.first == name)
          return TokenStream::Error(line, "two parameters are called '", name, "'");
      }
      macro.parameters.emplace_back(std::move(name), std::move(value));
    }
    tokens_.Take();
    const int loops = std::exchange(loops_, 0);
    ++scopes_;
    expressions_.set_in_macro(true);
    DFLASH_ASSIGN_OR_RETURN(macro.body, ParseWholeBlock("endmacro"));
    expressions_.set_in_macro(false);
    --scopes_;
    loops_ = loops;
    return Make(line, std::move(macro));
  }

  // What a `set` or a `for` assigns to. A `set` may also name an attribute of a namespace.
  absl::StatusOr<Target> ParseTarget(bool is_loop) {
    if (!is_loop && TokenStream::Is(tokens_.Next(), Kind::kOperator, ".")) {
      Target target;
      DFLASH_ASSIGN_OR_RETURN(target.name, tokens_.ExpectIdentifier());
      tokens_.Take();
      DFLASH_ASSIGN_OR_RETURN(target.attribute, tokens_.ExpectIdentifier());
      return target;
    }
    return ParseTargets([&] {
      return (is_loop && tokens_.AtName("in")) || tokens_.AtOperator("=") ||
             tokens_.Current().kind == Kind::kBlockEnd;
    });
  }

  template <typename AtEnd>
  absl::StatusOr<Target> ParseTargets(const AtEnd& at_end) {
    const TokenStream::Level level(tokens_);
    DFLASH_RETURN_IF_ERROR(level.status);
    Target tuple;
    bool has_comma = false;
    while (!at_end()) {
      Target part;
      if (tokens_.SkipOperator("(")) {
        const std::function<bool()> at_parenthesis = [&] { return tokens_.AtOperator(")"); };
        DFLASH_ASSIGN_OR_RETURN(part, ParseTargets(at_parenthesis));
        DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator(")"));
      } else {
        const int line = tokens_.Current().line;
        DFLASH_ASSIGN_OR_RETURN(part.name, tokens_.ExpectIdentifier());
        for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
          if (part.name == reserved) return TokenStream::Error(line, "cannot assign to '", part.name, "'");
        }
        if (tokens_.AtOperator(".") || tokens_.AtOperator("["))
          return TokenStream::Error(line, "cannot assign to a part of '", part.name, "' here");
      }
      tuple.parts.push_back(std::move(part));
      if (!tokens_.SkipOperator(",")) break;
      has_comma = true;
    }
    if (!at_end() && has_comma) return tokens_.Unexpected("','");
    if (tuple.parts.empty()) return tokens_.Unexpected("a name to assign to");
    if (has_comma) return tuple;
    Target single = std::move(tuple.parts.front());
    return single;
  }

  TokenStream tokens_;
  ExpressionParser expressions_;
  int loops_ = 0;   // loops that a break could leave
  int scopes_ = 0;  // blocks with variables of their own
};

}  // namespace

absl::StatusOr<Body> Parse(std::string_view source, const Limits& limits) {
  DFLASH_ASSIGN_OR_RETURN(std::vector<Token> tokens, Tokenize(source));
  return StatementParser(std::move(tokens), limits).Run();
}

}  // namespace dflash::jinja
