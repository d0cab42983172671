#include "tools/dflash_bench/report.h"

#include <cmath>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace dflash::bench {

std::string ShortNumber(double value) {
  const double size = std::abs(value);
  return absl::StrFormat("%.*f", size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3, value);
}

void Report::Fact(const std::string& name, const std::string& value) {
  std::printf("%-18s %s\n", name.c_str(), value.c_str());
  facts_.emplace_back(name, value);
}

void Report::Section(const std::string& title) {
  std::printf("\n%s\n", title.c_str());
  tables_.push_back({title, {}});
}

void Report::Add(Row row) {
  std::vector<Row>& rows = tables_.back().rows;
  bool heading = rows.empty() || rows.back().figures.size() != row.figures.size();
  for (size_t i = 0; !heading && i < row.figures.size(); ++i) {
    heading = rows.back().figures[i].name != row.figures[i].name;
  }
  if (heading) {
    std::printf("  %-34s", "");
    for (const Figure& figure : row.figures) std::printf("%12s", figure.name.c_str());
    std::printf("\n");
  }
  std::printf("  %-34s", row.name.c_str());
  for (const Figure& figure : row.figures) std::printf("%12s", ShortNumber(figure.value).c_str());
  std::printf("\n");
  std::fflush(stdout);
  rows.push_back(std::move(row));
}

std::string Report::Json() const {
  nlohmann::ordered_json document;
  for (const auto& [name, value] : facts_) document["facts"][name] = value;
  for (const Table& table : tables_) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Row& row : table.rows) {
      nlohmann::ordered_json entry = {{"name", row.name}};
      for (const Figure& figure : row.figures) entry[figure.name] = figure.value;
      rows.push_back(std::move(entry));
    }
    document["tables"].push_back({{"title", table.title}, {"rows", std::move(rows)}});
  }
  return document.dump(2) + "\n";
}

absl::Status Report::WriteJson(const std::string& path) const {
  std::ofstream file(path);
  file << Json();
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

}  // namespace dflash::bench
