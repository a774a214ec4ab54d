#include "checkpoint/safetensors.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;
namespace fs = std::filesystem;

namespace {

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "strata-safetensors-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  fs::path operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

fs::path raw_file(const Folder& folder, const std::string& header, std::size_t data_bytes) {
  const fs::path path = folder / "raw.safetensors";
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::uint64_t length = header.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header << std::string(data_bytes, '\1');
  return path;
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const DataError& e) {
    return e.what();
  }
  return "not refused";
}

std::string refusal_of(const std::string& header, std::size_t data_bytes) {
  const Folder folder;
  const fs::path path = raw_file(folder, header, data_bytes);
  return refusal([&] { SafetensorsFile file(path); });
}

using Catch::Matchers::Contains;

}  // namespace

TEST_CASE("tensors of every dtype survive a safetensors file, written in pieces") {
  const Folder folder;
  const std::vector<float> f32{1.5f, -0.0f, 3e38f, 1e-40f, 5, 6};
  const std::vector<bf16> b16{to_bf16(1), to_bf16(-2), to_bf16(0.5f)};
  const std::vector<double> f64{1e300};
  const std::vector<std::int32_t> i32{-1, 2};
  const std::vector<std::int64_t> i64{1ll << 62};
  const std::vector<std::int8_t> i8{-128, 127, 0};
  {
    SafetensorsWriter writer(folder / "t.safetensors",
                             {{"a", DType::f32, {2, 3}},
                              {"b.weight", DType::bf16, {3}},
                              {"scalar", DType::f64, {}},
                              {"empty", DType::f32, {0, 7}},
                              {"i32", DType::i32, {2}},
                              {"i64", DType::i64, {1}},
                              {"i8", DType::i8, {3}}},
                             {{"format", "pt"}, {"note", "\"quoted\" \xc3\xa8"}});
    writer.append(bytes_of(f32).first(7));
    writer.append(bytes_of(f32).subspan(7));
    writer.append(bytes_of(b16));
    writer.append(bytes_of(f64));
    writer.append(bytes_of(i32));
    writer.append(bytes_of(i64));
    writer.append(bytes_of(i8));
    CHECK_FALSE(fs::exists(folder / "t.safetensors"));
    writer.finish();
  }
  CHECK_FALSE(fs::exists(folder / "t.safetensors.partial"));
  SafetensorsFile file(folder / "t.safetensors");
  CHECK(file.entries().size() == 7);
  CHECK(file.metadata().at("note") == "\"quoted\" \xc3\xa8");
  CHECK(file.at("a").shape == std::vector<std::int64_t>{2, 3});
  CHECK(file.at("scalar").shape.empty());
  CHECK(file.at("empty").count == 0);
  CHECK(file.entries().front().offset % 64 == 0);
  CHECK(std::memcmp(file.values<float>("a").data(), f32.data(), 24) == 0);
  CHECK(std::memcmp(file.values<bf16>("b.weight").data(), b16.data(), 6) == 0);
  CHECK(file.values<double>("scalar") == f64);
  CHECK(file.values<std::int32_t>("i32") == i32);
  CHECK(file.values<std::int64_t>("i64") == i64);
  CHECK(file.values<std::int8_t>("i8") == i8);
  CHECK(file.values<float>("empty").empty());
  CHECK(file.find("nothing") == nullptr);
  CHECK_THROWS_AS(file.at("nothing"), DataError);
  CHECK_THAT(refusal([&] { file.values<float>("b.weight"); }), Contains("holds bf16, expected fp32"));
}

TEST_CASE("an interrupted safetensors write leaves no file behind") {
  const Folder folder;
  {
    SafetensorsWriter writer(folder / "t.safetensors", {{"a", DType::f32, {2}}});
    CHECK_THROWS_AS(writer.finish(), InternalError);
    CHECK_THROWS_AS(writer.append(bytes_of(std::vector<float>(3))), InternalError);
  }
  CHECK_FALSE(fs::exists(folder / "t.safetensors"));
  CHECK_FALSE(fs::exists(folder / "t.safetensors.partial"));
  CHECK_THROWS_AS(
      SafetensorsWriter(folder / "t.safetensors", {{"a", DType::f32, {2}}, {"a", DType::f32, {2}}}),
      InternalError);
}

TEST_CASE("damaged safetensors headers are refused with the file and the byte") {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  CHECK(refusal_of(good, 8) == "not refused");
  CHECK(refusal_of(good + "   ", 8) == "not refused");
  CHECK_THAT(refusal_of(good, 7), Contains("raw.safetensors: at byte"));
  CHECK_THAT(refusal_of(good, 7), Contains("which holds 7"));
  CHECK_THAT(refusal_of(good, 9), Contains("1 bytes belong to no tensor"));
  CHECK_THAT(refusal_of("", 8), Contains("does not start with '{'"));
  CHECK_THAT(refusal_of(" " + good, 8), Contains("does not start with '{'"));
  CHECK_THAT(refusal_of(good.substr(0, 20), 8), Contains("is not JSON"));
  CHECK_THAT(refusal_of(R"({"a":3})", 0), Contains("'a' is not a JSON object"));
  CHECK_THAT(refusal_of(R"({"__metadata__":{"x":1}})", 0), Contains("__metadata__ 'x' is not a string"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"U16","shape":[4],"data_offsets":[0,8]}})", 8),
             Contains("dtype U16"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8), Contains("need 12"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
             Contains("holds -2"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
             Contains("holds 2.0"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
             Contains("bytes 8 to 0"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8),
             Contains("two numbers"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8), Contains("'shape' is missing"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})", 0),
             Contains("more than 2^64"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                        16),
             Contains("names 'a' twice"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                        12),
             Contains("overlaps"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})",
                        20),
             Contains("bytes belong to no tensor"));
  CHECK_THAT(refusal_of(R"({"a":{"dtype":"F32","shape":[[[[2]]]],"data_offsets":[0,8]}})", 8),
             Contains("deeper"));
}

TEST_CASE("a safetensors file cut anywhere is refused, never read past its end") {
  const Folder folder;
  {
    SafetensorsWriter writer(folder / "t.safetensors", {{"a", DType::f32, {4}}, {"b", DType::i32, {2}}});
    writer.append(bytes_of(std::vector<float>(4)));
    writer.append(bytes_of(std::vector<std::int32_t>(2)));
    writer.finish();
  }
  const std::uintmax_t whole = fs::file_size(folder / "t.safetensors");
  for (std::uintmax_t size = 0; size < whole; ++size) {
    fs::copy_file(folder / "t.safetensors", folder / "cut", fs::copy_options::overwrite_existing);
    fs::resize_file(folder / "cut", size);
    REQUIRE_THROWS_AS(SafetensorsFile(folder / "cut"), DataError);
  }
  CHECK_THAT(refusal([&] { SafetensorsFile file(folder / "absent"); }), Contains("cannot be opened"));
  CHECK_THAT(refusal([&] { SafetensorsFile file(fs::temp_directory_path()); }),
             Contains("not a regular file"));
}

TEST_CASE("a header length past the end of the file is refused") {
  const Folder folder;
  for (const std::uint64_t length : {std::uint64_t{9}, std::uint64_t{200'000'000}, ~std::uint64_t{0}}) {
    std::ofstream file(folder / "t", std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << "{}      ";
    file.close();
    CHECK_THAT(refusal([&] { SafetensorsFile opened(folder / "t"); }), Contains("the header claims"));
  }
}
