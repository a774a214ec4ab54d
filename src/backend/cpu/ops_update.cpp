// CpuOps: sums, optimizer, elementwise, federation and initialisation.
#include <algorithm>
#include <cmath>

#include "backend/cpu/ops_impl.h"

namespace strata::cpu {

using kernels::kGrain;

template <class F>
void CpuOps::enqueue_sum(Stream& stream, double* out, std::int64_t count, bool accumulate, F part) {
  const std::int64_t ranges = (count + kGrain - 1) / kGrain;
  const ScratchBuffer scratch = scratch_.at_least(stream, static_cast<std::size_t>(ranges) * sizeof(double));
  cpu_stream(stream).run([=, this] {
    auto* parts = scratch->as<double>();
    workers_.run(
        ranges, [&](std::int64_t i, int) { parts[i] = part(i * kGrain, std::min(count, (i + 1) * kGrain)); });
    double total = accumulate ? *out : 0.0;
    for (std::int64_t i = 0; i < ranges; ++i) total += parts[i];
    *out = total;
  });
}

void CpuOps::sum(Stream& stream, double* out, const float* values, std::int64_t count, bool accumulate) {
  checks::sum(out, values, count);
  enqueue_sum(stream, out, count, accumulate,
              [=](std::int64_t begin, std::int64_t end) { return kernels::sum_range(values, begin, end); });
}

void CpuOps::sum_of_squares(Stream& stream, double* out, ConstFlat x, bool accumulate) {
  checks::sum_of_squares(out, x);
  enqueue_sum(stream, out, x.count, accumulate, [=](std::int64_t begin, std::int64_t end) {
    return kernels::sum_of_squares_range(x, begin, end);
  });
}

void CpuOps::clip_scale(Stream& stream, StepScale* out, const double* sums, float max_norm) {
  checks::clip_scale(out, sums);
  cpu_stream(stream).run([=] {
    const double tokens = sums[1];
    StepScale result;
    result.finite = std::isfinite(sums[0]) && std::isfinite(tokens);
    if (tokens > 0) {  // with every target masked there is no gradient and nothing to scale
      const double norm = std::sqrt(sums[0]) / tokens;
      const double clip = max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
      result.norm = static_cast<float>(norm);
      result.gradient_scale = static_cast<float>(clip / tokens);
    }
    *out = result;
  });
}

void CpuOps::adamw(Stream& stream, const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient,
                   Flat m, Flat v, const StepScale* scale) {
  checks::adamw(step, parameter, compute, gradient, m, v, scale);
  enqueue_ranges(stream, parameter.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    if (scale->finite == 0) return;
    kernels::adamw(step, parameter, compute, gradient, m, v, scale->gradient_scale, begin, end);
  });
}

void CpuOps::sgd(Stream& stream, float lr, float weight_decay, Flat parameter, Flat compute,
                 ConstFlat gradient, const StepScale* scale) {
  checks::sgd(parameter, compute, gradient, scale);
  enqueue_ranges(stream, parameter.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    if (scale->finite == 0) return;
    kernels::sgd(lr, weight_decay, parameter, compute, gradient, scale->gradient_scale, begin, end);
  });
}

void CpuOps::fill(Stream& stream, Flat out, float value) {
  checks::fill(out);
  enqueue_ranges(stream, out.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::fill(out, value, begin, end); });
}

void CpuOps::cast(Stream& stream, Flat out, ConstFlat in) {
  checks::cast(out, in);
  enqueue_ranges(stream, out.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::cast(out, in, begin, end); });
}

void CpuOps::axpby(Stream& stream, Flat y, float a, ConstFlat x, float b) {
  checks::axpby(y, x);
  enqueue_ranges(stream, y.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::axpby(y, a, x, b, begin, end); });
}

void CpuOps::pseudo_gradient(Stream& stream, Flat delta, ConstFlat theta_old, ConstFlat theta) {
  checks::pseudo_gradient(delta, theta_old, theta);
  enqueue_ranges(stream, delta.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::pseudo_gradient(delta, theta_old, theta, begin, end);
  });
}

void CpuOps::outer_step(Stream& stream, const OuterStep& step, Flat theta, Flat compute, Flat theta_old,
                        Flat momentum, ConstFlat delta) {
  checks::outer_step(step, theta, compute, theta_old, momentum, delta);
  enqueue_ranges(stream, theta.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::outer_step(step, theta, compute, theta_old, momentum, delta, begin, end);
  });
}

void CpuOps::quantize_int8(Stream& stream, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                           std::int64_t block) {
  checks::quantize_int8(q, scales, error, x, block);
  enqueue_ranges(stream, x.count, block, [=](std::int64_t begin, std::int64_t end) {
    kernels::quantize_block(q, scales + begin / block, error, x, begin, end);
  });
}

void CpuOps::dequantize_int8(Stream& stream, Flat out, const std::int8_t* q, const float* scales,
                             std::int64_t block, float weight, bool accumulate) {
  checks::dequantize_int8(out, q, scales, block);
  enqueue_ranges(stream, out.count, block, [=](std::int64_t begin, std::int64_t end) {
    kernels::dequantize_block(out, q, scales[begin / block], weight, accumulate, begin, end);
  });
}

void CpuOps::initialize_normal(Stream& stream, Flat out, float standard_deviation, RandomKey key,
                               std::int64_t first_element) {
  checks::initialize_normal(out, first_element);
  enqueue_ranges(stream, out.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::initialize_normal(out, standard_deviation, key, first_element, begin, end);
  });
}

}  // namespace strata::cpu
