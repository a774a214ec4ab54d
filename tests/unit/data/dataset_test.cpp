#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "base/error.h"
#include "data/permutation.h"
#include "tests/support/catch.h"
#include "tests/unit/data/shards.h"

using namespace strata;
using namespace strata::test;

namespace {

std::vector<std::int32_t> range(std::int32_t from, std::int32_t count) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

template <class F>
std::string data_error(F f) {
  try {
    f();
  } catch (const DataError& e) {
    return e.what();
  }
  return "(nothing was refused)";
}

// The first token of a sequence tells which one it is when token i of the data is i.
std::vector<std::int64_t> sequences_read(const SequenceReader& reader, std::int64_t position,
                                         std::size_t count, std::size_t length) {
  std::vector<std::int32_t> tokens(count * length), targets(count * length);
  reader.read(position, tokens, targets);
  std::vector<std::int64_t> out;
  for (std::size_t i = 0; i < count; ++i)
    out.push_back(tokens[i * length] / static_cast<std::int64_t>(length));
  return out;
}

}  // namespace

TEST_CASE("sequences are cut over shards in the order of their names, with targets one ahead") {
  const Folder folder("cut");
  write_megatron(folder.path + "/b", range(7, 5), {2, 3}, 8);
  write_llmc(folder.path + "/a.bin", range(0, 7), 20240520, 1);
  write_megatron(folder.path + "/c", range(12, 2), {2}, 4);  // 14 tokens in all
  const TokenDataset data({folder.path}, 4, 100);
  CHECK(data.tokens() == 14);
  CHECK(data.sequences() == 3);  // 13 targets make 3 whole sequences
  for (std::int64_t i = 0; i < 3; ++i) {
    std::vector<std::int32_t> tokens(4), targets(4);
    data.read(i, tokens, targets, std::nullopt);
    CHECK(tokens == range(static_cast<std::int32_t>(4 * i), 4));
    CHECK(targets == range(static_cast<std::int32_t>(4 * i) + 1, 4));
  }
  // A list keeps its order.
  const TokenDataset list({folder.path + "/c", folder.path + "/a.bin"}, 1, 100);
  std::vector<std::int32_t> token(1), target(1);
  list.read(1, token, target, std::nullopt);
  CHECK(token[0] == 13);
  CHECK(target[0] == 0);
}

TEST_CASE("targets equal to the ignored token are masked, tokens are not") {
  const Folder folder("ignore");
  write_megatron(folder.path + "/a", {1, 9, 2, 9, 9}, {5}, 8);
  const TokenDataset data({folder.path + "/a"}, 4, 10);
  std::vector<std::int32_t> tokens(4), targets(4);
  data.read(0, tokens, targets, 9);
  CHECK(tokens == std::vector<std::int32_t>{1, 9, 2, 9});
  CHECK(targets == std::vector<std::int32_t>{-1, 2, -1, -1});
}

TEST_CASE("data that cannot make a sequence is refused") {
  const Folder folder("none");
  CHECK(data_error([&] { TokenDataset({folder.path}, 4, 10); }).find("no .bin shards") != std::string::npos);
  CHECK(data_error([&] { TokenDataset({}, 4, 10); }).find("no token shards") != std::string::npos);
  write_megatron(folder.path + "/a", range(0, 4), {4}, 8);
  CHECK(data_error([&] { TokenDataset({folder.path}, 4, 10); }).find("4 tokens in 1 shard") !=
        std::string::npos);
  CHECK(TokenDataset({folder.path}, 3, 10).sequences() == 1);
  // The id after the last input is read and checked too.
  const TokenDataset data({folder.path}, 3, 3);
  std::vector<std::int32_t> tokens(3), targets(3);
  CHECK(data_error([&] { data.read(0, tokens, targets, std::nullopt); }).find("token 3 is 3") !=
        std::string::npos);
  CHECK(data_error([&] { data.validate(); }).find("token 3 is 3") != std::string::npos);
  // An index whose .bin is lost is not passed over.
  std::filesystem::remove(folder.path + "/a.bin");
  write_megatron(folder.path + "/b", range(0, 9), {9}, 8);
  CHECK(data_error([&] { TokenDataset({folder.path}, 3, 10); }).find("a.bin") != std::string::npos);
}

TEST_CASE("a shard described as one of a larger vocabulary is refused at once") {
  const Folder folder("described");
  const std::string prefix = folder.path + "/shard";
  write_megatron(prefix, range(0, 40), {40}, 8);
  auto open = [&](std::int64_t vocabulary) {
    return data_error([&] { const TokenDataset opened({prefix}, 8, vocabulary); });
  };
  std::ofstream(prefix + ".json") << R"({"format": "megatron", "vocab_size": 512})";
  CHECK(open(512) == "(nothing was refused)");
  CHECK(open(511).find("vocabulary of 512, the model's has 511") != std::string::npos);
  for (const char* other : {R"({"vocab_size": 512})", R"({"format": "megatron", "vocab_size": "many"})",
                            "{\"format\": \"megatron\"}\n{\"vocab_size\": 512}\n", "[]", ""}) {
    std::ofstream(prefix + ".json", std::ios::trunc) << other;
    CHECK(open(511) == "(nothing was refused)");
  }
}

TEST_CASE("the permutation is a bijection for every size") {
  auto check = [](std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
    const Permutation p(size, seed, epoch);
    std::vector<bool> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t x = p(i);
      REQUIRE((x >= 0 && x < size));
      REQUIRE_FALSE(seen[static_cast<std::size_t>(x)]);
      seen[static_cast<std::size_t>(x)] = true;
    }
  };
  for (std::int64_t size = 1; size <= 300; ++size) check(size, 42, size % 3);
  for (std::int64_t size : {1023, 1024, 1025, 4097, 65535, 65537, 100003}) check(size, 7, 1);
  // Sizes that no table could hold: distinct results that can only come from a bijection.
  const Permutation huge((std::int64_t{1} << 40) + 123, 1, 0);
  std::vector<std::int64_t> images;
  for (std::int64_t i = 0; i < 1000; ++i) images.push_back(huge(i));
  std::sort(images.begin(), images.end());
  CHECK(std::adjacent_find(images.begin(), images.end()) == images.end());
  CHECK(images.back() > (std::int64_t{1} << 39));
  CHECK(Permutation(std::int64_t{1} << 62, 1, 0)((std::int64_t{1} << 62) - 1) >= 0);
}

TEST_CASE("the order depends on seed and epoch, and looks random") {
  const std::int64_t size = 1000;
  auto order = [&](std::uint64_t seed, std::int64_t epoch) {
    const Permutation p(size, seed, epoch);
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < size; ++i) out.push_back(p(i));
    return out;
  };
  const auto base = order(42, 0);
  CHECK(base == order(42, 0));
  for (const auto& other : {order(42, 1), order(43, 0), order(0, 0), order(41, 1)}) {
    const auto same =
        std::inner_product(base.begin(), base.end(), other.begin(), 0, std::plus<>(), std::equal_to<>());
    CHECK(same < 12);  // one on average for independent orders
  }
  // Over many seeds, each element falls into each of 16 slices equally often: chi-squared with 15 degrees of
  // freedom for 7 elements of a size that is no power of two; 45 is passed with probability 8e-5.
  const std::int64_t n = 48;
  for (std::int64_t element : {0, 1, 2, 23, 24, 46, 47}) {
    std::vector<double> counts(16);
    const int trials = 16000;
    for (int seed = 0; seed < trials; ++seed) {
      ++counts[static_cast<std::size_t>(Permutation(n, static_cast<std::uint64_t>(seed), 0)(element) / 3)];
    }
    double chi = 0;
    for (double c : counts) chi += (c - trials / 16.0) * (c - trials / 16.0) / (trials / 16.0);
    INFO(element);
    CHECK(chi < 45);
  }
  // Neighbours do not stay neighbours.
  int close = 0;
  for (std::size_t i = 1; i < base.size(); ++i) close += std::abs(base[i] - base[i - 1]) < 10 ? 1 : 0;
  CHECK(close < 50);  // 19 on average
}

TEST_CASE("every sequence is read once an epoch, for any number of ranks, and batches straddle epochs") {
  const Folder folder("order");
  const std::int64_t n = 23;
  const std::size_t length = 4;
  write_megatron(folder.path + "/a", range(0, static_cast<std::int32_t>(n) * 4 + 1),
                 {static_cast<int>(n) * 4 + 1}, 8);
  const TokenDataset data({folder.path}, 4, 1000);
  REQUIRE(data.sequences() == n);
  const SequenceReader reader(data, Sampler(n, 42), std::nullopt);

  const auto alone = sequences_read(reader, 0, static_cast<std::size_t>(3 * n), length);
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<std::int64_t> one(alone.begin() + epoch * n, alone.begin() + (epoch + 1) * n);
    CHECK(one != std::vector<std::int64_t>(alone.begin() + ((epoch + 1) % 3) * n,
                                           alone.begin() + ((epoch + 1) % 3 + 1) * n));
    std::sort(one.begin(), one.end());
    for (std::int64_t i = 0; i < n; ++i) CHECK(one[static_cast<std::size_t>(i)] == i);
  }
  for (std::int64_t world : {2, 3, 8}) {
    for (std::int64_t batch : {1, 2}) {
      std::vector<std::int64_t> together;
      std::int64_t position = 0;
      while (position + world * batch <= 3 * n) {
        for (std::int64_t rank = 0; rank < world; ++rank) {
          const auto part =
              sequences_read(reader, position + rank * batch, static_cast<std::size_t>(batch), length);
          together.insert(together.end(), part.begin(), part.end());
        }
        position += world * batch;
      }
      CHECK(std::equal(together.begin(), together.end(), alone.begin()));
    }
  }
  const Sampler validation(n, 42, Sampler::Order::in_order);
  for (std::int64_t i = 0; i < 2 * n; ++i) CHECK(validation.sequence_at(i) == i % n);
  CHECK(Sampler(1, 42).sequence_at(5) == 0);
}
