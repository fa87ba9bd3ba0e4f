// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/safetensors.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>

#include "qkvjit/error.h"

namespace {

namespace fs = std::filesystem;
using namespace qkvjit;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "qkvjit_safetensors_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  [[nodiscard]] std::size_t count() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

void write_text(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// A file of that header and `data_bytes` bytes behind it.
std::string with_header(const std::string& header, std::size_t data_bytes) {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(static_cast<std::uint64_t>(header.size()) >> (8 * i));
  return text + header + std::string(data_bytes, 'd');
}

template <typename T>
StoredTensor stored(const std::string& name, const std::string& dtype, std::vector<std::uint64_t> shape,
                    const std::vector<T>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(values))};
}

std::string refusal(const std::string& path) {
  try {
    const SafetensorsFile file(path);
  } catch (const InvalidProblem& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_SUITE("safetensors") {
  TEST_CASE("a round trip of random tensors of several types; each is aligned to its element") {
    const Folder folder;
    std::mt19937 random(11);
    std::vector<std::uint8_t> bytes(7);
    std::vector<std::uint16_t> halves(3 * 5);
    std::vector<std::uint32_t> words(2 * 9);
    std::vector<double> doubles(4);
    for (auto& value : bytes) value = static_cast<std::uint8_t>(random());
    for (auto& value : halves) value = static_cast<std::uint16_t>(random());
    for (auto& value : words) value = static_cast<std::uint32_t>(random());
    for (auto& value : doubles) value = static_cast<double>(random()) / 3;
    const std::vector<StoredTensor> tensors{
        stored("bytes", "U8", {7}, bytes),
        stored("a.b/ü \"x\"", "F16", {3, 5}, halves),
        stored("words", "I32", {2, 9}, words),
        stored("scalar", "F64", {}, std::vector<double>(doubles.begin(), doubles.begin())),
        stored("none", "F32", {0, 1u << 20}, std::vector<float>()),
        stored("doubles", "F64", {2, 2}, doubles)};
    const std::string path = folder.file("a.safetensors");
    CHECK_THROWS_WITH_AS(write_safetensors(path, tensors), doctest::Contains("\"scalar\": has 0 bytes"),
                         InvalidProblem);
    CHECK(folder.count() == 0);  // nothing half-written stays behind

    std::vector<StoredTensor> good = tensors;
    const std::vector<double> one{2.5};
    good[3] = stored("scalar", "F64", {}, one);
    write_safetensors(path, good, {{"format", "pt"}, {"made by", "a test"}});
    CHECK(folder.count() == 1);
    SafetensorsFile first(path);
    const SafetensorsFile file = std::move(first);  // views survive a move
    REQUIRE(file.tensors().size() == good.size());
    CHECK(file.metadata().at("made by") == "a test");
    for (const StoredTensor& want : good) {
      CAPTURE(want.name);
      const StoredTensor& got = file.at(want.name);
      CHECK(got.dtype == want.dtype);
      CHECK(got.shape == want.shape);
      CHECK(std::ranges::equal(got.bytes, want.bytes));
      CHECK(reinterpret_cast<std::uintptr_t>(got.bytes.data()) % stored_element_bytes(want.dtype) == 0);
    }
    CHECK(file.at("words").copy<std::uint32_t>() == words);
    CHECK(file.at("words").shape_text() == "[2, 9]");
    CHECK(file.find("nothing") == nullptr);
    CHECK_THROWS_WITH_AS((void)file.at("word"), doctest::Contains("nearest of 6 are \"words\""), InvalidProblem);
    write_safetensors(path, good);
    const std::string again = read_text(path);
    write_safetensors(path, good);
    CHECK(read_text(path) == again);  // the same input gives the same file, and a file there is replaced
  }

  TEST_CASE("hostile files: each is refused by name and reason") {
    struct Case {
      const char* what;
      std::string text;
      const char* message;
    };
    const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
      return fmt::format(R"("t":{{"dtype":"{}","shape":{},"data_offsets":{}}})", dtype, shape, offsets);
    };
    const auto one = [&](const std::string& dtype, const std::string& shape, const std::string& offsets,
                         std::size_t bytes = 8) {
      return with_header(fmt::format("{{{}}}", tensor(dtype, shape, offsets)), bytes);
    };
    const std::string good = tensor("F32", "[2]", "[0,8]");
    std::string huge = with_header("{}", 0);
    huge.replace(0, 8, "\xff\xff\xff\xff\xff\xff\xff\xff");
    std::string long_header = with_header("{}", 0);
    long_header.replace(0, 8, std::string("\x03\0\0\0\0\0\0\0", 8));
    const std::vector<Case> cases{
        {"empty", "", "has 0 bytes"},
        {"shorter than the prefix", "1234567", "has 7 bytes"},
        {"a header length of 2^64 - 1", huge, "the header's length is 18446744073709551615"},
        {"a header one byte too long", long_header, "the header's length is 3, but 2 bytes follow"},
        {"an empty header", with_header("", 0), "does not begin with '{'"},
        {"a header that is a list", with_header("[]", 0), "does not begin with '{'"},
        {"broken JSON", with_header("{\"t\":", 0), "not valid JSON"},
        {"text behind the JSON", with_header("{} x", 0), "not valid JSON"},
        {"bytes that are no UTF-8", with_header("{\"\xff\":1}", 0), "not valid JSON"},
        {"a million brackets", with_header(fmt::format(R"({{"t":{})", std::string(1000000, '[')), 0), "nested deeper"},
        {"a name twice", with_header(fmt::format("{{{0},{0}}}", good), 8), "tensor \"t\": is in the header twice"},
        {"a field twice", with_header(R"({"t":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
         "twice"},
        {"an entry that is a number", with_header(R"({"t":1})", 0), "not an object"},
        {"no dtype", with_header(R"({"t":{"shape":[2],"data_offsets":[0,8]}})", 8), "has no \"dtype\""},
        {"no shape", with_header(R"({"t":{"dtype":"F32","data_offsets":[0,8]}})", 8), "has no \"shape\""},
        {"no offsets", with_header(R"({"t":{"dtype":"F32","shape":[2]}})", 8), "has no \"data_offsets\""},
        {"dtype is a number", with_header(R"({"t":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8),
         "\"dtype\" is not a string"},
        {"an unknown dtype", one("F99", "[2]", "[0,8]"), "unknown dtype \"F99\""},
        {"a dtype with an escape in it", one("\\u001b[31m", "[2]", "[0,8]"), "unknown dtype \"\\u001b[31m\""},
        {"a shape that is text", one("F32", "\"2\"", "[0,8]"), "\"shape\" is not a list"},
        {"a negative extent", one("F32", "[-2]", "[0,8]"), "\"shape\" holds -2"},
        {"a fractional extent", one("F32", "[2.0]", "[0,8]"), "\"shape\" holds 2.0"},
        {"an extent over 64 bits", one("F32", "[18446744073709551616]", "[0,8]"), "\"shape\" holds 1.8446744073709"},
        {"a shape whose product wraps to 8 bytes", one("F32", "[2,4611686018427387905,2,2]", "[0,8]"), "overflows"},
        {"a shape that wraps to 0", one("F32", "[4294967296,4294967296]", "[0,0]", 0), "overflows"},
        {"zero hides no overflow", one("F32", "[0,4294967296,4294967296]", "[0,0]", 0), "overflows"},
        {"too few bytes for the shape", one("F32", "[3]", "[0,8]"), "has 8 bytes, needs 12 for F32 [3]"},
        {"three offsets", one("F32", "[2]", "[0,8,8]"), "has 3 numbers"},
        {"offsets reversed", one("F32", "[2]", "[8,0]"), "not within"},
        {"the end one past the data", one("U8", "[9]", "[0,9]"), "its bytes 0 … 9 are not within the 8 bytes"},
        {"offsets at the end of 64 bits", one("F32", "[2]", "[18446744073709551608,18446744073709551615]"),
         "not within"},
        {"a hole before a tensor", one("F32", "[1]", "[4,8]"), "4 bytes before it belong to no tensor"},
        {"bytes at the end", one("F32", "[1]", "[0,4]"), "4 bytes at its end belong to no tensor"},
        {"an overlap",
         with_header(fmt::format("{{{}{}", good, R"(,"u":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})"), 8),
         "tensor \"u\": overlaps"},
        {"the same bytes twice",
         with_header(fmt::format("{{{}{}", good, R"(,"u":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})"), 8),
         "overlaps"},
        {"an empty tensor inside another",
         with_header(fmt::format("{{{}{}", good, R"(,"u":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})"), 8),
         "overlaps"},
        {"metadata that is a list", with_header(R"({"__metadata__":[]})", 0), "\"__metadata__\" is not an object"},
        {"metadata that is a number", with_header(R"({"__metadata__":{"a":1}})", 0), "\"a\" is not a string"},
        {"a name of 100000 letters", with_header(fmt::format(R"({{"{}":1}})", std::string(100000, 'n')), 0), "nnn…\""},
    };
    const Folder folder;
    const std::string path = folder.file("hostile.safetensors");
    for (const Case& hostile : cases) {
      CAPTURE(hostile.what);
      write_text(path, hostile.text);
      const std::string message = refusal(path);
      CHECK_MESSAGE(message.find(hostile.message) != std::string::npos, message.substr(0, 400));
      CHECK(message.find(path) != std::string::npos);
      CHECK(message.size() < 600);
    }
    write_text(path, with_header(fmt::format("{{{}}}", good), 8));
    CHECK(refusal(path) == "accepted");
    write_text(
        path,
        with_header(fmt::format("{{{}{}", good, R"(,"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}   )"), 8));
    CHECK(refusal(path) == "accepted");
    write_text(path, with_header("{}", 0));
    CHECK(refusal(path) == "accepted");
  }

  TEST_CASE("paths that are no file") {
    const Folder folder;
    CHECK(refusal(folder.file("absent")).find("No such file") != std::string::npos);
    CHECK(refusal(folder.file("")).find("not a regular file") != std::string::npos);
    const std::string pipe = folder.file("pipe");
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    CHECK(refusal(pipe).find("not a regular file") != std::string::npos);  // and does not wait for a writer
    const std::vector<float> values{1};
    const std::vector<StoredTensor> tensors{stored("t", "F32", {1}, values)};
    CHECK_THROWS_WITH_AS(write_safetensors(pipe, tensors), doctest::Contains("not a regular file"), InvalidProblem);
    CHECK_THROWS_WITH_AS(write_safetensors(folder.file(""), tensors), doctest::Contains("not a regular file"),
                         InvalidProblem);
    CHECK_THROWS_WITH_AS(write_safetensors(folder.file("no/such/folder"), tensors), doctest::Contains("No such file"),
                         InvalidProblem);
    fs::create_symlink("real", folder.file("link"));
    write_text(folder.file("real"), "old");
    write_safetensors(folder.file("link"), tensors);
    CHECK(fs::is_symlink(folder.file("link")));
    CHECK(refusal(folder.file("real")) == "accepted");
  }

  TEST_CASE("writing: what is refused") {
    const Folder folder;
    const std::vector<float> values{1, 2};
    const auto t = stored("t", "F32", {2}, values);
    const auto refused = [&](const std::vector<StoredTensor>& tensors, const char* message) {
      CHECK_THROWS_WITH_AS(write_safetensors(folder.file("w"), tensors), doctest::Contains(message), InvalidProblem);
    };
    refused({t, t}, "given twice");
    refused({stored("t", "F31", {2}, values)}, "unknown dtype");
    refused({stored("t", "F32", {3}, values)}, "which is not F32 [3]");
    refused({stored("__metadata__", "F32", {2}, values)}, "reserved");
    refused({stored("\xff", "F32", {2}, values)}, "UTF-8");
    CHECK(folder.count() == 0);
  }

  TEST_CASE("a file cut at every length, and one with every header byte changed, never gets past the checks") {
    const Folder folder;
    const std::string path = folder.file("small.safetensors");
    const std::vector<std::uint16_t> x{1, 2, 3, 4};
    const std::vector<std::uint32_t> w{5, 6};
    write_safetensors(path, std::vector{stored("x", "F16", {2, 2}, x), stored("w", "I32", {1, 2}, w)}, {{"k", "v"}});
    const std::string whole = read_text(path);
    for (std::size_t length = 0; length < whole.size(); ++length) {
      write_text(path, std::string_view(whole).substr(0, length));
      CAPTURE(length);
      CHECK(refusal(path).find(path) != std::string::npos);
    }
    std::mt19937 random(12);
    std::size_t refused = 0;
    for (std::size_t at = 0; at < whole.size() - 16; ++at) {
      for (int i = 0; i < 8; ++i) {
        std::string changed = whole;
        changed[at] = static_cast<char>(random());
        write_text(path, changed);
        const std::string message = refusal(path);  // a letter of a name may change and the file stay valid
        if (message != "accepted") ++refused;
        if (message == "accepted") {
          const SafetensorsFile file(path);
          std::size_t bytes = 0;
          for (const StoredTensor& tensor : file.tensors()) bytes += tensor.bytes.size();
          CHECK(bytes == 16);
        }
      }
    }
    CHECK(refused > whole.size());
  }
}
