#include "daemon/rpc/message_bytes.h"

#include <climits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "daemon/request/request_error.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/unknown_field_set.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "text/utf8.h"

namespace dflash {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// The path of the first string, in the order of the bytes, that is not UTF-8; nullopt when there is none
// before the end, or before the bytes stop making sense. protobuf itself only says that it fails.
std::optional<std::string> FindIllFormedText(const Descriptor& type, const std::string& prefix,
                                             CodedInputStream& input) {
  std::map<int, int> seen;  // how often a field came, by number
  while (const uint32_t tag = input.ReadTag()) {
    const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const bool holds_text = field != nullptr && (field->type() == FieldDescriptor::TYPE_STRING ||
                                                 field->type() == FieldDescriptor::TYPE_MESSAGE);
    if (!holds_text || WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (!WireFormatLite::SkipField(&input, tag)) return std::nullopt;
      continue;
    }
    std::string path = absl::StrCat(prefix, field->name());
    if (field->is_repeated()) absl::StrAppend(&path, "[", seen[field->number()]++, "]");
    uint32_t size = 0;
    if (!input.ReadVarint32(&size) || size > INT_MAX) return std::nullopt;
    if (field->type() == FieldDescriptor::TYPE_STRING) {
      std::string text;
      if (!input.ReadString(&text, static_cast<int>(size))) return std::nullopt;
      if (ReplaceIllFormed(text) != text) return path;
      continue;
    }
    const CodedInputStream::Limit outer = input.PushLimit(static_cast<int>(size));
    std::optional<std::string> found =
        FindIllFormedText(*field->message_type(), absl::StrCat(path, "."), input);
    if (found.has_value() || !input.ConsumedEntireMessage()) return found;
    input.PopLimit(outer);
  }
  return std::nullopt;
}

absl::Status WhyNotParsed(std::string_view bytes, const Descriptor& type) {
  CodedInputStream input(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int>(bytes.size()));
  if (const auto path = FindIllFormedText(type, "", input)) return BadParameter(*path, "is not valid UTF-8");
  return WithDetails(absl::InvalidArgumentError(absl::StrCat("the bytes are no message ", type.full_name())),
                     {.reason = "BAD_PARAMETER", .field = "", .retry_after = {}, .metadata = {}});
}

// `path`: of `message` in the request; empty: it is the request.
absl::Status RefuseUnknownFields(const Message& message, const std::string& path) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const google::protobuf::UnknownFieldSet& unknown = reflection.GetUnknownFields(message);
  if (!unknown.empty()) {
    // It has no name here: the nearest that has one is the message that it stands in.
    return NotInThisBuild(path, absl::StrCat("field ", unknown.field(0).number(), " of ",
                                             message.GetDescriptor()->full_name()));
  }
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const std::string inner = absl::StrCat(path, path.empty() ? "" : ".", field->name());
    if (!field->is_repeated()) {
      DFLASH_RETURN_IF_ERROR(RefuseUnknownFields(reflection.GetMessage(message, field), inner));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      DFLASH_RETURN_IF_ERROR(RefuseUnknownFields(reflection.GetRepeatedMessage(message, field, i),
                                                 absl::StrCat(inner, "[", i, "]")));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseRequest(std::string_view bytes, Message* message) {
  if (bytes.size() > INT_MAX || !message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return WhyNotParsed(bytes.substr(0, INT_MAX), *message->GetDescriptor());
  }
  return RefuseUnknownFields(*message, "");
}

absl::Status ParseRequest(const grpc::ByteBuffer& bytes, Message* message) {
  // The pieces of a message that came in several are joined; one alone is read where it lies.
  grpc::Slice slice;
  if (!bytes.TrySingleSlice(&slice).ok() && !bytes.DumpToSingleSlice(&slice).ok()) {
    return WhyNotParsed("\xff", *message->GetDescriptor());  // a compressed message that does not unpack
  }
  return ParseRequest(std::string_view(reinterpret_cast<const char*>(slice.begin()), slice.size()), message);
}

grpc::ByteBuffer ToByteBuffer(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, Message>(message, &bytes, &own_buffer);
  DFLASH_CHECK(status.ok());  // only a message over 2 GiB fails
  return bytes;
}

}  // namespace dflash
