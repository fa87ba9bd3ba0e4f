// SPDX-License-Identifier: Apache-2.0
// Which compute capability to generate code for, and the names of targets.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

/// Orin and Thor (10.1 was 11.0's name before CUDA 13): a cubin of an embedded GPU is for that GPU alone (CUDA
/// programming guide, "Binary Compatibility").
bool is_embedded(unsigned sm) { return sm == 87 || sm == 101 || sm == 110; }

}  // namespace

TargetChoice choose_target(unsigned sm, std::span<const unsigned> nvrtc_targets) {
  constexpr unsigned kOldest = 80;
  if (sm < kOldest) {
    throw UnsupportedDevice(
        fmt::format("the GPU has compute capability {}.{}; qkvjit needs 8.0 or newer", sm / 10, sm % 10));
  }
  // A cubin runs on its own minor and the later ones of its major, so the nearest below will do; PTX runs on anything
  // newer, but the driver then spends its own compile time. NVRTC may know neither: then the nearest below as PTX.
  unsigned same_major = 0;
  unsigned older = 0;
  for (const unsigned target : nvrtc_targets) {
    if (target < kOldest || target > sm || (target != sm && is_embedded(target))) continue;
    if (target / 10 == sm / 10 && target > same_major) same_major = target;
    if (target > older) older = target;
  }
  if (same_major != 0) return {.target = {.sm = same_major}, .needs_driver_jit = false};
  if (older != 0) return {.target = {.sm = older}, .needs_driver_jit = true};
  throw UnsupportedDevice(fmt::format(
      "NVRTC generates code for sm_{} only; none of these runs on a GPU of compute capability {}.{}; install an NVRTC "
      "that knows sm_{}",
      fmt::join(nvrtc_targets, ", sm_"), sm / 10, sm % 10, sm));
}

std::string to_string(Target target) {
  std::string text = fmt::format("sm_{}", target.sm);
  if (target.suffix != '\0') text += target.suffix;
  return text;
}

Target parse_target(const std::string& text) {
  const auto refuse = [&](const char* why) -> InvalidProblem {
    return InvalidProblem(
        fmt::format("target: got \"{}\", {}; give sm_NN or sm_NNa, as sm_80, sm_90 or sm_90a", text, why));
  };
  constexpr std::size_t kPrefix = 3;
  if (!text.starts_with("sm_")) throw refuse("which does not begin with sm_");
  Target target;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + kPrefix, end, target.sm);
  if (error != std::errc() || text[kPrefix] == '0' || rest - (text.data() + kPrefix) > 3) {
    throw refuse("which has no compute capability after sm_");
  }
  if (rest != end) {
    if (*rest != 'a' || rest + 1 != end) throw refuse("which has an unknown suffix");
    target.suffix = 'a';
  }
  if (target.sm < 80) throw refuse("which is below compute capability 8.0");
  return target;
}

}  // namespace qkvjit
