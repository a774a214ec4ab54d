// Cross-entropy over rows of logits, in place.
#include <cmath>

#include "backend/cpu/ops_kernels.h"
#include "backend/cpu/ops_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/ops_loss.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T>
float largest(const T* row, std::size_t count) {
  const std::size_t n = lanes();
  VecF m0 = hn::Set(F32(), widen(row[0])), m1 = m0;
  std::size_t i = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    m0 = hn::Max(m0, load(row + i));
    m1 = hn::Max(m1, load(row + i + n));
  }
  float most = max_of_lanes(hn::Max(m0, m1));
  for (; i < count; ++i) most = std::max(most, widen(row[i]));
  return most;
}

// Sum of exp(row - shift). NaN anywhere in the row gives NaN.
template <class T>
float sum_of_exponentials(const T* row, std::size_t count, float shift) {
  const std::size_t n = lanes();
  const VecF minus = hn::Set(F32(), -shift);
  VecF s0 = hn::Zero(F32()), s1 = s0;
  std::size_t i = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    s0 = hn::Add(s0, exp(hn::Add(load(row + i), minus)));
    s1 = hn::Add(s1, exp(hn::Add(load(row + i + n), minus)));
  }
  float sum = sum_of_lanes(hn::Add(s0, s1));
  for (; i < count; ++i) sum += std::exp(widen(row[i]) - shift);
  return sum;
}

template <class T>
void rows_of_logits(Matrix logits, float* losses, const std::int32_t* targets, bool write_gradient,
                    std::int64_t begin, std::int64_t end) {
  const auto count = static_cast<std::size_t>(logits.cols);
  for (std::int64_t r = begin; r < end; ++r) {
    T* row = static_cast<T*>(logits.data) + r * logits.stride;
    const std::int32_t target = targets[r];
    if (target < 0) {
      losses[r] = 0.0f;
      if (write_gradient) std::memset(row, 0, count * sizeof(T));
      continue;
    }
    // Only differences to the largest logit enter, so nothing overflows and large offsets cost no digits.
    const float most = largest(row, count);
    const float log_sum = std::log(sum_of_exponentials(row, count, most));
    const float chosen = widen(row[target]) - most;
    losses[r] = log_sum - chosen;
    if (!write_gradient) continue;
    const VecF shift = hn::Set(F32(), most), log_sums = hn::Set(F32(), log_sum);
    for_vectors(count, [&](std::size_t i, std::size_t n) HWY_ATTR {
      store(exp(hn::Sub(hn::Sub(load(row + i, n), shift), log_sums)), row + i, n);
    });
    const float at_target = std::expm1(chosen - log_sum);  // softmax - 1 without cancellation
    if constexpr (sizeof(T) == 2) {
      row[target] = to_bf16(at_target);
    } else {
      row[target] = at_target;
    }
  }
}

}  // namespace

void CrossEntropy(Matrix logits, float* losses, const std::int32_t* targets, bool write_gradient,
                  std::int64_t begin, std::int64_t end) {
  const auto call = logits.dtype == DType::bf16 ? rows_of_logits<bf16> : rows_of_logits<float>;
  call(logits, losses, targets, write_gradient, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::cpu {
HWY_EXPORT(CrossEntropy);
void kernels::cross_entropy(Matrix logits, float* losses, const std::int32_t* targets, bool write_gradient,
                            std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(CrossEntropy)(logits, losses, targets, write_gradient, begin, end);
}
}  // namespace strata::cpu
#endif
