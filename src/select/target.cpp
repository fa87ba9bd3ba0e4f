// SPDX-License-Identifier: Apache-2.0
// Which compute capability to generate code for, and the names of targets.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

/// Orin and Thor (10.1 was 11.0's name before CUDA 13): an embedded GPU runs only cubins made for it, and no other GPU
/// runs those (CUDA programming guide, "Binary Compatibility").
bool is_embedded(unsigned sm) { return sm == 87 || sm == 101 || sm == 110; }

}  // namespace

bool cubin_runs_on(Target target, unsigned sm) {
  if (target.sm == sm) return true;
  if (target.suffix != '\0' || is_embedded(target.sm) || is_embedded(sm)) return false;
  return target.sm / 10 == sm / 10 && target.sm < sm;
}

TargetChoice choose_target(unsigned sm, std::span<const unsigned> nvrtc_targets) {
  constexpr unsigned kOldest = 80;
  if (sm < kOldest) {
    throw UnsupportedDevice(
        fmt::format("the GPU has compute capability {}.{}; qkvjit needs 8.0 or newer", sm / 10, sm % 10));
  }
  // The nearest below: where its cubin does not run, its PTX does, but the driver then spends its own compile time.
  unsigned nearest = 0;
  for (const unsigned target : nvrtc_targets) {
    if (target < kOldest || target > sm || (target != sm && is_embedded(target))) continue;
    nearest = std::max(nearest, target);
  }
  if (nearest != 0) {
    const Target target{.sm = nearest};
    return {.target = target, .needs_driver_jit = !cubin_runs_on(target, sm)};
  }
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
