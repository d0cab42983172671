// The syntax tree of a template. Built by the parser, never changed afterwards, shared by all renderings.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja/marked_text.h"
#include "text/jinja/operators.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

struct Filter;     // text/jinja/filters.h
struct ValueTest;  // text/jinja/value_tests.h

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct ArgumentList {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> keyword;
};

struct Constant {
  Value value;
};
struct Name {
  std::string name;
};
struct SequenceDisplay {  // [a, b] or (a, b)
  Sequence::Kind kind;
  std::vector<ExpressionPtr> items;
};
struct DictDisplay {
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> items;
};
struct AttributeAccess {
  ExpressionPtr object;
  std::string name;
};
struct ItemAccess {
  ExpressionPtr object, key;
};
struct SliceAccess {
  ExpressionPtr object, start, stop, step;  // bounds may be null
};
struct Call {
  ExpressionPtr callee;
  ArgumentList arguments;
};
struct FilterCall {
  const Filter* filter;
  ExpressionPtr input;
  ArgumentList arguments;
};
struct TestCall {
  const ValueTest* test;
  ExpressionPtr input;
  ArgumentList arguments;
};
struct Unary {
  enum class Operator : uint8_t { kNot, kMinus, kPlus };
  Operator op;
  ExpressionPtr operand;
};
struct Binary {
  BinaryOperator op;
  ExpressionPtr left, right;
};
struct Logical {
  bool is_and;
  ExpressionPtr left, right;
};
struct Comparison {  // a < b <= c
  ExpressionPtr first;
  std::vector<std::pair<CompareOperator, ExpressionPtr>> rest;
};
struct Concatenation {  // a ~ b ~ c
  std::vector<ExpressionPtr> parts;
};
struct Conditional {                    // then if test else otherwise
  ExpressionPtr test, then, otherwise;  // otherwise may be null
};

struct Expression {
  int line;
  int depth;  // 1 + the deepest operand; bounded by Limits::max_nesting
  std::variant<Constant, Name, SequenceDisplay, DictDisplay, AttributeAccess, ItemAccess, SliceAccess, Call,
               FilterCall, TestCall, Unary, Binary, Logical, Comparison, Concatenation, Conditional>
      node;
};

struct Statement;
using Body = std::vector<std::unique_ptr<const Statement>>;

// What an assignment writes to: a name, an attribute of a namespace, or a tuple of targets.
struct Target {
  std::string name;       // empty for a tuple
  std::string attribute;  // not empty: name.attribute
  std::vector<Target> parts;
};

struct TextStatement {
  MarkedText text;
};
struct PrintStatement {
  ExpressionPtr value;
};
struct IfStatement {
  std::vector<std::pair<ExpressionPtr, Body>> branches;
  Body otherwise;
};
struct ForStatement {
  Target target;
  ExpressionPtr iterable, condition;  // condition may be null
  Body body, otherwise;
};
struct SetStatement {
  Target target;
  ExpressionPtr value;
};
struct SetBlockStatement {
  Target target;
  Body body;
};
struct MacroStatement {
  std::string name;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;  // defaults may be null
  Body body;
};
struct LoopControl {
  bool is_break;  // else continue
};
struct GenerationStatement {  // {% generation %}: marks what an assistant wrote; transparent when rendering
  Body body;
};

struct Statement {
  int line;
  std::variant<TextStatement, PrintStatement, IfStatement, ForStatement, SetStatement, SetBlockStatement,
               MacroStatement, LoopControl, GenerationStatement>
      node;
};

}  // namespace dflash::jinja
