#include "backend/cpu/gemm_dots.h"
#include "base/error.h"
#include "tests/support/catch.h"
#include "tests/support/ops_fixture.h"

using namespace strata;
using namespace strata::test;
using cpu::GemmPath;

namespace {

void check_linear(GemmPath path, DType type, DType gradient, int n, int in, int out, bool accumulate) {
  CAPTURE(static_cast<int>(path), name_of(type), name_of(gradient), n, in, out, accumulate);
  CpuFixture f({CpuDeviceOptions::deferred, 1}, {.gemm = path});
  const Vector x = random_values(static_cast<std::size_t>(n) * in, type, 1),
               w = random_values(static_cast<std::size_t>(out) * in, type, 2);
  const Vector dy = random_values(static_cast<std::size_t>(n) * out, type, 3);
  const Vector old_dx = random_values(x.size(), type, 4), old_dw = random_values(w.size(), gradient, 5);
  Tensor tx(type, n, in, x, 5), tw(type, out, in, w), tdy(type, n, out, dy, 3), ty(type, n, out, 7);
  Tensor tdx(type, n, in, old_dx, 2), tdw(gradient, out, in, old_dw);
  f.ops->linear_forward(f.stream, ty.matrix(), tx.matrix(), tw.matrix());
  f.ops->linear_backward_input(f.stream, tdx.matrix(), tdy.matrix(), tw.matrix(), accumulate);
  f.ops->linear_backward_weight(f.stream, tdw.matrix(), tdy.matrix(), tx.matrix(), accumulate);
  f.device->synchronize();
  Vector dx = reference::product(dy, false, w, false, n, in, out),
         dw = reference::product(dy, true, x, false, out, in, n);
  if (accumulate) {
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += old_dx[i];
    for (std::size_t i = 0; i < dw.size(); ++i) dw[i] += old_dw[i];
  }
  CHECK(relative_error(ty.values(), reference::product(x, false, w, true, n, out, in)) < tolerance(type));
  CHECK(relative_error(tdx.values(), dx) < tolerance(type));
  CHECK(relative_error(tdw.values(), dw) < tolerance(gradient));
  CHECK((ty.gaps_untouched() && tdx.gaps_untouched()));
}

}  // namespace

TEST_CASE("linear layers agree with the reference on every path") {
  const int sizes[][3] = {{1, 1, 1},     {17, 129, 17},    {129, 17, 1000}, {1, 1000, 129},
                          {129, 64, 96}, {1030, 24, 1040}, {7, 600, 33}};
  for (const auto& s : sizes) {
    for (bool accumulate : {false, true}) {
      check_linear(GemmPath::automatic, DType::f32, DType::f32, s[0], s[1], s[2], accumulate);
      check_linear(GemmPath::automatic, DType::bf16, DType::f32, s[0], s[1], s[2], accumulate);
      check_linear(GemmPath::packed, DType::bf16, DType::bf16, s[0], s[1], s[2], accumulate);
      check_linear(GemmPath::packed, DType::f32, DType::f32, s[0], s[1], s[2], accumulate);
      check_linear(GemmPath::automatic, DType::f32, DType::bf16, s[0], s[1], s[2], accumulate);
      check_linear(GemmPath::matmul, DType::f32, DType::f32, s[0], s[1], s[2], accumulate);
      if (cpu::cpu_has_bf16())
        check_linear(GemmPath::matmul, DType::bf16, DType::bf16, s[0], s[1], s[2], accumulate);
      if (cpu::cpu_has_bf16_dots()) {
        check_linear(GemmPath::dots, DType::bf16, DType::bf16, s[0], s[1], s[2], accumulate);
        check_linear(GemmPath::dots, DType::bf16, DType::f32, s[0], s[1], s[2], accumulate);
      }
    }
  }
}

TEST_CASE("linear layers agree with the reference on every instruction set") {
  for_each_instruction_set([&](const char* name) {
    CAPTURE(name);
    for (const GemmPath path : {GemmPath::automatic, GemmPath::packed}) {
      check_linear(path, DType::bf16, DType::f32, 67, 80, 45, true);
      check_linear(path, DType::bf16, DType::bf16, 35, 1090, 33, false);
    }
  });
}

TEST_CASE("products on bf16 dots agree with the reference when their operands are cut") {
  if (!cpu::cpu_has_bf16_dots()) return;
  // Several bands; several depths; a stride that would share cache lines; several blocks of columns.
  const int sizes[][3] = {{1100, 512, 70}, {25, 1500, 40}, {30, 2048, 24}, {20, 9000, 300}};
  for (const auto& s : sizes) check_linear(GemmPath::dots, DType::bf16, DType::f32, s[0], s[1], s[2], true);
}

TEST_CASE("products do not depend on the number of threads and repeat bit for bit") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Vector x = random_values(2100 * 40, type, 1), w = random_values(1100 * 40, type, 2);
  std::vector<unsigned char> first;
  for (int threads : {1, 1, 2, 3}) {
    CpuFixture f({}, {.threads = threads});
    Tensor tx(type, 2100, 40, x), tw(type, 1100, 40, w), ty(type, 2100, 1100);
    f.ops->linear_forward(f.stream, ty.matrix(), tx.matrix(), tw.matrix());
    f.device->synchronize();
    if (first.empty()) first = ty.bytes();
    CHECK(ty.bytes() == first);
  }
}

TEST_CASE("mismatched shapes and dtypes are refused at the call") {
  CpuFixture f;
  Tensor x(DType::f32, 4, 8), w(DType::f32, 16, 8), y(DType::f32, 4, 16), half(DType::bf16, 4, 16),
      narrow(DType::f32, 4, 15);
  CHECK_THROWS_AS(f.ops->linear_forward(f.stream, narrow.matrix(), x.matrix(), w.matrix()), InternalError);
  CHECK_THROWS_AS(f.ops->linear_forward(f.stream, half.matrix(), x.matrix(), w.matrix()), InternalError);
  CHECK_THROWS_AS(f.ops->linear_forward(f.stream, y.matrix(), w.matrix(), x.matrix()), InternalError);
  CHECK_THROWS_AS(f.ops->cast(f.stream, x.flat(), w.flat()), InternalError);
  CHECK_THROWS_AS(make_cpu_ops(*f.device, {.threads = 0}), UsageError);
  const std::int32_t wrong[] = {16, 0, 0, 0};
  float losses[4];
  CHECK_THROWS_AS(f.ops->cross_entropy(f.stream, y.matrix(), losses, wrong, false), InternalError);
}

TEST_CASE("RMSNorm forward and backward agree with the reference, in place where the contract allows") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int cols = GENERATE(1, 17, 129, 1000);
  const double scale = GENERATE(1.0, 1e-10, 1e10);
  const int rows = 129;
  CAPTURE(name_of(type), cols, scale);
  CpuFixture f({CpuDeviceOptions::deferred, 2});
  const float eps = 1e-5f;
  const Vector x = random_values(rows * cols, type, 1, scale),
               res = random_values(rows * cols, type, 2, scale);
  const Vector w = random_values(cols, type, 3), dy = random_values(rows * cols, type, 4),
               dres = random_values(rows * cols, type, 5);
  Vector h(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    h[i] = rounded(static_cast<float>(x[i]) + static_cast<float>(res[i]), type);
  Tensor tx(type, rows, cols, x, 3), tres(type, rows, cols, res), tw(type, 1, cols, w),
      ty(type, rows, cols, 1), trstd(DType::f32, 1, rows);
  float* rstd = static_cast<float*>(trstd.flat().data);
  f.ops->rmsnorm_forward(f.stream, ty.matrix(), rstd, tx.matrix(), tx.matrix(), tres.matrix(), tw.flat(),
                         eps);  // sum over x
  f.device->synchronize();
  const auto expected = reference::rmsnorm(h, w, rows, cols, eps);
  CHECK(tx.values() == h);
  CHECK(relative_error(ty.values(), expected.y) < tolerance(type));
  CHECK(relative_error(trstd.values(), expected.rstd) < 2e-6);
  CHECK((tx.gaps_untouched() && ty.gaps_untouched()));

  Tensor tdy(type, rows, cols, dy), tdres(type, rows, cols, dres, 2),
      tdw(DType::f32, 1, cols, Vector(cols, 1.0));
  Tensor separate(type, rows, cols);
  f.ops->rmsnorm_backward(f.stream, separate.matrix(), tdw.flat(), tdy.matrix(), tdres.matrix(), tx.matrix(),
                          tw.flat(), rstd, true);
  f.ops->rmsnorm_backward(f.stream, tdy.matrix(), tdw.flat(), tdy.matrix(), tdres.matrix(), tx.matrix(),
                          tw.flat(), rstd, false);
  f.device->synchronize();
  auto gradient = reference::rmsnorm_backward(dy, h, w, expected.rstd, rows, cols);
  for (std::size_t i = 0; i < dres.size(); ++i) gradient.dx[i] += dres[i];
  CHECK(relative_error(separate.values(), gradient.dx) < tolerance(type));
  CHECK(separate.values() == tdy.values());  // dx over dy
  CHECK(relative_error(tdw.values(), gradient.dweight) < 3e-6);
}

TEST_CASE("rotary embedding agrees with the reference and its inverse undoes it") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int d = GENERATE(2, 32, 80, 96, 256);
  const int sequence = 17, rows = 3 * sequence, heads = 3;
  CpuFixture f;
  Vector c, s;
  for (int i = 0; i < sequence * d / 2; ++i)
    c.push_back(rounded(std::cos(0.37 * i), DType::f32)),
        s.push_back(rounded(std::sin(0.37 * i), DType::f32));
  const Vector x = random_values(rows * heads * d, type, 1);
  Tensor tx(type, rows, heads * d, x, 4), tc(DType::f32, 1, sequence * d / 2, c),
      ts(DType::f32, 1, sequence * d / 2, s);
  auto* cosine = static_cast<float*>(tc.flat().data);
  auto* sine = static_cast<float*>(ts.flat().data);
  f.ops->rope(f.stream, tx.matrix(), d, sequence, cosine, sine, false);
  f.device->synchronize();
  CHECK(relative_error(tx.values(), reference::rope(x, rows, heads, d, sequence, c, s, false)) <
        tolerance(type));
  f.ops->rope(f.stream, tx.matrix(), d, sequence, cosine, sine, true);
  f.device->synchronize();
  CHECK(relative_error(tx.values(), x) < 2 * tolerance(type));
  CHECK(tx.gaps_untouched());
}

TEST_CASE("SwiGLU agrees with the reference, also for huge gates") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int width = GENERATE(1, 17, 129, 1000);
  const double scale = GENERATE(1.0, 60.0, 1e-6);
  const int rows = 17;
  CpuFixture f;
  const Vector gu = random_values(rows * 2 * width, type, 1, scale),
               dout = random_values(rows * width, type, 2);
  Tensor tgu(type, rows, 2 * width, gu, 3), tout(type, rows, width, 2), tdout(type, rows, width, dout),
      td(type, rows, 2 * width);
  f.ops->swiglu_forward(f.stream, tout.matrix(), tgu.matrix());
  f.ops->swiglu_backward(f.stream, td.matrix(), tdout.matrix(), tgu.matrix());
  f.device->synchronize();
  CHECK(relative_error(tout.values(), reference::swiglu(gu, rows, width)) < tolerance(type));
  CHECK(relative_error(td.values(), reference::swiglu_backward(dout, gu, rows, width)) < tolerance(type));
  CHECK((tgu.gaps_untouched() && tout.gaps_untouched()));
}

TEST_CASE("cross-entropy agrees with the reference: masked rows, huge offsets, NaN") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int v = GENERATE(1, 17, 129, 1000, 8192);
  const double scale = GENERATE(1.0, 30.0);
  const int rows = 19;
  CpuFixture f({CpuDeviceOptions::deferred, 3});
  Vector logits = random_values(rows * v, type, 1, scale);
  for (int j = 0; j < v; ++j) logits[3 * v + j] = rounded(logits[3 * v + j] + 1e4, type);
  std::vector<std::int32_t> targets(rows);
  for (int i = 0; i < rows; ++i) targets[i] = i % 5 == 4 ? -1 : i * 7 % v;
  Tensor t(type, rows, v, logits, 3), kept(type, rows, v, logits), losses(DType::f32, 1, rows),
      again(DType::f32, 1, rows);
  f.ops->cross_entropy(f.stream, t.matrix(), static_cast<float*>(losses.flat().data), targets.data(), true);
  f.ops->cross_entropy(f.stream, kept.matrix(), static_cast<float*>(again.flat().data), targets.data(),
                       false);
  f.device->synchronize();
  const auto expected = reference::cross_entropy(logits, targets, rows, v);
  CHECK(relative_error(losses.values(), expected.losses) < 2e-6);
  CHECK(again.values() == losses.values());
  CHECK(kept.values() == logits);
  CHECK(relative_error(t.values(), expected.gradient) < tolerance(type));
  CHECK(t.gaps_untouched());

  logits[v - 1] = NAN;
  Tensor bad(type, rows, v, logits);
  f.ops->cross_entropy(f.stream, bad.matrix(), static_cast<float*>(losses.flat().data), targets.data(), true);
  f.device->synchronize();
  CHECK(std::isnan(losses.values()[0]));
}

TEST_CASE("embedding gathers rows and its backward adds them in fp32, rounded once") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const bool accumulate = GENERATE(false, true);
  const int v = 29, cols = 129, rows = 1000;
  CpuFixture f({}, {.threads = 2});
  const Vector table = random_values(v * cols, type, 1), dout = random_values(rows * cols, type, 2);
  std::vector<std::int32_t> tokens(rows);
  for (int i = 0; i < rows; ++i) tokens[i] = i * i % (v - 1);  // the last row is never read
  Tensor tt(type, v, cols, table), out(type, rows, cols, 2), td(type, rows, cols, dout, 1),
      dt(type, v, cols, table);
  f.ops->embedding_forward(f.stream, out.matrix(), tt.matrix(), tokens.data());
  f.ops->embedding_backward(f.stream, dt.matrix(), td.matrix(), tokens.data(), accumulate);
  f.device->synchronize();
  Vector gathered, sums = accumulate ? table : Vector(v * cols);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c)
      gathered.push_back(table[tokens[r] * cols + c]), sums[tokens[r] * cols + c] += dout[r * cols + c];
  CHECK(out.values() == gathered);
  CHECK(relative_error(dt.values(), sums) < tolerance(type));
}
