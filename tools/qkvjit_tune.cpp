// SPDX-License-Identifier: Apache-2.0
// qkvjit-tune: times every tile on the GPU present and keeps the fastest in a file for PlanOptions::tuning.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>

#include "bench_rows.h"
#include "compile/kernel_templates.h"
#include "qkvjit/qkvjit.h"
#include "qkvjit/tune.h"

namespace {

using namespace qkvjit;

constexpr const char* kExamples = R"(Examples:
  qkvjit-tune -o h200.tuning.json --model llama-3-8b --tp 2       one rank's shape of a model, M = 1 to 8192
  qkvjit-tune -o h200.tuning.json --shape 4096:4096,1024,1024 --m 1,2,4,8,16 --layout k8n
  qkvjit-tune --show h200.tuning.json                             what a file holds; needs no GPU
A file that is there already is gone on with: rows for the same launches are replaced.
)";

struct Arguments {
  std::string output, show, model, dependent = "both";
  std::vector<std::string> shapes, layouts{"prepacked"};
  std::vector<std::uint64_t> ms;
  unsigned tp = 1, batches = TuneOptions{}.batches;
  int device = 0;
  double budget_s = 0;
  bool verbose = false;
};

std::string row_text(const TunedRow& row) {
  const QkvProblem& p = row.problem;
  return fmt::format("{:<22} {:<9} {:<4} M <= {:<6} {:<9} {:<29} {:<9} {:>9.2f} {:>9.2f} {:>9.2f}\n",
                     fmt::format("{}:{},{},{}", p.k, p.n_q, p.n_k, p.n_v), to_string(p.layout),
                     row.weights_are_constant ? "on" : "off", row.max_m, to_string(row.pipeline), tile_name(row.tile),
                     row.dependent_launch ? "dependent" : "ordinary", row.median_us, row.min_us, row.max_us);
}

std::string header_text() {
  return fmt::format("{:<22} {:<9} {:<4} {:<11} {:<9} {:<29} {:<9} {:>9} {:>9} {:>9}\n", "K:Nq,Nk,Nv", "layout", "dep",
                     "tokens", "pipeline", "tile", "launch", "us", "min", "max");
}

int show(const std::string& path) {
  const TuningTable table = TuningTable::load(path);
  const TunedHardware& hardware = table.hardware();
  fmt::print("{}, {} multiprocessors, {} KiB of shared memory a block, {} MiB L2; templates {:.12}{}\n{}",
             to_string(hardware.target), hardware.multiprocessors, hardware.smem_per_block_bytes >> 10,
             hardware.l2_bytes >> 20, table.templates_digest(),
             table.templates_digest() == templates_digest() ? "" : ", which are not those of this build",
             header_text());
  for (const TunedRow& row : table.rows()) fmt::print("{}", row_text(row));
  return 0;
}

std::vector<QkvProblem> problems_of(const Arguments& args) {
  std::vector<qkvbench::Shape> shapes;
  for (const std::string& text : args.shapes) shapes.push_back(qkvbench::parse_shape(text));
  if (!args.model.empty()) shapes.push_back(qkvbench::model_shape(args.model, args.tp));
  if (shapes.empty()) throw InvalidProblem("--shape: got none and no --model, needs what to tune for");
  std::vector<QkvProblem> problems;
  for (const qkvbench::Shape& shape : shapes) {
    for (const WeightLayout layout : {WeightLayout::prepacked, WeightLayout::k8n, WeightLayout::nk8}) {
      if (std::find(args.layouts.begin(), args.layouts.end(), to_string(layout)) == args.layouts.end()) continue;
      problems.push_back({.n_q = shape.n_q, .n_k = shape.n_k, .n_v = shape.n_v, .k = shape.k, .layout = layout});
      validate(problems.back());
    }
  }
  return problems;
}

int tune_all(const Arguments& args) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const std::vector<QkvProblem> problems = problems_of(args);
  const bool goes_on = access(args.output.c_str(), F_OK) == 0;
  const TuningTable before = goes_on ? TuningTable::load(args.output) : TuningTable();
  const DeviceContext context(args.device);
  KernelCache cache({.directory = ""});  // most candidates are never used again
  const DeviceInfo& info = context.info();
  TuningTable table(hardware_of(info, cache.target_for(info)), std::string(templates_digest()));
  if (goes_on) table.merge(before);  // refuses other hardware and other kernels, before any work
  fmt::print("{}, {} problems\n{}", info.name, problems.size(), header_text());

  bool stopped = false;
  TuneOptions options{.ms = args.ms, .batches = args.batches};
  if (args.dependent != "both") options.weights_are_constant = args.dependent == "on";
  for (const QkvProblem& problem : problems) {
    if (stopped) break;
    options.progress = [&](const TuneProgress& progress) {
      for (std::size_t i = 0; i < progress.times.size(); ++i) {
        const TunedTimes& times = progress.times[i];
        if (i != progress.winner && !args.verbose) continue;
        const Specialization& spec = times.candidate.spec;
        const std::string line = row_text({.problem = problem,
                                           .aligned = spec.aligned,
                                           .weights_are_constant = progress.weights_are_constant,
                                           .max_m = progress.m,
                                           .pipeline = spec.pipeline,
                                           .tile = spec.tile,
                                           .dependent_launch = times.candidate.dependent_launch,
                                           .median_us = times.median_us,
                                           .min_us = times.min_us,
                                           .max_us = times.max_us});
        fmt::print("{}{}", args.verbose ? (i == progress.winner ? "* " : "  ") : "", line);
      }
      std::fflush(stdout);
      stopped = args.budget_s > 0 && seconds() > args.budget_s;
      return !stopped;
    };
    table.merge(tune(cache, context, problem, options));
    table.save(args.output);
  }
  fmt::print("{} rows in {}{}\n", table.rows().size(), args.output,
             stopped ? "; the time is up, and what is missing can be tuned in a further run" : "");
  return 0;
}

int parse_and_run(int argc, char** argv) {
  Arguments args;
  CLI::App app("Finds the fastest tile for each token count on this GPU, for PlanOptions::tuning.", "qkvjit-tune");
  app.footer(kExamples);
  app.set_version_flag("--version", fmt::format("qkvjit-tune {}", version()));
  auto* output = app.add_option("-o,--output", args.output, "file to write, or to go on with");
  app.add_option("--show", args.show, "print this file and tune nothing")->excludes(output);
  app.add_option("--shape", args.shapes, "K:NQ,NK,NV; may be given again")->expected(1, -1);
  app.add_option("--model", args.model, "the shape of a model (qkvjit-bench --list-models)");
  app.add_option("--tp", args.tp, "tensor-parallel degree: the shape of one rank")->check(CLI::Range(1u, 1024u));
  app.add_option("--m", args.ms, "token counts (default 1 to 8192); each serves those down to the one before")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--layout", args.layouts, "prepacked, k8n, nk8")
      ->delimiter(',')
      ->check(CLI::IsMember({"prepacked", "k8n", "nk8"}))
      ->capture_default_str();
  app.add_option("--dependent-launch", args.dependent, "the promise of constant weights")
      ->check(CLI::IsMember({"on", "off", "both"}))
      ->capture_default_str();
  app.add_option("--batches", args.batches, "timed replays a tile")->check(CLI::Range(1u, 101u))->capture_default_str();
  app.add_option("--budget-s", args.budget_s, "stop after that many seconds; 0: never")->check(CLI::NonNegativeNumber);
  app.add_option("--device", args.device, "CUDA device ordinal")->check(CLI::Range(0, 1023))->capture_default_str();
  app.add_flag("--verbose", args.verbose, "print every tile that was timed, not the fastest alone");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (!args.show.empty()) return show(args.show);
  if (args.output.empty()) throw InvalidProblem("--output: got none, needs a file to write (or --show FILE)");
  return tune_all(args);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const LibraryUnavailable& error) {
    std::cerr << "qkvjit-tune: " << error.what() << '\n';
    return 2;
  } catch (const InvalidProblem& error) {
    std::cerr << "qkvjit-tune: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit-tune: " << error.what() << '\n';
    return 3;
  }
}
