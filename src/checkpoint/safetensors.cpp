#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace strata {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian; so are we");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr std::uint64_t kAlignment = 64;               // of the first tensor's byte in files written here

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr std::array<DTypeName, 6> kDTypes{{{"F32", DType::f32},
                                            {"BF16", DType::bf16},
                                            {"F64", DType::f64},
                                            {"I32", DType::i32},
                                            {"I64", DType::i64},
                                            {"I8", DType::i8}}};

const char* format_name(DType dtype) {
  return std::find_if(kDTypes.begin(), kDTypes.end(), [=](auto& d) { return d.dtype == dtype; })->name;
}

[[noreturn]] void fail(const std::filesystem::path& path, std::uint64_t offset, const std::string& what) {
  throw DataError(
      fmt::format("{}: at byte {}: {} -> the file is damaged or not a safetensors file: copy or "
                  "convert it again",
                  path.string(), offset, what));
}

// Parses the header, refusing what nlohmann::json would let pass: repeated keys and deep nesting.
json parse_header(const std::filesystem::path& path, std::string_view text) {
  std::vector<std::set<std::string>> keys;
  auto strict = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 3) fail(path, kLengthBytes, "the header is nested deeper than the format allows");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      fail(path, kLengthBytes, fmt::format("the header names '{}' twice", parsed.get<std::string>()));
    }
    return true;
  };
  try {
    json header = json::parse(text, strict);
    if (!header.is_object()) fail(path, kLengthBytes, "the header is not a JSON object");
    return header;
  } catch (const json::exception& e) {
    fail(path, kLengthBytes, fmt::format("the header is not JSON ({})", e.what()));
  }
}

std::uint64_t natural_number(const std::filesystem::path& path, const std::string& tensor, const char* key,
                             const json& value) {
  if (!value.is_number_unsigned()) {
    fail(
        path, kLengthBytes,
        fmt::format("tensor '{}': {} holds {}, allowed are whole numbers from 0", tensor, key, value.dump()));
  }
  return value.get<std::uint64_t>();
}

const json& member(const std::filesystem::path& path, const std::string& tensor, const json& object,
                   const char* key, json::value_t kind) {
  const auto found = object.find(key);
  if (found == object.end() || found->type() != kind) {
    fail(path, kLengthBytes, fmt::format("tensor '{}': '{}' is missing or of the wrong type", tensor, key));
  }
  return *found;
}

DType parse_dtype(const std::filesystem::path& path, const std::string& tensor, const std::string& name) {
  for (const auto& d : kDTypes) {
    if (name == d.name) return d.dtype;
  }
  throw DataError(
      fmt::format("{}: at byte {}: tensor '{}' has dtype {}, read are F32, BF16, F16, F64, I32, "
                  "I64 and I8 -> convert the file",
                  path.string(), kLengthBytes, tensor, name));
}

SafetensorsEntry parse_entry(const std::filesystem::path& path, const std::string& name, const json& value,
                             std::uint64_t data_begin, std::uint64_t data_bytes) {
  if (!value.is_object()) fail(path, kLengthBytes, fmt::format("tensor '{}' is not a JSON object", name));
  SafetensorsEntry entry;
  entry.name = name;
  const std::string type = member(path, name, value, "dtype", json::value_t::string);
  entry.half = type == "F16";
  entry.dtype = entry.half ? DType::i8 : parse_dtype(path, name, type);
  const std::uint64_t size = entry.half ? 2 : size_of(entry.dtype);
  std::uint64_t bytes = size;
  bool overflow = false;
  for (const json& extent : member(path, name, value, "shape", json::value_t::array)) {
    const std::uint64_t n = natural_number(path, name, "shape", extent);
    overflow |= __builtin_mul_overflow(bytes, n, &bytes) || n > std::uint64_t{1} << 62;
    entry.shape.push_back(static_cast<std::int64_t>(n));
  }
  const json& offsets = member(path, name, value, "data_offsets", json::value_t::array);
  if (offsets.size() != 2) {
    fail(path, kLengthBytes, fmt::format("tensor '{}': data_offsets needs two numbers", name));
  }
  const std::uint64_t begin = natural_number(path, name, "data_offsets", offsets[0]);
  const std::uint64_t end = natural_number(path, name, "data_offsets", offsets[1]);
  if (begin > end || end > data_bytes) {
    fail(path, data_begin,
         fmt::format("tensor '{}' lies at bytes {} to {} of the data, which holds {}", name, begin, end,
                     data_bytes));
  }
  if (overflow || end - begin != bytes) {
    fail(path, data_begin + begin,
         fmt::format("tensor '{}' has {} bytes, its shape and dtype need {}", name, end - begin,
                     overflow ? "more than 2^64" : std::to_string(bytes)));
  }
  entry.count = static_cast<std::int64_t>(bytes / size);
  entry.offset = data_begin + begin;
  entry.bytes = bytes;
  return entry;
}

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::f32;
  if constexpr (std::is_same_v<T, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::i32;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::i64;
  if constexpr (std::is_same_v<T, std::int8_t>) return DType::i8;
}

}  // namespace

class SafetensorsFile::Mapping {
 public:
  explicit Mapping(const std::filesystem::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
      throw DataError(
          fmt::format("{}: cannot be opened ({}) -> check the path", path.string(), std::strerror(errno)));
    }
    struct stat status {};
    const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    size_ = regular ? static_cast<std::size_t>(status.st_size) : 0;
    if (regular && size_ >= kLengthBytes) data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int error = errno;
    ::close(file);
    if (!regular) throw DataError(fmt::format("{}: is not a regular file -> check the path", path.string()));
    if (size_ < kLengthBytes)
      fail(path, 0, fmt::format("the file has {} bytes, too few for a header", size_));
    if (data_ == MAP_FAILED) {
      throw DataError(fmt::format("{}: cannot be mapped ({}) -> check memory limits", path.string(),
                                  std::strerror(error)));
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(data_, size_); }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_ = MAP_FAILED;
  std::size_t size_ = 0;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), mapping_(std::make_unique<Mapping>(path)) {
  const std::span<const std::byte> all = mapping_->bytes();
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, all.data(), kLengthBytes);
  if (header_bytes > kLargestHeader || header_bytes > all.size() - kLengthBytes) {
    fail(path_, 0,
         fmt::format("the header claims {} bytes, the file has {} after the length (at most {} allowed)",
                     header_bytes, all.size() - kLengthBytes, kLargestHeader));
  }
  const std::string_view text(reinterpret_cast<const char*>(all.data()) + kLengthBytes, header_bytes);
  if (text.empty() || text.front() != '{') fail(path_, kLengthBytes, "the header does not start with '{'");

  const std::uint64_t data_begin = kLengthBytes + header_bytes, data_bytes = all.size() - data_begin;
  const json header = parse_header(path_, text);
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries_.push_back(parse_entry(path_, name, value, data_begin, data_bytes));
      continue;
    }
    if (!value.is_object()) fail(path_, kLengthBytes, "__metadata__ is not a JSON object");
    for (const auto& [key, text_value] : value.items()) {
      if (!text_value.is_string())
        fail(path_, kLengthBytes, fmt::format("__metadata__ '{}' is not a string", key));
      metadata_[key] = text_value.get<std::string>();
    }
  }
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  std::uint64_t expected = data_begin;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].offset != expected) {
      fail(path_, expected,
           fmt::format("tensor '{}' starts at byte {}: {}", entries_[i].name, entries_[i].offset,
                       entries_[i].offset > expected ? "bytes belong to no tensor"
                                                     : "it overlaps the tensor before it"));
    }
    expected += entries_[i].bytes;
    index_[entries_[i].name] = i;
  }
  if (expected != all.size())
    fail(path_, expected, fmt::format("{} bytes belong to no tensor", all.size() - expected));
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(const std::string& name) const {
  if (const SafetensorsEntry* entry = find(name)) return *entry;
  throw DataError(fmt::format("{}: holds no tensor '{}' ({} others) -> check that it is the right file",
                              path_.string(), name, entries_.size()));
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return mapping_->bytes().subspan(entry.offset, entry.bytes);
}

template <class T>
std::vector<T> SafetensorsFile::values(const std::string& name) const {
  const SafetensorsEntry& entry = at(name);
  if (entry.half || entry.dtype != dtype_of<T>()) {
    throw DataError(fmt::format("{}: at byte {}: tensor '{}' holds {}, expected {} -> convert the file",
                                path_.string(), entry.offset, name,
                                entry.half ? "fp16" : name_of(entry.dtype), name_of(dtype_of<T>())));
  }
  std::vector<T> result(static_cast<std::size_t>(entry.count));
  if (!result.empty()) std::memcpy(result.data(), bytes(entry).data(), entry.bytes);
  return result;
}

template std::vector<float> SafetensorsFile::values(const std::string&) const;
template std::vector<bf16> SafetensorsFile::values(const std::string&) const;
template std::vector<double> SafetensorsFile::values(const std::string&) const;
template std::vector<std::int32_t> SafetensorsFile::values(const std::string&) const;
template std::vector<std::int64_t> SafetensorsFile::values(const std::string&) const;
template std::vector<std::int8_t> SafetensorsFile::values(const std::string&) const;

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, const std::vector<SafetensorsSpec>& specs,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), partial_(path_.string() + ".partial") {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const SafetensorsSpec& spec : specs) {
    std::uint64_t bytes = size_of(spec.dtype);
    for (const std::int64_t extent : spec.shape) bytes *= static_cast<std::uint64_t>(extent);
    json entry = {{"dtype", format_name(spec.dtype)},
                  {"shape", spec.shape},
                  {"data_offsets", {announced_, announced_ + bytes}}};
    if (spec.name == "__metadata__" || !header.emplace(spec.name, std::move(entry)).second) {
      throw InternalError(
          fmt::format("{}: tensor '{}' cannot be written twice, and '__metadata__' not at all",
                      path_.string(), spec.name));
    }
    announced_ += bytes;
  }
  std::string text = header.dump();
  const std::uint64_t end = kLengthBytes + text.size();
  text.append((kAlignment - end % kAlignment) % kAlignment, ' ');
  file_.reset(std::fopen(partial_.c_str(), "wb"));
  if (!file_) {
    throw DataError(fmt::format("{}: cannot be created ({}) -> check the folder and its permissions",
                                partial_.string(), std::strerror(errno)));
  }
  const std::uint64_t length = text.size();
  write(&length, sizeof length);
  write(text.data(), text.size());
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!file_) return;
  file_.reset();
  std::error_code ignored;
  std::filesystem::remove(partial_, ignored);
}

void SafetensorsWriter::write(const void* data, std::size_t bytes) {
  if (bytes != 0 && std::fwrite(data, 1, bytes, file_.get()) != bytes) {
    throw DataError(fmt::format("{}: writing failed ({}) -> free space on the disk", partial_.string(),
                                std::strerror(errno)));
  }
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  if (!file_ || bytes.size() > announced_ - appended_) {
    throw InternalError(
        fmt::format("{}: more bytes appended than its tensors hold ({})", path_.string(), announced_));
  }
  write(bytes.data(), bytes.size());
  appended_ += bytes.size();
}

void SafetensorsWriter::finish() {
  if (!file_ || appended_ != announced_) {
    throw InternalError(
        fmt::format("{}: finished after {} bytes of {}", path_.string(), appended_, announced_));
  }
  const bool flushed = std::fflush(file_.get()) == 0 && ::fsync(::fileno(file_.get())) == 0;
  const int error = errno;
  if (!flushed) {
    throw DataError(fmt::format("{}: writing failed ({}) -> free space on the disk", partial_.string(),
                                std::strerror(error)));
  }
  file_.reset();
  std::filesystem::rename(partial_, path_);
}

}  // namespace strata
