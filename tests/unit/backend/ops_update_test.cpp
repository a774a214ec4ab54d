#include <hwy/targets.h>

#include "backend/random.h"
#include "tests/support/catch.h"
#include "tests/support/ops_fixture.h"

using namespace strata;
using namespace strata::test;

namespace {
StepScale scale_of(float s, int finite = 1) {
  return {s, 0, finite};
}
}  // namespace

TEST_CASE("AdamW follows the published recurrence over steps") {
  const DType gradient = GENERATE(DType::f32, DType::bf16);
  const int n = GENERATE(1, 17, 129, 1000, 70001);
  CpuFixture f({CpuDeviceOptions::deferred, 1});
  Vector p = random_values(n, DType::f32, 1), m(n, 0.0), v(n, 0.0);
  Tensor tp(DType::f32, 1, n, p), tm(DType::f32, 1, n, m), tv(DType::f32, 1, n, v), tc(DType::bf16, 1, n);
  const float lr = 1e-2f, b1 = 0.9f, b2 = 0.95f, eps = 1e-8f, decay = 0.1f;
  const StepScale scale = scale_of(0.25f);
  for (int t = 1; t <= 3; ++t) {
    const Vector g = random_values(n, gradient, static_cast<unsigned>(10 + t));
    Tensor tg(gradient, 1, n, g);
    f.ops->adamw(
        f.stream,
        {.lr = lr, .beta1 = b1, .beta2 = b2, .eps = eps, .weight_decay = decay, .step = t, .key = {}},
        tp.flat(), tc.flat(), tg.flat(), tm.flat(), tv.flat(), &scale);
    f.device->synchronize();
    for (int i = 0; i < n; ++i) {
      const double gi = g[i] * 0.25;
      p[i] -= static_cast<double>(lr) * decay * p[i];
      m[i] = b1 * m[i] + (1.0 - b1) * gi;
      v[i] = b2 * v[i] + (1.0 - b2) * gi * gi;
      p[i] -= lr * (m[i] / (1 - std::pow(b1, t))) /
              (std::sqrt(v[i] / (1 - std::pow(static_cast<double>(b2), t))) + eps);
    }
  }
  CHECK(relative_error(tp.values(), p) < 1e-6);
  CHECK(relative_error(tm.values(), m) < 1e-6);
  CHECK(relative_error(tv.values(), v) < 1e-6);
  Vector half = tp.values();
  for (double& x : half) x = rounded(x, DType::bf16);
  CHECK(tc.values() == half);
}

TEST_CASE("a step that is not finite leaves everything untouched") {
  CpuFixture f;
  const Vector p = random_values(100, DType::f32, 1), zero(100, 0.0);
  Tensor tp(DType::f32, 1, 100, p), tm(DType::f32, 1, 100, zero), tv(DType::f32, 1, 100, zero),
      tg(DType::f32, 1, 100, 0, NAN);
  StepScale scale;
  const double sums[] = {NAN, 100};
  f.ops->clip_scale(f.stream, &scale, sums, 1);
  CHECK(scale.finite == 0);
  f.ops->adamw(f.stream, {.lr = 1, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .key = {}}, tp.flat(), {},
               tg.flat(), tm.flat(), tv.flat(), &scale);
  f.ops->sgd(f.stream, 1, 0, tp.flat(), {}, tg.flat(), &scale);
  CHECK(tp.values() == p);
  CHECK(tm.values() == zero);
}

TEST_CASE("bf16 AdamW rounds parameters at random by element, so no cut of the buffer changes it") {
  CpuFixture f;
  const int n = 4099;
  const RandomKey key = random_key(3, "adamw", "w", 5);
  const Vector p = random_values(n, DType::bf16, 1), g = random_values(n, DType::bf16, 2);
  const AdamWStep step{.lr = 1e-3f,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .eps = 1e-8f,
                       .stochastic_rounding = true,
                       .key = key,
                       .first_element = 13};
  const StepScale scale = scale_of(1);
  Tensor tg(DType::bf16, 1, n, g), exact(DType::f32, 1, n, p), em(DType::f32, 1, n, 0, 0.0),
      ev(DType::f32, 1, n, 0, 0.0);
  Tensor tp(DType::bf16, 1, n, p), tm(DType::bf16, 1, n, 0, 0.0), tv(DType::bf16, 1, n, 0, 0.0);
  Tensor cut(DType::bf16, 1, n, p), cm(DType::bf16, 1, n, 0, 0.0), cv(DType::bf16, 1, n, 0, 0.0);
  f.ops->adamw(f.stream, step, tp.flat(), {}, tg.flat(), tm.flat(), tv.flat(), &scale);
  AdamWStep plain = step;
  plain.stochastic_rounding = false;
  f.ops->adamw(f.stream, plain, exact.flat(), {}, tg.flat(), em.flat(), ev.flat(), &scale);
  AdamWStep second = step;
  second.first_element += 1001;
  f.ops->adamw(f.stream, step, cut.flat().slice(0, 1001), {}, tg.flat().slice(0, 1001),
               cm.flat().slice(0, 1001), cv.flat().slice(0, 1001), &scale);
  f.ops->adamw(f.stream, second, cut.flat().slice(1001, n - 1001), {}, tg.flat().slice(1001, n - 1001),
               cm.flat().slice(1001, n - 1001), cv.flat().slice(1001, n - 1001), &scale);
  CHECK(cut.values() == tp.values());
  const Vector wanted = exact.values(), found = tp.values();
  for (int i = 0; i < n; ++i) {
    const bf16 expected{stochastic_bf16_bits(static_cast<float>(wanted[i]),
                                             rounding_word(key, static_cast<std::uint64_t>(13 + i)))};
    REQUIRE(found[i] == to_float(expected));
  }
}

TEST_CASE("SGD, fill, cast, axpby and pseudo-gradient compute what they say") {
  const DType a = GENERATE(DType::f32, DType::bf16), b = GENERATE(DType::f32, DType::bf16);
  const int n = GENERATE(1, 17, 129, 1000, 3000);
  CpuFixture f({CpuDeviceOptions::deferred, 4});
  const Vector x = random_values(n, a, 1), y = random_values(n, b, 2);
  Tensor tx(a, 1, n, x), ty(b, 1, n, y), to(b, 1, n), td(b, 1, n), tf(a, 1, n), ts(b, 1, n, y),
      unread(b, 1, n);
  const StepScale scale = scale_of(0.5f);
  f.ops->cast(f.stream, to.flat(), tx.flat());
  f.ops->pseudo_gradient(f.stream, td.flat(), tx.flat(), ty.flat());
  f.ops->fill(f.stream, tf.flat(), 0.75f);
  f.ops->sgd(f.stream, 0.125f, 0.5f, ts.flat(), {}, tx.flat(), &scale);
  f.ops->axpby(f.stream, ty.flat(), 2, tx.flat(), -0.5f);
  f.ops->axpby(f.stream, unread.flat(), 2, tx.flat(), 0);  // NaN before
  f.device->synchronize();
  Vector cast(n), delta(n), sgd(n), axpby(n), twice(n);
  for (int i = 0; i < n; ++i) {
    cast[i] = rounded(x[i], b), delta[i] = rounded(x[i] - y[i], b);
    sgd[i] = y[i] * (1 - 0.0625) - 0.125 * 0.5 * x[i], axpby[i] = 2 * x[i] - 0.5 * y[i],
    twice[i] = rounded(2 * x[i], b);
  }
  CHECK(to.values() == cast);
  CHECK(td.values() == delta);
  CHECK(tf.values() == Vector(n, 0.75));
  CHECK(relative_error(ts.values(), sgd) < tolerance(b));
  CHECK(relative_error(ty.values(), axpby) < tolerance(b));
  CHECK(unread.values() == twice);
}

TEST_CASE("outer rules follow the table of methods over rounds") {
  const OuterRule rule =
      GENERATE(OuterRule::fedavg, OuterRule::fedavgm, OuterRule::fedmom, OuterRule::diloco);
  const float alpha = GENERATE(0.0f, 0.5f);
  const int n = 1001;
  CpuFixture f;
  const double eta = 0.7f, mu = 0.9f;
  Vector old = random_values(n, DType::f32, 1), local = random_values(n, DType::f32, 2);
  Vector state = rule == OuterRule::fedmom ? old : Vector(n, 0.0);
  Tensor told(DType::f32, 1, n, old), tlocal(DType::f32, 1, n, local), tstate(DType::f32, 1, n, state),
      tc(DType::bf16, 1, n);
  for (int round = 0; round < 3; ++round) {
    const Vector delta = random_values(n, DType::f32, static_cast<unsigned>(5 + round));
    Tensor tdelta(DType::f32, 1, n, delta);
    f.ops->outer_step(f.stream, {rule, 0.7f, 0.9f, alpha}, tlocal.flat(), tc.flat(), told.flat(),
                      rule == OuterRule::fedavg ? Flat{} : tstate.flat(), tdelta.flat());
    for (int i = 0; i < n; ++i) {
      double next = old[i];
      if (rule == OuterRule::fedavg) next = old[i] - eta * delta[i];
      if (rule == OuterRule::fedavgm) state[i] = mu * state[i] + delta[i], next = old[i] - eta * state[i];
      if (rule == OuterRule::fedmom) {
        const double v = old[i] - eta * delta[i];
        next = v + mu * (v - state[i]), state[i] = v;
      }
      if (rule == OuterRule::diloco)
        state[i] = mu * state[i] + delta[i], next = old[i] - eta * (delta[i] + mu * state[i]);
      old[i] = next;
      local[i] = alpha * local[i] + (1 - alpha) * next;
    }
  }
  CHECK(relative_error(told.values(), old) < 1e-6);
  CHECK(relative_error(tlocal.values(), local) < 1e-6);
  if (rule != OuterRule::fedavg) CHECK(relative_error(tstate.values(), state) < 1e-6);
  CHECK(relative_error(tc.values(), local) < tolerance(DType::bf16));
}

TEST_CASE("sums run in one order for every thread count, and accumulate") {
  const int n = GENERATE(1, 17, 129, 1000, 200003);
  const Vector x = random_values(n, DType::bf16, 1);
  double expected = 0, squares = 0;
  for (double v : x) expected += v, squares += v * v;
  double first[3] = {};
  for (int threads : {1, 3}) {
    CpuFixture f({}, {.threads = threads});
    Tensor t(DType::f32, 1, n, x), half(DType::bf16, 1, n, x);
    double out[3] = {NAN, NAN, 5};
    f.ops->sum(f.stream, &out[0], static_cast<float*>(t.flat().data), n, false);
    f.ops->sum_of_squares(f.stream, &out[1], half.flat(), false);
    f.ops->sum_of_squares(f.stream, &out[2], t.flat(), true);
    CHECK(out[0] == Approx(expected).epsilon(1e-12).margin(1e-9));
    CHECK(out[1] == Approx(squares).epsilon(1e-12));
    CHECK(out[2] == Approx(squares + 5).epsilon(1e-12));
    for (int i = 0; i < 3; ++i) {
      if (threads > 1) CHECK(out[i] == first[i]);
      first[i] = out[i];
    }
  }
}

TEST_CASE("clipping scales the norm of the mean gradient") {
  CpuFixture f;
  StepScale s;
  const double sums[] = {400, 10};  // norm of the mean: 2
  f.ops->clip_scale(f.stream, &s, sums, 1);
  CHECK((s.norm == 2.0f && s.gradient_scale == 0.05f && s.finite == 1));
  f.ops->clip_scale(f.stream, &s, sums, 4);
  CHECK(s.gradient_scale == 0.1f);
  f.ops->clip_scale(f.stream, &s, sums, 0);
  CHECK(s.gradient_scale == 0.1f);
  const double none[] = {0, 0};
  f.ops->clip_scale(f.stream, &s, none, 1);
  CHECK((s.norm == 0 && s.gradient_scale == 0 && s.finite == 1));
}

TEST_CASE("int8 keeps what it loses in the error feedback") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int n = 1000, block = 129, blocks = 8;
  CpuFixture f;
  Vector x = random_values(n, type, 1);
  for (int i = 0; i < block; ++i) x[i] = 0;
  const Vector error = random_values(n, DType::f32, 2, 0.01);
  Tensor tx(type, 1, n, x), te(DType::f32, 1, n, error), out(DType::f32, 1, n, Vector(n, 1.0));
  std::vector<std::int8_t> q(n);
  std::vector<float> scales(blocks);
  f.ops->quantize_int8(f.stream, q.data(), scales.data(), te.flat(), tx.flat(), block);
  f.ops->dequantize_int8(f.stream, out.flat(), q.data(), scales.data(), block, 0.5f, true);
  const Vector left = te.values(), back = out.values();
  for (int i = 0; i < n; ++i) {
    const double step = scales[i / block], total = x[i] + error[i];
    REQUIRE(std::fabs(q[i]) <= 127);
    REQUIRE(std::fabs(left[i]) <= step * 0.5001);
    REQUIRE(q[i] * step + left[i] == Approx(total).margin(1e-6));
    REQUIRE(back[i] == Approx(1 + 0.5 * q[i] * step).margin(1e-6));
  }
  Vector bad(block, 1.0);
  bad[5] = NAN;
  Tensor tb(DType::f32, 1, block, bad), ob(DType::f32, 1, block);
  f.ops->quantize_int8(f.stream, q.data(), scales.data(), {}, tb.flat(), block);
  f.ops->dequantize_int8(f.stream, ob.flat(), q.data(), scales.data(), block, 1, false);
  CHECK(std::isnan(ob.values()[0]));  // not hidden by the cast
}

TEST_CASE("random numbers, optimizer and sums are the same bits on every instruction set") {
  const int n = 5003;
  std::vector<unsigned char> first;
  for (std::int64_t target : {HWY_SSE4, HWY_AVX2, HWY_AVX3}) {
    hwy::SetSupportedTargetsForTest(0);
    if ((hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    CpuFixture f;
    Tensor p(DType::f32, 1, n), g(DType::bf16, 1, n), m(DType::f32, 1, n, 0, 0.0),
        v(DType::f32, 1, n, 0, 0.0), c(DType::bf16, 1, n);
    const StepScale scale = scale_of(0.3f);
    double sum = 0;
    f.ops->initialize_normal(f.stream, p.flat(), 0.02f, random_key(1, "a", "b"), 7);
    f.ops->initialize_normal(f.stream, g.flat(), 1.0f, random_key(2, "a", "b"), 0);
    f.ops->adamw(f.stream,
                 {.lr = 1e-3f,
                  .beta1 = 0.9f,
                  .beta2 = 0.95f,
                  .eps = 1e-8f,
                  .weight_decay = 0.1f,
                  .step = 3,
                  .key = {}},
                 p.flat(), c.flat(), g.flat(), m.flat(), v.flat(), &scale);
    f.ops->sum_of_squares(f.stream, &sum, p.flat(), false);
    auto all = p.bytes();
    for (const Tensor* t : {&g, &m, &v, &c}) all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    all.insert(all.end(), reinterpret_cast<unsigned char*>(&sum), reinterpret_cast<unsigned char*>(&sum + 1));
    if (first.empty()) first = all;
    CHECK(all == first);
  }
  hwy::SetSupportedTargetsForTest(0);
}
