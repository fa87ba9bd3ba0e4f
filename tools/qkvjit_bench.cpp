// SPDX-License-Identifier: Apache-2.0
// qkvjit-bench: times the fused projection against this GPU's own limits and cuBLAS f16, verifying each row first.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>

#include "bench_gpu.h"
#include "bench_report.h"
#include "bench_rows.h"
#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace {

using namespace qkvbench;
using Clock = std::chrono::steady_clock;

constexpr const char* kExamples = R"(Examples:
  qkvjit-bench                                             the core set: four shapes, M = 1 to 64
  qkvjit-bench --model llama-3-8b --tp 2 --m 1,16,64       one rank's shape of a model
  qkvjit-bench --set full --json h200.json --resume --budget-s 500   the full set, over several calls
  qkvjit-bench --set prefill --json prefill.json           five shapes, M = 128 to 8192, in bursts against cuBLAS
  qkvjit-bench --shape 4096:4096,1024,1024 --m 77,333,1500 --interleave     odd M, the chip never at rest
  qkvjit-bench --from h200.json --svg h200.svg             table and plot of an earlier run; needs no GPU
  qkvjit-bench --plan --model llama-3-8b                   the rows that would be timed; needs no GPU
)";

struct Arguments {
  std::string set = "core", dependent = "both", json, csv, svg, from, commit = "unknown", model;
  std::vector<std::string> shapes, layouts;
  std::vector<std::uint64_t> ms;
  std::string pipeline, tile, tuning;
  unsigned tp = 1, repetitions = BenchOptions{}.repetitions;
  int device = 0;
  double budget_s = 0;
  bool resume = false, plan = false, list_models = false, fused = false, progress = false, interleave = false;
};

std::vector<Row> wanted_rows(const Arguments& args) {
  std::vector<Shape> shapes;
  for (const std::string& text : args.shapes) shapes.push_back(parse_shape(text));
  if (!args.model.empty()) shapes.push_back(model_shape(args.model, args.tp));
  const bool prefill = args.set == "prefill" || args.set == "prefill-sweep";
  if (shapes.empty()) shapes = args.set == "full" ? full_shapes() : prefill ? prefill_shapes() : core_shapes();
  std::vector<WeightLayout> layouts;
  for (const WeightLayout layout : {WeightLayout::prepacked, WeightLayout::k8n, WeightLayout::nk8}) {
    const bool named = std::find(args.layouts.begin(), args.layouts.end(), to_string(layout)) != args.layouts.end();
    const bool of_set =
        layout == WeightLayout::prepacked || args.set == "full" || (layout == WeightLayout::k8n && !prefill);
    if (named || (args.layouts.empty() && of_set)) layouts.push_back(layout);
  }
  std::vector<bool> dependent;
  if (args.dependent != "on") dependent.push_back(false);
  if (args.dependent != "off") dependent.push_back(true);
  const std::vector<std::uint64_t> ms = !args.ms.empty()              ? args.ms
                                        : args.set == "full"          ? full_ms()
                                        : args.set == "prefill"       ? prefill_ms()
                                        : args.set == "prefill-sweep" ? prefill_sweep_ms()
                                                                      : core_ms();
  std::vector<Row> rows = plan_rows(shapes, ms, layouts, dependent);
  for (Row& row : rows) row.interleaved = args.interleave && row.m > kFewTokens;
  return rows;
}

void write_outputs(const Arguments& args, const Report& report) {
  if (!args.json.empty()) write_file(args.json, to_json(report));
  if (!args.csv.empty()) write_file(args.csv, to_csv(report));
  if (!args.svg.empty()) write_file(args.svg, to_svg(report));
}

int redraw(Arguments args) {
  const Report report = from_json(read_file(args.from));
  fmt::print("{}, driver {}, NVRTC {}, {}, read bandwidth {:.2f} TB/s\n{}", report.device, report.driver, report.nvrtc,
             report.date, report.read_tb_s, table_header());
  for (const Row& row : report.rows) fmt::print("{}", table_line(row, report.read_tb_s));
  args.json.clear();
  write_outputs(args, report);
  return 0;
}

/// The rows of the file to go on from; none where there is no file.
std::vector<Row> rows_done(const Arguments& args, const Report& now) {
  if (!args.resume) return {};
  if (args.json.empty()) throw qkvjit::InvalidProblem("--resume: got no --json FILE, needs the file to go on with");
  if (access(args.json.c_str(), F_OK) != 0) return {};
  Report before = from_json(read_file(args.json));
  if (before.device != now.device || before.driver != now.driver || before.templates_digest != now.templates_digest) {
    throw qkvjit::InvalidProblem(
        fmt::format("--resume: '{}' is of {}, driver {}, templates {:.12}, this is {}, driver {}, templates {:.12}; "
                    "give another file",
                    args.json, before.device, before.driver, before.templates_digest, now.device, now.driver,
                    now.templates_digest));
  }
  return before.rows;
}

int measure(const Arguments& args) {
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  BenchOptions options{
      .pipeline = args.pipeline, .tile = args.tile, .three_launches = args.fused, .repetitions = args.repetitions};
  if (!args.tuning.empty()) options.tuning = qkvjit::TuningTable::load(args.tuning);
  GpuBench bench(args.device, std::move(options));
  Report report = bench.describe();
  report.commit = args.commit;
  report.rows = rows_done(args, report);
  std::vector<Row> rows = remaining(wanted_rows(args), report.rows);
  fmt::print("{}, driver {}, NVRTC {}, read bandwidth {:.2f} TB/s, {} rows\n{}", report.device, report.driver,
             report.nvrtc, report.read_tb_s, rows.size(), table_header());
  const bool progress = args.progress || isatty(STDERR_FILENO) != 0;
  std::size_t done = 0, wrong = 0;
  if (args.tile.empty() && args.pipeline.empty()) bench.expect(rows);
  while (done < rows.size()) {
    if (args.budget_s > 0 && seconds() > args.budget_s) break;
    if (progress) {
      const double left =
          done == 0 ? 0 : seconds() / static_cast<double>(done) * static_cast<double>(rows.size() - done);
      std::cerr << fmt::format("[{}/{}] {:.0f} s, about {:.0f} s left\r", done + 1, rows.size(), seconds(), left);
    }
    const std::span<Row> left(rows.begin() + static_cast<std::ptrdiff_t>(done), rows.end());
    const std::span<Row> group = left.first(group_length(left));
    bench.measure(group, most_tokens(left, group.front().shape));
    const std::size_t before = done;
    for (const Row& row : group) {
      ++done;
      if (!row.verified) ++wrong;
      fmt::print("{}", table_line(row, report.read_tb_s));
      report.rows.push_back(row);
    }
    std::cout.flush();
    if (done / 20 != before / 20 && !args.json.empty()) write_file(args.json, to_json(report));
  }
  report.clock_mhz = bench.describe().clock_mhz;
  write_outputs(args, report);
  if (done < rows.size()) fmt::print("{} rows are left: run again with --resume\n", rows.size() - done);
  if (wrong > 0) std::cerr << fmt::format("qkvjit-bench: {} of {} rows gave wrong results\n", wrong, done);
  return wrong > 0 ? 1 : 0;
}

int run(const Arguments& args) {
  if (args.list_models) {
    for (const Model& model : models()) {
      const Shape shape = model_shape(model.name, 1);
      fmt::print("{:<14} K = {}, N = {} + {} + {}\n", model.name, shape.k, shape.n_q, shape.n_k, shape.n_v);
    }
    return 0;
  }
  if (!args.from.empty()) return redraw(args);
  if (args.plan) {
    for (const Row& row : wanted_rows(args)) {
      fmt::print("{:<22} M = {:<5} {:<9} dependent launch {}{}\n", shape_text(row.shape), row.m, to_string(row.layout),
                 row.dependent_launch ? "on" : "off", row.interleaved ? ", without rest" : "");
    }
    return 0;
  }
  return measure(args);
}

int parse_and_run(int argc, char** argv) {
  Arguments args;
  CLI::App app("Times the fused INT4 Q/K/V projection: microseconds, memory bandwidth, and cuBLAS f16 beside it.",
               "qkvjit-bench");
  app.footer(kExamples);
  app.set_version_flag("--version", fmt::format("qkvjit-bench {}", qkvjit::version()));
  app.add_option("--set", args.set, "rows to time")
      ->check(CLI::IsMember({"core", "full", "prefill", "prefill-sweep"}))
      ->capture_default_str();
  app.add_option("--shape", args.shapes, "K:NQ,NK,NV instead of the set's shapes; may be given again")->expected(1, -1);
  app.add_option("--model", args.model, "the shape of a model (--list-models)");
  app.add_option("--tp", args.tp, "tensor-parallel degree: the shape of one rank")->check(CLI::Range(1u, 1024u));
  app.add_option("--m", args.ms, "token counts, such as 1,8,16")->delimiter(',')->check(CLI::Range(1, 1 << 20));
  app.add_option("--layout", args.layouts, "prepacked, k8n, nk8")
      ->delimiter(',')
      ->check(CLI::IsMember({"prepacked", "k8n", "nk8"}));
  app.add_option("--dependent-launch", args.dependent, "the promise of constant weights")
      ->check(CLI::IsMember({"on", "off", "both"}))
      ->capture_default_str();
  app.add_option("--pipeline", args.pipeline, "a kernel family instead of what selection picks");
  app.add_option("--tile", args.tile, "a tile by its name (qkvjit-dump --list prints them)");
  app.add_option("--tuning", args.tuning, "a file of qkvjit-tune, which selection looks at first");
  app.add_option("--repetitions", args.repetitions, "timed bursts of each row of more than 64 tokens")
      ->check(CLI::Range(1u, 101u))
      ->capture_default_str();
  app.add_flag("--interleave", args.interleave,
               "more than 64 tokens: in turn with cuBLAS without any rest, at the clock of long work");
  app.add_flag("--fused", args.fused, "also time Q, K and V in a launch each (layout k8n, up to 64 tokens)");
  app.add_option("--json", args.json, "file to write");
  app.add_option("--csv", args.csv, "file to write");
  app.add_option("--svg", args.svg, "plot to write");
  app.add_option("--from", args.from, "print and plot this JSON file instead of timing");
  app.add_flag("--resume", args.resume, "keep the rows that --json FILE has already");
  app.add_option("--budget-s", args.budget_s, "stop after that many seconds; 0: never")->check(CLI::NonNegativeNumber);
  app.add_option("--commit", args.commit, "text for the report's field")->capture_default_str();
  app.add_option("--device", args.device, "CUDA device ordinal")->check(CLI::Range(0, 1023))->capture_default_str();
  app.add_flag("--plan", args.plan, "print the rows and time nothing");
  app.add_flag("--list-models", args.list_models, "print the models and their shapes");
  app.add_flag("--progress", args.progress, "show progress though stderr is no terminal");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return run(args);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const qkvjit::LibraryUnavailable& error) {
    std::cerr << "qkvjit-bench: " << error.what() << '\n';
    return 2;
  } catch (const qkvjit::InvalidProblem& error) {
    std::cerr << "qkvjit-bench: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit-bench: " << error.what() << '\n';
    return 3;
  }
}
