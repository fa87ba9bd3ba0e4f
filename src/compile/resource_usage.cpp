// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include "compile/compiler.h"
#include "qkvjit/error.h"

namespace qkvjit {
namespace {

/// The number that stands right before `unit` behind position `from`; false where `unit` does not occur.
bool number_before(std::string_view log, std::string_view unit, std::size_t from, unsigned& value) {
  const std::size_t at = log.find(unit, from);
  if (at == std::string_view::npos || at == 0) return false;
  std::size_t begin = at;
  while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') --begin;
  return std::from_chars(log.data() + begin, log.data() + at, value).ec == std::errc();
}

}  // namespace

ResourceUsage parse_resource_usage(std::string_view log) {
  ResourceUsage usage;
  unsigned stores = 0, loads = 0;
  const std::size_t used = log.find("Used ");
  if (used == std::string_view::npos || !number_before(log, " registers", used, usage.registers) ||
      !number_before(log, " bytes spill stores", 0, stores) || !number_before(log, " bytes spill loads", 0, loads)) {
    throw CompileError("NVRTC's log does not tell registers and spills; it reads:\n" + std::string(log));
  }
  usage.spill_bytes = stores + loads;
  number_before(log, " bytes smem", used, usage.static_smem_bytes);  // the line has it only where there is some
  return usage;
}

}  // namespace qkvjit
