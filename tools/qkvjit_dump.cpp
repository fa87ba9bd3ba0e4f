// SPDX-License-Identifier: Apache-2.0
// qkvjit-dump: compiles one kernel for any architecture and writes what was asked for. Needs NVRTC, but neither a
// GPU nor a driver. Exit codes: 0 done, 2 bad usage or input, 3 something is not installed, 4 the compile failed.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>

#include "compile/compiler.h"
#include "compile/name_expression.h"
#include "find_program.h"
#include "qkvjit/qkvjit.h"
#include "select/tile_table.h"

namespace {

using namespace qkvjit;

struct Arguments {
  std::uint64_t n = 0, n_q = 0, n_k = 0, n_v = 0, k = 0, m = 1;
  std::string tile, pipeline, arch = "sm_90", layout = "k8n", emit = "ptx", output;
  bool unaligned = false, list = false;
};

constexpr const char* kExamples = R"(Examples:
  qkvjit-dump --n 4096 --k 4096 --m 1 --arch sm_90                    PTX of the kernel for one token
  qkvjit-dump --n 4096 --k 4096 --m 1024 --arch sm_86 --emit info     registers, spills, shared memory
  qkvjit-dump --n-q 4096 --n-k 1024 --n-v 1024 --k 4096 --emit sass   machine code (needs nvdisasm)
  qkvjit-dump --n 4096 --k 4096 --emit source -o kernel.cu            one self-contained CUDA file
  qkvjit-dump --n 4096 --k 4096 --list --arch sm_80                   the tiles, and which M each serves)";

QkvProblem problem_of(const Arguments& args) {
  const auto pick = [&](std::uint64_t own) { return own != 0 ? own : args.n; };
  QkvProblem problem;
  problem.n_q = pick(args.n_q);
  problem.n_k = pick(args.n_k);
  problem.n_v = pick(args.n_v);
  problem.k = args.k;
  problem.layout = args.layout == "nk8"         ? WeightLayout::nk8
                   : args.layout == "prepacked" ? WeightLayout::prepacked
                                                : WeightLayout::k8n;
  return problem;
}

DeviceInfo device_of(Target target) { return typical_device(target.sm); }

Specialization choose(const Arguments& args, const QkvProblem& problem, Target target) {
  const DeviceInfo info = device_of(target);
  if (args.tile.empty() && args.pipeline.empty()) {
    return select_specialization(problem, info, target, !args.unaligned, args.m);
  }
  const std::optional<TileConfig> tile = args.tile.empty() ? std::nullopt : std::optional(parse_tile(args.tile));
  for (const Specialization& spec : candidate_specializations(problem, info, target, !args.unaligned)) {
    if (tile.has_value() && !(spec.tile == *tile)) continue;
    if (!args.pipeline.empty() && args.pipeline != to_string(spec.pipeline)) continue;
    return spec;
  }
  throw InvalidProblem(fmt::format(
      "--tile/--pipeline: got tile '{}', pipeline '{}', and no tile of {} is both; --list prints those there are",
      args.tile, args.pipeline, to_string(target)));
}

std::string list_text(const Arguments& args, const QkvProblem& problem, Target target) {
  std::string text = fmt::format("tiles of {} for N = {}+{}+{}, K = {}, {}\n\n", to_string(target), problem.n_q,
                                 problem.n_k, problem.n_v, problem.k, args.layout);
  text += fmt::format("{:<9} {:<28} {:>12} {:>8} {:>10}  {}\n", "pipeline", "tile", "serves M", "threads", "shared B",
                      "operands");
  const DeviceInfo info = device_of(target);
  for (const bool aligned : {true, false}) {
    const auto selected = select_rows(problem, info, target, aligned);
    const auto candidates = candidate_specializations(problem, info, target, aligned);
    if (!aligned && !candidates.empty() &&
        selected.front().spec == select_rows(problem, info, target, true).front().spec)
      break;
    for (const Specialization& spec : candidates) {
      std::string serves = "-";
      for (std::size_t i = 0; i < selected.size(); ++i) {
        if (!(selected[i].spec == spec)) continue;
        const std::uint64_t low = i == 0 ? 1 : selected[i - 1].max_m + 1;
        serves = selected[i].max_m == kAnyM ? fmt::format("{}...", low) : fmt::format("{}-{}", low, selected[i].max_m);
      }
      text += fmt::format("{:<9} {:<28} {:>12} {:>8} {:>10}  {}\n", to_string(spec.pipeline), tile_name(spec.tile),
                          serves, threads_per_block(spec.tile), smem_bytes(spec), spec.aligned ? "aligned" : "any");
    }
  }
  return text;
}

/// "8.0" from the PTX's ".version 8.0" line.
std::string ptx_isa(const std::string& ptx) {
  const std::size_t at = ptx.find(".version ");
  return at == std::string::npos ? "unknown" : ptx.substr(at + 9, ptx.find('\n', at) - at - 9);
}

std::string info_text(const CompiledKernel& kernel) {
  const Specialization& spec = kernel.spec;
  std::string text;
  const auto line = [&](std::string_view name, const auto& value) { text += fmt::format("{:<22} {}\n", name, value); };
  line("kernel", fmt::format("qkv_{} ({})", to_string(spec.pipeline), template_file(spec.pipeline)));
  line("tile", tile_name(spec.tile));
  line("target", to_string(spec.target));
  line("registers per thread", kernel.registers);
  line("spill bytes", kernel.spill_bytes);
  line("shared memory bytes", fmt::format("{} dynamic, {} static", smem_bytes(spec), kernel.static_smem_bytes));
  line("threads per block", threads_per_block(spec.tile));
  line("blocks", fmt::format("{} x ceil(M / {})", column_tiles(spec), spec.tile.block_m));
  line("PTX ISA", ptx_isa(kernel.ptx));
  line("NVRTC", kernel.nvrtc_version);
  line("options", fmt::format("{}", fmt::join(kernel.options, " ")));
  line("PTX bytes", kernel.ptx.size());
  line("cubin bytes", kernel.cubin.size());
  line("compile time", fmt::format("{:.0f} ms", kernel.compile_ms));
  line("symbol", kernel.lowered_name);
  text += "specialisation\n";
  for_each_field(spec, [&](std::string_view name, auto value) {
    if constexpr (std::is_enum_v<decltype(value)>) {
      text += fmt::format("  {:<20} {}\n", name, to_string(value));
    } else if constexpr (std::is_same_v<decltype(value), char>) {
      text += fmt::format("  {:<20} {}\n", name, value == '\0' ? std::string("none") : std::string(1, value));
    } else {
      text += fmt::format("  {:<20} {}\n", name, value);
    }
  });
  return text;
}

/// Disassembles through the toolkit's own program. Throws LibraryUnavailable where there is none.
std::string sass_text(const CompiledKernel& kernel) {
  const std::string program = tools::find_program("nvdisasm");
  const std::string fallback = program.empty() ? tools::find_program("cuobjdump") : std::string();
  if (program.empty() && fallback.empty()) {
    throw LibraryUnavailable(
        "neither nvdisasm nor cuobjdump was found on PATH, in $CUDA_HOME/bin, /usr/local/cuda*/bin or the nvidia "
        "wheels "
        "of $VIRTUAL_ENV: install the CUDA toolkit or the PyPI package nvidia-cuda-nvdisasm");
  }
  const tools::TemporaryFile file(".cubin");
  std::ofstream(file.path(), std::ios::binary)
      .write(kernel.cubin.data(), static_cast<std::streamsize>(kernel.cubin.size()));
  if (!program.empty()) return tools::run_program({program, file.path()});
  return tools::run_program({fallback, "--dump-sass", file.path()});
}

std::string nvcc_text(const Arguments& args, const Specialization& spec) {
  const std::string source = args.output.empty() ? "kernel.cu" : args.output;
  const std::string problem = fmt::format("--n-q {} --n-k {} --n-v {} --k {}", spec.n_q, spec.n_k, spec.n_v, spec.k);
  return fmt::format("qkvjit-dump {} --layout {} --arch {} --pipeline {} --tile {}{} --emit source -o {} && {}\n",
                     problem, to_string(spec.layout), to_string(spec.target), to_string(spec.pipeline),
                     tile_name(spec.tile), args.unaligned ? " --unaligned" : "", source,
                     nvcc_command(spec, source, "kernel.cubin"));
}

std::string produce(const Arguments& args) {
  const QkvProblem problem = problem_of(args);
  const Target target = parse_target(args.arch);
  if (args.list) return list_text(args, problem, target);
  const Specialization spec = choose(args, problem, target);
  if (args.emit == "source") return flattened_source(spec);
  if (args.emit == "nvcc") return nvcc_text(args, spec);

  const bool terminal = isatty(STDERR_FILENO) != 0;
  if (terminal) std::cerr << fmt::format("compiling {} for {} ...\r", tile_name(spec.tile), args.arch) << std::flush;
  KernelCache cache({.directory = ""});  // what it prints is of a compile of now
  const std::shared_ptr<const CompiledKernel> kernel = cache.compile(spec);
  if (terminal) std::cerr << "\x1b[2K";
  if (args.emit == "ptx") return kernel->ptx;
  if (args.emit == "cubin") return {kernel->cubin.begin(), kernel->cubin.end()};
  if (args.emit == "sass") return sass_text(*kernel);
  return info_text(*kernel);
}

void write_output(const Arguments& args, const std::string& text) {
  if (args.output.empty() || args.emit == "nvcc") {
    if (args.emit == "cubin" && !args.list && isatty(STDOUT_FILENO) != 0) {
      throw InvalidProblem("--emit cubin: the output is binary and would go to the terminal; name a file with -o");
    }
    std::cout.write(text.data(), static_cast<std::streamsize>(text.size())).flush();
    if (!std::cout) throw InvalidProblem("the output could not be written to the standard output");
    return;
  }
  // A sibling and a rename: a reader never sees half a file.
  const std::string temporary = fmt::format("{}.{}.tmp", args.output, getpid());
  std::ofstream file(temporary, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size())).flush();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, args.output, error);
  if (!file || error) {
    std::filesystem::remove(temporary, error);
    throw InvalidProblem(
        fmt::format("-o: '{}' cannot be written; name a file in a folder that exists and is yours", args.output));
  }
}

int run(int argc, char** argv) {
  Arguments args;
  CLI::App app("Compiles one fused INT4 Q/K/V kernel and prints it. Needs NVRTC, no GPU.", "qkvjit-dump");
  app.footer(kExamples);
  app.set_version_flag("--version", fmt::format("qkvjit-dump {}", version()));
  app.add_option("--n", args.n, "columns of each of Q, K and V")->check(CLI::PositiveNumber);
  app.add_option("--n-q", args.n_q, "columns of Q (default: --n)")->check(CLI::PositiveNumber);
  app.add_option("--n-k", args.n_k, "columns of K (default: --n)")->check(CLI::PositiveNumber);
  app.add_option("--n-v", args.n_v, "columns of V (default: --n)")->check(CLI::PositiveNumber);
  app.add_option("--k", args.k, "inner extent, a multiple of 128")->required()->check(CLI::PositiveNumber);
  auto* m = app.add_option("--m", args.m, "tokens: take the tile that selection picks for it")
                ->check(CLI::NonNegativeNumber)
                ->capture_default_str();
  app.add_option("--tile", args.tile, "a tile by its name (see --list)")->excludes(m);
  app.add_option("--pipeline", args.pipeline, "a kernel family by its name")
      ->check(CLI::IsMember({"simple", "gemv", "decode", "mma_sync", "wgmma", "prefill"}));
  app.add_option("--arch", args.arch, "target, sm_80 ... sm_121")->capture_default_str();
  app.add_option("--layout", args.layout, "weight layout: k8n [K/8, N], nk8 [N, K/8] or prepacked")
      ->check(CLI::IsMember({"k8n", "nk8", "prepacked"}))
      ->capture_default_str();
  app.add_flag("--unaligned", args.unaligned, "the kernel for base pointers that are not 16-byte aligned");
  app.add_option("--emit", args.emit, "what to write")
      ->check(CLI::IsMember({"ptx", "cubin", "sass", "source", "info", "nvcc"}))
      ->capture_default_str();
  app.add_flag("--list", args.list, "list the target's tiles instead");
  app.add_option("-o,--output", args.output, "file to write (default: the standard output)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  write_output(args, produce(args));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const qkvjit::LibraryUnavailable& error) {
    std::cerr << "qkvjit-dump: " << error.what() << '\n';
    return 3;
  } catch (const qkvjit::CompileError& error) {
    std::cerr << "qkvjit-dump: " << error.what() << '\n';
    return 4;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit-dump: " << error.what() << '\n';
    return 2;
  }
}
