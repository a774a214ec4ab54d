#pragma once
// Tensors for tests of Ops on the CPU device: values in double, stored in a dtype with padding between rows.
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "backend/cpu/ops.h"
#include "tests/support/reference.h"

namespace strata::test {

using reference::Vector;

inline double rounded(double x, DType type) {
  return type == DType::bf16 ? static_cast<double>(to_float(to_bf16(static_cast<float>(x))))
                             : static_cast<float>(x);
}

// Normal numbers that the dtype holds exactly.
inline Vector random_values(std::size_t count, DType type, unsigned seed, double scale = 1) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0, scale);
  Vector v(count);
  for (double& x : v) x = rounded(normal(engine), type);
  return v;
}

// rows x cols values with `gap` sentinel elements after each row, which no operation may touch.
class Tensor {
 public:
  Tensor(DType type, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0, double fill = NAN)
      : type_(type),
        rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        bytes_(static_cast<std::size_t>(rows * stride_) * size_of(type)) {
    for (std::int64_t i = 0; i < rows * stride_; ++i) put(i, i % stride_ < cols ? fill : kSentinel);
  }
  Tensor(DType type, std::int64_t rows, std::int64_t cols, const Vector& values, std::int64_t gap = 0)
      : Tensor(type, rows, cols, gap) {
    for (std::int64_t i = 0; i < rows * cols; ++i) put(i / cols * stride_ + i % cols, values[i]);
  }
  Matrix matrix() { return {bytes_.data(), type_, rows_, cols_, stride_}; }
  Flat flat() { return {bytes_.data(), type_, rows_ * stride_}; }
  Vector values() const {
    Vector v;
    for (std::int64_t r = 0; r < rows_; ++r)
      for (std::int64_t c = 0; c < cols_; ++c) v.push_back(get(r * stride_ + c));
    return v;
  }
  bool gaps_untouched() const {
    for (std::int64_t r = 0; r < rows_; ++r)
      for (std::int64_t c = cols_; c < stride_; ++c)
        if (get(r * stride_ + c) != kSentinel) return false;
    return true;
  }
  const std::vector<unsigned char>& bytes() const { return bytes_; }
  void set_bytes(std::vector<unsigned char> bytes) { bytes_ = std::move(bytes); }

 private:
  static constexpr double kSentinel = -12288;
  void put(std::int64_t i, double x) {
    if (type_ == DType::f32) reinterpret_cast<float*>(bytes_.data())[i] = static_cast<float>(x);
    if (type_ == DType::bf16) reinterpret_cast<bf16*>(bytes_.data())[i] = to_bf16(static_cast<float>(x));
  }
  double get(std::int64_t i) const {
    return type_ == DType::f32 ? reinterpret_cast<const float*>(bytes_.data())[i]
                               : to_float(reinterpret_cast<const bf16*>(bytes_.data())[i]);
  }
  DType type_;
  std::int64_t rows_, cols_, stride_;
  std::vector<unsigned char> bytes_;
};

// |found - expected| over |expected|, by norm.
inline double relative_error(const Vector& found, const Vector& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += (found.at(i) - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// fp32 arithmetic with sums of some thousand terms; bf16 is rounded once at the end (2^-8 / 2 at most an
// element).
inline double tolerance(DType type) {
  return type == DType::bf16 ? 3.95e-3 : 2e-6;
}

struct CpuFixture {
  explicit CpuFixture(CpuDeviceOptions device_options = {}, CpuOpsOptions options = {})
      : device(make_cpu_device(device_options)),
        stream(device->create_stream("compute", Device::StreamKind::compute)),
        ops(make_cpu_ops(*device, options)) {}
  std::unique_ptr<CpuDevice> device;
  Stream& stream;
  std::unique_ptr<Ops> ops;
};

// Calls check(name) with the kernels held to each instruction set that this CPU has, the least first.
template <class F>
void for_each_instruction_set(F check) {
  struct Restore {
    ~Restore() { hold_to(0); }
    static void hold_to(std::int64_t targets) {  // 0: all
      hwy::SetSupportedTargetsForTest(targets);
      hwy::GetChosenTarget().DeInit();
    }
  };
  const std::int64_t here = hwy::SupportedTargets();
  const Restore restore;
  for (const std::int64_t target : {HWY_SSE4, HWY_AVX2, HWY_AVX3}) {
    if ((here & target) == 0) continue;
    Restore::hold_to(target);
    check(hwy::TargetName(target));
  }
}

}  // namespace strata::test
