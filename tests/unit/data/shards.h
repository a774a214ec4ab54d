#pragma once
// Writes token shards for tests, byte by byte and independently of the reader.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

namespace strata::test {

struct Bytes {
  std::vector<char> data;
  template <class T>
  Bytes& add(T value) {
    const auto at = data.size();
    data.resize(at + sizeof(T));
    std::memcpy(data.data() + at, &value, sizeof(T));
    return *this;
  }
  template <class T>
  Bytes& set(std::size_t at, T value) {
    std::memcpy(data.data() + at, &value, sizeof(T));
    return *this;
  }
  std::span<const std::byte> view() const { return std::as_bytes(std::span(data)); }
  void write(const std::string& path) const {
    std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(data.size()));
  }
};

// code: 8 uint16, 4 int32. boundaries are the document index: 0 ... number of sequences.
inline Bytes megatron_index(const std::vector<std::int32_t>& lengths,
                            const std::vector<std::int64_t>& boundaries, int code) {
  Bytes b;
  for (char c : {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'}) b.add(c);
  b.add<std::uint64_t>(1).add(static_cast<std::uint8_t>(code));
  b.add<std::uint64_t>(lengths.size()).add<std::uint64_t>(boundaries.size());
  for (std::int32_t length : lengths) b.add(length);
  std::int64_t pointer = 0;
  for (std::int32_t length : lengths) {
    b.add(pointer);
    pointer += std::int64_t{length} * (code == 8 ? 2 : 4);
  }
  for (std::int64_t boundary : boundaries) b.add(boundary);
  return b;
}

inline void write_megatron(const std::string& prefix, const std::vector<std::int32_t>& ids,
                           const std::vector<std::int32_t>& lengths, int code) {
  std::vector<std::int64_t> boundaries;
  for (std::size_t i = 0; i <= lengths.size(); ++i) boundaries.push_back(static_cast<std::int64_t>(i));
  megatron_index(lengths, boundaries, code).write(prefix + ".idx");
  Bytes bin;
  for (std::int32_t id : ids) {
    if (code == 8) {
      bin.add(static_cast<std::uint16_t>(id));
    } else {
      bin.add(id);
    }
  }
  bin.write(prefix + ".bin");
}

inline Bytes llmc_file(const std::vector<std::int32_t>& ids, std::int32_t magic, std::int32_t version) {
  Bytes b;
  b.add(magic).add(version).add(static_cast<std::int32_t>(ids.size()));
  b.data.resize(1024);
  for (std::int32_t id : ids) {
    if (magic == 20240520) {
      b.add(static_cast<std::uint16_t>(id));
    } else {
      b.add(static_cast<std::uint32_t>(id));
    }
  }
  return b;
}

inline void write_llmc(const std::string& path, const std::vector<std::int32_t>& ids, std::int32_t magic,
                       std::int32_t version) {
  llmc_file(ids, magic, version).write(path);
}

struct Folder {
  std::string path;
  explicit Folder(const std::string& name) : path("strata_test_data_" + name) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace strata::test
