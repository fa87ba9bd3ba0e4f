// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "qkvjit/error.h"
#include "support/file.h"

namespace qkvjit {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
constexpr std::uint64_t kPrefixBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int kMaxDepth = 3;                            // {name: {shape: [ … ]}}

/// A name out of a file may hold anything: escaped and cut, so that it cannot disturb a terminal or flood a log.
std::string printable(const std::string& name) {
  constexpr std::size_t kLongest = 120;
  std::string text = Json(name).dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "…\"";
  return text;
}

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw InvalidProblem(fmt::format("safetensors file '{}': {}", path, reason));
}

[[noreturn]] void refuse(const std::string& path, const std::string& tensor, const std::string& reason) {
  throw InvalidProblem(fmt::format("safetensors file '{}': tensor {}: {}", path, printable(tensor), reason));
}

/// Elements of a shape times the element's bytes; false where that passes 64 bits.
bool byte_count(std::span<const std::uint64_t> shape, std::uint64_t element, std::uint64_t& bytes) {
  bytes = element;
  // A zero extent makes the product zero, but only once the others are known to fit.
  bool empty = false;
  for (const std::uint64_t extent : shape) {
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return false;
    }
  }
  if (empty) bytes = 0;
  return true;
}

/// The header as JSON. The parser does not recurse, and depth and repeated names are refused while it reads.
Json parse_header(const std::string& path, std::string_view text) {
  if (text.empty() || text.front() != '{')
    refuse(path, "the header does not begin with '{'; this is no safetensors file");
  std::vector<std::set<std::string>> names(kMaxDepth + 1);
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) refuse(path, "the header is nested deeper than the format allows");
    if (event == Json::parse_event_t::object_start) names[static_cast<std::size_t>(depth)].clear();
    if (event == Json::parse_event_t::key) {
      auto name = parsed.get<std::string>();
      // A key event's depth counts the object it is in.
      if (!names[static_cast<std::size_t>(depth - 1)].insert(name).second) refuse(path, name, "is in the header twice");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    refuse(path, fmt::format("the header is not valid JSON: {}", error.what()));
  }
}

const Json& field(const std::string& path, const std::string& tensor, const Json& entry, const char* name) {
  const auto found = entry.find(name);
  if (found == entry.end()) refuse(path, tensor, fmt::format("has no \"{}\"", name));
  return *found;
}

std::vector<std::uint64_t> unsigned_list(const std::string& path, const std::string& tensor, const Json& list,
                                         const char* name) {
  if (!list.is_array()) refuse(path, tensor, fmt::format("\"{}\" is not a list", name));
  std::vector<std::uint64_t> values;
  for (const Json& value : list) {
    if (!value.is_number_unsigned()) {
      refuse(path, tensor,
             fmt::format("\"{}\" holds {}, needs integers from 0 to 2^64 - 1", name, value.dump(-1, ' ', true)));
    }
    values.push_back(value.get<std::uint64_t>());
  }
  return values;
}

/// `data` is everything behind the header.
StoredTensor read_entry(const std::string& path, const std::string& name, const Json& entry,
                        std::span<const std::byte> data) {
  if (!entry.is_object()) refuse(path, name, "its entry in the header is not an object");
  const Json& dtype = field(path, name, entry, "dtype");
  if (!dtype.is_string()) refuse(path, name, "\"dtype\" is not a string");
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype.get<std::string>();
  const std::size_t element = stored_element_bytes(tensor.dtype);
  if (element == 0) refuse(path, name, fmt::format("has the unknown dtype {}", printable(tensor.dtype)));
  tensor.shape = unsigned_list(path, name, field(path, name, entry, "shape"), "shape");
  const auto offsets = unsigned_list(path, name, field(path, name, entry, "data_offsets"), "data_offsets");
  if (offsets.size() != 2) refuse(path, name, fmt::format("\"data_offsets\" has {} numbers, needs 2", offsets.size()));
  if (offsets[0] > offsets[1] || offsets[1] > data.size()) {
    refuse(path, name,
           fmt::format("its bytes {} … {} are not within the {} bytes behind the header; the file is cut "
                       "short or damaged",
                       offsets[0], offsets[1], data.size()));
  }
  std::uint64_t bytes = 0;
  if (!byte_count(tensor.shape, element, bytes)) {
    refuse(path, name, fmt::format("the shape {} overflows", tensor.shape_text()));
  }
  if (bytes != offsets[1] - offsets[0]) {
    refuse(path, name,
           fmt::format("has {} bytes, needs {} for {} {}", offsets[1] - offsets[0], bytes, tensor.dtype,
                       tensor.shape_text()));
  }
  tensor.bytes = data.subspan(offsets[0], bytes);
  return tensor;
}

/// As the format demands: in the order of their bytes, tensors cover all of `data` and share none of it.
void require_partition(const std::string& path, const std::vector<StoredTensor>& tensors,
                       std::span<const std::byte> data) {
  const std::byte* end = data.data();
  for (const StoredTensor& tensor : tensors) {
    if (tensor.bytes.data() < end) refuse(path, tensor.name, "overlaps the tensor before it");
    if (tensor.bytes.data() > end)
      refuse(path, tensor.name, fmt::format("{} bytes before it belong to no tensor", tensor.bytes.data() - end));
    end += tensor.bytes.size();
  }
  const std::ptrdiff_t rest = data.data() + data.size() - end;
  if (rest != 0) refuse(path, fmt::format("{} bytes at its end belong to no tensor", rest));
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string StoredTensor::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::size_t stored_element_bytes(const std::string& dtype) noexcept {
  static constexpr std::pair<std::string_view, std::size_t> kBytes[] = {
      {"F64", 8}, {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4},  {"U32", 4},     {"F16", 2},     {"BF16", 2},
      {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, bytes] : kBytes) {
    if (dtype == name) return bytes;
  }
  return 0;
}

void SafetensorsFile::Unmap::operator()(void* address) const noexcept { munmap(address, bytes); }

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a pipe must not make it wait
  if (file.get() < 0) refuse(path, fmt::format("cannot be opened: {}", error_text(errno)));
  struct stat facts {};
  if (fstat(file.get(), &facts) != 0) refuse(path, fmt::format("cannot be read: {}", error_text(errno)));
  if (!S_ISREG(facts.st_mode)) refuse(path, "is not a regular file");
  const auto size = static_cast<std::uint64_t>(facts.st_size);
  if (size < kPrefixBytes) refuse(path, fmt::format("has {} bytes, needs at least {}", size, kPrefixBytes));
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) refuse(path, fmt::format("cannot be mapped: {}", error_text(errno)));
  mapping_ = {address, Unmap{size}};

  const std::span<const std::byte> all(static_cast<const std::byte*>(address), size);
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kPrefixBytes; ++i) header_bytes |= std::to_integer<std::uint64_t>(all[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes || header_bytes > size - kPrefixBytes) {
    refuse(path, fmt::format("the header's length is {}, but {} bytes follow and {} are allowed; the file is cut short "
                             "or no safetensors file",
                             header_bytes, size - kPrefixBytes, kMaxHeaderBytes));
  }
  const Json header = parse_header(path, {reinterpret_cast<const char*>(all.data()) + kPrefixBytes, header_bytes});
  const std::span<const std::byte> data = all.subspan(kPrefixBytes + header_bytes);
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadata) {
      tensors_.push_back(read_entry(path, name, entry, data));
      continue;
    }
    if (!entry.is_object()) refuse(path, "\"__metadata__\" is not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse(path, fmt::format("\"__metadata__\": {} is not a string", printable(key)));
      metadata_.emplace(key, value.get<std::string>());
    }
  }
  // Empty tensors stand before the one whose bytes begin where they do.
  std::ranges::stable_sort(
      tensors_, {}, [](const StoredTensor& tensor) { return std::pair(tensor.bytes.data(), tensor.bytes.size()); });
  require_partition(path, tensors_, data);
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const noexcept {
  const auto found = std::ranges::find(tensors_, name, &StoredTensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

const StoredTensor& SafetensorsFile::at(const std::string& name) const {
  if (const StoredTensor* tensor = find(name)) return *tensor;
  constexpr std::size_t kShown = 5;
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const StoredTensor& tensor : tensors_) {
    near.emplace_back(edit_distance(name, std::string_view(tensor.name).substr(0, 256)), printable(tensor.name));
  }
  std::ranges::sort(near);
  near.resize(std::min(near.size(), kShown));
  std::vector<std::string> names;
  for (auto& [distance, text] : near) names.push_back(std::move(text));
  refuse(path_, name,
         names.empty()
             ? std::string("is not there; the file has no tensors")
             : fmt::format("is not there; the nearest of {} are {}", tensors_.size(), fmt::join(names, ", ")));
}

void write_safetensors(const std::string& path, std::span<const StoredTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const StoredTensor*> order;
  std::set<std::string> names;
  for (const StoredTensor& tensor : tensors) {
    const std::size_t element = stored_element_bytes(tensor.dtype);
    if (element == 0) refuse(path, tensor.name, fmt::format("has the unknown dtype {}", printable(tensor.dtype)));
    if (tensor.name == kMetadata) refuse(path, tensor.name, "the name is reserved");
    if (!names.insert(tensor.name).second) refuse(path, tensor.name, "is given twice");
    std::uint64_t bytes = 0;
    if (!byte_count(tensor.shape, element, bytes) || bytes != tensor.bytes.size()) {
      refuse(path, tensor.name,
             fmt::format("has {} bytes, which is not {} {}", tensor.bytes.size(), tensor.dtype, tensor.shape_text()));
    }
    order.push_back(&tensor);
  }
  // Widest elements first: with a header padded to eight bytes, each tensor is aligned to its element.
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [](const StoredTensor* tensor) { return stored_element_bytes(tensor->dtype); });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::uint64_t offset = 0;
  for (const StoredTensor* tensor : order) {
    header[tensor->name] = {
        {"dtype", tensor->dtype}, {"shape", tensor->shape}, {"data_offsets", {offset, offset + tensor->bytes.size()}}};
    offset += tensor->bytes.size();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    refuse(path, "a name or metadata string to write is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string prefix(kPrefixBytes, '\0');
  for (std::size_t i = 0; i < kPrefixBytes; ++i) {
    prefix[i] = static_cast<char>(static_cast<std::uint64_t>(text.size()) >> (8 * i) & 255);
  }
  text.insert(0, prefix);

  // What is no regular file (a device, a folder) must not be replaced, and a link is followed.
  std::error_code error;
  std::string target = path;
  if (std::filesystem::exists(path, error)) {
    if (!std::filesystem::is_regular_file(path, error))
      refuse(path, "cannot be written: it exists and is not a regular file");
    target = std::filesystem::canonical(path, error).string();
    if (error) refuse(path, fmt::format("cannot be written: {}", error.message()));
  }
  try {
    AtomicFile file("safetensors file", target);
    file.write(std::as_bytes(std::span(text)));
    for (const StoredTensor* tensor : order) file.write(tensor->bytes);
    file.commit();
  } catch (const Error& failure) {
    throw InvalidProblem(failure.what());
  }
}

}  // namespace qkvjit
