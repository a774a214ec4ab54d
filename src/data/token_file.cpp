#include "data/token_file.h"

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
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/mapped_read.h"

namespace strata {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are little-endian and read in place");

constexpr std::array<char, 9> kMegatronMagic = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr std::int64_t kMegatronHeader = 34;   // magic 9, version 8, dtype 1, sequences 8, documents 8
constexpr std::int64_t kLlmcHeader = 256 * 4;  // int32 words

// Unaligned little-endian value at a byte offset that the caller has checked.
template <class T>
T load(std::span<const std::byte> bytes, std::int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

std::int64_t size_of_span(std::span<const std::byte> bytes) {
  return static_cast<std::int64_t>(bytes.size());
}

[[noreturn]] void refuse(const std::string& path, std::int64_t offset, const std::string& found,
                         const std::string& advice) {
  throw DataError(fmt::format("{}: byte {}: {} -> {}", path, offset, found, advice));
}

const char* kRemake = "write the shard again, or copy it again if it was cut short";

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Lengths are positive, pointers run on without a gap, and the last sequence ends inside the .bin.
std::int64_t check_sequences(std::span<const std::byte> index, std::int64_t sequences, TokenType type,
                             std::int64_t bin_bytes, const std::string& path) {
  const std::int64_t lengths = kMegatronHeader, pointers = lengths + 4 * sequences;
  std::int64_t expected = 0;  // bytes
  for (std::int64_t i = 0; i < sequences; ++i) {
    const auto length = load<std::int32_t>(index, lengths + 4 * i);
    if (length < 0) {
      refuse(path, lengths + 4 * i, fmt::format("sequence {} has length {}; allowed: at least 0", i, length),
             kRemake);
    }
    const auto pointer = load<std::int64_t>(index, pointers + 8 * i);
    if (pointer != expected) {
      refuse(path, pointers + 8 * i,
             fmt::format("sequence {} starts at byte {} of the .bin; expected {}, the end of the one before",
                         i, pointer, expected),
             kRemake);
    }
    expected += length * size_of(type);
    if (expected > bin_bytes) {
      refuse(path, lengths + 4 * i,
             fmt::format("sequence {} ends at byte {} of the .bin, which has {}", i, expected, bin_bytes),
             kRemake);
    }
  }
  return expected;
}

void check_documents(std::span<const std::byte> index, std::int64_t sequences, std::int64_t boundaries,
                     const std::string& path) {
  const std::int64_t first = kMegatronHeader + 12 * sequences;
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < boundaries; ++i) {
    const auto boundary = load<std::int64_t>(index, first + 8 * i);
    const bool ends = i + 1 < boundaries || boundary == sequences;
    if (boundary < before || boundary > sequences || (i == 0 && boundary != 0) || !ends) {
      refuse(path, first + 8 * i,
             fmt::format("document boundary {} is {}; expected boundaries that rise from 0 to {}", i,
                         boundary, sequences),
             kRemake);
    }
    before = boundary;
  }
}

template <class T>
std::int64_t first_outside(const std::byte* from, std::int64_t count, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < count; ++i) {
    T id;
    std::memcpy(&id, from + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    if (static_cast<std::int64_t>(id) < 0 || static_cast<std::int64_t>(id) >= vocabulary) return i;
  }
  return count;
}

template <class T>
void widen(std::span<std::int32_t> out, const std::byte* from) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T id;
    std::memcpy(&id, from + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int32_t>(id);
  }
}

// Calls f with a value of the C++ type of the ids.
template <class F>
auto with_type(TokenType type, F f) {
  switch (type) {
    case TokenType::u16:
      return f(std::uint16_t{});
    case TokenType::u32:
      return f(std::uint32_t{});
    case TokenType::i32:
      break;
  }
  return f(std::int32_t{});
}

// `ids` are the file's tokens from `begin` on.
void check_ids(const std::string& path, const TokenLayout& layout, std::span<const std::byte> ids,
               std::int64_t begin, std::int64_t vocabulary) {
  const std::int64_t size = size_of(layout.type), count = size_of_span(ids) / size;
  const std::int64_t bad = with_type(
      layout.type, [&](auto id) { return first_outside<decltype(id)>(ids.data(), count, vocabulary); });
  if (bad == count) return;
  const auto value = with_type(
      layout.type, [&](auto id) { return static_cast<std::int64_t>(load<decltype(id)>(ids, bad * size)); });
  refuse(path, layout.offset + (begin + bad) * size,
         fmt::format("token {} is {}; the model's vocabulary has ids 0 to {}", begin + bad, value,
                     vocabulary - 1),
         "use the tokenizer the model is configured for, or set model.vocab_size to the tokenizer's size");
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file(path);
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    throw DataError(fmt::format("{}: cannot open: {} -> check the path", path, std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) throw DataError(path + ": not a regular file -> check the path");
  size_ = status.st_size;
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ, MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED) {
    throw DataError(fmt::format("{}: cannot map {} bytes: {} -> check the file system and memory limits",
                                path, size_, std::strerror(errno)));
  }
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<std::size_t>(size_));
}

TokenLayout parse_megatron_index(std::span<const std::byte> index, std::int64_t bin_bytes,
                                 const std::string& path) {
  const std::int64_t size = size_of_span(index);
  if (size < kMegatronHeader) {
    refuse(path, size, fmt::format("the index ends inside its header of {} bytes", kMegatronHeader), kRemake);
  }
  if (std::memcmp(index.data(), kMegatronMagic.data(), kMegatronMagic.size()) != 0) {
    refuse(path, 0, "not a Megatron index: it does not start with MMIDIDX",
           "check that this is the right .idx");
  }
  const auto version = load<std::uint64_t>(index, 9);
  if (version != 1) {
    refuse(path, 9, fmt::format("index version {}; version 1 is read", version),
           "write the shard as version 1");
  }
  const auto code = load<std::uint8_t>(index, 17);
  if (code != 8 && code != 4) {
    refuse(path, 17, fmt::format("dtype code {}; allowed: 8 (uint16) and 4 (int32)", code),
           "write the shard with one of these");
  }
  TokenLayout layout;
  layout.type = code == 8 ? TokenType::u16 : TokenType::i32;
  const auto sequences = load<std::uint64_t>(index, 18), boundaries = load<std::uint64_t>(index, 26);
  // Counts past the file's size would overflow the products below.
  const auto most = static_cast<std::uint64_t>(size);
  if (sequences > most / 12 || boundaries > most / 8 ||
      kMegatronHeader + 12 * static_cast<std::int64_t>(sequences) +
              8 * static_cast<std::int64_t>(boundaries) !=
          size) {
    refuse(path, 18,
           fmt::format("{} sequences and {} document boundaries do not make the {} bytes of this index",
                       sequences, boundaries, size),
           kRemake);
  }
  if (sequences == 0) refuse(path, 18, "the index holds no sequences", "give a shard with text in it");
  if (boundaries < 2) {
    refuse(path, 26, fmt::format("{} document boundaries; at least 2 bound one document", boundaries),
           kRemake);
  }
  const std::int64_t bytes =
      check_sequences(index, static_cast<std::int64_t>(sequences), layout.type, bin_bytes, path);
  check_documents(index, static_cast<std::int64_t>(sequences), static_cast<std::int64_t>(boundaries), path);
  if (bytes != bin_bytes) {
    refuse(path, kMegatronHeader,
           fmt::format("the sequences take {} bytes of the .bin, which has {}", bytes, bin_bytes), kRemake);
  }
  if (bytes == 0) refuse(path, kMegatronHeader, "the index holds no tokens", "give a shard with text in it");
  layout.tokens = bytes / size_of(layout.type);
  layout.documents = static_cast<std::int64_t>(boundaries) - 1;
  return layout;
}

TokenLayout parse_llmc_header(std::span<const std::byte> file, const std::string& path) {
  const std::int64_t size = size_of_span(file);
  if (size < kLlmcHeader) {
    refuse(path, size, fmt::format("the file ends inside its header of {} bytes", kLlmcHeader),
           "a Megatron shard needs its .idx beside it; an llm.c shard was cut short");
  }
  const auto magic = load<std::int32_t>(file, 0), version = load<std::int32_t>(file, 4);
  TokenLayout layout;
  layout.offset = kLlmcHeader;
  int expected_version = 0;
  if (magic == 20240520) {
    layout.type = TokenType::u16, expected_version = 1;
  } else if (magic == 20240801) {
    layout.type = TokenType::u32, expected_version = 7;
  } else {
    refuse(path, 0, fmt::format("magic {}; llm.c shards have 20240520 or 20240801", magic),
           "a Megatron shard needs its .idx beside it; otherwise write the file again");
  }
  if (version != expected_version) {
    refuse(path, 4, fmt::format("version {}; with magic {} it is {}", version, magic, expected_version),
           "write the shard in a known version");
  }
  // The count is one signed word of the header; larger files are told apart by their size.
  const auto count = load<std::int32_t>(file, 8);
  const std::int64_t bytes = size - kLlmcHeader;
  if (bytes % size_of(layout.type) != 0) {
    refuse(path, size,
           fmt::format("the last token is cut: {} bytes of tokens of {} bytes each", bytes,
                       size_of(layout.type)),
           kRemake);
  }
  layout.tokens = bytes / size_of(layout.type);
  if (count != layout.tokens) {
    refuse(path, 8, fmt::format("the header says {} tokens, the file holds {}", count, layout.tokens),
           kRemake);
  }
  if (layout.tokens == 0) refuse(path, 8, "the file holds no tokens", "give a shard with text in it");
  return layout;
}

TokenFile::TokenFile(const std::string& path) {
  std::string prefix = path;
  if (prefix.ends_with(".bin") || prefix.ends_with(".idx")) prefix.resize(prefix.size() - 4);
  path_ = prefix + ".bin";
  if (!exists(path_) && !path.ends_with(".idx") && exists(path))
    path_ = path;  // an llm.c shard may have any name
  std::error_code unknown;
  if (!std::filesystem::exists(path_, unknown) && !unknown)
    throw DataError(
        fmt::format("{}: there is no such shard -> check the path; data_tools/prepare.py makes "
                    "shards from text",
                    path_));
  map_ = MappedFile(path_);
  const std::string index = prefix + ".idx";
  if (exists(index)) {
    const MappedFile mapped(index);
    layout_ = parse_megatron_index(mapped.bytes(), size_of_span(map_.bytes()), index);
  } else {
    layout_ = parse_llmc_header(map_.bytes(), path_);
  }
}

void TokenFile::read(std::int64_t begin, std::span<std::int32_t> out, std::int64_t vocabulary) const {
  const auto count = static_cast<std::int64_t>(out.size());
  if (begin < 0 || count > tokens() - begin) {
    throw InternalError(
        fmt::format("{}: tokens {} to {} of {} were asked for", path_, begin, begin + count, tokens()));
  }
  const std::vector<std::byte> ids = copy(begin, count);
  check_ids(path_, layout_, ids, begin, vocabulary);
  with_type(layout_.type, [&](auto id) { widen<decltype(id)>(out, ids.data()); });
}

void TokenFile::validate(std::int64_t vocabulary) const {
  constexpr std::int64_t kPiece = std::int64_t{1} << 18;
  for (std::int64_t begin = 0; begin < tokens(); begin += kPiece) {
    const std::vector<std::byte> ids = copy(begin, std::min(kPiece, tokens() - begin));
    check_ids(path_, layout_, ids, begin, vocabulary);
  }
}

std::vector<std::byte> TokenFile::copy(std::int64_t begin, std::int64_t count) const {
  const std::int64_t offset = layout_.offset + begin * size_of(layout_.type);
  std::vector<std::byte> ids(static_cast<std::size_t>(count * size_of(layout_.type)));
  if (!copy_from_mapping(ids.data(), map_.bytes().data() + offset, ids.size())) {
    refuse(
        path_, offset,
        fmt::format("tokens {} to {} cannot be read: the file shrank while it was in use, or its disk fails",
                    begin, begin + count),
        kRemake);
  }
  return ids;
}

}  // namespace strata
