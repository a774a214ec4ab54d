#include "backend/mpi/reduce_kernel.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/error.h"

namespace strata::mpi {
namespace {

// Elements that are summed at a time: the accumulators stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;

template <class Acc>
Acc widen(float x) {
  return x;
}
template <class Acc>
Acc widen(double x) {
  return static_cast<Acc>(x);
}
// Arithmetic on the bits alone, so that the compiler vectorises it.
template <class Acc>
Acc widen(bf16 x) {
  return to_float(x);
}

template <class T, class Acc>
T narrow(Acc x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

std::int64_t total_weight(const ReduceRule& rule, std::size_t n) {
  if (rule.kind != ReduceRule::Kind::mean) return 1;
  if (rule.weights.empty()) return static_cast<std::int64_t>(n);
  std::int64_t total = 0;
  for (const std::int64_t w : rule.weights) {
    if (w < 0) throw InternalError("all_reduce_mean: a weight is negative -> weights are token counts");
    total += w;
  }
  if (total == 0) throw InternalError("all_reduce_mean: all weights are zero -> nothing can be averaged");
  return total;
}

// Wire: element type of contributions; Acc: what they are added in; Out: result.
template <class Wire, class Acc, class Out>
void add_once(Out* out, std::int64_t count, std::span<const void* const> in, const ReduceRule& rule) {
  const auto total = static_cast<Acc>(total_weight(rule, in.size()));
  const bool mean = rule.kind == ReduceRule::Kind::mean, weighted = mean && !rule.weights.empty();
  Acc acc[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    for (std::size_t r = 0; r < in.size(); ++r) {
      const Wire* x = static_cast<const Wire*>(in[r]) + begin;
      const Acc w = weighted ? static_cast<Acc>(rule.weights[r]) : Acc(1);
      if (r == 0) {
        for (std::int64_t i = 0; i < n; ++i) acc[i] = weighted ? w * widen<Acc>(x[i]) : widen<Acc>(x[i]);
      } else if (weighted) {
        for (std::int64_t i = 0; i < n; ++i) acc[i] += w * widen<Acc>(x[i]);
      } else {
        for (std::int64_t i = 0; i < n; ++i) acc[i] += widen<Acc>(x[i]);
      }
    }
    if (mean) {
      for (std::int64_t i = 0; i < n; ++i) acc[i] /= total;
    }
    for (std::int64_t i = 0; i < n; ++i) out[begin + i] = narrow<Out>(acc[i]);
  }
}

// Every partial sum is rounded to the wire dtype; each contribution enters in equal parts.
template <class Wire, class Acc, class Out>
void add_by_hops(Out* out, std::int64_t count, std::span<const void* const> in, const ReduceRule& rule) {
  const auto n = static_cast<int>(in.size());
  const int parts = std::max(1, (rule.options.imitate_hops + n - 1) / n);
  const auto total = static_cast<Acc>(total_weight(rule, in.size()));
  const bool mean = rule.kind == ReduceRule::Kind::mean, weighted = mean && !rule.weights.empty();
  for (std::int64_t i = 0; i < count; ++i) {
    Acc sum = 0;
    for (std::size_t r = 0; r < in.size(); ++r) {
      Acc x = widen<Acc>(static_cast<const Wire*>(in[r])[i]);
      if (weighted) x *= static_cast<Acc>(rule.weights[r]);
      const Acc part = parts == 1 ? x : x / static_cast<Acc>(parts);
      for (int p = 0; p < parts; ++p) sum = widen<Acc>(narrow<Wire>(sum + part));
    }
    out[i] = narrow<Out>(mean ? sum / total : sum);
  }
}

template <class Wire, class Once, class Hop, class Out>
void add(Out* out, std::int64_t count, std::span<const void* const> in, const ReduceRule& rule) {
  if (rule.options.rounding == ReduceRounding::hop) {
    add_by_hops<Wire, Hop>(out, count, in, rule);
  } else {
    add_once<Wire, Once>(out, count, in, rule);
  }
}

void maximum(double* out, std::int64_t count, std::span<const void* const> in) {
  for (std::int64_t i = 0; i < count; ++i) {
    double best = static_cast<const double*>(in[0])[i];
    for (std::size_t r = 1; r < in.size(); ++r) {
      const double x = static_cast<const double*>(in[r])[i];
      if (x > best || std::isnan(x)) best = x;
    }
    out[i] = best;
  }
}

}  // namespace

void reduce_in_rank_order(Flat out, DType wire, std::span<const void* const> in, const ReduceRule& rule) {
  if (rule.kind == ReduceRule::Kind::max && wire == DType::f64 && out.dtype == wire)
    return maximum(static_cast<double*>(out.data), out.count, in);
  if (rule.kind != ReduceRule::Kind::max) {
    if (wire == DType::f32 && out.dtype == wire)
      return add<float, double, float>(static_cast<float*>(out.data), out.count, in, rule);
    if (wire == DType::f64 && out.dtype == wire)
      return add<double, double, double>(static_cast<double*>(out.data), out.count, in, rule);
    if (wire == DType::bf16 && out.dtype == wire)
      return add<bf16, float, float>(static_cast<bf16*>(out.data), out.count, in, rule);
    if (wire == DType::bf16 && out.dtype == DType::f32)
      return add<bf16, float, float>(static_cast<float*>(out.data), out.count, in, rule);
  }
  throw InternalError(std::string("a reduction of ") + name_of(wire) + " into " + name_of(out.dtype) +
                      " is not defined -> use fp32, bf16 or fp64 on the wire; maxima are fp64");
}

}  // namespace strata::mpi
