// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/tuning_table.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "qkvjit tuning table";
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{64} << 20;
constexpr std::size_t kMaxNameLength = 100;

auto key_of(const TunedRow& row) {
  const QkvProblem& p = row.problem;
  return std::tuple(p.k, p.n_q, p.n_k, p.n_v, p.group_size, p.layout, p.activation_dtype, p.scale_dtype, row.aligned,
                    row.weights_are_constant, row.max_m);
}

[[noreturn]] void refuse(const std::string& field, const std::string& why) {
  throw Error(fmt::format("tuning table: {}: {}", field, why));
}

/// What a table may not hold, or an empty text; begins with the field.
std::string fault_of(const TunedRow& row) {
  if (row.max_m == 0) return "max_m: got 0, needs 1 or more";
  const auto is_time = [](double us) { return std::isfinite(us) && us > 0; };
  if (!is_time(row.median_us)) return fmt::format("median_us: got {}, needs a time above 0", row.median_us);
  if (!is_time(row.min_us) || row.min_us > row.median_us) {
    return fmt::format("min_us: got {}, needs a time above 0 and not above median_us, {}", row.min_us, row.median_us);
  }
  if (!is_time(row.max_us) || row.max_us < row.median_us) {
    return fmt::format("max_us: got {}, needs a time not below median_us, {}", row.max_us, row.median_us);
  }
  if (row.dependent_launch && !row.weights_are_constant) {
    return "dependent_launch: got true without weights_are_constant, needs that promise";
  }
  try {
    validate(row.problem);
  } catch (const InvalidProblem& error) {
    return fmt::format("problem: {}", error.what());
  }
  return {};
}

// --- Reading: every field once, by name, and none that is not known ------------------------------------------------

/// The value of the enumeration that has the name: both kinds of names come from to_string.
template <typename Enum>
Enum enum_of(const std::string& name, const std::string& field) {
  for (unsigned char i = 0; i < 255; ++i) {
    const std::string known = to_string(static_cast<Enum>(i));
    if (known.find("unknown") != std::string::npos) break;
    if (known == name) return static_cast<Enum>(i);
  }
  refuse(field, fmt::format("got '{}', which has no meaning in this version of qkvjit", name));
}

/// The fields of one JSON object, taken one by one.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) refuse(path_.empty() ? "the file" : path_, "needs an object");
  }

  [[nodiscard]] std::string name(const char* key) const { return path_.empty() ? key : path_ + "." + key; }

  const json& take(const char* key) {
    const auto it = object_.find(key);
    if (it == object_.end()) refuse(name(key), "is missing");
    taken_.insert(key);
    return *it;
  }
  std::uint64_t integer(const char* key, std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
    const json& value = take(key);
    if (!value.is_number_unsigned()) refuse(name(key), "needs a whole number, 0 or more");
    const auto number = value.get<std::uint64_t>();
    if (number > most) refuse(name(key), fmt::format("got {}, needs {} or less", number, most));
    return number;
  }
  double time(const char* key) {
    const json& value = take(key);
    if (!value.is_number()) refuse(name(key), "needs a number");
    return value.get<double>();
  }
  bool boolean(const char* key) {
    const json& value = take(key);
    if (!value.is_boolean()) refuse(name(key), "needs true or false");
    return value.get<bool>();
  }
  std::string text(const char* key) {
    const json& value = take(key);
    if (!value.is_string()) refuse(name(key), "needs a text");
    auto result = value.get<std::string>();
    if (result.size() > kMaxNameLength) refuse(name(key), fmt::format("is {} characters long", result.size()));
    const bool plain = std::all_of(result.begin(), result.end(), [](char c) { return c >= ' ' && c <= '~'; });
    if (!plain) refuse(name(key), "holds characters that no name here has");
    return result;
  }
  /// After the last: what is left is unknown.
  void done() const {
    for (const auto& [key, value] : object_.items()) {
      if (!taken_.contains(key)) refuse(name(key.substr(0, kMaxNameLength).c_str()), "is a field that is not known");
    }
  }

 private:
  const json& object_;
  std::string path_;
  std::set<std::string> taken_;
};

TunedHardware read_hardware(const json& object) {
  Fields fields(object, "hardware");
  TunedHardware hardware;
  try {
    hardware.target = parse_target(fields.text("target"));
  } catch (const InvalidProblem& error) {
    refuse("hardware.target", error.what());
  }
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;
  hardware.multiprocessors = static_cast<int>(fields.integer("multiprocessors", 1u << 20));
  hardware.smem_per_block_bytes = fields.integer("smem_per_block_bytes", kMostBytes);
  hardware.smem_per_multiprocessor_bytes = fields.integer("smem_per_multiprocessor_bytes", kMostBytes);
  hardware.l2_bytes = fields.integer("l2_bytes", kMostBytes);
  fields.done();
  return hardware;
}

TunedRow read_row(const json& object, const std::string& path) {
  Fields fields(object, path);
  TunedRow row;
  row.problem.n_q = fields.integer("n_q");
  row.problem.n_k = fields.integer("n_k");
  row.problem.n_v = fields.integer("n_v");
  row.problem.k = fields.integer("k");
  row.problem.group_size = fields.integer("group_size");
  row.problem.layout = enum_of<WeightLayout>(fields.text("layout"), fields.name("layout"));
  row.problem.activation_dtype = enum_of<DType>(fields.text("activation_dtype"), fields.name("activation_dtype"));
  row.problem.scale_dtype = enum_of<DType>(fields.text("scale_dtype"), fields.name("scale_dtype"));
  row.aligned = fields.boolean("aligned");
  row.weights_are_constant = fields.boolean("weights_are_constant");
  row.max_m = fields.integer("max_m");
  row.pipeline = enum_of<Pipeline>(fields.text("pipeline"), fields.name("pipeline"));
  try {
    row.tile = parse_tile(fields.text("tile"));
  } catch (const InvalidProblem& error) {
    refuse(fields.name("tile"), error.what());
  }
  row.dependent_launch = fields.boolean("dependent_launch");
  row.median_us = fields.time("median_us");
  row.min_us = fields.time("min_us");
  row.max_us = fields.time("max_us");
  fields.done();
  if (const std::string fault = fault_of(row); !fault.empty()) {
    throw Error(fmt::format("tuning table: {}.{}", path, fault));
  }
  return row;
}

/// The JSON, in which no object has a key twice: a parser would otherwise keep one of the two and say nothing.
json parse(const std::string& text) {
  std::vector<std::set<std::string>> keys;
  const auto each = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      refuse(value.get<std::string>().substr(0, kMaxNameLength), "is there twice");
    }
    return true;
  };
  try {
    return json::parse(text, each);
  } catch (const json::exception& error) {
    throw Error(fmt::format("tuning table: no JSON: {}", error.what()));
  }
}

json row_json(const TunedRow& row) {
  return {{"n_q", row.problem.n_q},
          {"n_k", row.problem.n_k},
          {"n_v", row.problem.n_v},
          {"k", row.problem.k},
          {"group_size", row.problem.group_size},
          {"layout", to_string(row.problem.layout)},
          {"activation_dtype", to_string(row.problem.activation_dtype)},
          {"scale_dtype", to_string(row.problem.scale_dtype)},
          {"aligned", row.aligned},
          {"weights_are_constant", row.weights_are_constant},
          {"max_m", row.max_m},
          {"pipeline", to_string(row.pipeline)},
          {"tile", tile_name(row.tile)},
          {"dependent_launch", row.dependent_launch},
          {"median_us", row.median_us},
          {"min_us", row.min_us},
          {"max_us", row.max_us}};
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool write_all(int file, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(file, text.data() + at, text.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += static_cast<std::size_t>(written);
  }
  return true;
}

}  // namespace

TunedHardware hardware_of(const DeviceInfo& info, Target target) {
  return {.target = {.sm = target.sm},
          .multiprocessors = info.multiprocessors,
          .smem_per_block_bytes = info.smem_per_block_bytes,
          .smem_per_multiprocessor_bytes = info.smem_per_multiprocessor_bytes,
          .l2_bytes = info.l2_bytes};
}

bool TunedRow::same_key(const TunedRow& other) const { return key_of(*this) == key_of(other); }

TuningTable::TuningTable(const TunedHardware& hardware, std::string templates_digest)
    : hardware_(hardware), templates_digest_(std::move(templates_digest)) {
  if (!is_digest(templates_digest_)) refuse("templates_digest", "needs 64 hex digits");
}

std::vector<TunedRow> TuningTable::rows_for(const QkvProblem& problem, bool aligned, bool weights_are_constant) const {
  std::vector<TunedRow> rows;
  std::copy_if(rows_.begin(), rows_.end(), std::back_inserter(rows), [&](const TunedRow& row) {
    return row.problem == problem && row.aligned == aligned && row.weights_are_constant == weights_are_constant;
  });
  return rows;
}

void TuningTable::set(const TunedRow& row) {
  if (const std::string fault = fault_of(row); !fault.empty()) throw InvalidProblem("tuning table: " + fault);
  const auto at = std::lower_bound(rows_.begin(), rows_.end(), row,
                                   [](const TunedRow& a, const TunedRow& b) { return key_of(a) < key_of(b); });
  if (at != rows_.end() && at->same_key(row)) {
    *at = row;
  } else {
    rows_.insert(at, row);
  }
}

void TuningTable::merge(const TuningTable& other) {
  if (!(hardware_ == other.hardware_)) {
    throw InvalidProblem(fmt::format(
        "tuning table: hardware: got {} with {} multiprocessors, needs {} with {} and the same memory; keep one file "
        "for each kind of GPU",
        to_string(other.hardware_.target), other.hardware_.multiprocessors, to_string(hardware_.target),
        hardware_.multiprocessors));
  }
  if (templates_digest_ != other.templates_digest_) {
    throw InvalidProblem(
        fmt::format("tuning table: templates_digest: got {:.12}, needs {:.12}: the two were measured with different "
                    "kernels; tune again into a new file",
                    other.templates_digest_, templates_digest_));
  }
  for (const TunedRow& row : other.rows_) set(row);
}

std::string TuningTable::to_json() const {
  json rows = json::array();
  for (const TunedRow& row : rows_) rows.push_back(row_json(row));
  const json all = {{"format", kFormat},
                    {"version", kTuningTableVersion},
                    {"hardware",
                     {{"target", to_string(hardware_.target)},
                      {"multiprocessors", hardware_.multiprocessors},
                      {"smem_per_block_bytes", hardware_.smem_per_block_bytes},
                      {"smem_per_multiprocessor_bytes", hardware_.smem_per_multiprocessor_bytes},
                      {"l2_bytes", hardware_.l2_bytes}}},
                    {"templates_digest", templates_digest_},
                    {"rows", std::move(rows)}};
  return all.dump(1) + "\n";
}

TuningTable TuningTable::from_json(const std::string& text) {
  const json all = parse(text);
  Fields fields(all, "");
  if (const std::string format = fields.text("format"); format != kFormat) {
    refuse("format", fmt::format("got '{}', needs '{}'", format, kFormat));
  }
  if (const std::uint64_t version = fields.integer("version"); version != kTuningTableVersion) {
    refuse("version", fmt::format("got {}, needs {}: tune again with this version", version, kTuningTableVersion));
  }
  TuningTable table;
  table.hardware_ = read_hardware(fields.take("hardware"));
  table.templates_digest_ = fields.text("templates_digest");
  if (!is_digest(table.templates_digest_)) refuse("templates_digest", "needs 64 hex digits");
  const json& rows = fields.take("rows");
  if (!rows.is_array()) refuse("rows", "needs a list");
  fields.done();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    table.rows_.push_back(read_row(rows[i], fmt::format("rows[{}]", i)));
  }
  std::stable_sort(table.rows_.begin(), table.rows_.end(),
                   [](const TunedRow& a, const TunedRow& b) { return key_of(a) < key_of(b); });
  const auto twice = std::adjacent_find(table.rows_.begin(), table.rows_.end(),
                                        [](const TunedRow& a, const TunedRow& b) { return a.same_key(b); });
  if (twice != table.rows_.end()) {
    refuse("rows", fmt::format("has two rows for K = {}, N = {}+{}+{} and M up to {}", twice->problem.k,
                               twice->problem.n_q, twice->problem.n_k, twice->problem.n_v, twice->max_m));
  }
  return table;
}

void TuningTable::save(const std::string& path) const {
  static std::atomic<unsigned> count{0};
  const std::string temporary = fmt::format("{}.{}.{}.tmp", path, ::getpid(), count++);
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  bool good = file >= 0;
  int code = errno;
  if (good) {
    good = write_all(file, to_json()) && ::fsync(file) == 0;
    if (!good) code = errno;
    if (::close(file) != 0 && good) good = false, code = errno;
    if (good && std::rename(temporary.c_str(), path.c_str()) != 0) good = false, code = errno;
    if (!good) ::unlink(temporary.c_str());
  }
  if (!good) throw Error(fmt::format("tuning table: cannot write '{}': {}", path, std::strerror(code)));
}

TuningTable TuningTable::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (size < 0) throw Error(fmt::format("tuning table: cannot read '{}': no such file, or no right to", path));
  if (static_cast<std::uint64_t>(size) > kMaxFileBytes) {
    throw Error(fmt::format("tuning table: '{}' has {} bytes, needs {} or fewer", path, size, kMaxFileBytes));
  }
  std::string text(static_cast<std::size_t>(size), '\0');
  file.seekg(0);
  file.read(text.data(), size);
  if (!file) throw Error(fmt::format("tuning table: cannot read '{}'", path));
  try {
    return from_json(text);
  } catch (const Error& error) {
    throw Error(fmt::format("'{}': {}", path, error.what()));
  }
}

}  // namespace qkvjit
