// Grammars of JSON: any object, and what conforms to a JSON Schema.
//
// Texts are JSON in UTF-8 with little white space (at most one line break and 32 blanks at a place), numbers
// of bounded length, and values in values up to a bound. Everything that a schema's grammar describes
// conforms to the schema, not the other way round: properties come in the order of the schema, and those that
// it does not list only where additionalProperties says so.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "text/grammar/grammar.h"

namespace dflash {

inline constexpr size_t kMaxSchemaBytes = 64 << 10;
inline constexpr int64_t kMaxCountedItems = 1024;  // bounds of lengths in a schema

absl::StatusOr<Grammar> AnyJsonObject();

// Keywords: type, enum, const, properties, required, additionalProperties, items, minItems, maxItems,
// minLength, maxLength, anyOf, allOf of one, $ref into the same document, and those that say nothing about
// conformance (title, description, default, examples, format, ...). InvalidArgument: no JSON, no schema,
// nothing conforms to it, or a bound is too large; Unimplemented: another keyword, with its place.
absl::StatusOr<Grammar> ConformsTo(const std::string& schema);

// One of the texts. InvalidArgument: there are none.
absl::StatusOr<Grammar> OneOf(const std::vector<std::string>& texts);

}  // namespace dflash
