// Optimizer, elementwise, federation and sum kernels on flat buffers.
//
// Every kernel works through blocks of kBlock elements that are widened to fp32 on the stack (or used in
// place when they are fp32 already), so arithmetic is written once, for fp32. No fused multiply-add here: the
// results are the same bits whatever the instruction set.
#include <cmath>

#include "backend/cpu/ops_kernels.h"
#include "backend/cpu/ops_targets.h"
#include "backend/random.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/ops_flat.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

using std::size_t;
constexpr std::int64_t kBlock = 1024;

// Elements [begin, begin + count) of x as fp32: in place, or widened into `room`.
const float* read(const ConstFlat& x, std::int64_t begin, size_t count, float* room) {
  if (x.dtype == DType::f32) return static_cast<const float*>(x.data) + begin;
  const bf16* from = static_cast<const bf16*>(x.data) + begin;
  for_vectors(count, [&](size_t i, size_t n) HWY_ATTR { store(load(from + i, n), room + i, n); });
  return room;
}

// Where results for these elements go: in place, or `room`, which `write` then narrows.
float* place(const Flat& x, std::int64_t begin, float* room) {
  return x.dtype == DType::f32 ? static_cast<float*>(x.data) + begin : room;
}

void write(const Flat& x, std::int64_t begin, size_t count, const float* values) {
  if (x.dtype == DType::f32) {
    float* to = static_cast<float*>(x.data) + begin;
    if (to != values) std::memcpy(to, values, count * sizeof(float));
    return;
  }
  bf16* to = static_cast<bf16*>(x.data) + begin;
  for_vectors(count, [&](size_t i, size_t n) HWY_ATTR { store(load(values + i, n), to + i, n); });
}

// bf16 elements, rounded up or down at random; first is the first element's index within its parameter.
void write_stochastic(const Flat& x, std::int64_t begin, size_t count, const float* values, RandomKey key,
                      std::uint64_t first) {
  bf16* to = static_cast<bf16*>(x.data) + begin;
  constexpr size_t kAtOnce = 8;  // elements that share a Philox block
  for (size_t i = 0; i < count;) {
    const auto in_block = static_cast<std::uint32_t>((first + i) % kAtOnce);
    const PhiloxBlock block = philox_block(key, (first + i) / kAtOnce);
    const size_t n = std::min<size_t>(kAtOnce - in_block, count - i);
    for (size_t k = 0; k < n; ++k) {
      const std::uint32_t word = rounding_word(block, in_block + static_cast<std::uint32_t>(k));
      to[i + k].bits = stochastic_bf16_bits(values[i + k], word);
    }
    i += n;
  }
}

template <class F>
HWY_INLINE void for_blocks(std::int64_t begin, std::int64_t end, F&& f) {
  for (std::int64_t at = begin; at < end; at += kBlock)
    f(at, static_cast<size_t>(std::min(kBlock, end - at)));
}

using Room = float[kBlock];

// Sixteen chains, element i in chain i mod 16, then pairwise: the same bits for every vector width. A square
// of an fp32 is exact in fp64.
template <bool kSquare>
double chains_of_sums(ConstFlat x, std::int64_t begin, std::int64_t end) {
  constexpr size_t kChains = 16;
  double sums[kChains] = {};
  alignas(64) Room room;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* values = read(x, at, count, room);
    const hn::ScalableTag<double> d;
    const hn::Rebind<float, hn::ScalableTag<double>> half;
    const size_t n = hn::Lanes(d);
    const size_t whole = count / kChains * kChains;
    for (size_t c = 0; c < kChains; c += n) {
      auto sum = hn::LoadU(d, sums + c);
      for (size_t i = 0; i < whole; i += kChains) {
        const auto v = hn::PromoteTo(d, hn::LoadU(half, values + i + c));
        sum = hn::Add(sum, kSquare ? hn::Mul(v, v) : v);
      }
      hn::StoreU(sum, d, sums + c);
    }
    for (size_t i = whole; i < count; ++i) {
      const double v = values[i];
      sums[i - whole] += kSquare ? v * v : v;
    }
  });
  for (size_t step = kChains / 2; step != 0; step /= 2) {
    for (size_t c = 0; c < step; ++c) sums[c] += sums[c + step];
  }
  return sums[0];
}

}  // namespace

double SumRange(const float* values, std::int64_t begin, std::int64_t end) {
  return chains_of_sums<false>({values, DType::f32, end}, begin, end);
}
double SumOfSquaresRange(ConstFlat x, std::int64_t begin, std::int64_t end) {
  return chains_of_sums<true>(x, begin, end);
}

void AdamW(const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient, Flat m, Flat v,
           float gradient_scale, std::int64_t begin, std::int64_t end) {
  const double correction1 = 1.0 - std::pow(static_cast<double>(step.beta1), static_cast<double>(step.step));
  const double correction2 = 1.0 - std::pow(static_cast<double>(step.beta2), static_cast<double>(step.step));
  const F32 d;
  const VecF scale = hn::Set(d, gradient_scale);
  const VecF beta1 = hn::Set(d, step.beta1), rest1 = hn::Set(d, 1.0f - step.beta1);
  const VecF beta2 = hn::Set(d, step.beta2), rest2 = hn::Set(d, 1.0f - step.beta2);
  const VecF keep = hn::Set(d, static_cast<float>(1.0 - static_cast<double>(step.lr) * step.weight_decay));
  const VecF rate = hn::Set(d, static_cast<float>(step.lr / correction1));
  const VecF root2 = hn::Set(d, static_cast<float>(1.0 / std::sqrt(correction2)));
  const VecF eps = hn::Set(d, step.eps);
  alignas(64) Room pr, gr, mr, vr;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* g = read(gradient, at, count, gr);
    const float* p_in = read(parameter, at, count, pr);
    const float* m_in = read(m, at, count, mr);
    const float* v_in = read(v, at, count, vr);
    float *p_out = place(parameter, at, pr), *m_out = place(m, at, mr), *v_out = place(v, at, vr);
    for_vectors(count, [&](size_t i, size_t n) HWY_ATTR {
      const VecF gi = hn::Mul(load(g + i, n), scale);
      const VecF mi = hn::Add(hn::Mul(load(m_in + i, n), beta1), hn::Mul(gi, rest1));
      const VecF vi = hn::Add(hn::Mul(load(v_in + i, n), beta2), hn::Mul(hn::Mul(gi, gi), rest2));
      const VecF denominator = hn::Add(hn::Mul(hn::Sqrt(vi), root2), eps);
      const VecF decayed = hn::Mul(load(p_in + i, n), keep);
      store(hn::Sub(decayed, hn::Div(hn::Mul(rate, mi), denominator)), p_out + i, n);
      store(mi, m_out + i, n);
      store(vi, v_out + i, n);
    });
    if (step.stochastic_rounding) {
      write_stochastic(parameter, at, count, p_out, step.key,
                       static_cast<std::uint64_t>(step.first_element + at));
    } else {
      write(parameter, at, count, p_out);
    }
    write(m, at, count, m_out);
    write(v, at, count, v_out);
    if (compute) write(compute, at, count, p_out);
  });
}

void Sgd(float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient, float gradient_scale,
         std::int64_t begin, std::int64_t end) {
  const VecF keep = hn::Set(F32(), static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay));
  const VecF rate = hn::Set(F32(), lr), scale = hn::Set(F32(), gradient_scale);
  alignas(64) Room pr, gr;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* g = read(gradient, at, count, gr);
    const float* p_in = read(parameter, at, count, pr);
    float* p = place(parameter, at, pr);
    for_vectors(count, [&](size_t i, size_t n) HWY_ATTR {
      const VecF step = hn::Mul(rate, hn::Mul(load(g + i, n), scale));
      store(hn::Sub(hn::Mul(load(p_in + i, n), keep), step), p + i, n);
    });
    write(parameter, at, count, p);
    if (compute) write(compute, at, count, p);
  });
}

void Fill(Flat out, float value, std::int64_t begin, std::int64_t end) {
  const VecF v = hn::Set(F32(), value);
  const auto count = static_cast<size_t>(end - begin);
  if (out.dtype == DType::f32) {
    float* to = static_cast<float*>(out.data) + begin;
    for_vectors(count, [&](size_t i, size_t n) HWY_ATTR { store(v, to + i, n); });
  } else {
    bf16* to = static_cast<bf16*>(out.data) + begin;
    for_vectors(count, [&](size_t i, size_t n) HWY_ATTR { store(v, to + i, n); });
  }
}

void Cast(Flat out, ConstFlat in, std::int64_t begin, std::int64_t end) {
  if (out.dtype == in.dtype) {
    if (out.data != in.data) {
      std::memcpy(out.at(begin), in.at(begin), static_cast<size_t>(end - begin) * size_of(out.dtype));
    }
    return;
  }
  alignas(64) Room room;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    write(out, at, count, read(in, at, count, room));
  });
}

void Axpby(Flat y, float a, ConstFlat x, float b, std::int64_t begin, std::int64_t end) {
  const VecF va = hn::Set(F32(), a), vb = hn::Set(F32(), b);
  alignas(64) Room xr, yr;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* from = read(x, at, count, xr);
    float* to = place(y, at, yr);
    if (b == 0.0f) {
      for_vectors(count,
                  [&](size_t i, size_t n) HWY_ATTR { store(hn::Mul(va, load(from + i, n)), to + i, n); });
    } else {
      const float* old = read(y, at, count, yr);
      for_vectors(count, [&](size_t i, size_t n) HWY_ATTR {
        store(hn::Add(hn::Mul(va, load(from + i, n)), hn::Mul(vb, load(old + i, n))), to + i, n);
      });
    }
    write(y, at, count, to);
  });
}

void PseudoGradient(Flat delta, ConstFlat theta_old, ConstFlat theta, std::int64_t begin, std::int64_t end) {
  alignas(64) Room dr, old_room, now_room;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* old = read(theta_old, at, count, old_room);
    const float* now = read(theta, at, count, now_room);
    float* to = place(delta, at, dr);
    for_vectors(count, [&](size_t i, size_t n)
                           HWY_ATTR { store(hn::Sub(load(old + i, n), load(now + i, n)), to + i, n); });
    write(delta, at, count, to);
  });
}

void OuterStepRange(const OuterStep& step, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                    ConstFlat delta, std::int64_t begin, std::int64_t end) {
  const VecF eta = hn::Set(F32(), step.eta), mu = hn::Set(F32(), step.momentum);
  const VecF alpha = hn::Set(F32(), step.alpha), rest = hn::Set(F32(), 1.0f - step.alpha);
  const OuterRule rule = step.rule;
  const bool mix = step.alpha != 0.0f;
  alignas(64) Room tr, old_room, mr, dr, new_room;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* change = read(delta, at, count, dr);
    const float* old = read(theta_old, at, count, old_room);
    const float* local = mix ? read(theta, at, count, tr) : nullptr;
    float* state = nullptr;
    if (rule != OuterRule::fedavg) {
      read(momentum, at, count, mr);
      state = place(momentum, at, mr);
    }
    for_vectors(count, [&](size_t i, size_t n) HWY_ATTR {
      const VecF o = load(old + i, n), c = load(change + i, n);
      VecF next = o;
      switch (rule) {
        case OuterRule::fedavg:
          next = hn::Sub(o, hn::Mul(eta, c));
          break;
        case OuterRule::fedavgm: {
          const VecF v = hn::Add(hn::Mul(mu, load(state + i, n)), c);
          store(v, state + i, n);
          next = hn::Sub(o, hn::Mul(eta, v));
          break;
        }
        case OuterRule::fedmom: {
          const VecF v = hn::Sub(o, hn::Mul(eta, c));
          next = hn::Add(v, hn::Mul(mu, hn::Sub(v, load(state + i, n))));
          store(v, state + i, n);
          break;
        }
        case OuterRule::diloco: {
          const VecF m = hn::Add(hn::Mul(mu, load(state + i, n)), c);
          store(m, state + i, n);
          next = hn::Sub(o, hn::Mul(eta, hn::Add(c, hn::Mul(mu, m))));
          break;
        }
      }
      store(next, new_room + i, n);
    });
    if (state) write(momentum, at, count, state);
    write(theta_old, at, count, new_room);
    if (mix) {
      for_vectors(count, [&](size_t i, size_t n) HWY_ATTR {
        const VecF mixed = hn::Add(hn::Mul(alpha, load(local + i, n)), hn::Mul(rest, load(new_room + i, n)));
        store(mixed, new_room + i, n);
      });
    }
    write(theta, at, count, new_room);
    if (compute) write(compute, at, count, new_room);
  });
}

void QuantizeBlock(std::int8_t* q, float* scale, Flat error, ConstFlat x, std::int64_t begin,
                   std::int64_t end) {
  alignas(64) Room room;
  // Magnitudes compared as integers, so that a NaN, the largest of all, reaches the scale.
  std::uint32_t most = 0;
  auto value = [&](const float* from, std::int64_t at, size_t i) HWY_ATTR {
    return error ? from[i] + static_cast<const float*>(error.data)[at + static_cast<std::int64_t>(i)]
                 : from[i];
  };
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* from = read(x, at, count, room);
    for (size_t i = 0; i < count; ++i) most = std::max(most, ieee::bits(value(from, at, i)) & 0x7fffffffu);
  });
  const float step = ieee::from_bits(most) / 127.0f;
  *scale = step;
  const bool usable = most != 0 && most < 0x7f800000u && step > 0.0f;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* from = read(x, at, count, room);
    for (size_t i = 0; i < count; ++i) {
      const float v = value(from, at, i);
      // A scale that is zero or not finite keeps nothing (q = 0; dequantising gives 0 or NaN); a subnormal
      // one is rounded so coarsely that a ratio may pass 127.
      const float ratio = usable ? std::min(std::max(v / step, -127.0f), 127.0f) : 0.0f;
      // Adding and taking away 1.5 2^23 rounds to the nearest integer, ties to even.
      const float rounded = (ratio + 12582912.0f) - 12582912.0f;
      q[at + static_cast<std::int64_t>(i)] = static_cast<std::int8_t>(static_cast<std::int32_t>(rounded));
      if (error) static_cast<float*>(error.data)[at + static_cast<std::int64_t>(i)] = v - rounded * step;
    }
  });
}

void DequantizeBlock(Flat out, const std::int8_t* q, float scale, float weight, bool accumulate,
                     std::int64_t begin, std::int64_t end) {
  const float factor = weight * scale;
  alignas(64) Room room;
  for_blocks(begin, end, [&](std::int64_t at, size_t count) HWY_ATTR {
    const float* old = accumulate ? read(out, at, count, room) : nullptr;
    float* to = place(out, at, room);
    for (size_t i = 0; i < count; ++i) {
      const float v = factor * static_cast<float>(q[at + static_cast<std::int64_t>(i)]);
      to[i] = accumulate ? old[i] + v : v;
    }
    write(out, at, count, to);
  });
}

void InitializeNormal(Flat out, float standard_deviation, RandomKey key, std::int64_t first_element,
                      std::int64_t begin, std::int64_t end) {
  constexpr std::uint64_t kAtOnce = 4;                     // elements that share a Philox block
  constexpr std::uint64_t kBlocks = kBlock / kAtOnce - 1;  // whole blocks that cover any kBlock - 7 elements
  alignas(64) Room normals;
  for (std::int64_t at = begin; at < end;) {
    const std::uint64_t element = static_cast<std::uint64_t>(first_element + at);
    const std::uint64_t block = element / kAtOnce;
    const auto skip = static_cast<size_t>(element % kAtOnce);
    for (std::uint64_t b = 0; b < kBlocks; ++b) {
      const PhiloxBlock words = philox_block(key, block + b);
      float* to = normals + b * kAtOnce;
      normal_pair(words.word[0], words.word[1], to[0], to[1]);
      normal_pair(words.word[2], words.word[3], to[2], to[3]);
      for (size_t i = 0; i < kAtOnce; ++i) to[i] *= standard_deviation;
    }
    const size_t count = std::min<size_t>(kBlocks * kAtOnce - skip, static_cast<size_t>(end - at));
    write(out, at, count, normals + skip);
    at += static_cast<std::int64_t>(count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::cpu {

HWY_EXPORT(SumRange);
HWY_EXPORT(SumOfSquaresRange);
HWY_EXPORT(AdamW);
HWY_EXPORT(Sgd);
HWY_EXPORT(Fill);
HWY_EXPORT(Cast);
HWY_EXPORT(Axpby);
HWY_EXPORT(PseudoGradient);
HWY_EXPORT(OuterStepRange);
HWY_EXPORT(QuantizeBlock);
HWY_EXPORT(DequantizeBlock);
HWY_EXPORT(InitializeNormal);

namespace kernels {

double sum_range(const float* values, std::int64_t begin, std::int64_t end) {
  return HWY_DYNAMIC_DISPATCH(SumRange)(values, begin, end);
}
double sum_of_squares_range(ConstFlat x, std::int64_t begin, std::int64_t end) {
  return HWY_DYNAMIC_DISPATCH(SumOfSquaresRange)(x, begin, end);
}
void adamw(const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient, Flat m, Flat v,
           float gradient_scale, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(AdamW)(step, parameter, compute, gradient, m, v, gradient_scale, begin, end);
}
void sgd(float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient, float gradient_scale,
         std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(Sgd)(lr, weight_decay, parameter, compute, gradient, gradient_scale, begin, end);
}
void fill(Flat out, float value, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(Fill)(out, value, begin, end);
}
void cast(Flat out, ConstFlat in, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(Cast)(out, in, begin, end);
}
void axpby(Flat y, float a, ConstFlat x, float b, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(Axpby)(y, a, x, b, begin, end);
}
void pseudo_gradient(Flat delta, ConstFlat theta_old, ConstFlat theta, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(PseudoGradient)(delta, theta_old, theta, begin, end);
}
void outer_step(const OuterStep& step, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                ConstFlat delta, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(OuterStepRange)(step, theta, compute, theta_old, momentum, delta, begin, end);
}
void quantize_block(std::int8_t* q, float* scale, Flat error, ConstFlat x, std::int64_t begin,
                    std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(QuantizeBlock)(q, scale, error, x, begin, end);
}
void dequantize_block(Flat out, const std::int8_t* q, float scale, float weight, bool accumulate,
                      std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(DequantizeBlock)(out, q, scale, weight, accumulate, begin, end);
}
void initialize_normal(Flat out, float standard_deviation, RandomKey key, std::int64_t first_element,
                       std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(InitializeNormal)(out, standard_deviation, key, first_element, begin, end);
}

}  // namespace kernels
}  // namespace strata::cpu
#endif
