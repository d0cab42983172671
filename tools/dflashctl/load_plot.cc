#include "tools/dflashctl/load_plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dflash::ctl {
namespace {

constexpr double kWidth = 320, kHeight = 220, kLeft = 60, kTop = 40, kGap = 80;
constexpr const char* kColors[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                   "#ff7f0e", "#17becf", "#8c564b"};
constexpr size_t kMaxPoints = 400;  // of one curve

const char* Color(size_t i) { return kColors[i % std::size(kColors)]; }

// A panel's frame and the map from values to places in it.
struct Panel {
  double x = 0;  // of its left edge
  std::string title;
  double low = 0, high = 1;  // of the horizontal axis, in decades
  double X(double value) const {
    return x + kWidth * std::clamp((std::log10(value) - low) / (high - low), 0.0, 1.0);
  }
  static double Y(double share) { return kTop + kHeight * (1 - share); }
};

void AppendText(std::string* svg, double x, double y, const char* anchor, const std::string& text,
                const char* color = "#333") {
  absl::StrAppend(
      svg, absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"%s\">%s</text>\n", x, y,
                           anchor, color, text));
}
void AppendLine(std::string* svg, double x1, double y1, double x2, double y2) {
  absl::StrAppend(
      svg, absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ccc\"/>\n", x1,
                           y1, x2, y2));
}

std::string SecondsText(double seconds) {
  return seconds < 1 ? absl::StrFormat("%g ms", seconds * 1e3) : absl::StrFormat("%g s", seconds);
}

void AppendShares(std::string* svg, const Panel& panel, const std::vector<LoadResult>& results,
                  double LoadSample::*figure) {
  AppendText(svg, panel.x + kWidth / 2, kTop - 14, "middle", panel.title);
  for (int tenth = 0; tenth <= 10; tenth += 5) {
    AppendLine(svg, panel.x, Panel::Y(tenth / 10.0), panel.x + kWidth, Panel::Y(tenth / 10.0));
    AppendText(svg, panel.x - 6, Panel::Y(tenth / 10.0) + 4, "end", absl::StrFormat("%d%%", tenth * 10));
  }
  for (double decade = panel.low; decade <= panel.high; ++decade) {
    const double at = panel.X(std::pow(10, decade));
    AppendLine(svg, at, kTop, at, kTop + kHeight);
    AppendText(svg, at, kTop + kHeight + 16, "middle", SecondsText(std::pow(10, decade)));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    std::vector<double> times;
    for (const LoadSample& sample : results[i].requests) {
      if (sample.code == grpc::StatusCode::OK) times.push_back(std::max(sample.*figure, 1e-9));
    }
    std::sort(times.begin(), times.end());
    const size_t stride = std::max<size_t>(1, times.size() / kMaxPoints);
    std::string points;
    for (size_t k = 0; k < times.size(); k += stride) {
      const double share = static_cast<double>(k + 1) / static_cast<double>(results[i].requests.size());
      absl::StrAppend(&points, absl::StrFormat("%.1f,%.1f ", panel.X(times[k]), Panel::Y(share)));
    }
    absl::StrAppend(svg, "<polyline fill=\"none\" stroke=\"", Color(i), "\" stroke-width=\"1.5\" points=\"",
                    points, "\"/>\n");
  }
}

// The decades that hold all times of all phases.
void FitDecades(const std::vector<LoadResult>& results, double LoadSample::*figure, Panel* panel) {
  double low = 1, high = -1;
  for (const LoadResult& result : results) {
    for (const LoadSample& sample : result.requests) {
      if (sample.code != grpc::StatusCode::OK) continue;
      const double decade = std::log10(std::max(sample.*figure, 1e-6));
      low = low > high ? decade : std::min(low, decade);
      high = std::max(high, decade);
    }
  }
  panel->low = low > high ? -3 : std::floor(low);
  panel->high = std::max(panel->low + 1, low > high ? 0 : std::ceil(high));
}

void AppendRates(std::string* svg, double x, const std::vector<LoadFigures>& figures) {
  AppendText(svg, x + kWidth / 2, kTop - 14, "middle", "requests/s: offered, finished, good");
  double most = 0;
  const auto offered = [](const LoadFigures& f) {
    return f.wall_seconds > 0 ? static_cast<double>(f.sent) / f.wall_seconds : 0;
  };
  for (const LoadFigures& f : figures) most = std::max(most, offered(f));
  if (most <= 0) most = 1;
  for (int i = 0; i <= 2; ++i) {
    AppendLine(svg, x, Panel::Y(i / 2.0), x + kWidth, Panel::Y(i / 2.0));
    AppendText(svg, x - 6, Panel::Y(i / 2.0) + 4, "end", absl::StrFormat("%.3g", most * i / 2));
  }
  const double slot = kWidth / static_cast<double>(std::max<size_t>(figures.size(), 1));
  for (size_t i = 0; i < figures.size(); ++i) {
    const double bars[] = {offered(figures[i]), figures[i].requests_per_second,
                           figures[i].good_requests_per_second};
    for (int k = 0; k < 3; ++k) {
      const double height = kHeight * bars[k] / most;
      absl::StrAppend(
          svg, absl::StrFormat("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" "
                               "fill-opacity=\"%.2f\"/>\n",
                               x + slot * (static_cast<double>(i) + 0.15 + 0.24 * k), kTop + kHeight - height,
                               slot * 0.22, height, Color(i), 0.3 + 0.35 * k));
    }
  }
}

}  // namespace

std::string FormatPlot(const std::vector<LoadResult>& results, const std::vector<LoadFigures>& figures) {
  const double width = kLeft + 3 * kWidth + 2 * kGap + 30;
  const double height = kTop + kHeight + 40 + 16 * static_cast<double>(figures.size());
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      width, height);
  Panel first = {.x = kLeft, .title = "first token within"};
  Panel total = {.x = kLeft + kWidth + kGap, .title = "whole request within"};
  FitDecades(results, &LoadSample::first_token, &first);
  FitDecades(results, &LoadSample::end, &total);
  AppendShares(&svg, first, results, &LoadSample::first_token);
  AppendShares(&svg, total, results, &LoadSample::end);
  AppendRates(&svg, kLeft + 2 * (kWidth + kGap), figures);
  for (size_t i = 0; i < figures.size(); ++i) {
    const LoadFigures& f = figures[i];
    AppendText(&svg, kLeft, kTop + kHeight + 42 + 16 * static_cast<double>(i), "start",
               absl::StrFormat(
                   "%s: %d sent, %d finished, %d refused, %d failed; %.1f tokens/s, %.2f tokens per round; "
                   "first token p50 %.1f ms, p99 %.1f ms",
                   f.phase.Name(), f.sent, f.finished, f.refused, f.failed, f.tokens_per_second,
                   f.tokens_per_round, f.first_token.p50 * 1e3, f.first_token.p99 * 1e3),
               Color(i));
  }
  return svg + "</svg>\n";
}

}  // namespace dflash::ctl
