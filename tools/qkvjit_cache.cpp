// SPDX-License-Identifier: Apache-2.0
// qkvjit-cache: kernels made ahead for GPUs that need not be here, and what a bundle of them holds. Exit codes: 0 done,
// 1 verify or why found something, 2 bad usage or input, 3 something is not installed, 4 a compile failed.
#include <CLI/CLI.hpp>
#include <iostream>

#include "cache_commands.h"
#include "qkvjit/qkvjit.h"

namespace {

using namespace qkvjit;

constexpr const char* kExamples = R"(Examples:
  qkvjit-cache export --problems problems.json --arch sm_80,sm_90a -o kernels.qkvb    needs NVRTC, no GPU
  qkvjit-cache list kernels.qkvb                                                      its kernels
  qkvjit-cache verify kernels.qkvb                                                    reads and checks every entry
  qkvjit-cache why kernels.qkvb --problems problems.json --arch sm_90a                what is missing, and what differs

problems.json is a list of
  {"n_q": 4096, "n_k": 1024, "n_v": 1024, "k": 4096}    a shape, or
  {"model": "llama-3-8b", "tp": 2}                      one rank of a model
each with "layout" ("k8n", "nk8", "prepacked" or a list of them), "group_size", "activation_dtype" and "scale_dtype"
where they are not the defaults (k8n, 128, f16, f16).
)";

int run(int argc, char** argv) {
  tools::CacheArguments args;
  CLI::App app("Makes bundles of compiled kernels and looks into them.", "qkvjit-cache");
  app.footer(kExamples);
  app.set_version_flag("--version", std::string("qkvjit-cache ") + version());
  app.require_subcommand(0, 1);  // so that an unknown one is named
  app.fallthrough();
  app.add_flag("--json", args.json, "write JSON to the standard output");

  const auto add_bundle = [&](CLI::App* command) {
    command->add_option("bundle", args.bundle, "a file that export wrote")->required();
  };
  const auto add_problems = [&](CLI::App* command) {
    command->add_option("--problems", args.problems, "the list of problems, a JSON file")->required();
    command->add_option("--arch", args.arches, "targets, such as sm_80,sm_90a")->delimiter(',')->required();
    command->add_option("--multiprocessors", args.multiprocessors, "of the GPU, where it has not the usual number")
        ->check(CLI::PositiveNumber);
  };
  CLI::App* make = app.add_subcommand("export", "compile all kernels of the problems into a bundle");
  add_problems(make);
  make->add_option("-o,--output", args.output, "the bundle to write")->required();
  make->add_option("--threads", args.threads, "compiles at once (default: as many as the machine has)");
  CLI::App* list = app.add_subcommand("list", "the kernels of a bundle");
  CLI::App* stat = app.add_subcommand("stat", "what made a bundle, and how much it holds");
  CLI::App* check = app.add_subcommand("verify", "read and check every entry; exit code 1 where one is bad");
  CLI::App* why = app.add_subcommand("why", "which kernels of the problems are missing, and what differs; exit code 1");
  for (CLI::App* command : {list, stat, check, why}) add_bundle(command);
  add_problems(why);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (app.get_subcommands().empty()) {
    std::cerr << "qkvjit-cache: got no subcommand, needs one of export, list, stat, verify and why; see --help\n";
    return 2;
  }
  if (*make) return tools::export_bundle(args);
  if (*list) return tools::list_bundle(args);
  if (*stat) return tools::stat_bundle(args);
  if (*check) return tools::verify_bundle(args);
  return tools::explain_bundle(args);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const qkvjit::LibraryUnavailable& error) {
    std::cerr << "qkvjit-cache: " << error.what() << '\n';
    return 3;
  } catch (const qkvjit::CompileError& error) {
    std::cerr << "qkvjit-cache: " << error.what() << '\n';
    return 4;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit-cache: " << error.what() << '\n';
    return 2;
  }
}
