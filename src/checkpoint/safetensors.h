#pragma once
// safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
//
// The reader maps the file and validates the whole header before it hands out anything: names are unique,
// every dtype is known, every byte range is its shape's size, and the ranges cover the data without gap or
// overlap. It throws DataError with the file and the byte offset. The writer writes to `<path>.partial` and
// renames at the end, so an interrupted write leaves no file that looks whole.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace strata {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  bool half = false;  // F16: nothing here computes in it, so it has no DType, and `dtype` says i8
  std::vector<std::int64_t> shape;
  std::int64_t count = 0;    // elements
  std::uint64_t offset = 0;  // of the first byte in the file
  std::uint64_t bytes = 0;
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in file order
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  const SafetensorsEntry* find(const std::string& name) const;  // nullptr when there is none
  const SafetensorsEntry& at(const std::string& name) const;    // throws DataError when there is none
  // The tensor's bytes inside the mapping, valid as long as this object. They start at the file's own
  // alignment, which foreign writers may leave odd: copy them, do not cast.
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  // A copy as numbers. Throws DataError when T is not what the file holds (bf16 reads as strata::bf16).
  template <class T>
  std::vector<T> values(const std::string& name) const;

 private:
  class Mapping;
  std::filesystem::path path_;
  std::unique_ptr<Mapping> mapping_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t> index_;
  std::map<std::string, std::string> metadata_;
};

struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
};

// Writes the header at once and then takes the tensors' bytes in the order of `specs`, in pieces of any size:
// no tensor needs to be whole in memory.
class SafetensorsWriter {
 public:
  // Throws DataError when the file cannot be created, InternalError on a repeated name.
  SafetensorsWriter(std::filesystem::path path, const std::vector<SafetensorsSpec>& specs,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();  // without finish(): removes what was written
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void append(std::span<const std::byte> bytes);
  // Flushes to the disk and renames. Throws InternalError unless exactly the announced bytes were appended.
  void finish();

 private:
  void write(const void* data, std::size_t bytes);

  struct CloseFile {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::filesystem::path path_, partial_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::uint64_t announced_ = 0, appended_ = 0;
};

}  // namespace strata
