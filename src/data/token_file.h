#pragma once
// One file of token ids, memory-mapped and validated on open. Two formats are read:
//  Megatron  NAME.bin (the ids, nothing else) with NAME.idx: magic "MMIDIDX\0\0", version 1 (u64), dtype code
//            (u8: 8 uint16, 4 int32), sequences S (u64), documents D (u64), lengths (S) i32, pointers (S) i64
//            in bytes, document boundaries (D) i64.
//  llm.c     NAME.bin: 256 int32 of header {magic, version, tokens}, then the ids: magic 20240520 version 1,
//            uint16; magic 20240801 version 7, uint32.
// Everything is little-endian and counted in 64 bits. The ids of a file are one run of tokens: sequences for
// training are cut across documents.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace strata {

enum class TokenType : std::uint8_t { u16, u32, i32 };
constexpr std::int64_t size_of(TokenType t) {
  return t == TokenType::u16 ? 2 : 4;
}

// A read-only mapping of a whole file. Movable; unmapped with its owner.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // throws DataError
  MappedFile(MappedFile&& o) noexcept { swap(o); }
  MappedFile& operator=(MappedFile&& o) noexcept {
    MappedFile(std::move(o)).swap(*this);
    return *this;
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, static_cast<std::size_t>(size_)}; }
  void swap(MappedFile& o) noexcept { std::swap(data_, o.data_), std::swap(size_, o.size_); }

 private:
  const std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
};

// Where the ids lie in a file, as its header or index says.
struct TokenLayout {
  TokenType type = TokenType::u16;
  std::int64_t offset = 0;     // bytes before the first id
  std::int64_t tokens = 0;     // ids in the file
  std::int64_t documents = 0;  // 0: the format does not tell
};

// Validate the contents of an index and a header. Throw DataError naming `path` and the byte offset.
TokenLayout parse_megatron_index(std::span<const std::byte> index, std::int64_t bin_bytes,
                                 const std::string& path);
TokenLayout parse_llmc_header(std::span<const std::byte> file, const std::string& path);

class TokenFile {
 public:
  // `path` is a .bin, an .idx, or their common prefix. A .bin with an .idx beside it is Megatron's, one
  // without is llm.c's. Throws DataError naming the file and the byte offset.
  explicit TokenFile(const std::string& path);

  const std::string& path() const { return path_; }  // of the .bin
  std::int64_t tokens() const { return layout_.tokens; }
  std::int64_t documents() const { return layout_.documents; }
  TokenType type() const { return layout_.type; }

  // Copies ids [begin, begin + out.size()). Throws DataError with the byte offset of the first id that is not
  // in [0, vocabulary), or of the tokens asked for when the file shrank meanwhile.
  void read(std::int64_t begin, std::span<std::int32_t> out, std::int64_t vocabulary) const;
  // Scans every id.
  void validate(std::int64_t vocabulary) const;

 private:
  std::vector<std::byte> copy(std::int64_t begin, std::int64_t count) const;

  std::string path_;
  MappedFile map_;
  TokenLayout layout_;
};

}  // namespace strata
