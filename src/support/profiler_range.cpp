// SPDX-License-Identifier: Apache-2.0
#include "support/profiler_range.h"

#if !defined(QKVJIT_WITHOUT_NVTX) && defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#define QKVJIT_HAS_NVTX 1
#include <nvtx3/nvToolsExt.h>
#endif
#endif

namespace qkvjit {

#ifdef QKVJIT_HAS_NVTX

namespace {

/// Null without a profiler.
nvtxDomainHandle_t domain() noexcept {
  static nvtxDomainHandle_t const kDomain = nvtxDomainCreateA("qkvjit");
  return kDomain;
}

}  // namespace

bool ProfilerRange::listens() noexcept { return domain() != nullptr; }

void ProfilerRange::begin(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &attributes);
  begun_ = true;
}

void ProfilerRange::end() noexcept { nvtxDomainRangePop(domain()); }

#else

bool ProfilerRange::listens() noexcept { return false; }
void ProfilerRange::begin(const std::string&) {}
void ProfilerRange::end() noexcept {}

#endif

}  // namespace qkvjit
