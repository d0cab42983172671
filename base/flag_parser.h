// Command line flags of the programs: "--name value", "--name=value", and "--name" alone for switches.
// Strict: an unknown flag, a flag given twice, a missing or bad value and a stray argument are errors that
// name the flag.
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
  // HOST:PORT with a port in [min_port, 65535] (base/host_port.h).
  void Address(std::string name, std::string help, int min_port, std::string* target);
  // Takes no value: the target becomes true.
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

  // Was the flag on the command line?
  bool Given(std::string_view name) const;

  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string value;
    std::string help;
    std::string default_text;
    std::function<absl::Status(const std::string&)> set;  // its error says what is wrong with the value
    enum class Kind { kWithValue, kSwitch, kPositional } kind = Kind::kWithValue;
    bool given = false;
  };
  void Add(Flag flag);
  Flag* Find(std::string_view name);
  absl::Status TakePositional(const std::string& argument);

  std::string program_;
  std::string summary_;
  std::vector<Flag> flags_;
};

}  // namespace dflash
