#include "text/jinja/interpreter.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <variant>

#include "text/jinja/access.h"
#include "text/jinja/builtins.h"
#include "text/jinja/filters.h"
#include "text/jinja/format.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/value_tests.h"

namespace dflash::jinja {

namespace {

// Sets a variable for as long as it lives.
template <typename T>
class Restore {
 public:
  Restore(T& variable, T value) : variable_(variable), old_(std::exchange(variable, value)) {}
  ~Restore() { variable_ = old_; }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

 private:
  T& variable_;
  const T old_;
};

}  // namespace

void Interpreter::Scope::Assign(std::string_view name, Value value) {
  for (auto& variable : variables) {
    if (variable.first == name) {
      variable.second = std::move(value);
      return;
    }
  }
  variables.emplace_back(name, std::move(value));
}

const Value* Interpreter::Scope::Find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->parent) {
    for (const auto& variable : scope->variables) {
      if (variable.first == name) return &variable.second;
    }
  }
  return nullptr;
}

Interpreter::Interpreter(Runtime& runtime, std::vector<std::pair<std::string, Value>> variables)
    : runtime_(runtime) {
  globals_.variables = std::move(variables);
}

absl::StatusOr<MarkedText> Interpreter::Run(const Body& body) {
  MarkedTextBuilder builder;
  output_ = &builder;
  const absl::Status status = Execute(body).status();
  if (!status.ok()) return Annotate(status, absl::StrCat("line ", line_));
  return builder.Build();
}

// --- statements ---

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const Body& body) {
  const Runtime::Level level(runtime_);
  DFLASH_RETURN_IF_ERROR(level.status);
  for (const std::unique_ptr<const Statement>& statement : body) {
    line_ = statement->line;
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
    const absl::StatusOr<Flow> flow =
        std::visit([this](const auto& node) { return Execute(node); }, statement->node);
    if (!flow.ok() || *flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

absl::Status Interpreter::Write(const MarkedText& text) {
  DFLASH_RETURN_IF_ERROR(runtime_.ChargeAppend(output_->size(), text.size()));
  output_->Append(text);
  return absl::OkStatus();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const TextStatement& statement) {
  DFLASH_RETURN_IF_ERROR(Write(statement.text));
  return Flow::kNext;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const PrintStatement& statement) {
  DFLASH_ASSIGN_OR_RETURN(const Value value, Evaluate(statement.value));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, ToText(runtime_, value));
  DFLASH_RETURN_IF_ERROR(Write(text));
  return Flow::kNext;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const IfStatement& statement) {
  for (const auto& [test, body] : statement.branches) {
    DFLASH_ASSIGN_OR_RETURN(const Value value, Evaluate(test));
    if (IsTrue(value)) return Execute(body);
  }
  return Execute(statement.otherwise);
}

absl::StatusOr<std::shared_ptr<const Sequence>> Interpreter::LoopItems(const ForStatement& statement) {
  DFLASH_ASSIGN_OR_RETURN(const Value iterable, Evaluate(statement.iterable));
  DFLASH_ASSIGN_OR_RETURN(std::shared_ptr<const Sequence> items, Iterate(runtime_, iterable));
  if (statement.condition == nullptr) return items;
  std::vector<Value> kept;
  for (const Value& item : items->items) {
    Scope scope{.parent = scope_, .variables = {}};
    const Restore restore(scope_, &scope);
    DFLASH_RETURN_IF_ERROR(Assign(statement.target, item));
    DFLASH_ASSIGN_OR_RETURN(const Value passes, Evaluate(statement.condition));
    if (IsTrue(passes)) kept.push_back(item);
  }
  DFLASH_ASSIGN_OR_RETURN(const Value filtered, runtime_.NewSequence(Sequence::Kind::kList, std::move(kept)));
  return *filtered.As<std::shared_ptr<const Sequence>>();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const ForStatement& statement) {
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, LoopItems(statement));
  const auto loop = std::make_shared<Loop>(Loop{items, 0});
  for (; loop->index < items->items.size(); ++loop->index) {
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
    Scope scope{.parent = scope_, .variables = {}};
    const Restore restore(scope_, &scope);
    scope.Assign("loop", Value(loop));
    DFLASH_RETURN_IF_ERROR(Assign(statement.target, items->items[loop->index]));
    DFLASH_ASSIGN_OR_RETURN(const Flow flow, Execute(statement.body));
    if (flow == Flow::kBreak) break;
  }
  if (!items->items.empty()) return Flow::kNext;
  Scope scope{.parent = scope_, .variables = {}};
  const Restore restore(scope_, &scope);
  return Execute(statement.otherwise);
}

absl::Status Interpreter::Assign(const Target& target, const Value& value) {
  DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
  if (!target.attribute.empty()) {
    const Value* found = scope_->Find(target.name);
    if (found == nullptr || found->As<Namespace*>() == nullptr) {
      return RenderError("cannot assign attribute '", target.attribute, "': '", target.name,
                         "' is not a namespace");
    }
    (*found->As<Namespace*>())->Assign(target.attribute, value);
    return absl::OkStatus();
  }
  if (target.parts.empty()) {
    scope_->Assign(target.name, value);
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime_, value));
  if (items->items.size() != target.parts.size()) {
    return RenderError("cannot unpack ", items->items.size(), " values into ", target.parts.size(), " names");
  }
  for (size_t i = 0; i < target.parts.size(); ++i)
    DFLASH_RETURN_IF_ERROR(Assign(target.parts[i], items->items[i]));
  return absl::OkStatus();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const SetStatement& statement) {
  DFLASH_ASSIGN_OR_RETURN(const Value value, Evaluate(statement.value));
  DFLASH_RETURN_IF_ERROR(Assign(statement.target, value));
  return Flow::kNext;
}

absl::StatusOr<MarkedText> Interpreter::Capture(const Body& body, Scope* parent,
                                                std::vector<std::pair<std::string, Value>> variables) {
  MarkedTextBuilder builder;
  Scope scope{.parent = parent, .variables = std::move(variables)};
  const Restore restore_scope(scope_, &scope);
  const Restore restore_output(output_, &builder);
  DFLASH_RETURN_IF_ERROR(Execute(body).status());
  return builder.Build();
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const SetBlockStatement& statement) {
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, Capture(statement.body, scope_, {}));
  DFLASH_RETURN_IF_ERROR(Assign(statement.target, Value(text)));
  return Flow::kNext;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const MacroStatement& statement) {
  scope_->Assign(statement.name, Value(&statement));
  return Flow::kNext;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const LoopControl& statement) {
  return statement.is_break ? Flow::kBreak : Flow::kContinue;
}

absl::StatusOr<Interpreter::Flow> Interpreter::Execute(const GenerationStatement& statement) {
  Scope scope{.parent = scope_, .variables = {}};
  const Restore restore(scope_, &scope);
  return Execute(statement.body);
}

// --- expressions ---

absl::StatusOr<Value> Interpreter::Evaluate(const Expression& expression) {
  const Runtime::Level level(runtime_);
  DFLASH_RETURN_IF_ERROR(level.status);
  DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
  line_ = expression.line;
  return std::visit([this](const auto& node) { return Evaluate(node); }, expression.node);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Constant& node) { return node.value; }

absl::StatusOr<Value> Interpreter::Evaluate(const Name& node) {
  if (const Value* found = scope_->Find(node.name)) return *found;
  DFLASH_ASSIGN_OR_RETURN(std::optional<Value> builtin, FindBuiltin(node.name));
  if (builtin.has_value()) return *std::move(builtin);
  return Value::MakeUndefined(absl::StrCat("'", node.name, "' is undefined"));
}

absl::StatusOr<Value> Interpreter::Evaluate(const SequenceDisplay& node) {
  std::vector<Value> items;
  items.reserve(node.items.size());
  for (const ExpressionPtr& item : node.items) {
    DFLASH_ASSIGN_OR_RETURN(Value value, Evaluate(item));
    items.push_back(std::move(value));
  }
  return runtime_.NewSequence(node.kind, std::move(items));
}

absl::StatusOr<Value> Interpreter::Evaluate(const DictDisplay& node) {
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [key_node, value_node] : node.items) {
    DFLASH_ASSIGN_OR_RETURN(Value key, Evaluate(key_node));
    DFLASH_ASSIGN_OR_RETURN(Value value, Evaluate(value_node));
    if (!IsKey(key))
      return absl::UnimplementedError(
          absl::StrCat("a dict key of type ", TypeName(key), " is not supported"));
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(items.size() / 8));
    const auto same =
        std::find_if(items.begin(), items.end(), [&](const auto& item) { return SameKey(item.first, key); });
    if (same != items.end()) {
      same->second = std::move(value);
    } else {
      items.emplace_back(std::move(key), std::move(value));
    }
  }
  return runtime_.NewDict(std::move(items));
}

absl::StatusOr<Value> Interpreter::Evaluate(const AttributeAccess& node) {
  DFLASH_ASSIGN_OR_RETURN(const Value object, Evaluate(node.object));
  return GetAttribute(runtime_, object, node.name);
}

absl::StatusOr<Value> Interpreter::Evaluate(const ItemAccess& node) {
  DFLASH_ASSIGN_OR_RETURN(const Value object, Evaluate(node.object));
  DFLASH_ASSIGN_OR_RETURN(const Value key, Evaluate(node.key));
  return GetItem(runtime_, object, key);
}

absl::StatusOr<Value> Interpreter::Evaluate(const SliceAccess& node) {
  DFLASH_ASSIGN_OR_RETURN(const Value object, Evaluate(node.object));
  Value bounds[3];
  const ExpressionPtr* nodes[3] = {&node.start, &node.stop, &node.step};
  for (int i = 0; i < 3; ++i) {
    if (*nodes[i] == nullptr) continue;
    DFLASH_ASSIGN_OR_RETURN(bounds[i], Evaluate(*nodes[i]));
  }
  return GetSlice(runtime_, object, bounds[0], bounds[1], bounds[2]);
}

absl::StatusOr<Arguments> Interpreter::EvaluateArguments(const ArgumentList& list) {
  Arguments arguments;
  for (const ExpressionPtr& node : list.positional) {
    DFLASH_ASSIGN_OR_RETURN(Value value, Evaluate(node));
    arguments.positional.push_back(std::move(value));
  }
  for (const auto& [name, node] : list.keyword) {
    DFLASH_ASSIGN_OR_RETURN(Value value, Evaluate(node));
    arguments.keyword.emplace_back(name, std::move(value));
  }
  return arguments;
}

absl::StatusOr<Value> Interpreter::Evaluate(const Call& node) {
  const int line = line_;
  DFLASH_ASSIGN_OR_RETURN(const Value callee, Evaluate(node.callee));
  DFLASH_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(node.arguments));
  line_ = line;
  if (const auto* method = callee.As<std::shared_ptr<const Method>>())
    return CallMethod(runtime_, **method, arguments);
  if (const auto* macro = callee.As<const MacroStatement*>()) return CallMacro(**macro, arguments);
  if (const auto* builtin = callee.As<Builtin>()) return CallBuiltin(runtime_, *builtin, arguments);
  if (const auto* undefined = callee.As<Undefined>()) return RenderError(*undefined->message);
  return RenderError("a value of type ", TypeName(callee), " is not callable");
}

absl::StatusOr<Value> Interpreter::CallMacro(const MacroStatement& macro, const Arguments& arguments) {
  std::vector<std::string_view> parameters;
  for (const auto& parameter : macro.parameters) parameters.push_back(parameter.first);
  DFLASH_ASSIGN_OR_RETURN(std::vector<std::optional<Value>> bound,
                          Bind(macro.name, parameters, 0, arguments));
  // Defaults are evaluated at each call and see the parameters before them.
  Scope scope{.parent = &globals_, .variables = {}};
  {
    const Restore restore(scope_, &scope);
    for (size_t i = 0; i < bound.size(); ++i) {
      const auto& [name, default_node] = macro.parameters[i];
      Value value =
          bound[i].value_or(Value::MakeUndefined(absl::StrCat("parameter '", name, "' was not provided")));
      if (!bound[i].has_value() && default_node != nullptr) {
        DFLASH_ASSIGN_OR_RETURN(value, Evaluate(default_node));
      }
      scope.Assign(name, std::move(value));
    }
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText text, Capture(macro.body, &globals_, std::move(scope.variables)));
  return Value(std::move(text));
}

absl::StatusOr<Value> Interpreter::Evaluate(const FilterCall& node) {
  const int line = line_;
  DFLASH_ASSIGN_OR_RETURN(const Value input, Evaluate(node.input));
  DFLASH_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(node.arguments));
  line_ = line;
  return node.filter->apply(runtime_, input, arguments);
}

absl::StatusOr<Value> Interpreter::Evaluate(const TestCall& node) {
  const int line = line_;
  DFLASH_ASSIGN_OR_RETURN(const Value input, Evaluate(node.input));
  DFLASH_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(node.arguments));
  line_ = line;
  DFLASH_ASSIGN_OR_RETURN(const bool passes, node.test->apply(runtime_, input, arguments));
  return Value(passes);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Unary& node) {
  DFLASH_ASSIGN_OR_RETURN(const Value operand, Evaluate(node.operand));
  if (node.op == Unary::Operator::kNot) return Value(!IsTrue(operand));
  return ApplySign(operand, node.op == Unary::Operator::kMinus);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Binary& node) {
  const int line = line_;
  DFLASH_ASSIGN_OR_RETURN(const Value left, Evaluate(node.left));
  DFLASH_ASSIGN_OR_RETURN(const Value right, Evaluate(node.right));
  line_ = line;
  return ApplyBinary(runtime_, node.op, left, right);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Logical& node) {
  DFLASH_ASSIGN_OR_RETURN(Value left, Evaluate(node.left));
  if (IsTrue(left) != node.is_and) return left;  // the operand itself, as in Python
  return Evaluate(node.right);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Comparison& node) {
  DFLASH_ASSIGN_OR_RETURN(Value left, Evaluate(node.first));
  for (const auto& [op, right_node] : node.rest) {
    DFLASH_ASSIGN_OR_RETURN(Value right, Evaluate(right_node));
    DFLASH_ASSIGN_OR_RETURN(const bool holds, Compare(runtime_, op, left, right));
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

absl::StatusOr<Value> Interpreter::Evaluate(const Concatenation& node) {
  MarkedTextBuilder builder;
  for (const ExpressionPtr& part : node.parts) {
    DFLASH_ASSIGN_OR_RETURN(const Value value, Evaluate(part));
    DFLASH_ASSIGN_OR_RETURN(const MarkedText text, ToText(runtime_, value));
    DFLASH_RETURN_IF_ERROR(runtime_.ChargeAppend(builder.size(), text.size()));
    builder.Append(text);
  }
  return Value(builder.Build());
}

absl::StatusOr<Value> Interpreter::Evaluate(const Conditional& node) {
  const int line = line_;
  DFLASH_ASSIGN_OR_RETURN(const Value test, Evaluate(node.test));
  if (IsTrue(test)) return Evaluate(node.then);
  if (node.otherwise != nullptr) return Evaluate(node.otherwise);
  return Value::MakeUndefined(absl::StrCat("the inline if-expression on line ", line,
                                           " evaluated to false and no else section was defined."));
}

}  // namespace dflash::jinja
