// Every collective against a plain serial twin that recomputes what all ranks put in.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/mpi/mpi_session.h"
#include "tests/support/catch.h"

using namespace strata;
using strata::test::Ranks;

namespace {

const std::int64_t kCounts[] = {0, 1, 7, 997, 100003};
const CollectiveLabel kLabel{Traffic::training, "unit", 1};

MpiOptions small_messages() {
  MpiOptions options;
  options.message_bytes = 10000;
  options.scratch_bytes = 60000;
  return options;
}

// What rank r contributes at element i: the same on every rank that asks.
double value(int seed, int r, std::int64_t i) {
  std::uint64_t x = static_cast<std::uint64_t>(seed) * 1000003 + static_cast<std::uint64_t>(r) * 8191 +
                    static_cast<std::uint64_t>(i);
  x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull, x ^= x >> 33;
  return (static_cast<double>(x >> 11) * 0x1p-53 - 0.5) * std::exp2(static_cast<double>(x % 9) - 4);
}

double load(const void* p, DType t, std::int64_t i) {
  if (t == DType::f32) return static_cast<const float*>(p)[i];
  if (t == DType::f64) return static_cast<const double*>(p)[i];
  return to_float(static_cast<const bf16*>(p)[i]);
}
void store(void* p, DType t, std::int64_t i, double x) {
  if (t == DType::f32) static_cast<float*>(p)[i] = static_cast<float>(x);
  if (t == DType::f64) static_cast<double*>(p)[i] = x;
  if (t == DType::bf16) static_cast<bf16*>(p)[i] = to_bf16(static_cast<float>(x));
}
double rounded(DType t, double x) {
  if (t == DType::f32) return static_cast<float>(x);
  if (t == DType::bf16) return to_float(to_bf16(static_cast<float>(x)));
  return x;
}

// Memory with a guard element after its end, which nothing may touch.
struct Tensor {
  Tensor(Device& device, DType t, std::int64_t n)
      : buffer(device.allocate(static_cast<std::size_t>(n + 1) * size_of(t), Purpose::data)),
        flat{buffer.data(), t, n} {
    store(flat.data, t, n, 77);
  }
  double operator[](std::int64_t i) const { return load(flat.data, flat.dtype, i); }
  void set(std::int64_t i, double x) { store(flat.data, flat.dtype, i, x); }
  bool guarded() const { return (*this)[flat.count] == 77; }
  Buffer buffer;
  Flat flat;
};

std::uint64_t bits(double x) {
  return std::bit_cast<std::uint64_t>(x);
}

// Sum in rank order as the contract says, rounded once.
double serial_sum(DType wire, int seed, int n, std::int64_t i, const std::int64_t* weights = nullptr) {
  if (wire == DType::bf16) {
    float sum = 0;
    for (int r = 0; r < n; ++r) {
      const auto x = static_cast<float>(rounded(wire, value(seed, r, i)));
      const float term = weights != nullptr ? static_cast<float>(weights[r]) * x : x;
      sum = r == 0 ? term : sum + term;
    }
    return sum;
  }
  double sum = 0;
  for (int r = 0; r < n; ++r) {
    const double x = rounded(wire, value(seed, r, i));
    const double term = weights != nullptr ? static_cast<double>(weights[r]) * x : x;
    sum = r == 0 ? term : sum + term;
  }
  return sum;
}
double divided(DType wire, double sum, std::int64_t by) {
  return wire == DType::bf16 ? static_cast<float>(sum) / static_cast<float>(by)
                             : sum / static_cast<double>(by);
}

// FNV-1a of a buffer, to compare results between ranks.
std::string digest(const Tensor& t) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  const auto* p = static_cast<const unsigned char*>(t.flat.data);
  for (std::int64_t i = 0; i < t.flat.bytes(); ++i) h = (h ^ p[i]) * 0x100000001b3ull;
  return std::to_string(h);
}

}  // namespace

TEST_CASE("all_gather puts every shard in its place, from outside and in place") {
  Ranks ranks({}, small_messages());
  const auto all = ranks.everyone();
  for (const DType t : {DType::f32, DType::bf16, DType::f64})
    for (const std::int64_t n : kCounts)
      for (const bool in_place : {false, true}) {
        Tensor full(*ranks.device, t, n * ranks.size), shard(*ranks.device, t, n);
        for (std::int64_t i = 0; i < n; ++i) {
          shard.set(i, value(1, ranks.rank, i));
          if (in_place) full.set(ranks.rank * n + i, value(1, ranks.rank, i));
        }
        all->all_gather(ranks.transfer, kLabel, full.flat,
                        in_place ? full.flat.slice(ranks.rank * n, n) : shard.flat);
        ranks.device->synchronize();
        std::int64_t wrong = 0;
        for (int r = 0; r < ranks.size; ++r)
          for (std::int64_t i = 0; i < n; ++i) wrong += full[r * n + i] != rounded(t, value(1, r, i));
        CHECK(wrong == 0);
        CHECK(full.guarded());
      }
}

TEST_CASE("reduce_scatter gives every rank the sum of its part, fp32 from a bf16 wire unrounded") {
  Ranks ranks({}, small_messages());
  const auto all = ranks.everyone();
  const std::pair<DType, DType> dtypes[] = {{DType::f32, DType::f32},
                                            {DType::bf16, DType::bf16},
                                            {DType::f64, DType::f64},
                                            {DType::bf16, DType::f32}};
  for (const auto& [wire, out] : dtypes)
    for (const std::int64_t n : kCounts) {
      Tensor full(*ranks.device, wire, n * ranks.size), shard(*ranks.device, out, n);
      for (std::int64_t i = 0; i < full.flat.count; ++i) full.set(i, value(2, ranks.rank, i));
      all->reduce_scatter(ranks.transfer, kLabel, shard.flat, full.flat, {});
      ranks.device->synchronize();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < n; ++i)
        wrong += bits(shard[i]) != bits(rounded(out, serial_sum(wire, 2, ranks.size, ranks.rank * n + i)));
      CHECK(wrong == 0);
      CHECK(shard.guarded());
    }
}

TEST_CASE("all_reduce_sum and all_reduce_mean equal the serial twin to the last bit, the same on all ranks") {
  Ranks ranks({}, small_messages());
  const auto all = ranks.everyone();
  std::vector<std::int64_t> weights;
  for (int r = 0; r < ranks.size; ++r) weights.push_back(4096 + 513 * r);
  const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  for (const DType t : {DType::f32, DType::bf16, DType::f64})
    for (const std::int64_t n : kCounts)
      for (const int kind : {0, 1, 2}) {
        Tensor data(*ranks.device, t, n);
        for (std::int64_t i = 0; i < n; ++i) data.set(i, value(3, ranks.rank, i));
        const std::int64_t* w = kind == 2 ? weights.data() : nullptr;
        if (kind == 0) {
          all->all_reduce_sum(ranks.transfer, kLabel, data.flat, {});
        } else {
          all->all_reduce_mean(ranks.transfer, kLabel, data.flat, w, {});
        }
        ranks.device->synchronize();
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          double expected = serial_sum(t, 3, ranks.size, i, w);
          if (kind > 0) expected = divided(t, expected, kind == 1 ? ranks.size : total);
          // A group of one leaves its data as it is.
          if (ranks.size == 1) expected = rounded(t, value(3, 0, i));
          wrong += bits(data[i]) != bits(rounded(t, expected));
        }
        CHECK(wrong == 0);
        CHECK(data.guarded());
        const auto digests = ranks.world->gather_strings({Traffic::control, "test", 0}, digest(data));
        CHECK(std::count(digests.begin(), digests.end(), digests[0]) == ranks.size);
      }
}

TEST_CASE("identical copies average to themselves, whatever the weights") {
  Ranks ranks({}, small_messages());
  std::vector<int> members;
  std::mt19937 random(7);
  for (int n = 1; n <= ranks.size; ++n) {
    members.push_back(n - 1);
    if (ranks.rank >= n) continue;
    const auto group = ranks.world->group("copies", members);
    for (const DType t : {DType::f32, DType::bf16})
      for (const bool weighted : {false, true}) {
        const std::int64_t count = 20001;
        Tensor data(*ranks.device, t, count), before(*ranks.device, t, count);
        std::mt19937 bits_of(static_cast<unsigned>(n));  // any finite pattern, but no overflow of a bf16 sum
        for (std::int64_t i = 0; i < count; ++i) {
          const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits_of()));
          const double y = std::isfinite(x) && std::fabs(x) < 1e31f ? x : 1.5;
          data.set(i, y), before.set(i, y);
        }
        std::vector<std::int64_t> weights;
        for (int r = 0; r < n; ++r) weights.push_back(1 + 99991 * r);
        group->all_reduce_mean(ranks.transfer, kLabel, data.flat, weighted ? weights.data() : nullptr, {});
        ranks.device->synchronize();
        CHECK(std::memcmp(data.flat.data, before.flat.data, static_cast<std::size_t>(data.flat.bytes())) ==
              0);
      }
  }
}

TEST_CASE("hop rounding equals a serial emulation, also of more hops than ranks") {
  Ranks ranks({}, small_messages());
  const auto all = ranks.everyone();
  const int n = ranks.size;
  for (const int hops : {0, 512})
    for (const bool mean : {false, true}) {
      const std::int64_t count = 997;
      Tensor data(*ranks.device, DType::bf16, count);
      for (std::int64_t i = 0; i < count; ++i) data.set(i, value(4, ranks.rank, i));
      const ReduceOptions options{ReduceRounding::hop, hops};
      if (mean) {
        all->all_reduce_mean(ranks.transfer, kLabel, data.flat, nullptr, options);
      } else {
        all->all_reduce_sum(ranks.transfer, kLabel, data.flat, options);
      }
      ranks.device->synchronize();
      const int parts = hops == 0 ? 1 : (hops + n - 1) / n;
      std::int64_t wrong = 0;
      double error = 0, size = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < n; ++r)
          for (int p = 0; p < parts; ++p)
            sum = to_float(to_bf16(sum + to_float(to_bf16(static_cast<float>(value(4, r, i)))) /
                                             static_cast<float>(parts)));
        if (mean) sum = to_float(to_bf16(sum / static_cast<float>(n)));
        if (n > 1) wrong += bits(data[i]) != bits(sum);
        double exact = 0;
        for (int r = 0; r < n; ++r) exact += rounded(DType::bf16, value(4, r, i));
        if (mean) exact /= n;
        error += (data[i] - exact) * (data[i] - exact), size += exact * exact;
      }
      CHECK(wrong == 0);
      // The effect that the option is for: many roundings cost far more than the last one alone.
      if (n > 1 && hops == 512) CHECK(std::sqrt(error / size) > 0.005);
      if (hops == 0) CHECK(std::sqrt(error / size) < 0.01);
    }
}

TEST_CASE("all_reduce_max takes the largest number and lets NaN through") {
  Ranks ranks;
  const auto all = ranks.everyone();
  for (const std::int64_t n : {1, 7, 997}) {
    Tensor data(*ranks.device, DType::f64, n);
    for (std::int64_t i = 0; i < n; ++i) data.set(i, value(5, ranks.rank, i));
    if (ranks.rank == ranks.size - 1) data.set(0, std::nan(""));
    all->all_reduce_max(ranks.transfer, kLabel, data.flat);
    ranks.device->synchronize();
    CHECK(std::isnan(data[0]));
    std::int64_t wrong = 0;
    for (std::int64_t i = 1; i < n; ++i) {
      double best = value(5, 0, i);
      for (int r = 1; r < ranks.size; ++r) best = std::max(best, value(5, r, i));
      wrong += data[i] != best;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("broadcast gives everyone the root's data, from every root") {
  Ranks ranks({}, small_messages());
  const auto all = ranks.everyone();
  for (const DType t : {DType::f32, DType::bf16})
    for (const std::int64_t n : kCounts)
      for (int root = 0; root < ranks.size; ++root) {
        Tensor data(*ranks.device, t, n);
        for (std::int64_t i = 0; i < n; ++i) data.set(i, value(6, ranks.rank, i));
        all->broadcast(ranks.transfer, kLabel, data.flat, root);
        ranks.device->synchronize();
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < n; ++i) wrong += data[i] != rounded(t, value(6, root, i));
        CHECK(wrong == 0);
        CHECK(data.guarded());
      }
}

TEST_CASE("wrong counts and dtypes are refused before anything is enqueued") {
  Ranks ranks;
  const auto all = ranks.everyone();
  Tensor a(*ranks.device, DType::f32, 8), b(*ranks.device, DType::bf16, 8 * ranks.size);
  CHECK_THROWS_AS(all->all_gather(ranks.transfer, kLabel, a.flat.slice(0, 7), a.flat), InternalError);
  CHECK_THROWS_AS(all->all_gather(ranks.transfer, kLabel, b.flat, a.flat), InternalError);
  CHECK_THROWS_AS(all->reduce_scatter(ranks.transfer, kLabel, a.flat.slice(0, 3), b.flat, {}), InternalError);
  CHECK_THROWS_AS(all->all_reduce_max(ranks.transfer, kLabel, a.flat), InternalError);
  CHECK_THROWS_AS(all->all_reduce_sum(ranks.transfer, kLabel, Flat{a.flat.data, DType::i32, 8}, {}),
                  InternalError);
  CHECK_THROWS_AS(all->broadcast(ranks.transfer, kLabel, a.flat, ranks.size), InternalError);
  CHECK_NOTHROW(ranks.device->synchronize());
}
