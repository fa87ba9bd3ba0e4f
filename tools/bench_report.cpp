// SPDX-License-Identifier: Apache-2.0
#include "bench_report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvbench {

using nlohmann::json;

namespace {

WeightLayout layout_of(const std::string& name) {
  for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked}) {
    if (name == to_string(layout)) return layout;
  }
  throw qkvjit::Error(fmt::format("the report has a row of layout '{}', which is none of k8n, nk8, prepacked", name));
}

json optional_json(const std::optional<double>& value) { return value ? json(*value) : json(nullptr); }

std::optional<double> optional_of(const json& row, const char* key) {
  if (!row.contains(key) || row[key].is_null()) return std::nullopt;
  return row[key].get<double>();
}

}  // namespace

std::string table_header() {
  return fmt::format("{:<22} {:>5} {:<9} {:<4} {:<8} {:<29} {:>9} {:>9} {:>9} {:>7} {:>6} {:>6} {:>8} {:>6}\n",
                     "K:Nq,Nk,Nv", "M", "layout", "dep", "pipeline", "tile", "us", "min", "max", "TFLOP/s", "TB/s",
                     "limit", "cuBLAS", "ratio");
}

std::string table_line(const Row& row, double read_tb_s) {
  std::string line =
      fmt::format("{:<22} {:>5} {:<9} {:<4} {:<8} {:<29} ", shape_text(row.shape), row.m, to_string(row.layout),
                  row.dependent_launch ? (row.launched_dependent ? "on" : "(on)") : "off", row.pipeline, row.tile);
  if (!row.verified) return line + "WRONG RESULT, not timed\n";
  const double tb_s = bytes_of(row.shape, row.m) / row.us / 1e6;
  line += fmt::format("{:>9.2f} {:>9.2f} {:>9.2f} {:>7.1f} {:>6.2f} {:>5.0f}% ", row.us, row.us_min, row.us_max,
                      tflops_of(row), tb_s, read_tb_s > 0 ? 100 * tb_s / read_tb_s : 0.0);
  if (row.cublas_f16_us) line += fmt::format("{:>8.2f} {:>5.2f}x", *row.cublas_f16_us, *ratio_of(row));
  if (row.interleaved) line += "  without rest";
  if (row.three_launches_us)
    line += fmt::format("  three launches {:.2f}, {:.2f}x", *row.three_launches_us, *row.three_launches_us / row.us);
  return line + "\n";
}

std::string to_json(const Report& report) {
  json rows = json::array();
  for (const Row& row : report.rows) {
    json entry = {{"k", row.shape.k},
                  {"n_q", row.shape.n_q},
                  {"n_k", row.shape.n_k},
                  {"n_v", row.shape.n_v},
                  {"m", row.m},
                  {"group", 128},
                  {"dtype", "f16"},
                  {"layout", to_string(row.layout)},
                  {"pipeline", row.pipeline},
                  {"tile", row.tile},
                  {"dependent_launch", row.dependent_launch},
                  {"launched_dependent", row.launched_dependent},
                  {"us", row.us},
                  {"us_min", row.us_min},
                  {"us_max", row.us_max},
                  {"limit_us", row.limit_us},
                  {"cublas_f16_us", optional_json(row.cublas_f16_us)},
                  {"tflops", tflops_of(row)},
                  {"ratio", optional_json(ratio_of(row))},
                  {"verified", row.verified}};
    if (row.interleaved) entry["interleaved"] = true;
    if (row.cublas_us_max > 0) entry["cublas_us_min"] = row.cublas_us_min, entry["cublas_us_max"] = row.cublas_us_max;
    if (row.three_launches_us) entry["three_launches_us"] = *row.three_launches_us;
    rows.push_back(std::move(entry));
  }
  const json all = {{"device", report.device},
                    {"driver", report.driver},
                    {"nvrtc", report.nvrtc},
                    {"commit", report.commit},
                    {"templates_digest", report.templates_digest},
                    {"date", report.date},
                    {"clock_mhz", optional_json(report.clock_mhz)},
                    {"read_tb_s", report.read_tb_s},
                    {"protocol", report.protocol},
                    {"rows", std::move(rows)}};
  return all.dump(1) + "\n";
}

Report from_json(const std::string& text) {
  try {
    const json all = json::parse(text);
    Report report;
    report.device = all.at("device");
    report.driver = all.at("driver");
    report.nvrtc = all.at("nvrtc");
    report.commit = all.at("commit");
    report.templates_digest = all.at("templates_digest");
    report.date = all.at("date");
    report.protocol = all.at("protocol");
    report.clock_mhz = optional_of(all, "clock_mhz");
    report.read_tb_s = all.at("read_tb_s");
    for (const json& entry : all.at("rows")) {
      Row row;
      row.shape = {entry.at("k"), entry.at("n_q"), entry.at("n_k"), entry.at("n_v")};
      row.m = entry.at("m");
      row.layout = layout_of(entry.at("layout"));
      row.dependent_launch = entry.at("dependent_launch");
      row.launched_dependent = entry.value("launched_dependent", false);
      row.interleaved = entry.value("interleaved", false);
      row.pipeline = entry.at("pipeline");
      row.tile = entry.at("tile");
      row.us = entry.at("us");
      row.us_min = entry.at("us_min");
      row.us_max = entry.at("us_max");
      row.limit_us = entry.at("limit_us");
      row.cublas_f16_us = optional_of(entry, "cublas_f16_us");
      row.cublas_us_min = entry.value("cublas_us_min", 0.0), row.cublas_us_max = entry.value("cublas_us_max", 0.0);
      row.three_launches_us = optional_of(entry, "three_launches_us");
      row.verified = entry.at("verified");
      report.rows.push_back(std::move(row));
    }
    return report;
  } catch (const json::exception& error) {
    throw qkvjit::Error(fmt::format("not a report of qkvjit-bench: {}", error.what()));
  }
}

std::string to_csv(const Report& report) {
  std::string text =
      "k,n_q,n_k,n_v,m,layout,dependent_launch,pipeline,tile,us,us_min,us_max,limit_us,cublas_f16_us,tflops,ratio,"
      "interleaved\n";
  for (const Row& r : report.rows) {
    text += fmt::format("{},{},{},{},{},{},{},{},{},{:.3f},{:.3f},{:.3f},{:.3f},{},{:.2f},{},{}\n", r.shape.k,
                        r.shape.n_q, r.shape.n_k, r.shape.n_v, r.m, to_string(r.layout),
                        r.dependent_launch ? "on" : "off", r.pipeline, r.tile, r.us, r.us_min, r.us_max, r.limit_us,
                        r.cublas_f16_us ? fmt::format("{:.3f}", *r.cublas_f16_us) : "", tflops_of(r),
                        ratio_of(r) ? fmt::format("{:.4f}", *ratio_of(r)) : "", r.interleaved ? "on" : "off");
  }
  return text;
}

// --- The plot
// -----------------------------------------------------------------------------------------------------------

namespace {

constexpr double kPanelWidth = 420, kPanelHeight = 300, kLeft = 58, kRight = 16, kTop = 56, kBottom = 44;

struct Line {
  std::string name, color;
  bool dashed = false;
  std::map<std::uint64_t, double> points;  // M to microseconds, or to TFLOP/s
};

/// One plot: a shape's rows of few tokens in microseconds, or of many in TFLOP/s.
struct Panel {
  Shape shape;
  bool many = false;

  bool operator==(const Panel&) const = default;
  [[nodiscard]] bool holds(const Row& row) const { return row.shape == shape && (row.m > kFewTokens) == many; }
};

/// The lines of one panel, in the order they are drawn.
std::vector<Line> lines_of(const Report& report, const Panel& panel) {
  std::vector<Line> lines{{"limit", "#888888", true, {}},
                          {"cuBLAS f16", "#d9822b", false, {}},
                          {"nk8", "#8e6bbf", false, {}},
                          {"k8n", "#2f9e6e", false, {}},
                          {"prepacked", "#2a78d6", false, {}}};
  // Times with and without rest do not belong on one line.
  const bool rested = std::any_of(report.rows.begin(), report.rows.end(),
                                  [&](const Row& row) { return panel.holds(row) && !row.interleaved; });
  for (const Row& row : report.rows) {
    if (!panel.holds(row) || !row.verified || row.interleaved == rested) continue;
    if (!panel.many) lines[0].points[row.m] = row.limit_us;
    if (row.cublas_f16_us) {
      lines[1].points[row.m] = panel.many ? tflops_of(row) / *ratio_of(row) : *row.cublas_f16_us;
    }
    Line& ours = lines[row.layout == WeightLayout::nk8 ? 2 : row.layout == WeightLayout::k8n ? 3 : 4];
    // The faster of the two launches: what a user would take.
    const double value = panel.many ? tflops_of(row) : row.us;
    const auto [it, fresh] = ours.points.emplace(row.m, value);
    if (!fresh) it->second = panel.many ? std::max(it->second, value) : std::min(it->second, value);
  }
  std::erase_if(lines, [](const Line& line) { return line.points.empty(); });
  return lines;
}

/// The values that an axis names: 1, 2 and 5 of each decade of a logarithmic one from a decade to a decade; five to ten
/// round ones from 0 of a linear one.
std::vector<double> ticks_of(bool linear, double low, double high) {
  std::vector<double> ticks;
  if (linear) {
    const double decade = std::pow(10, std::floor(std::log10(high)));
    const double step = high / decade > 5 ? decade : high / decade > 2 ? decade / 2 : decade / 5;
    for (int i = 0; i * step < high + step * 0.999; ++i) ticks.push_back(i * step);
    return ticks;
  }
  const double first = std::pow(10, std::floor(std::log10(low))),
               last = std::pow(10, std::ceil(std::log10(high * 1.001)));
  for (double value = first; value <= last * 1.001; value *= 10) {
    for (const double step : {1., 2., 5.}) {
      if (value * step <= last * 1.001) ticks.push_back(value * step);
    }
  }
  return ticks;
}

std::string draw(const std::vector<Line>& lines, const Panel& panel, double x0, double y0) {
  const Shape& shape = panel.shape;
  double low_m = 1e300, high_m = 0, low_y = 1e300, high_y = 0;
  for (const Line& line : lines) {
    for (const auto& [m, y] : line.points) {
      low_m = std::min(low_m, static_cast<double>(m)), high_m = std::max(high_m, static_cast<double>(m));
      low_y = std::min(low_y, y), high_y = std::max(high_y, y);
    }
  }
  if (high_m <= low_m) high_m = low_m * 2;
  const std::vector<double> ticks = ticks_of(panel.many, low_y, high_y);
  const auto on_axis = [&](double y) { return panel.many ? y : std::log10(y); };
  const double width = kPanelWidth - kLeft - kRight, height = kPanelHeight - kTop - kBottom;
  const auto x_of = [&](double m) {
    return x0 + kLeft + width * (std::log2(m) - std::log2(low_m)) / (std::log2(high_m) - std::log2(low_m));
  };
  const auto y_of = [&](double y) {
    return y0 + kTop +
           height * (1 - (on_axis(y) - on_axis(ticks.front())) / (on_axis(ticks.back()) - on_axis(ticks.front())));
  };
  std::string svg = fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"title\">K = {}, N = {}+{}+{}</text>\n",
                                x0 + kLeft, y0 + 20, shape.k, shape.n_q, shape.n_k, shape.n_v);
  for (const double tick : ticks) {
    svg += fmt::format(
        "<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"grid\"/>"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n",
        x0 + kLeft, x0 + kLeft + width, y_of(tick), y_of(tick), x0 + kLeft - 6, y_of(tick) + 4, tick);
  }
  for (double m = std::pow(2, std::ceil(std::log2(low_m))); m <= high_m; m *= high_m / low_m > 100 ? 4 : 2) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:g}</text>\n", x_of(m),
                       y0 + kTop + height + 16, m);
  }
  svg += fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">tokens M</text>"
      "<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
      x0 + kLeft + width / 2, y0 + kTop + height + 34, x0 + 8, y0 + kTop - (panel.many ? 12 : 2),
      panel.many ? "TFLOP/s" : "µs");
  double legend_x = x0 + kLeft;
  const double legend = y0 + 36;
  for (const Line& line : lines) {
    std::string points;
    for (const auto& [m, us] : line.points)
      points += fmt::format("{:.1f},{:.1f} ", x_of(static_cast<double>(m)), y_of(us));
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>\n", points,
                       line.color, line.dashed ? " stroke-dasharray=\"5 4\"" : "");
    if (!line.dashed) {
      for (const auto& [m, us] : line.points) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\" fill=\"{}\"/>", x_of(static_cast<double>(m)),
                           y_of(us), line.color);
      }
    }
    svg += fmt::format(
        "<line x1=\"{0:.1f}\" x2=\"{1:.1f}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\" "
        "stroke-width=\"2\"{4}/><text x=\"{5:.1f}\" y=\"{6:.1f}\">{7}</text>\n",
        legend_x, legend_x + 20, legend, line.color, line.dashed ? " stroke-dasharray=\"5 4\"" : "", legend_x + 26,
        legend + 4, line.name);
    legend_x += 38 + 6.2 * static_cast<double>(line.name.size());
  }
  return svg;
}

}  // namespace

std::string to_svg(const Report& report) {
  std::vector<Panel> panels;
  for (const bool many : {false, true}) {
    for (const Row& row : report.rows) {
      const Panel panel{row.shape, many};
      if (row.verified && panel.holds(row) && std::find(panels.begin(), panels.end(), panel) == panels.end()) {
        panels.push_back(panel);
      }
    }
  }
  const std::size_t columns = std::min<std::size_t>(panels.size(), 2), rows = (panels.size() + 1) / 2;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\">\n<title>Time of a call on {2}</title>\n"
      "<style>text{{font:11px sans-serif;fill:#555}}.title{{font:bold 13px sans-serif}}.grid{{stroke:#8884;"
      "stroke-width:1}}@media (prefers-color-scheme:dark){{text{{fill:#bbb}}}}</style>\n",
      kPanelWidth * static_cast<double>(columns), kPanelHeight * static_cast<double>(rows), report.device);
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const std::size_t column = i % 2, row = i / 2;
    svg += draw(lines_of(report, panels[i]), panels[i], kPanelWidth * static_cast<double>(column),
                kPanelHeight * static_cast<double>(row));
  }
  return svg + "</svg>\n";
}

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  std::ofstream file(temporary, std::ios::binary);
  file << text;
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    throw qkvjit::Error(fmt::format("cannot write '{}': check that its folder exists and has room", path));
  }
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw qkvjit::Error(fmt::format("cannot read '{}'", path));
  return text.str();
}

}  // namespace qkvbench
