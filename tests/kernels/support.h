#pragma once
// Kernel tests: tensors in device memory, and a launch repeated under every schedule of the emulation.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/device_array.h"
#include "tests/support/ops_fixture.h"
#if defined(STRATA_EMULATE)
#include "cuda/emulation/options.h"
#endif

namespace strata::test {

#if defined(STRATA_MODE_plain)
inline constexpr bool thorough = true;  // the other modes are slower and look for other faults
#else
inline constexpr bool thorough = false;
#endif

// A Tensor's copy in device memory.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& host) : host_(host), memory_(host.bytes()) {}
  Matrix matrix() {
    Matrix m = host_.matrix();
    m.data = memory_.data();
    return m;
  }
  Flat flat() {
    Flat f = host_.flat();
    f.data = memory_.data();
    return f;
  }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(memory_.data());
  }
  Tensor download() const {
    Tensor t = host_;
    t.set_bytes(memory_.download());
    return t;
  }

 private:
  Tensor host_;
  DeviceArray<unsigned char> memory_;
};

enum class Schedules { all, few };

// What `run` returns (it makes its own device memory), after checking that every schedule gives the same
// bits: forward and reverse thread orders with early and late copies, and five random orders of threads and
// blocks; `few`, and modes other than plain: forward and one random order. On a GPU: twice. With
// STRATA_KERNEL_TESTS_ONE_SCHEDULE set: the environment's schedule alone (tests/cuda/mutate.py).
inline std::vector<Tensor> in_every_schedule(const std::function<std::vector<Tensor>()>& run,
                                             Schedules which = Schedules::all) {
  std::vector<Tensor> first = run();
  if (std::getenv("STRATA_KERNEL_TESTS_ONE_SCHEDULE") != nullptr) return first;
  const auto again = [&] {
    const std::vector<Tensor> other = run();
    REQUIRE(other.size() == first.size());
    for (std::size_t i = 0; i < first.size(); ++i) REQUIRE(other[i].bytes() == first[i].bytes());
  };
#if defined(STRATA_EMULATE)
  using emulation::CopyTime;
  using emulation::Order;
  const auto schedule = [&](Order order, CopyTime copies, std::uint64_t seed) {
    emulation::Options options = emulation::Options::from_environment();
    options.threads = order;
    options.blocks = order;
    options.copies = copies;
    options.seed = seed;
    const emulation::ScopedOptions scope(options);
    again();
  };
  if (which == Schedules::all && thorough) {
    schedule(Order::forward, CopyTime::at_wait, 0);
    schedule(Order::reverse, CopyTime::at_issue, 0);
    schedule(Order::reverse, CopyTime::at_wait, 0);
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      schedule(Order::random, seed % 2 == 0 ? CopyTime::at_issue : CopyTime::at_wait, seed);
    }
  } else {
    schedule(Order::random, CopyTime::at_wait, 1);
  }
#else
  static_cast<void>(which);
  again();
#endif
  return first;
}

// Largest difference over the largest expected magnitude; NaN where they disagree about a NaN or an infinity.
inline double worst_error(const Vector& found, const Vector& expected) {
  double worst = 0, most = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double f = found.at(i), e = expected[i];
    if (std::isnan(e) && std::isnan(f)) continue;
    if (std::isinf(e) && f == e) continue;
    const double difference = std::fabs(f - e);
    if (!(difference <= worst)) worst = difference;
    if (std::isfinite(e)) most = std::max(most, std::fabs(e));
  }
  return most > 0 ? worst / most : worst;
}

// Element by element the bits of a and b, where all NaNs are alike.
inline bool same_values(const Tensor& a, const Tensor& b) {
  const Vector x = a.values(), y = b.values();
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (std::isnan(y[i]) ? !std::isnan(x.at(i)) : x.at(i) != y[i] || std::signbit(x[i]) != std::signbit(y[i]))
      return false;
  }
  return x.size() == y.size();
}

inline Tensor int_tensor(const std::vector<std::int32_t>& values) {
  // The dtype only says that an element has four bytes.
  Tensor t(DType::f32, 1, static_cast<std::int64_t>(values.size()));
  std::vector<unsigned char> bytes(values.size() * sizeof(std::int32_t));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  t.set_bytes(std::move(bytes));
  return t;
}

}  // namespace strata::test
