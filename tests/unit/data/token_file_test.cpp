#include "data/token_file.h"

#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "tests/support/catch.h"
#include "tests/unit/data/shards.h"

using namespace strata;
using namespace strata::test;

namespace {

template <class F>
void refused(F f, const std::vector<std::string>& pieces) {
  std::string message = "(nothing was refused)";
  try {
    f();
  } catch (const DataError& e) {
    message = e.what();
  }
  INFO(message);
  CHECK(message.find(" -> ") != std::string::npos);
  for (const std::string& piece : pieces) {
    INFO(piece);
    CHECK(message.find(piece) != std::string::npos);
  }
}

std::vector<std::int32_t> read_all(const TokenFile& file, std::int64_t vocabulary) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(file.tokens()));
  file.read(0, out, vocabulary);
  return out;
}

// A valid index of three sequences in two documents, to be broken in one place.
Bytes valid_index() {
  return megatron_index({3, 0, 2}, {0, 2, 3}, 8);
}
constexpr std::int64_t kBinBytes = 10;

void index_refused(const Bytes& index, const std::vector<std::string>& pieces,
                   std::int64_t bin_bytes = kBinBytes) {
  refused([&] { parse_megatron_index(index.view(), bin_bytes, "x.idx"); }, pieces);
}

}  // namespace

TEST_CASE("every format gives back the ids that were written") {
  const Folder folder("formats");
  const std::vector<std::int32_t> ids = {5, 0, 65535, 7, 1};
  write_megatron(folder.path + "/m16", ids, {3, 2}, 8);
  write_megatron(folder.path + "/m32", {5, 0, 128255, 7, 1}, {3, 2}, 4);
  write_llmc(folder.path + "/l16.bin", ids, 20240520, 1);
  write_llmc(folder.path + "/l32.bin", {5, 0, 128255, 7, 1}, 20240801, 7);
  for (const char* name : {"/m16", "/m16.bin", "/m16.idx", "/l16.bin", "/l16"}) {
    INFO(name);
    const TokenFile file(folder.path + name);
    CHECK(read_all(file, 65536) == ids);
    CHECK(file.type() == TokenType::u16);
  }
  for (const char* name : {"/m32", "/l32.bin"}) {
    INFO(name);
    CHECK(read_all(TokenFile(folder.path + name), 128256) == std::vector<std::int32_t>{5, 0, 128255, 7, 1});
  }
  CHECK(TokenFile(folder.path + "/m16").documents() == 2);
  std::vector<std::int32_t> middle(2);
  TokenFile(folder.path + "/m16").read(2, middle, 65536);
  CHECK(middle == std::vector<std::int32_t>{65535, 7});
}

TEST_CASE("a token past the vocabulary is refused with file and byte offset, on reading and by a scan") {
  const Folder folder("vocabulary");
  write_megatron(folder.path + "/m", {1, 2, 96, 97, 3}, {5}, 8);
  const TokenFile file(folder.path + "/m");
  file.validate(98);
  refused([&] { file.validate(97); }, {"m.bin", "byte 6", "token 3 is 97", "ids 0 to 96"});
  std::vector<std::int32_t> out(2);
  file.read(0, out, 97);  // does not touch it
  refused([&] { file.read(2, out, 97); }, {"m.bin", "byte 6", "token 3 is 97"});

  write_megatron(folder.path + "/negative", {1, -1}, {2}, 4);
  refused([&] { TokenFile(folder.path + "/negative").validate(97); }, {"byte 4", "token 1 is -1"});
  write_llmc(folder.path + "/u32.bin", {1, -1}, 20240801, 7);
  refused([&] { TokenFile(folder.path + "/u32.bin").validate(std::numeric_limits<std::int32_t>::max()); },
          {"byte 1028", "token 1 is 4294967295"});
}

TEST_CASE("a broken Megatron index is refused where it is broken") {
  CHECK(parse_megatron_index(valid_index().view(), kBinBytes, "x.idx").tokens == 5);
  for (std::size_t size = 0; size < valid_index().data.size(); ++size) {  // cut anywhere
    Bytes cut = valid_index();
    cut.data.resize(size);
    index_refused(cut, {"x.idx", "byte "});
  }
  index_refused(valid_index().set<char>(0, 'X'), {"byte 0", "MMIDIDX"});
  index_refused(valid_index().set<std::uint64_t>(9, 2), {"byte 9", "version 2"});
  index_refused(valid_index().set<std::uint8_t>(17, 5), {"byte 17", "dtype code 5"});
  index_refused(valid_index().set<std::uint64_t>(18, std::uint64_t{1} << 63), {"byte 18"});
  index_refused(valid_index().set<std::uint64_t>(18, 1537228672809129301ull),
                {"byte 18"});  // 12 x wraps to 2^64 - 4
  index_refused(valid_index().set<std::uint64_t>(26, ~0ull), {"byte 18"});
  index_refused(valid_index().set<std::int32_t>(34, -3), {"byte 34", "length -3"});
  index_refused(valid_index().set<std::int64_t>(34 + 12 + 8, 8), {"byte 54", "sequence 1", "expected 6"});
  index_refused(valid_index().set<std::int32_t>(34 + 8, 3), {"byte 42", "ends at byte 12", "has 10"});
  index_refused(valid_index(), {"ends at byte 10", "has 8"}, 8);  // .bin cut short
  index_refused(valid_index(), {"take 10 bytes", "has 12"}, 12);  // .bin too long
  index_refused(valid_index().set<std::int64_t>(70, 1), {"byte 70", "boundary 0 is 1"});
  index_refused(valid_index().set<std::int64_t>(78, 4), {"byte 78", "boundary 1 is 4"});
  index_refused(valid_index().set<std::int64_t>(86, 2), {"byte 86", "boundary 2 is 2"});
  index_refused(megatron_index({}, {0}, 8), {"byte 18", "no sequences"}, 0);
  index_refused(megatron_index({5}, {0}, 8), {"byte 26", "1 document boundaries"});
  index_refused(megatron_index({0}, {0, 1}, 8), {"no tokens"}, 0);
}

TEST_CASE("a broken llm.c header is refused where it is broken") {
  auto header_refused = [](const Bytes& file, const std::vector<std::string>& pieces) {
    refused([&] { parse_llmc_header(file.view(), "x.bin"); }, pieces);
  };
  auto valid = [] { return llmc_file({1, 2, 3}, 20240520, 1); };
  CHECK(parse_llmc_header(valid().view(), "x.bin").tokens == 3);
  header_refused(valid().set<std::int32_t>(0, 20240521), {"x.bin", "byte 0", "20240521"});
  header_refused(valid().set<std::int32_t>(4, 7), {"byte 4", "version 7"});
  header_refused(llmc_file({1}, 20240801, 1), {"byte 4", "version 1"});
  header_refused(valid().set<std::int32_t>(8, 4), {"byte 8", "says 4 tokens, the file holds 3"});
  header_refused(valid().set<std::int32_t>(8, -1), {"byte 8", "says -1"});
  header_refused(llmc_file({}, 20240520, 1), {"no tokens"});
  for (std::size_t size : {0, 1, 1023, 1025, 1028}) {
    Bytes cut = valid();
    cut.data.resize(size);
    header_refused(cut, {"x.bin", "byte "});
  }
}

TEST_CASE("files that are missing, empty or not files are refused by name") {
  const Folder folder("missing");
  refused([&] { TokenFile(folder.path + "/none"); }, {"none.bin", "no such shard", "data_tools/prepare.py"});
  std::ofstream(folder.path + "/empty.bin").flush();
  refused([&] { TokenFile(folder.path + "/empty.bin"); }, {"empty.bin", "byte 0"});
  write_megatron(folder.path + "/lost", {1, 2}, {2}, 8);
  std::filesystem::remove(folder.path + "/lost.idx");
  refused([&] { TokenFile(folder.path + "/lost"); }, {"lost.bin", ".idx"});
  std::filesystem::create_directory(folder.path + "/folder.bin");
  refused([&] { TokenFile(folder.path + "/folder.bin"); }, {"folder.bin", "not a regular file"});
}

TEST_CASE("a shard that is cut while it is mapped is refused by name, and the rest of it still reads") {
  const Folder folder("cut");
  write_megatron(folder.path + "/cut", std::vector<std::int32_t>(8192, 7), {8192}, 4);
  const TokenFile file(folder.path + "/cut");
  std::vector<std::int32_t> out(16);
  file.read(8000, out, 97);
  std::filesystem::resize_file(folder.path + "/cut.bin", 4096);  // one page stays
  for (int i = 0; i < 2; ++i) refused([&] { file.read(8000, out, 97); }, {"cut.bin", "byte 32000", "shrank"});
  refused([&] { file.validate(97); }, {"cut.bin", "byte 0", "shrank"});
  file.read(0, out, 97);
  CHECK(out == std::vector<std::int32_t>(16, 7));
}

TEST_CASE("offsets are 64-bit: a shard past 4 GB is read at its end") {
  const Folder folder("large");
  const std::int64_t tokens = (std::int64_t{1} << 31) + 5;  // 8.6 GB of int32, a sparse file
  const std::string path = folder.path + "/big";
  std::vector<std::int32_t> lengths(2, (1 << 30) + 2);
  lengths.push_back(1);
  REQUIRE(lengths[0] * std::int64_t{2} + 1 == tokens);
  megatron_index(lengths, {0, 3}, 4).write(path + ".idx");
  std::ofstream(path + ".bin").flush();
  std::filesystem::resize_file(path + ".bin", static_cast<std::uintmax_t>(tokens) * 4);
  {
    std::fstream bin(path + ".bin", std::ios::in | std::ios::out | std::ios::binary);
    bin.seekp((tokens - 2) * 4);
    const std::int32_t ids[2] = {41, 42};
    bin.write(reinterpret_cast<const char*>(ids), sizeof ids);
  }
  const TokenFile file(path);
  CHECK(file.tokens() == tokens);
  std::vector<std::int32_t> out(3);
  file.read(tokens - 3, out, 97);
  CHECK(out == std::vector<std::int32_t>{0, 41, 42});
}
