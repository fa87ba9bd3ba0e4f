// SPDX-License-Identifier: Apache-2.0
// Bundle files: what is written is read back, equal input makes equal bytes, and a damaged or forged file yields an
// error that names the field, never a wrong entry.
#include "cache/bundle.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>

#include "qkvjit/error.h"

namespace {

using namespace qkvjit;
namespace fs = std::filesystem;

constexpr std::size_t kHeaderBytes = 96, kItemBytes = 80;

struct Folder {
  fs::path path = fs::temp_directory_path() / fmt::format("qkvjit_bundle_test_{}", getpid());
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
};

const BundleProducer kProducer{"0.1.0", std::string(64, 'a'), "13.0"};

/// `count` entries of random bytes, the first of them empty.
std::vector<BundleEntry> entries_of(std::size_t count, std::size_t largest = 300) {
  std::mt19937 random(7);
  std::vector<BundleEntry> entries(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (unsigned char& byte : entries[i].key) byte = static_cast<unsigned char>(random());
    entries[i].bytes.resize(i == 0 ? 0 : random() % largest);
    for (char& byte : entries[i].bytes) byte = static_cast<char>(random());
  }
  return entries;
}

std::string content(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void put_content(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Makes the checksums of header and index fit again, as someone would who forges a bundle.
std::string sealed(std::string bytes) {
  std::uint32_t produced = 0;
  std::uint64_t count = 0;
  std::memcpy(&produced, bytes.data() + 12, sizeof produced);
  std::memcpy(&count, bytes.data() + 16, sizeof count);
  const Sha256 index = sha256(std::string_view(bytes).substr(kHeaderBytes, produced + count * kItemBytes));
  std::memcpy(bytes.data() + 32, index.data(), index.size());
  const Sha256 header = sha256(std::string_view(bytes).substr(0, 64));
  std::memcpy(bytes.data() + 64, header.data(), header.size());
  return bytes;
}

template <typename T>
std::string with(std::string bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

/// What() of the error that opening throws; empty where it opens.
std::string refusal(const fs::path& path) {
  try {
    (void)Bundle::open(path);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Reads whatever can be read; false where any entry is not one of `truth`. Counts those that are right.
bool only_true_entries(const fs::path& path, const std::vector<BundleEntry>& truth, std::size_t& right) {
  right = 0;
  try {
    const Bundle bundle = Bundle::open(path);
    for (const Bundle::Item& item : bundle.items()) {
      try {
        const std::string bytes = bundle.read(item);
        bool found = false;
        for (const BundleEntry& entry : truth) found = found || (entry.key == item.key && entry.bytes == bytes);
        if (!found) return false;
        ++right;
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return true;
}

}  // namespace

TEST_SUITE("bundle") {
  TEST_CASE("SHA-256: the standard's known answers; digests as text") {
    CHECK(to_hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(to_hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(parse_hex(to_hex(sha256("abc"))) == sha256("abc"));
    CHECK_FALSE(parse_hex("ba78").has_value());
    CHECK_FALSE(parse_hex(std::string(64, 'g')).has_value());
    CHECK_FALSE(parse_hex(std::string(64, 'A')).has_value());  // one text a digest
  }

  TEST_CASE("a round trip: every entry, in the order of the keys, and the producer") {
    const Folder folder;
    for (const std::size_t count : {0u, 1u, 2u, 100u}) {
      const std::vector<BundleEntry> entries = entries_of(count);
      const std::string path = folder.path / "a.qkvb";
      write_bundle(path, entries, kProducer);
      const Bundle bundle = Bundle::open(path);
      CHECK(bundle.producer() == kProducer);
      REQUIRE(bundle.items().size() == count);
      for (const BundleEntry& entry : entries) {
        const Bundle::Item* item = bundle.find(entry.key);
        REQUIRE(item != nullptr);
        CHECK(bundle.read(*item) == entry.bytes);
      }
      for (std::size_t i = 1; i < count; ++i) CHECK(bundle.items()[i - 1].key < bundle.items()[i].key);
      CHECK(bundle.find(sha256("not there")) == nullptr);
    }
  }

  TEST_CASE("equal input makes equal bytes whatever the order; a key given twice is refused") {
    const Folder folder;
    std::vector<BundleEntry> entries = entries_of(20);
    write_bundle(folder.path / "a.qkvb", entries, kProducer);
    std::ranges::reverse(entries);
    write_bundle(folder.path / "b.qkvb", entries, kProducer);
    CHECK(content(folder.path / "a.qkvb") == content(folder.path / "b.qkvb"));
    entries.push_back(entries[3]);
    CHECK_THROWS_WITH_AS(write_bundle(folder.path / "c.qkvb", entries, kProducer),
                         doctest::Contains(to_hex(entries[3].key).c_str()), Error);
    CHECK_FALSE(fs::exists(folder.path / "c.qkvb"));
  }

  TEST_CASE("written at once: an open bundle keeps its content, nothing is left behind, failures name the file") {
    const Folder folder;
    const std::string path = folder.path / "a.qkvb";
    const std::vector<BundleEntry> before = entries_of(3);
    write_bundle(path, before, kProducer);
    const Bundle open = Bundle::open(path);
    write_bundle(path, {}, kProducer);
    CHECK(open.read(*open.find(before[2].key)) == before[2].bytes);
    CHECK(Bundle::open(path).items().empty());
    CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);

    CHECK_THROWS_WITH_AS(write_bundle(folder.path / "none" / "a.qkvb", before, kProducer), doctest::Contains("none"),
                         Error);
    fs::create_directory(folder.path / "taken");
    CHECK_THROWS_WITH_AS(write_bundle(folder.path / "taken", before, kProducer), doctest::Contains("taken"), Error);
    CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 2);
    const BundleProducer wordy{std::string(5000, 'x'), "", ""};
    CHECK_THROWS_WITH_AS(write_bundle(path, before, wordy), doctest::Contains("4096"), Error);
  }

  TEST_CASE("one bit flipped, or the file cut: never a wrong entry") {
    const Folder folder;
    const std::vector<BundleEntry> entries = entries_of(24, 600);
    const fs::path path = folder.path / "a.qkvb", bad = folder.path / "bad.qkvb";
    write_bundle(path, entries, kProducer);
    const std::string good = content(path);
    std::size_t right = 0;
    CHECK(only_true_entries(path, entries, right));
    CHECK(right == entries.size());
    // All bytes of header, producer and index, every 64th of the entries.
    const std::size_t begin = Bundle::open(path).items().front().offset;
    for (std::size_t at = 0; at < good.size(); at += at < begin ? 1 : 64) {
      put_content(bad, with(good, at, static_cast<char>(good[at] ^ (1 << at % 8))));
      CAPTURE(at);
      CHECK(only_true_entries(bad, entries, right));
      // Where an entry is hit, the others still serve.
      CHECK(right == (at < begin ? 0 : entries.size() - 1));
    }
    for (std::size_t size = 0; size < good.size(); size += 64) {
      put_content(bad, good.substr(0, size));
      CAPTURE(size);
      CHECK_FALSE(refusal(bad).empty());
    }
    put_content(bad, good + "x");
    CHECK(has(refusal(bad), fmt::format("has {} bytes, needs {}", good.size() + 1, good.size())));
  }

  TEST_CASE("forged files with fitting checksums: refused, with the field") {
    const Folder folder;
    const fs::path path = folder.path / "a.qkvb", bad = folder.path / "bad.qkvb";
    std::vector<BundleEntry> entries = entries_of(3);
    for (BundleEntry& entry : entries) entry.bytes.resize(20, 'x');
    write_bundle(path, entries, kProducer);
    const std::string good = content(path);
    const std::size_t index = kHeaderBytes + 12 + 5 + 64 + 4;
    const std::size_t begin = index + 3 * kItemBytes;
    const std::uint64_t huge = ~std::uint64_t{0};
    put_content(bad, sealed(good));
    CHECK(refusal(bad).empty());
    const auto item = [&](std::size_t i, std::size_t field) { return index + i * kItemBytes + field; };
    std::string swapped = good, twice = good;
    std::swap_ranges(swapped.begin() + static_cast<long>(item(0, 0)), swapped.begin() + static_cast<long>(item(0, 32)),
                     swapped.begin() + static_cast<long>(item(1, 0)));
    twice.replace(item(1, 0), 32, good, item(0, 0), 32);
    struct Forgery {
      std::string bytes;
      const char* reason;
    };
    for (const Forgery& forgery : std::initializer_list<Forgery>{
             {with(good, 0, 'q'), "no bundle"},
             {with(good, 8, std::uint32_t{2}), "format version is 2, this build reads 1"},
             {with(good, 12, std::uint32_t{5000}), "cannot hold"},
             {with(good, 16, huge), "cannot hold"},
             {with(good, 16, huge / kItemBytes + 1), "cannot hold"},
             {with(good, 16, std::uint64_t{1'000'000}), "cannot hold"},
             {sealed(with(good, 16, std::uint64_t{2})), "offset"},
             {sealed(with(good, 24, huge)), "needs 18446744073709551615"},
             {sealed(with(good, kHeaderBytes, std::uint32_t{1'000'000})), "producer"},
             {sealed(with(good, kHeaderBytes, ~std::uint32_t{0})), "producer"},
             {sealed(with(good, kHeaderBytes + 9, std::uint32_t{3})), "producer"},
             {sealed(with(good, item(0, 32), std::uint64_t{0})), "its offset is 0, needs"},
             {sealed(with(good, item(1, 32), std::uint64_t{begin})), "its offset is"},
             {sealed(with(good, item(1, 32), huge)), "its offset is 18446744073709551615"},
             {sealed(with(good, item(1, 40), huge)), "its length is 18446744073709551615"},
             {sealed(with(good, item(2, 40), std::uint64_t{0})), "the entries end at"},
             {sealed(swapped), "keys must ascend"},
             {sealed(twice), "keys must ascend"},
         }) {
      std::string bytes = forgery.bytes;
      // Where only the header is wrong, its own checksum is made to fit; the index need not be read.
      if (bytes.compare(64, 32, good, 64, 32) == 0) {
        const Sha256 header = sha256(std::string_view(bytes).substr(0, 64));
        std::memcpy(bytes.data() + 64, header.data(), header.size());
      }
      put_content(bad, bytes);
      const std::string text = refusal(bad);
      CAPTURE(std::string(forgery.reason));
      CAPTURE(text);
      CHECK(has(text, "bad.qkvb"));
      CHECK(has(text, forgery.reason));
    }
  }

  TEST_CASE("what is no file, or cannot be opened, is said") {
    const Folder folder;
    CHECK(has(refusal(folder.path), "not a regular file"));
    CHECK(has(refusal(folder.path / "none"), "No such file"));
    REQUIRE(mkfifo((folder.path / "pipe").c_str(), 0600) == 0);
    CHECK(has(refusal(folder.path / "pipe"), "not a regular file"));  // and does not wait for a writer
    put_content(folder.path / "text", std::string(500, 'x'));
    CHECK(has(refusal(folder.path / "text"), "no bundle"));
  }

  TEST_CASE("a file that is cut short or overwritten while open: a failed read, and the process lives") {
    const Folder folder;
    const std::string path = folder.path / "a.qkvb";
    const std::vector<BundleEntry> entries = entries_of(2, 100'000);
    write_bundle(path, entries, kProducer);
    const Bundle bundle = Bundle::open(path);
    const Bundle::Item& last = *bundle.find(entries[1].key);
    std::string changed = content(path);
    changed[last.offset + last.length / 2] ^= 1;
    put_content(path, changed);
    CHECK_THROWS_WITH_AS((void)bundle.read(last), doctest::Contains("does not match its checksum"), Error);
    fs::resize_file(path, last.offset + 10);
    CHECK_THROWS_WITH_AS((void)bundle.read(last), doctest::Contains("the file ends after 10"), Error);
  }

  TEST_CASE("what differs between a bundle's producer and this build") {
    CHECK(producer_mismatch(kProducer, kProducer).empty());
    CHECK(producer_mismatch({"0.0.9", kProducer.templates_digest, "13.0"}, kProducer).empty());  // keys do not hold it
    CHECK(producer_mismatch({"0.1.0", "bb", "12.9"}, {"0.1.0", "cc", "13.0"}) ==
          "templates digest: the bundle has bb, this build needs cc; NVRTC version: the bundle has 12.9, this build "
          "needs 13.0");
    CHECK(producer_mismatch({"0.1.0", "bb", "12.9"}, {"0.1.0", "bb", ""}).empty());
  }

  TEST_CASE("100 kernels open within a millisecond") {
    const Folder folder;
    const std::string path = folder.path / "a.qkvb";
    write_bundle(path, entries_of(100, 200'000), kProducer);
    double best = 1e9;
    for (int i = 0; i < 20; ++i) {
      const auto start = std::chrono::steady_clock::now();
      CHECK(Bundle::open(path).items().size() == 100);
      best =
          std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::cout << fmt::format("a bundle of 100 entries opens in {:.3f} ms\n", best);
    CHECK(best < 1.0);
  }
}
