// What dflash-bench measured: tables on the terminal, the same figures as JSON.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace dflash::bench {

struct Figure {
  std::string name;  // with its unit, for example "us" or "GB/s"
  double value = 0;
};

// Figures of one thing that was measured.
struct Row {
  std::string name;
  std::vector<Figure> figures;
};

class Report {
 public:
  // A fact about the run, such as the processor's name.
  void Fact(const std::string& name, const std::string& value);
  // Begins a table; the rows that follow belong to it.
  void Section(const std::string& title);
  // Also prints the row, with a heading wherever the names of the figures change.
  void Add(Row row);

  std::string Json() const;
  // Unavailable, naming the file, when it cannot be written.
  absl::Status WriteJson(const std::string& path) const;

 private:
  struct Table {
    std::string title;
    std::vector<Row> rows;
  };
  std::vector<std::pair<std::string, std::string>> facts_;
  std::vector<Table> tables_;
};

// "12.3": as many decimals as three significant digits need.
std::string ShortNumber(double value);

}  // namespace dflash::bench
