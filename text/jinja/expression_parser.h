// The expression half of the parser: everything between the brackets of a tag.
#pragma once

#include <optional>
#include <utility>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/token_stream.h"

namespace dflash::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenStream& tokens) : tokens_(tokens) {}

  // One expression.
  absl::StatusOr<ExpressionPtr> ParseExpression();
  // Expressions with commas between them make a tuple; one alone is itself. Without `with_conditional`, an
  // `if` ends the expression. `in_parentheses` allows the empty tuple.
  absl::StatusOr<ExpressionPtr> ParseTuple(bool with_conditional, bool in_parentheses = false);

  // Inside a macro some names would mean its extra arguments, which are not supported.
  void set_in_macro(bool in_macro) { in_macro_ = in_macro; }

 private:
  template <typename Node>
  absl::StatusOr<ExpressionPtr> Make(int line, int operand_depth, Node node) const;

  // From the loosest binding to the tightest.
  absl::StatusOr<ExpressionPtr> ParseOr();
  absl::StatusOr<ExpressionPtr> ParseAnd();
  absl::StatusOr<ExpressionPtr> ParseNot();
  absl::StatusOr<ExpressionPtr> ParseComparison();
  std::optional<CompareOperator> TakeCompareOperator();
  absl::StatusOr<ExpressionPtr> ParseSum();
  absl::StatusOr<ExpressionPtr> ParseConcatenation();
  absl::StatusOr<ExpressionPtr> ParseProduct();
  absl::StatusOr<ExpressionPtr> ParsePower();
  absl::StatusOr<ExpressionPtr> ParseUnary(bool with_filters);
  absl::StatusOr<ExpressionPtr> ParsePrimary();
  absl::StatusOr<ExpressionPtr> ParseList();
  absl::StatusOr<ExpressionPtr> ParseDict();
  // Attributes, subscripts and calls after an expression.
  absl::StatusOr<ExpressionPtr> ParsePostfix(ExpressionPtr object);
  absl::StatusOr<ExpressionPtr> ParseSubscript(ExpressionPtr object);
  absl::StatusOr<ArgumentList> ParseArguments();
  absl::StatusOr<ExpressionPtr> ParseCall(ExpressionPtr callee);
  absl::StatusOr<ExpressionPtr> ParseFilter(ExpressionPtr input);
  absl::StatusOr<ExpressionPtr> ParseTest(ExpressionPtr input);

  TokenStream& tokens_;
  bool in_macro_ = false;
};

}  // namespace dflash::jinja
