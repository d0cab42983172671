#include "text/jinja/expression_parser.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "text/jinja/filters.h"
#include "text/jinja/value_tests.h"

namespace dflash::jinja {

namespace {

using Kind = Token::Kind;

int DepthOf(const ExpressionPtr& expression) { return expression == nullptr ? 0 : expression->depth; }

int DepthOf(const std::vector<ExpressionPtr>& expressions) {
  int depth = 0;
  for (const ExpressionPtr& expression : expressions) depth = std::max(depth, DepthOf(expression));
  return depth;
}

int DepthOf(const ArgumentList& arguments) {
  int depth = DepthOf(arguments.positional);
  for (const auto& [name, expression] : arguments.keyword) depth = std::max(depth, DepthOf(expression));
  return depth;
}

template <typename... Operands>
int Deepest(const Operands&... operands) {
  return std::max({DepthOf(operands)...});
}

}  // namespace

template <typename Node>
absl::StatusOr<ExpressionPtr> ExpressionParser::Make(int line, int operand_depth, Node node) const {
  DFLASH_RETURN_IF_ERROR(tokens_.CheckNesting(operand_depth + 1));
  return std::make_unique<const Expression>(Expression{line, operand_depth + 1, std::move(node)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseTuple(bool with_conditional, bool in_parentheses) {
  const int line = tokens_.Current().line;
  std::vector<ExpressionPtr> items;
  bool is_tuple = false;
  while (!(tokens_.Current().kind == Kind::kVariableEnd || tokens_.Current().kind == Kind::kBlockEnd ||
           tokens_.AtOperator(")"))) {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr item, with_conditional ? ParseExpression() : ParseOr());
    items.push_back(std::move(item));
    if (!tokens_.SkipOperator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items.front());
  if (!is_tuple && !in_parentheses) return tokens_.Unexpected("an expression");
  const int depth = Deepest(items);
  return Make(line, depth, SequenceDisplay{Sequence::Kind::kTuple, std::move(items)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseExpression() {
  const TokenStream::Level level(tokens_);
  DFLASH_RETURN_IF_ERROR(level.status);
  const int line = tokens_.Current().line;
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr then, ParseOr());
  while (tokens_.SkipName("if")) {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr test, ParseOr());
    ExpressionPtr otherwise;
    if (tokens_.SkipName("else")) {
      DFLASH_ASSIGN_OR_RETURN(otherwise, ParseExpression());
    }
    const int depth = Deepest(test, then, otherwise);
    DFLASH_ASSIGN_OR_RETURN(
        then, Make(line, depth, Conditional{std::move(test), std::move(then), std::move(otherwise)}));
  }
  return then;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseOr() {
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr left, ParseAnd());
  while (tokens_.AtName("or")) {
    const int line = tokens_.Take().line;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr right, ParseAnd());
    const int depth = Deepest(left, right);
    DFLASH_ASSIGN_OR_RETURN(left, Make(line, depth, Logical{false, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseAnd() {
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr left, ParseNot());
  while (tokens_.AtName("and")) {
    const int line = tokens_.Take().line;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr right, ParseNot());
    const int depth = Deepest(left, right);
    DFLASH_ASSIGN_OR_RETURN(left, Make(line, depth, Logical{true, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseNot() {
  if (!tokens_.AtName("not")) return ParseComparison();
  const TokenStream::Level level(tokens_);
  DFLASH_RETURN_IF_ERROR(level.status);
  const int line = tokens_.Take().line;
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr operand, ParseNot());
  const int depth = Deepest(operand);
  return Make(line, depth, Unary{Unary::Operator::kNot, std::move(operand)});
}

std::optional<CompareOperator> ExpressionParser::TakeCompareOperator() {
  static constexpr std::pair<std::string_view, CompareOperator> kOperators[] = {
      {"==", CompareOperator::kEqual},  {"!=", CompareOperator::kNotEqual},
      {"<", CompareOperator::kLess},    {"<=", CompareOperator::kLessEqual},
      {">", CompareOperator::kGreater}, {">=", CompareOperator::kGreaterEqual}};
  for (const auto& [text, op] : kOperators) {
    if (tokens_.SkipOperator(text)) return op;
  }
  if (tokens_.SkipName("in")) return CompareOperator::kIn;
  if (tokens_.AtName("not") && TokenStream::Is(tokens_.Next(), Kind::kName, "in")) {
    tokens_.Take();
    tokens_.Take();
    return CompareOperator::kNotIn;
  }
  return std::nullopt;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseComparison() {
  const int line = tokens_.Current().line;
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr first, ParseSum());
  int depth = Deepest(first);
  std::vector<std::pair<CompareOperator, ExpressionPtr>> rest;
  while (const std::optional<CompareOperator> op = TakeCompareOperator()) {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr operand, ParseSum());
    depth = std::max(depth, Deepest(operand));
    rest.emplace_back(*op, std::move(operand));
  }
  if (rest.empty()) return first;
  return Make(line, depth, Comparison{std::move(first), std::move(rest)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseSum() {
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr left, ParseConcatenation());
  while (tokens_.AtOperator("+") || tokens_.AtOperator("-")) {
    const int line = tokens_.Current().line;
    const BinaryOperator op = tokens_.Take().text == "+" ? BinaryOperator::kAdd : BinaryOperator::kSubtract;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr right, ParseConcatenation());
    const int depth = Deepest(left, right);
    DFLASH_ASSIGN_OR_RETURN(left, Make(line, depth, Binary{op, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseConcatenation() {
  const int line = tokens_.Current().line;
  std::vector<ExpressionPtr> parts;
  do {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr part, ParseProduct());
    parts.push_back(std::move(part));
  } while (tokens_.SkipOperator("~"));
  if (parts.size() == 1) return std::move(parts.front());
  const int depth = Deepest(parts);
  return Make(line, depth, Concatenation{std::move(parts)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseProduct() {
  static constexpr std::pair<std::string_view, BinaryOperator> kOperators[] = {
      {"*", BinaryOperator::kMultiply},
      {"/", BinaryOperator::kDivide},
      {"//", BinaryOperator::kFloorDivide},
      {"%", BinaryOperator::kModulo}};
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr left, ParsePower());
  while (true) {
    const auto found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                    [&](const auto& entry) { return tokens_.AtOperator(entry.first); });
    if (found == std::end(kOperators)) return left;
    const int line = tokens_.Take().line;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr right, ParsePower());
    const int depth = Deepest(left, right);
    DFLASH_ASSIGN_OR_RETURN(left,
                            Make(line, depth, Binary{found->second, std::move(left), std::move(right)}));
  }
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParsePower() {
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr left, ParseUnary(/*with_filters=*/true));
  while (tokens_.AtOperator("**")) {  // groups from the left in Jinja
    const int line = tokens_.Take().line;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr right, ParseUnary(/*with_filters=*/true));
    const int depth = Deepest(left, right);
    DFLASH_ASSIGN_OR_RETURN(
        left, Make(line, depth, Binary{BinaryOperator::kPower, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseUnary(bool with_filters) {
  ExpressionPtr expression;
  if (tokens_.AtOperator("-") || tokens_.AtOperator("+")) {
    const TokenStream::Level level(tokens_);
    DFLASH_RETURN_IF_ERROR(level.status);
    const int line = tokens_.Current().line;
    const Unary::Operator op = tokens_.Take().text == "-" ? Unary::Operator::kMinus : Unary::Operator::kPlus;
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr operand, ParseUnary(/*with_filters=*/false));
    const int depth = Deepest(operand);
    DFLASH_ASSIGN_OR_RETURN(expression, Make(line, depth, Unary{op, std::move(operand)}));
  } else {
    DFLASH_ASSIGN_OR_RETURN(expression, ParsePrimary());
  }
  DFLASH_ASSIGN_OR_RETURN(expression, ParsePostfix(std::move(expression)));
  while (with_filters) {
    if (tokens_.AtOperator("|")) {
      DFLASH_ASSIGN_OR_RETURN(expression, ParseFilter(std::move(expression)));
    } else if (tokens_.AtName("is")) {
      DFLASH_ASSIGN_OR_RETURN(expression, ParseTest(std::move(expression)));
    } else if (tokens_.AtOperator("(")) {
      DFLASH_ASSIGN_OR_RETURN(expression, ParseCall(std::move(expression)));
    } else {
      break;
    }
  }
  return expression;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParsePrimary() {
  const Token& token = tokens_.Current();
  switch (token.kind) {
    case Kind::kName:
      tokens_.Take();
      if (token.text == "true" || token.text == "True") return Make(token.line, 0, Constant{Value(true)});
      if (token.text == "false" || token.text == "False") return Make(token.line, 0, Constant{Value(false)});
      if (token.text == "none" || token.text == "None") return Make(token.line, 0, Constant{Value()});
      if (in_macro_ && (token.text == "varargs" || token.text == "kwargs" || token.text == "caller")) {
        return TokenStream::Unsupported(token.line, "'", token.text, "' in a macro is not supported");
      }
      return Make(token.line, 0, Name{token.text});
    case Kind::kString: {
      std::string text;
      while (tokens_.Current().kind == Kind::kString)
        text += tokens_.Take().text;  // adjacent strings are one
      return Make(token.line, 0, Constant{Value::Text(text)});
    }
    case Kind::kInteger:
      return Make(token.line, 0, Constant{Value(tokens_.Take().integer)});
    case Kind::kFloat:
      return Make(token.line, 0, Constant{Value(tokens_.Take().number)});
    case Kind::kOperator:
      if (tokens_.SkipOperator("(")) {
        DFLASH_ASSIGN_OR_RETURN(ExpressionPtr tuple,
                                ParseTuple(/*with_conditional=*/true, /*in_parentheses=*/true));
        DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator(")"));
        return tuple;
      }
      if (tokens_.AtOperator("[")) return ParseList();
      if (tokens_.AtOperator("{")) return ParseDict();
      break;
    case Kind::kData:
    case Kind::kBlockBegin:
    case Kind::kBlockEnd:
    case Kind::kVariableBegin:
    case Kind::kVariableEnd:
    case Kind::kEnd:
      break;
  }
  return tokens_.Unexpected("an expression");
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseList() {
  const int line = tokens_.Take().line;
  std::vector<ExpressionPtr> items;
  while (!tokens_.AtOperator("]")) {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr item, ParseExpression());
    items.push_back(std::move(item));
    if (!tokens_.SkipOperator(",")) break;
  }
  DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator("]"));
  const int depth = Deepest(items);
  return Make(line, depth, SequenceDisplay{Sequence::Kind::kList, std::move(items)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseDict() {
  const int line = tokens_.Take().line;
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> items;
  int depth = 0;
  while (!tokens_.AtOperator("}")) {
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr key, ParseExpression());
    DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator(":"));
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr value, ParseExpression());
    depth = std::max(depth, Deepest(key, value));
    items.emplace_back(std::move(key), std::move(value));
    if (!tokens_.SkipOperator(",")) break;
  }
  DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator("}"));
  return Make(line, depth, DictDisplay{std::move(items)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParsePostfix(ExpressionPtr object) {
  while (true) {
    if (tokens_.AtOperator(".")) {
      const int line = tokens_.Take().line;
      const int depth = Deepest(object);
      if (tokens_.Current().kind == Kind::kName) {
        DFLASH_ASSIGN_OR_RETURN(object,
                                Make(line, depth, AttributeAccess{std::move(object), tokens_.Take().text}));
      } else if (tokens_.Current().kind == Kind::kInteger) {
        DFLASH_ASSIGN_OR_RETURN(ExpressionPtr key, Make(line, 0, Constant{Value(tokens_.Take().integer)}));
        DFLASH_ASSIGN_OR_RETURN(object, Make(line, depth, ItemAccess{std::move(object), std::move(key)}));
      } else {
        return tokens_.Unexpected("a name or a number after '.'");
      }
    } else if (tokens_.AtOperator("[")) {
      DFLASH_ASSIGN_OR_RETURN(object, ParseSubscript(std::move(object)));
    } else if (tokens_.AtOperator("(")) {
      DFLASH_ASSIGN_OR_RETURN(object, ParseCall(std::move(object)));
    } else {
      return object;
    }
  }
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseSubscript(ExpressionPtr object) {
  const int line = tokens_.Take().line;
  const auto at_bound_end = [&] { return tokens_.AtOperator(":") || tokens_.AtOperator("]"); };
  ExpressionPtr bounds[3];
  bool is_slice = false;
  if (!at_bound_end()) {
    DFLASH_ASSIGN_OR_RETURN(bounds[0], ParseExpression());
  }
  for (int i = 1; i < 3 && tokens_.SkipOperator(":"); ++i) {
    is_slice = true;
    if (at_bound_end()) continue;
    DFLASH_ASSIGN_OR_RETURN(bounds[i], ParseExpression());
  }
  if (tokens_.AtOperator(","))
    return TokenStream::Unsupported(line, "a subscript of several indices is not supported");
  if (!is_slice && bounds[0] == nullptr) return tokens_.Unexpected("an index");
  DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator("]"));
  const int depth = Deepest(object, bounds[0], bounds[1], bounds[2]);
  if (!is_slice) return Make(line, depth, ItemAccess{std::move(object), std::move(bounds[0])});
  return Make(
      line, depth,
      SliceAccess{std::move(object), std::move(bounds[0]), std::move(bounds[1]), std::move(bounds[2])});
}

absl::StatusOr<ArgumentList> ExpressionParser::ParseArguments() {
  ArgumentList arguments;
  DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator("("));
  while (!tokens_.AtOperator(")")) {
    const int line = tokens_.Current().line;
    if (tokens_.AtOperator("*") || tokens_.AtOperator("**"))
      return TokenStream::Unsupported(line, "unpacking arguments is not supported");
    if (tokens_.Current().kind == Kind::kName && TokenStream::Is(tokens_.Next(), Kind::kOperator, "=")) {
      std::string name = tokens_.Take().text;
      tokens_.Take();
      for (const auto& argument : arguments.keyword) {
        if (argument.first == name) return TokenStream::Error(line, "argument '", name, "' is given twice");
      }
      DFLASH_ASSIGN_OR_RETURN(ExpressionPtr value, ParseExpression());
      arguments.keyword.emplace_back(std::move(name), std::move(value));
    } else {
      if (!arguments.keyword.empty())
        return TokenStream::Error(line, "a positional argument follows a keyword argument");
      DFLASH_ASSIGN_OR_RETURN(ExpressionPtr value, ParseExpression());
      arguments.positional.push_back(std::move(value));
    }
    if (!tokens_.SkipOperator(",")) break;
  }
  DFLASH_RETURN_IF_ERROR(tokens_.ExpectOperator(")"));
  return arguments;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseCall(ExpressionPtr callee) {
  const int line = tokens_.Current().line;
  DFLASH_ASSIGN_OR_RETURN(ArgumentList arguments, ParseArguments());
  const int depth = Deepest(callee, arguments);
  return Make(line, depth, Call{std::move(callee), std::move(arguments)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseFilter(ExpressionPtr input) {
  const int line = tokens_.Take().line;
  DFLASH_ASSIGN_OR_RETURN(const std::string name, tokens_.ExpectIdentifier());
  const absl::StatusOr<const Filter*> filter = FindFilter(name);
  if (!filter.ok()) return Annotate(filter.status(), absl::StrCat("line ", line));
  ArgumentList arguments;
  if (tokens_.AtOperator("(")) {
    DFLASH_ASSIGN_OR_RETURN(arguments, ParseArguments());
  }
  const int depth = Deepest(input, arguments);
  return Make(line, depth, FilterCall{*filter, std::move(input), std::move(arguments)});
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseTest(ExpressionPtr input) {
  const int line = tokens_.Take().line;
  const bool negated = tokens_.SkipName("not");
  DFLASH_ASSIGN_OR_RETURN(const std::string name, tokens_.ExpectIdentifier());
  const absl::StatusOr<const ValueTest*> test = FindValueTest(name);
  if (!test.ok()) return Annotate(test.status(), absl::StrCat("line ", line));
  ArgumentList arguments;
  const bool at_value = tokens_.Current().kind == Kind::kName || tokens_.Current().kind == Kind::kString ||
                        tokens_.Current().kind == Kind::kInteger || tokens_.Current().kind == Kind::kFloat ||
                        tokens_.AtOperator("[") || tokens_.AtOperator("{");
  if (tokens_.AtOperator("(")) {
    DFLASH_ASSIGN_OR_RETURN(arguments, ParseArguments());
  } else if (tokens_.AtName("is")) {
    return TokenStream::Error(line, "tests with 'is' cannot be chained");
  } else if (at_value && !tokens_.AtName("else") && !tokens_.AtName("or") && !tokens_.AtName("and")) {
    // Any other name is the argument, even `if`: {{ x is defined if y }} is an error in Jinja too.
    DFLASH_ASSIGN_OR_RETURN(ExpressionPtr argument, ParsePrimary());
    DFLASH_ASSIGN_OR_RETURN(argument, ParsePostfix(std::move(argument)));
    arguments.positional.push_back(std::move(argument));
  }
  const int depth = Deepest(input, arguments);
  DFLASH_ASSIGN_OR_RETURN(ExpressionPtr result,
                          Make(line, depth, TestCall{*test, std::move(input), std::move(arguments)}));
  if (!negated) return result;
  return Make(line, depth + 1, Unary{Unary::Operator::kNot, std::move(result)});
}

}  // namespace dflash::jinja
