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
  const Check check("sum");
  check.present("out", out);
  check.flat("values", {values, DType::f32, count}, -1);
  enqueue_sum(stream, out, count, accumulate,
              [=](std::int64_t begin, std::int64_t end) { return kernels::sum_range(values, begin, end); });
}

void CpuOps::sum_of_squares(Stream& stream, double* out, ConstFlat x, bool accumulate) {
  const Check check("sum_of_squares");
  check.present("out", out);
  check.flat("x", x, -1);
  enqueue_sum(stream, out, x.count, accumulate, [=](std::int64_t begin, std::int64_t end) {
    return kernels::sum_of_squares_range(x, begin, end);
  });
}

void CpuOps::clip_scale(Stream& stream, StepScale* out, const double* sums, float max_norm) {
  const Check check("clip_scale");
  check.present("out", out);
  check.present("sums", sums);
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
  const Check check("adamw");
  check.flat("parameter", parameter, -1);
  check.flat("gradient", gradient, parameter.count);
  check.flat("m", m, parameter.count);
  check.flat("v", v, parameter.count);
  check.dtype("m", m.dtype, parameter.dtype);
  check.dtype("v", v.dtype, parameter.dtype);
  check.present("scale", scale);
  check.that(step.step >= 1, "step is not counted from 1");
  check.that(!step.stochastic_rounding || parameter.dtype == DType::bf16,
             "stochastic rounding was asked for parameters that are not bf16");
  if (compute)
    check.flat("compute", compute, parameter.count), check.dtype("compute", compute.dtype, DType::bf16);
  enqueue_ranges(stream, parameter.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    if (scale->finite == 0) return;
    kernels::adamw(step, parameter, compute, gradient, m, v, scale->gradient_scale, begin, end);
  });
}

void CpuOps::sgd(Stream& stream, float lr, float weight_decay, Flat parameter, Flat compute,
                 ConstFlat gradient, const StepScale* scale) {
  const Check check("sgd");
  check.flat("parameter", parameter, -1);
  check.flat("gradient", gradient, parameter.count);
  check.present("scale", scale);
  if (compute)
    check.flat("compute", compute, parameter.count), check.dtype("compute", compute.dtype, DType::bf16);
  enqueue_ranges(stream, parameter.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    if (scale->finite == 0) return;
    kernels::sgd(lr, weight_decay, parameter, compute, gradient, scale->gradient_scale, begin, end);
  });
}

void CpuOps::fill(Stream& stream, Flat out, float value) {
  const Check check("fill");
  check.flat("out", out, -1);
  enqueue_ranges(stream, out.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::fill(out, value, begin, end); });
}

void CpuOps::cast(Stream& stream, Flat out, ConstFlat in) {
  const Check check("cast");
  check.flat("in", in, -1);
  check.flat("out", out, in.count);
  enqueue_ranges(stream, out.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::cast(out, in, begin, end); });
}

void CpuOps::axpby(Stream& stream, Flat y, float a, ConstFlat x, float b) {
  const Check check("axpby");
  check.flat("y", y, -1);
  check.flat("x", x, y.count);
  enqueue_ranges(stream, y.count, kGrain,
                 [=](std::int64_t begin, std::int64_t end) { kernels::axpby(y, a, x, b, begin, end); });
}

void CpuOps::pseudo_gradient(Stream& stream, Flat delta, ConstFlat theta_old, ConstFlat theta) {
  const Check check("pseudo_gradient");
  check.flat("delta", delta, -1);
  check.flat("theta_old", theta_old, delta.count);
  check.flat("theta", theta, delta.count);
  enqueue_ranges(stream, delta.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::pseudo_gradient(delta, theta_old, theta, begin, end);
  });
}

void CpuOps::outer_step(Stream& stream, const OuterStep& step, Flat theta, Flat compute, Flat theta_old,
                        Flat momentum, ConstFlat delta) {
  const Check check("outer_step");
  check.flat("theta", theta, -1);
  check.flat("theta_old", theta_old, theta.count);
  check.flat("delta", delta, theta.count);
  if (step.rule != OuterRule::fedavg) {
    check.flat("momentum", momentum, theta.count);
    check.dtype("momentum", momentum.dtype, DType::f32);
  }
  if (compute)
    check.flat("compute", compute, theta.count), check.dtype("compute", compute.dtype, DType::bf16);
  enqueue_ranges(stream, theta.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::outer_step(step, theta, compute, theta_old, momentum, delta, begin, end);
  });
}

void CpuOps::quantize_int8(Stream& stream, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                           std::int64_t block) {
  const Check check("quantize_int8");
  check.that(block > 0, "the block is empty");
  check.flat("x", x, -1);
  check.that(x.count == 0 || (q != nullptr && scales != nullptr), "q or scales is missing");
  if (error) check.flat("error", error, x.count), check.dtype("error", error.dtype, DType::f32);
  enqueue_ranges(stream, x.count, block, [=](std::int64_t begin, std::int64_t end) {
    kernels::quantize_block(q, scales + begin / block, error, x, begin, end);
  });
}

void CpuOps::dequantize_int8(Stream& stream, Flat out, const std::int8_t* q, const float* scales,
                             std::int64_t block, float weight, bool accumulate) {
  const Check check("dequantize_int8");
  check.that(block > 0, "the block is empty");
  check.flat("out", out, -1);
  check.that(out.count == 0 || (q != nullptr && scales != nullptr), "q or scales is missing");
  enqueue_ranges(stream, out.count, block, [=](std::int64_t begin, std::int64_t end) {
    kernels::dequantize_block(out, q, scales[begin / block], weight, accumulate, begin, end);
  });
}

void CpuOps::initialize_normal(Stream& stream, Flat out, float standard_deviation, RandomKey key,
                               std::int64_t first_element) {
  const Check check("initialize_normal");
  check.flat("out", out, -1);
  check.that(first_element >= 0, "first_element is negative");
  enqueue_ranges(stream, out.count, kGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::initialize_normal(out, standard_deviation, key, first_element, begin, end);
  });
}

}  // namespace strata::cpu
