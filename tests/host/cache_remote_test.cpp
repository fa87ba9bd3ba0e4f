// SPDX-License-Identifier: Apache-2.0
// KernelCache with a remote store: what it brings is verified, kept in the folder, and never makes a call fail.
#include <doctest/doctest.h>

#include <map>
#include <mutex>
#include <string>

#include "cache/artifact_entry.h"
#include "compile/compiler.h"
#include "qkvjit/remote_cache.h"
#include "support/cache_fixture.h"
#include "support/cache_folder.h"

namespace {

using namespace qkvjit;
using fake::CacheFolder;
using fake::spec_of;

/// A server's entries, in memory.
class MapStore final : public RemoteStore {
 public:
  std::optional<std::string> load(std::string_view name) noexcept override {
    const std::lock_guard lock(mutex_);
    ++loads;
    const auto it = entries.find(std::string(name));
    return it == entries.end() ? std::nullopt : std::optional(it->second);
  }
  bool store(std::string_view name, std::string bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    return entries.insert_or_assign(std::string(name), std::move(bytes)).second;
  }
  bool flush(std::chrono::milliseconds) noexcept override { return true; }
  [[nodiscard]] RemoteStats stats() const override { return {}; }
  [[nodiscard]] const std::string& where() const noexcept override { return where_; }

  std::map<std::string, std::string> entries;
  int loads = 0;

 private:
  std::mutex mutex_;
  std::string where_ = "a map";
};

CacheStats compile_with(const std::shared_ptr<MapStore>& store, const std::filesystem::path& folder = {},
                        bool is_frozen = false) {
  KernelCache cache({.directory = folder, .remote = store}, fake::nvrtc());
  if (is_frozen) cache.freeze(FreezePolicy::refuse);
  const auto kernel = cache.compile(spec_of());
  CHECK(kernel->spec == spec_of());
  CHECK(has(kernel->ptx, kernel->lowered_name));
  return cache.stats();
}

}  // namespace

TEST_SUITE("cache_remote") {
  TEST_CASE("one machine compiles, the others find; a frozen cache finds too") {
    fake::begin();
    const auto store = std::make_shared<MapStore>();
    const CacheStats first = compile_with(store);
    CHECK(first.compiles == 1);
    CHECK(first.remote_hits == 0);
    REQUIRE(store->entries.size() == 1);
    CHECK(store->entries.begin()->first == ArtifactKey::of(spec_of(), *fake::nvrtc()).name());
    for (const bool is_frozen : {false, true}) {
      const CacheStats next = compile_with(store, {}, is_frozen);
      CHECK(next.compiles == 0);
      CHECK(next.remote_hits == 1);
      CHECK(next.remote_rejected == 0);
    }
  }

  TEST_CASE("what came from the store is kept in the folder, which is asked first") {
    fake::begin();
    const auto store = std::make_shared<MapStore>();
    compile_with(store);
    const CacheFolder folder;
    CHECK(compile_with(store, folder.path()).remote_hits == 1);
    store->loads = 0;
    const CacheStats warm = compile_with(store, folder.path());
    CHECK(warm.disk.hits == 1);
    CHECK(warm.remote_hits == 0);
    CHECK(warm.compiles == 0);
    CHECK(store->loads == 0);
  }

  TEST_CASE("a damaged or foreign entry is counted, compiled anew and mended") {
    fake::begin();
    const auto store = std::make_shared<MapStore>();
    compile_with(store);
    std::string& entry = store->entries.begin()->second;
    const std::string good = entry;
    KernelCache other({.directory = std::filesystem::path(), .remote = store}, fake::nvrtc());
    other.compile(spec_of(128));
    std::string foreign;
    for (const auto& [name, bytes] : store->entries) {
      if (bytes != good) foreign = bytes;
    }
    std::string flipped = good;
    flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 1);
    for (const std::string& bad : {std::string(), good.substr(0, good.size() - 1), flipped, foreign}) {
      store->entries[ArtifactKey::of(spec_of(), *fake::nvrtc()).name()] = bad;
      const CacheStats stats = compile_with(store);
      CHECK(stats.remote_rejected == 1);
      CHECK(stats.remote_hits == 0);
      CHECK(stats.compiles == 1);
      CHECK(compile_with(store).remote_hits == 1);
    }
  }
}
