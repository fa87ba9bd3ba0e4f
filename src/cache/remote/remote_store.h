// SPDX-License-Identifier: Apache-2.0
// The store behind make_remote_store(): deadline, breaker, envelope, queue and counters over any connection.
#pragma once

#include <memory>
#include <string>

#include "cache/remote/connection.h"
#include "qkvjit/remote_cache.h"

namespace qkvjit::remote {

/// `options` are checked already.
std::shared_ptr<RemoteStore> open_store(const RemoteCacheOptions& options, std::string where, Connect connect);

}  // namespace qkvjit::remote
