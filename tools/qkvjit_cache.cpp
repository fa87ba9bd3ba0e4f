// SPDX-License-Identifier: Apache-2.0
// qkvjit-cache: kernels made ahead for GPUs that need not be here, and what bundles and the folder of the disk cache
// hold. Exit codes: 0 done, 1 not all is well (bad entries, missing kernels, what could not be stored), 2 bad usage or
// input, 3 something is not installed, 4 a compile failed.
#include <CLI/CLI.hpp>
#include <functional>
#include <iostream>

#include "cache_commands.h"
#include "qkvjit/qkvjit.h"

namespace {

using namespace qkvjit;

constexpr const char* kExamples = R"(Examples:
  qkvjit-cache export --problems problems.json --arch sm_80,sm_90a -o kernels.qkvb    needs NVRTC, no GPU
  qkvjit-cache verify kernels.qkvb                                                    reads and checks every entry
  qkvjit-cache why kernels.qkvb --problems problems.json --arch sm_90a                what is missing, and what differs
  qkvjit-cache import kernels.qkvb --dir /srv/qkvjit                                  into the folder of the disk cache
  qkvjit-cache warm --problems problems.json                                          for the GPU present
  qkvjit-cache list                                                                   the default folder
  qkvjit-cache trim --max-bytes 200MiB                                                least recently used kernels go

problems.json is a list of
  {"n_q": 4096, "n_k": 1024, "n_v": 1024, "k": 4096}    a shape, or
  {"model": "llama-3-8b", "tp": 2}                      one rank of a model
each with "layout" ("k8n", "nk8", "prepacked" or a list of them), "group_size", "activation_dtype" and "scale_dtype"
where they are not the defaults (k8n, 128, f16, f16).
)";

int run(int argc, char** argv) {
  tools::CacheArguments args;
  std::function<int()> run_command;
  CLI::App app("Compiles kernels ahead, and looks after the disk cache and bundles.", "qkvjit-cache");
  app.footer(kExamples);
  app.set_version_flag("--version", std::string("qkvjit-cache ") + version());
  app.require_subcommand(0, 1);  // so that an unknown one is named
  app.fallthrough();
  app.add_flag("--json", args.json, "write JSON to the standard output");

  const auto add = [&](const char* name, const char* what, int (*command)(const tools::CacheArguments&)) {
    CLI::App* added = app.add_subcommand(name, what);
    added->callback([&args, &run_command, command] { run_command = [&args, command] { return command(args); }; });
    return added;
  };
  const auto add_directory = [&](CLI::App* command) {
    command->add_option("--dir", args.directory,
                        "the folder (default: as the library finds it, $QKVJIT_CACHE_DIR first)");
  };
  const auto add_problems = [&](CLI::App* command) {
    command->add_option("--problems", args.problems, "the list of problems, a JSON file")->required();
    command->add_option("--multiprocessors", args.multiprocessors, "of the GPU, where it has not the usual number")
        ->check(CLI::PositiveNumber);
    return command->add_option("--arch", args.arches, "targets, such as sm_80,sm_90a")->delimiter(',');
  };
  const auto add_threads = [&](CLI::App* command) {
    command->add_option("--threads", args.threads, "compiles at once (default: as many as the machine has)");
  };

  CLI::App* list = add("list", "the kernels of a bundle or of the folder", tools::list_entries);
  CLI::App* stat = add("stat", "how much a bundle or the folder holds", tools::show_totals);
  CLI::App* verify =
      add("verify", "read and check every entry; bad ones of the folder are removed", tools::verify_entries);
  CLI::App* why = add("why", "which kernels of the problems are missing, and how the nearest stored one differs",
                      tools::explain_misses);
  for (CLI::App* command : {list, stat, verify, why}) {
    auto* bundle = command->add_option("bundle", args.bundle, "a file that export wrote (default: the folder)");
    add_directory(command);
    command->get_option("--dir")->excludes(bundle);
  }
  add_problems(why)->required();

  CLI::App* trim = add("trim", "remove the least recently used kernels of the folder", tools::trim_folder);
  trim->add_option("--max-bytes", args.max_bytes, "what may stay: 5000000, 200MB, 1GiB")
      ->transform(CLI::AsSizeValue(false))
      ->required();
  CLI::App* clear = add("clear", "remove all kernels of the folder", tools::clear_folder);
  CLI::App* import = add("import", "put a bundle's kernels into the folder", tools::import_bundle);
  import->add_option("bundle", args.bundle, "a file that export wrote")->required();

  CLI::App* make =
      add("export", "compile all kernels of the problems into a bundle; needs no GPU", tools::export_bundle);
  add_problems(make)->required();
  make->add_option("-o,--output", args.output, "the bundle to write")->required();
  CLI::App* warm = add("warm", "compile all kernels of the problems into the folder", tools::warm_folder);
  auto* arch = add_problems(warm);
  warm->get_option("--multiprocessors")->needs(arch);  // else the GPU tells
  warm->add_option("--device", args.device, "the GPU to do it for, where there is no --arch")
      ->excludes(arch)
      ->check(CLI::NonNegativeNumber);
  for (CLI::App* command : {make, warm}) add_threads(command);
  for (CLI::App* command : {trim, clear, import, warm}) add_directory(command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (run_command) return run_command();
  std::cerr << "qkvjit-cache: got no subcommand, needs one of list, stat, verify, why, trim, clear, import, export and "
               "warm; see --help\n";
  return 2;
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
