// Walks a syntax tree and writes what it renders to.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/marked_text.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// One rendering of one template.
class Interpreter {
 public:
  Interpreter(Runtime& runtime, std::vector<std::pair<std::string, Value>> variables);
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Errors: as of Template::Render.
  absl::StatusOr<MarkedText> Run(const Body& body);

 private:
  // Variables of a block; reads go on to the parent, writes stay.
  struct Scope {
    Scope* parent = nullptr;
    std::vector<std::pair<std::string, Value>> variables;

    void Assign(std::string_view name, Value value);
    const Value* Find(std::string_view name) const;
  };
  enum class Flow { kNext, kBreak, kContinue };

  absl::StatusOr<Flow> Execute(const Body& body);
  absl::StatusOr<Flow> Execute(const TextStatement& statement);
  absl::StatusOr<Flow> Execute(const PrintStatement& statement);
  absl::StatusOr<Flow> Execute(const IfStatement& statement);
  absl::StatusOr<Flow> Execute(const ForStatement& statement);
  absl::StatusOr<Flow> Execute(const SetStatement& statement);
  absl::StatusOr<Flow> Execute(const SetBlockStatement& statement);
  absl::StatusOr<Flow> Execute(const MacroStatement& statement);
  absl::StatusOr<Flow> Execute(const LoopControl& statement);
  absl::StatusOr<Flow> Execute(const GenerationStatement& statement);

  absl::Status Write(const MarkedText& text);
  absl::Status Assign(const Target& target, const Value& value);
  // The output of `body` as a string, in a scope of its own below `parent` that starts with `variables`.
  absl::StatusOr<MarkedText> Capture(const Body& body, Scope* parent,
                                     std::vector<std::pair<std::string, Value>> variables);
  // The items of the loop, those that its condition lets through.
  absl::StatusOr<std::shared_ptr<const Sequence>> LoopItems(const ForStatement& statement);

  absl::StatusOr<Value> Evaluate(const Expression& expression);
  absl::StatusOr<Value> Evaluate(const ExpressionPtr& expression) { return Evaluate(*expression); }
  absl::StatusOr<Value> Evaluate(const Constant& node);
  absl::StatusOr<Value> Evaluate(const Name& node);
  absl::StatusOr<Value> Evaluate(const SequenceDisplay& node);
  absl::StatusOr<Value> Evaluate(const DictDisplay& node);
  absl::StatusOr<Value> Evaluate(const AttributeAccess& node);
  absl::StatusOr<Value> Evaluate(const ItemAccess& node);
  absl::StatusOr<Value> Evaluate(const SliceAccess& node);
  absl::StatusOr<Value> Evaluate(const Call& node);
  absl::StatusOr<Value> Evaluate(const FilterCall& node);
  absl::StatusOr<Value> Evaluate(const TestCall& node);
  absl::StatusOr<Value> Evaluate(const Unary& node);
  absl::StatusOr<Value> Evaluate(const Binary& node);
  absl::StatusOr<Value> Evaluate(const Logical& node);
  absl::StatusOr<Value> Evaluate(const Comparison& node);
  absl::StatusOr<Value> Evaluate(const Concatenation& node);
  absl::StatusOr<Value> Evaluate(const Conditional& node);
  absl::StatusOr<Arguments> EvaluateArguments(const ArgumentList& list);
  absl::StatusOr<Value> CallMacro(const MacroStatement& macro, const Arguments& arguments);

  Runtime& runtime_;
  Scope globals_;
  Scope* scope_ = &globals_;
  MarkedTextBuilder* output_ = nullptr;
  int line_ = 0;  // where an error is reported
};

}  // namespace dflash::jinja
