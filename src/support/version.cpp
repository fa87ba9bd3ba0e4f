// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/qkvjit.h"

namespace qkvjit {

const char* version() noexcept { return QKVJIT_VERSION; }

}  // namespace qkvjit
