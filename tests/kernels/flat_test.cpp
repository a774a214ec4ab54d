// Optimizer, elementwise, federation, int8, initialisation and sums: the CPU's bits, and formulas in double
// precision.
#include "cuda/kernels/kernels.h"
#include "tests/kernels/support.h"

using namespace strata;
using namespace strata::test;

namespace {

// `skip` elements before the view: with 1, nothing is 16-byte aligned.
struct Cut {
  std::int64_t count, skip;
  Flat operator()(DeviceTensor& t) const { return t.flat().slice(skip, count); }
  Flat operator()(Tensor& t) const { return t.flat().slice(skip, count); }
  std::int64_t whole() const { return count + skip; }
};

std::vector<Cut> cuts() {
  std::vector<Cut> all = {{1, 0}, {17, 0}, {17, 1}, {129, 8}, {1000, 3}, {4099, 0}};
  if (thorough) all.push_back({20011, 0});
  return all;
}

Tensor values_of(DType type, const Cut& cut, unsigned seed, double scale = 1) {
  return Tensor(type, 1, cut.whole(),
                random_values(static_cast<std::size_t>(cut.whole()), type, seed, scale));
}

Tensor scale_tensor(float gradient_scale, int finite = 1) {
  Tensor t(DType::f32, 1, 3);
  const StepScale scale{gradient_scale, 0, finite};
  std::vector<unsigned char> bytes(sizeof scale);
  std::memcpy(bytes.data(), &scale, sizeof scale);
  t.set_bytes(std::move(bytes));
  return t;
}

}  // namespace

TEST_CASE("AdamW: the CPU's bits over steps, fp32 and pure bf16, with and without stochastic rounding") {
  const DType type = GENERATE(DType::f32, DType::bf16), gradient = GENERATE(DType::f32, DType::bf16);
  const bool stochastic = type == DType::bf16 && GENERATE(false, true);
  const Cut cut = GENERATE(from_range(cuts()));
  const std::int64_t first = GENERATE(0, 13);
  CAPTURE(name_of(type), name_of(gradient), stochastic, cut.count, cut.skip, first);
  const Tensor p = values_of(type, cut, 1), m(type, 1, cut.whole(), Vector(cut.whole(), 0.0)), v = m,
               c(DType::bf16, 1, cut.whole(), 0, 0.5), scale = scale_tensor(0.3f);
  const auto step_of = [&](int t) {
    return AdamWStep{.lr = 1e-3f,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f,
                     .weight_decay = 0.1f,
                     .step = t,
                     .stochastic_rounding = stochastic,
                     .key = random_key(3, "adamw", "w", static_cast<std::uint64_t>(t)),
                     .first_element = first};
  };
  const auto gradient_of = [&](int t) {
    return values_of(gradient, cut, static_cast<unsigned>(10 + t), t == 2 ? 1e-12 : 1);
  };
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dp(p), dm(m), dv(v), dc(c), ds(scale);
        for (int t = 1; t <= 2; ++t) {
          DeviceTensor dg(gradient_of(t));
          gpu::adamw(nullptr, step_of(t), cut(dp), stochastic ? Flat{} : cut(dc), cut(dg), cut(dm), cut(dv),
                     ds.as<StepScale>());
        }
        return std::vector<Tensor>{dp.download(), dm.download(), dv.download(), dc.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor hp = p, hm = m, hv = v, hc = c, hs = scale;
  for (int t = 1; t <= 2; ++t) {
    Tensor hg = gradient_of(t);
    cpu.ops->adamw(cpu.stream, step_of(t), cut(hp), stochastic ? Flat{} : cut(hc), cut(hg), cut(hm), cut(hv),
                   static_cast<const StepScale*>(hs.flat().data));
  }
  CHECK(found[0].bytes() == hp.bytes());
  CHECK(found[1].bytes() == hm.bytes());
  CHECK(found[2].bytes() == hv.bytes());
  CHECK(found[3].bytes() == hc.bytes());
  if (cut.count > 1) CHECK(found[0].bytes() != p.bytes());
}

TEST_CASE("SGD: the CPU's bits") {
  const DType type = GENERATE(DType::f32, DType::bf16), gradient = GENERATE(DType::f32, DType::bf16);
  const Cut cut = GENERATE(from_range(cuts()));
  CAPTURE(name_of(type), name_of(gradient), cut.count, cut.skip);
  const Tensor p = values_of(type, cut, 1), g = values_of(gradient, cut, 2),
               c(DType::bf16, 1, cut.whole(), 0, 0.5), scale = scale_tensor(0.3f);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dp(p), dg(g), dc(c), ds(scale);
        gpu::sgd(nullptr, 0.1f, 0.5f, cut(dp), cut(dc), cut(dg), ds.as<StepScale>());
        return std::vector<Tensor>{dp.download(), dc.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor hp = p, hg = g, hc = c, hs = scale;
  cpu.ops->sgd(cpu.stream, 0.1f, 0.5f, cut(hp), cut(hc), cut(hg),
               static_cast<const StepScale*>(hs.flat().data));
  CHECK(found[0].bytes() == hp.bytes());
  CHECK(found[1].bytes() == hc.bytes());
}

TEST_CASE("a step that is not finite leaves everything untouched") {
  const Cut cut{100, 0};
  const Tensor p = values_of(DType::f32, cut, 1);
  DeviceTensor dp(p), dm(p), dv(p), dg(p), scale(scale_tensor(NAN, 0));
  gpu::adamw(nullptr, {.lr = 1, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .key = {}}, cut(dp), {}, cut(dg),
             cut(dm), cut(dv), scale.as<StepScale>());
  gpu::sgd(nullptr, 1, 0, cut(dp), {}, cut(dg), scale.as<StepScale>());
  CHECK(dp.download().bytes() == p.bytes());
  CHECK(dm.download().bytes() == p.bytes());
  CHECK(dv.download().bytes() == p.bytes());
}

TEST_CASE("fill, cast, axpby and pseudo-gradient: the CPU's bits, special values included") {
  const DType a = GENERATE(DType::f32, DType::bf16), b = GENERATE(DType::f32, DType::bf16);
  const Cut cut = GENERATE(from_range(cuts()));
  CAPTURE(name_of(a), name_of(b), cut.count, cut.skip);
  Vector special = random_values(static_cast<std::size_t>(cut.whole()), a, 1);
  const double values[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 3.38953139e38, 1e-40, 65535.0};
  for (std::size_t i = 0; i < special.size(); i += 5) special[i] = rounded(values[i / 5 % 8], a);
  const Tensor x(a, 1, cut.whole(), special), y = values_of(b, cut, 2), unread(b, 1, cut.whole(), 0, NAN);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dx(x), dy(y), filled(x), cast(y), twice(unread), delta(y);
        gpu::fill(nullptr, cut(filled), 0.7f);
        gpu::cast(nullptr, cut(cast), cut(dx));
        gpu::axpby(nullptr, cut(twice), 2, cut(dx), 0);
        gpu::pseudo_gradient(nullptr, cut(delta), cut(dx), cut(dy));
        gpu::axpby(nullptr, cut(dy), 0.3f, cut(dx), -0.6f);
        return std::vector<Tensor>{filled.download(), cast.download(), twice.download(), delta.download(),
                                   dy.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor hx = x, hy = y, filled = x, cast = y, twice = unread, delta = y;
  cpu.ops->fill(cpu.stream, cut(filled), 0.7f);
  cpu.ops->cast(cpu.stream, cut(cast), cut(hx));
  cpu.ops->axpby(cpu.stream, cut(twice), 2, cut(hx), 0);
  cpu.ops->pseudo_gradient(cpu.stream, cut(delta), cut(hx), cut(hy));
  cpu.ops->axpby(cpu.stream, cut(hy), 0.3f, cut(hx), -0.6f);
  CHECK(found[0].bytes() == filled.bytes());
  CHECK(same_values(found[1], cast));
  CHECK(same_values(found[2], twice));
  CHECK(same_values(found[3], delta));
  CHECK(same_values(found[4], hy));
}

TEST_CASE("outer rules: the CPU's bits over rounds") {
  const OuterRule rule =
      GENERATE(OuterRule::fedavg, OuterRule::fedavgm, OuterRule::fedmom, OuterRule::diloco);
  const float alpha = GENERATE(0.0f, 0.5f);
  const DType type = GENERATE(DType::f32, DType::bf16), delta_type = GENERATE(DType::f32, DType::bf16);
  const Cut cut = GENERATE(Cut{17, 1}, Cut{1000, 0});
  CAPTURE(static_cast<int>(rule), alpha, name_of(type), name_of(delta_type), cut.count);
  const Tensor old = values_of(DType::f32, cut, 1), local = values_of(type, cut, 2),
               state = rule == OuterRule::fedmom ? old : Tensor(DType::f32, 1, cut.whole(), 0, 0.0),
               copy(DType::bf16, 1, cut.whole(), 0, 0.5);
  const OuterStep step{rule, 0.7f, 0.9f, alpha};
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dold(old), dlocal(local), dstate(state), dcopy(copy);
        for (unsigned round = 0; round < 2; ++round) {
          DeviceTensor delta(values_of(delta_type, cut, 5 + round));
          gpu::outer_step(nullptr, step, cut(dlocal), cut(dcopy), cut(dold),
                          rule == OuterRule::fedavg ? Flat{} : cut(dstate), cut(delta));
        }
        return std::vector<Tensor>{dold.download(), dlocal.download(), dstate.download(), dcopy.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor hold = old, hlocal = local, hstate = state, hcopy = copy;
  for (unsigned round = 0; round < 2; ++round) {
    Tensor delta = values_of(delta_type, cut, 5 + round);
    cpu.ops->outer_step(cpu.stream, step, cut(hlocal), cut(hcopy), cut(hold),
                        rule == OuterRule::fedavg ? Flat{} : cut(hstate), cut(delta));
  }
  CHECK(found[0].bytes() == hold.bytes());
  CHECK(found[1].bytes() == hlocal.bytes());
  CHECK(found[2].bytes() == hstate.bytes());
  CHECK(found[3].bytes() == hcopy.bytes());
}

TEST_CASE("int8: the CPU's bits, zero blocks, subnormal and non-finite ones included") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const bool feedback = GENERATE(true, false);
  struct Case {
    Cut cut;
    int block;
  };
  const Case s = GENERATE(Case{{1, 0}, 1}, Case{{1000, 0}, 129}, Case{{1000, 1}, 64}, Case{{1000, 0}, 8},
                          Case{{1003, 0}, 256}, Case{{4100, 8}, 1024}, Case{{2000, 0}, 5000});
  const std::int64_t blocks = (s.cut.count + s.block - 1) / s.block;
  CAPTURE(name_of(type), feedback, s.cut.count, s.cut.skip, s.block);
  Vector x = random_values(static_cast<std::size_t>(s.cut.whole()), type, 1);
  for (std::int64_t i = 0; i < s.cut.count; ++i) {
    double& value = x[s.cut.skip + i];
    switch (i / s.block) {
      case 1:
        value = 0;
        break;
      case 2:
        value = rounded(value * 1e-39, type);
        break;
      case 3:
        value = i % s.block == 5 ? NAN : value;
        break;
      case 4:
        value = i % s.block == 6 ? INFINITY : value;
        break;
      case 5:
        value = rounded(value * 1e37, type);
        break;
      default:
        break;
    }
  }
  Tensor tx(type, 1, s.cut.whole(), x),
      te(DType::f32, 1, s.cut.whole(), random_values(x.size(), DType::f32, 2, 0.01)),
      tout(DType::f32, 1, s.cut.whole(), 0, 1.0), thalf(DType::bf16, 1, s.cut.whole(), 0, 1.0);
  if (s.block > 1) {  // zero and tiny blocks must stay so
    Vector e = te.values();
    for (std::int64_t i = 0; i < s.cut.count; ++i) {
      if (i / s.block == 1 || i / s.block == 2) e[s.cut.skip + i] = 0;
    }
    te = Tensor(DType::f32, 1, s.cut.whole(), e);
  }
  const Tensor no_q(DType::f32, 1, (s.cut.count + 3) / 4, 0, 0.0), no_scales(DType::f32, 1, blocks);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dx(tx), de(te), dq(no_q), dscales(no_scales), out(tout), half(thalf), plain(tout);
        auto* const q = dq.as<std::int8_t>();
        gpu::quantize_int8(nullptr, q, dscales.as<float>(), feedback ? s.cut(de) : Flat{}, s.cut(dx),
                           s.block);
        gpu::dequantize_int8(nullptr, s.cut(out), q, dscales.as<float>(), s.block, 0.5f, true);
        gpu::dequantize_int8(nullptr, s.cut(half), q, dscales.as<float>(), s.block, 0.3f, true);
        gpu::dequantize_int8(nullptr, s.cut(plain), q, dscales.as<float>(), s.block, 1.0f, false);
        return std::vector<Tensor>{dq.download(),  dscales.download(), de.download(),
                                   out.download(), half.download(),    plain.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor he = te, hq = no_q, hscales = no_scales, out = tout, half = thalf, plain = tout;
  auto* const q = static_cast<std::int8_t*>(hq.flat().data);
  auto* const scales = static_cast<float*>(hscales.flat().data);
  cpu.ops->quantize_int8(cpu.stream, q, scales, feedback ? s.cut(he) : Flat{}, s.cut(tx), s.block);
  cpu.ops->dequantize_int8(cpu.stream, s.cut(out), q, scales, s.block, 0.5f, true);
  cpu.ops->dequantize_int8(cpu.stream, s.cut(half), q, scales, s.block, 0.3f, true);
  cpu.ops->dequantize_int8(cpu.stream, s.cut(plain), q, scales, s.block, 1.0f, false);
  CHECK(found[0].bytes() == hq.bytes());
  CHECK(same_values(found[1], hscales));
  CHECK(same_values(found[2], he));
  CHECK(same_values(found[3], out));
  CHECK(same_values(found[4], half));
  CHECK(same_values(found[5], plain));
}

TEST_CASE("initialisation: the CPU's bits from any first element") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Cut cut = GENERATE(from_range(cuts()));
  const std::int64_t first = GENERATE(0, 4, 7, std::int64_t{3} << 33);
  CAPTURE(name_of(type), cut.count, cut.skip, first);
  const RandomKey key = random_key(42, "initialise", "layers.0");
  const Tensor empty(type, 1, cut.whole(), 0, 0.5);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor out(empty);
        gpu::initialize_normal(nullptr, cut(out), 0.02f, key, first);
        return std::vector<Tensor>{out.download()};
      },
      Schedules::few);
  CpuFixture cpu;
  Tensor out = empty;
  cpu.ops->initialize_normal(cpu.stream, cut(out), 0.02f, key, first);
  CHECK(found[0].bytes() == out.bytes());
}

TEST_CASE("sums: double precision, accumulated, the same bits in every schedule") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  Cut cut = GENERATE(from_range(cuts()));
  if (thorough && cut.count > 10000) cut.count = 70001;
  CAPTURE(name_of(type), cut.count, cut.skip);
  Tensor x = values_of(type, cut, 1, 1e15), plain = values_of(DType::f32, cut, 2);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dx(x), dplain(plain),
            out(Tensor(DType::f32, 1, 6, Vector{0, 2.0, 0, 0, 0, 0}));  // out[0] = 2.0 as fp64
        DeviceArray<unsigned char> scratch(gpu::sums_scratch_bytes);
        auto* const sums = out.as<double>();
        gpu::sum_of_squares(nullptr, sums, cut(dx), true, scratch.data());
        gpu::sum_of_squares(nullptr, sums + 1, cut(dx), false, scratch.data());
        gpu::sum(nullptr, sums + 2, static_cast<const float*>(cut(dplain).data), cut.count, false,
                 scratch.data());
        return std::vector<Tensor>{out.download()};
      },
      cut.count > 10000 ? Schedules::few : Schedules::all);
  double sums[3];
  std::memcpy(sums, found[0].bytes().data(), sizeof sums);
  double squares = 0, sum = 0, magnitude = 0;
  const Vector xs = x.values(), ps = plain.values();
  for (std::int64_t i = cut.skip; i < cut.whole(); ++i)
    squares += xs[i] * xs[i], sum += ps[i], magnitude += std::fabs(ps[i]);
  CHECK(sums[1] == Approx(squares).epsilon(1e-12));
  CHECK(sums[0] == Approx(squares + 2).epsilon(1e-12));
  CHECK(std::fabs(sums[2] - sum) <= 1e-13 * magnitude);
  CpuFixture cpu;
  double host = 0;
  cpu.ops->sum_of_squares(cpu.stream, &host, cut(x), false);
  CHECK(sums[1] == Approx(host).epsilon(1e-13));
}

TEST_CASE("an empty sum is zero or what was there, and clipping is the CPU's") {
  DeviceArray<unsigned char> scratch(gpu::sums_scratch_bytes);
  DeviceArray<double> out(std::vector<double>{5, 7});
  gpu::sum_of_squares(nullptr, out.data(), {nullptr, DType::f32, 0}, true, scratch.data());
  gpu::sum(nullptr, out.data() + 1, nullptr, 0, false, scratch.data());
  CHECK(out.download() == std::vector<double>{5, 0});
  CpuFixture cpu;
  const std::vector<std::vector<double>> cases = {{400, 10},     {0, 0},     {NAN, 100},
                                                  {INFINITY, 3}, {1e-30, 7}, {3e20, 4096}};
  for (const auto& sums : cases) {
    for (const float max_norm : {0.0f, 1.0f, 4.0f}) {
      DeviceArray<double> in(sums);
      DeviceArray<StepScale> scale(1);
      gpu::clip_scale(nullptr, scale.data(), in.data(), max_norm);
      const StepScale found = scale.download()[0];
      StepScale host;
      cpu.ops->clip_scale(cpu.stream, &host, sums.data(), max_norm);
      CHECK(found.finite == host.finite);
      if (host.finite != 0) {
        CHECK(found.norm == host.norm);
        CHECK(found.gradient_scale == host.gradient_scale);
      }
    }
  }
}
