// What one rendering shares: its limits, what it has used of them, its clock, and the objects that live as
// long as it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// Templates come with a checkpoint and messages from clients: neither may cost more than this.
struct Limits {
  size_t max_template_bytes = size_t{1} << 20;
  // Of the template: nesting of statements, and of expressions (a chain of operators nests once per
  // operator).
  int max_nesting = 200;
  // Of the values: containers within containers.
  int max_value_depth = 200;
  // Of the rendering: statements, expressions and macro calls within each other.
  int max_call_depth = 800;
  // Evaluated nodes, list items touched and 16-byte units of text produced, together.
  int64_t max_steps = 20'000'000;
  // Of the rendering, and of every string on the way.
  size_t max_output_bytes = size_t{16} << 20;
};

// Positional and keyword arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

// Binds `arguments` to the named parameters, the first `required` of which must be given, by Python's rules.
// Errors: InvalidArgument naming `function` and the parameter.
absl::StatusOr<std::vector<std::optional<Value>>> Bind(std::string_view function,
                                                       const std::vector<std::string_view>& parameters,
                                                       size_t required, const Arguments& arguments);

class Runtime {
 public:
  // `now` is what strftime_now shows, in `time_zone`.
  Runtime(const Limits& limits, absl::Time now, absl::TimeZone time_zone)
      : limits_(limits), now_(now), time_zone_(time_zone) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const Limits& limits() const { return limits_; }
  absl::Time now() const { return now_; }
  absl::TimeZone time_zone() const { return time_zone_; }

  // Counts work. Errors: ResourceExhausted when the rendering has used up its steps.
  absl::Status Charge(size_t steps);
  // Counts a string of that many bytes about to be copied or searched. Errors: ResourceExhausted, also when
  // it is too long. Work on single characters costs more: see MapText.
  absl::Status ChargeText(size_t bytes) { return ChargeAppend(0, bytes); }
  // Counts `bytes` about to be appended to a string of `size` bytes.
  absl::Status ChargeAppend(size_t size, size_t bytes);

  // MapCharacters, counted: a step for every 4 bytes.
  template <typename Map>
  absl::StatusOr<MarkedText> MapText(const MarkedText& text, const Map& map) {
    DFLASH_RETURN_IF_ERROR(Charge(text.size() / 4));
    return MapCharacters(text, map);
  }

  // Counts one level of recursion while it lives; `status` says whether there was room for it.
  class Level {
   public:
    explicit Level(Runtime& runtime)
        : status(runtime.CheckCallDepth(++runtime.call_depth_)), runtime_(runtime) {}
    ~Level() { --runtime_.call_depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

    const absl::Status status;

   private:
    Runtime& runtime_;
  };

  // Make containers. Errors: ResourceExhausted by steps or depth.
  absl::StatusOr<Value> NewSequence(Sequence::Kind kind, std::vector<Value> items, bool is_content = false);
  // The keys must be distinct.
  absl::StatusOr<Value> NewDict(std::vector<std::pair<Value, Value>> items, bool is_content = false);
  absl::StatusOr<Value> NewMethod(const Value& self, std::string_view name);
  Namespace* NewNamespace();

 private:
  absl::Status CheckDepth(int depth) const;
  absl::Status CheckCallDepth(int depth) const;

  const Limits limits_;
  const absl::Time now_;
  const absl::TimeZone time_zone_;
  int64_t steps_ = 0;
  int call_depth_ = 0;
  std::vector<std::unique_ptr<Namespace>> namespaces_;
};

// An error of the template or of what it was given.
template <typename... Parts>
absl::Status RenderError(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Text for absl::StrCat, whose string_view is not the standard one.
inline absl::string_view View(std::string_view text) { return absl::string_view(text.data(), text.size()); }

}  // namespace dflash::jinja
