// SPDX-License-Identifier: Apache-2.0
#include "compile/compiler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <set>
#include <utility>

#include "compile/kernel_templates.h"
#include "compile/name_expression.h"
#include "qkvjit/select.h"
#include "support/log.h"

namespace qkvjit {
namespace {

/// Owns an nvrtcProgram.
class Program {
 public:
  explicit Program(const NvrtcTable& nvrtc) : nvrtc_(nvrtc) {}
  ~Program() {
    if (program != nullptr) nvrtc_.nvrtcDestroyProgram(&program);
  }
  Program(const Program&) = delete;  // one owner
  Program& operator=(const Program&) = delete;

  nvrtcProgram program = nullptr;

 private:
  const NvrtcTable& nvrtc_;
};

std::string_view template_text(std::string_view name) {
  for (const TemplateFile& file : kernel_templates()) {
    if (file.name == name) return file.text;
  }
  throw CompileError(fmt::format("the kernel template '{}' is not embedded in this build", name));
}

std::string program_log(const NvrtcTable& nvrtc, nvrtcProgram program) {
  std::size_t size = 0;
  if (nvrtc.nvrtcGetProgramLogSize(program, &size) != NVRTC_SUCCESS || size == 0) return {};
  std::string log(size, '\0');
  if (nvrtc.nvrtcGetProgramLog(program, log.data()) != NVRTC_SUCCESS) return {};
  log.resize(log.find_last_not_of(std::string_view("\0\n", 2)) + 1);
  return log;
}

std::string numbered(std::string_view text) {
  std::string out;
  unsigned line = 1;
  for (std::size_t begin = 0; begin < text.size(); ++line) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    out += fmt::format("{:5} | {}\n", line, text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

[[noreturn]] void fail(const NvrtcTable& nvrtc, const Specialization& spec, std::string_view call, nvrtcResult code,
                       const std::string& log) {
  const std::string file = template_file(spec.pipeline);
  std::string text =
      fmt::format("{} failed with {} for {}\n  specialisation: {}\n  options: {}\n  NVRTC {}.{} ({})\n  log:\n{}", call,
                  nvrtc.nvrtcGetErrorString(code), file, describe(spec), fmt::join(compile_options(nvrtc, spec), " "),
                  nvrtc.major, nvrtc.minor, nvrtc.path, log);
  // The kernel's own file, and each header in which the log finds something.
  for (const TemplateFile& source : kernel_templates()) {
    if (source.name != file && log.find(fmt::format("{}(", source.name)) == std::string::npos) continue;
    text += fmt::format("\n  {}:\n{}", source.name, numbered(source.text));
  }
  throw CompileError(text);
}

/// Appends `name` and, before it, what it includes, each file once; #line keeps the compiler's line numbers true.
void flatten(std::string_view name, std::set<std::string, std::less<>>& done, std::string& out) {
  if (!done.insert(std::string(name)).second) return;
  const std::string_view text = template_text(name);
  out += fmt::format("#line 1 \"{}\"\n", name);
  unsigned line = 1;
  for (std::size_t begin = 0; begin < text.size(); ++line) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view content = text.substr(begin, end - begin);
    constexpr std::string_view kInclude = "#include \"";
    if (content.starts_with(kInclude)) {
      const std::string_view rest = content.substr(kInclude.size());
      flatten(rest.substr(0, rest.find('"')), done, out);
      out += fmt::format("#line {} \"{}\"\n", line + 1, name);
    } else if (content != "#pragma once") {
      out += content;
      out += '\n';
    } else {
      out += '\n';
    }
    begin = end + 1;
  }
}

}  // namespace

std::vector<std::string> compile_options(const NvrtcTable& nvrtc, const Specialization& spec) {
  std::vector<std::string> options = {"--std=c++20", "--gpu-architecture=" + to_string(spec.target), "-default-device",
                                      "--ptxas-options=-v"};
  // Where there is a driver, newer NVRTCs keep a disk cache of their own, and what comes from it has no log: registers
  // and spills would be unknown. 12.3 refuses the option, 12.9 takes it.
  if (std::pair(nvrtc.major, nvrtc.minor) >= std::pair(12, 9)) options.emplace_back("--no-cache");
  return options;
}

CompiledKernel compile_kernel(const NvrtcTable& nvrtc, const Specialization& spec) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<const char*> names, texts;
  for (const TemplateFile& file : kernel_templates()) {
    if (file.name.ends_with(".cu")) continue;
    names.push_back(file.name.data());  // literals: terminated
    texts.push_back(file.text.data());
  }
  const std::string file = template_file(spec.pipeline);
  const std::string expression = name_expression(spec);
  const std::vector<std::string> options = compile_options(nvrtc, spec);
  std::vector<const char*> option_pointers;
  for (const std::string& option : options) option_pointers.push_back(option.c_str());

  Program owner(nvrtc);
  const auto check_step = [&](nvrtcResult code, std::string_view call) {
    if (code == NVRTC_SUCCESS) return;
    fail(nvrtc, spec, call, code, owner.program == nullptr ? std::string() : program_log(nvrtc, owner.program));
  };
  check_step(nvrtc.nvrtcCreateProgram(&owner.program, template_text(file).data(), file.c_str(),
                                      static_cast<int>(names.size()), texts.data(), names.data()),
             "nvrtcCreateProgram");
  check_step(nvrtc.nvrtcAddNameExpression(owner.program, expression.c_str()), "nvrtcAddNameExpression");
  check_step(nvrtc.nvrtcCompileProgram(owner.program, static_cast<int>(option_pointers.size()), option_pointers.data()),
             "nvrtcCompileProgram");

  CompiledKernel kernel;
  kernel.spec = spec;
  kernel.options = options;
  kernel.nvrtc_version = fmt::format("{}.{}", nvrtc.major, nvrtc.minor);
  kernel.log = program_log(nvrtc, owner.program);
  const char* lowered = nullptr;
  check_step(nvrtc.nvrtcGetLoweredName(owner.program, expression.c_str(), &lowered), "nvrtcGetLoweredName");
  kernel.lowered_name = lowered;
  std::size_t size = 0;
  check_step(nvrtc.nvrtcGetPTXSize(owner.program, &size), "nvrtcGetPTXSize");
  kernel.ptx.resize(size);
  check_step(nvrtc.nvrtcGetPTX(owner.program, kernel.ptx.data()), "nvrtcGetPTX");
  while (!kernel.ptx.empty() && kernel.ptx.back() == '\0') kernel.ptx.pop_back();  // c_str() brings its own
  check_step(nvrtc.nvrtcGetCUBINSize(owner.program, &size), "nvrtcGetCUBINSize");
  kernel.cubin.resize(size);
  check_step(nvrtc.nvrtcGetCUBIN(owner.program, kernel.cubin.data()), "nvrtcGetCUBIN");

  const ResourceUsage usage = parse_resource_usage(kernel.log);
  kernel.registers = usage.registers;
  kernel.spill_bytes = usage.spill_bytes;
  kernel.static_smem_bytes = usage.static_smem_bytes;
  kernel.compile_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  log::line(log::Level::info, "compiled {} {} for {} in {:.0f} ms: {} registers, {} spill bytes", file,
            tile_name(spec.tile), to_string(spec.target), kernel.compile_ms, kernel.registers, kernel.spill_bytes);
  return kernel;
}

std::string flattened_source(const Specialization& spec) {
  std::string out = fmt::format("// {}\n", describe(spec));
  std::set<std::string, std::less<>> done;
  flatten(template_file(spec.pipeline), done, out);
  out += fmt::format("\n#line 1 \"instantiation\"\ntemplate __global__ void {}(const __grid_constant__ qkvjit::{});\n",
                     name_expression(spec), spec.pipeline == Pipeline::prefill ? "PrefillParams" : "QkvParams");
  return out;
}

std::string nvcc_command(const Specialization& spec, const std::string& source_file, const std::string& output_file) {
  const std::string number = to_string(spec.target).substr(3);
  return fmt::format(
      "nvcc -std=c++20 --expt-relaxed-constexpr -gencode arch=compute_{0},code=sm_{0} -Xptxas -v -cubin -o {1} {2}",
      number, output_file, source_file);
}

}  // namespace qkvjit
