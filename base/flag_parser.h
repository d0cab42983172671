// Command line flags of the programs: "--name value", "--name=value", and "--name" alone for switches.
// Strict: an unknown flag, a flag given twice, a missing or bad value and a stray argument are errors that
// name the flag. Values may also come from elsewhere (a file, the environment): Set().
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace dflash {

class FlagParser {
 public:
  // `program` and `summary` head the help text.
  FlagParser(std::string program, std::string summary);

  // Each registers one flag. `name` without dashes; `value` is how the help text calls its value; the target
  // holds the default, is written by Parse() and must outlive it.
  void Text(std::string name, std::string value, std::string help, std::string* target);
  // A whole number in [min, max].
  void Integer(std::string name, std::string value, std::string help, int64_t min, int64_t max,
               int64_t* target);
  // A finite number in [min, max].
  void Number(std::string name, std::string value, std::string help, double min, double max, double* target);
  // The same without a default: the target stays empty unless the flag is given.
  void Integer(std::string name, std::string value, std::string help, int64_t min, int64_t max,
               std::optional<int64_t>* target);
  void Integer(std::string name, std::string value, std::string help, uint64_t min, uint64_t max,
               std::optional<uint64_t>* target);
  void Number(std::string name, std::string value, std::string help, double min, double max,
              std::optional<double>* target);
  // 0, which stands for "not said", or a whole number in [min, max].
  void IntegerOrZero(std::string name, std::string value, std::string help, int64_t min, int64_t max,
                     int64_t* target);
  // HOST:PORT with a port in [min_port, 65535] (base/host_port.h).
  void Address(std::string name, std::string help, int min_port, std::string* target);
  // HOST:PORT, unix:PATH, or nothing.
  void AddressOrSocket(std::string name, std::string help, std::string* target);
  // Alone it makes the target true; "--name=true" and "--name=false" say it in full.
  void Switch(std::string name, std::string help, bool* target);
  // An argument without dashes, in the order of registration. Required.
  void Positional(std::string name, std::string help, std::string* target);
  // One of `choices`.
  void Choice(std::string name, std::vector<std::string> choices, std::string help, std::string* target);

  // What a command line asks for.
  enum class Outcome { kRun, kHelp, kVersion };

  // Reads the arguments after the program's name. "--help" and "--version" win over everything after them.
  // InvalidArgument: the first thing wrong, naming the flag (and the nearest known name when it is unknown).
  absl::Status Parse(int argc, const char* const* argv, Outcome* outcome);

  // Where a value comes from; each counts for more than those before it.
  enum class Source : uint8_t { kDefault, kFile, kEnvironment, kFlag };

  // Gives a flag a value that does not stand on the command line. Call it before Parse(), lesser sources
  // first. NotFound, with the nearest known name: no such flag. InvalidArgument, naming the flag: a bad
  // value.
  absl::Status Set(Source source, std::string_view name, const std::string& value);

  // Does the flag have another value than its default's, from wherever?
  bool Given(std::string_view name) const;

  // The state of all flags, in the order of registration, positional ones left out.
  struct Value {
    std::string name;
    std::optional<std::string> value;  // nullopt: an optional that is unset
    bool is_text = true;               // else a number, true or false
    Source source = Source::kDefault;
  };
  std::vector<Value> Values() const;

  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string value;
    std::string help;
    std::string default_text;
    std::function<absl::Status(const std::string&)> set;  // its error says what is wrong with the value
    std::function<std::optional<std::string>()> show;
    bool is_text = true;
    enum class Kind { kWithValue, kSwitch, kPositional } kind = Kind::kWithValue;
    Source source = Source::kDefault;
  };
  void Add(Flag flag);
  template <typename Target>
  void AddNumber(std::string name, std::string value, std::string help,
                 std::function<absl::Status(const std::string&)> set, Target* target);
  std::string Nearest(std::string_view name) const;  // the nearest known name
  Flag* Find(std::string_view name);
  absl::Status TakePositional(const std::string& argument);

  std::string program_;
  std::string summary_;
  std::vector<Flag> flags_;
};

// What a command line says of a flag that has a value, read before the command line is known to be right: for
// what decides how errors of the command line are said. nullopt: nothing.
std::optional<std::string> EarlyValue(int argc, const char* const* argv, std::string_view flag);

}  // namespace dflash
