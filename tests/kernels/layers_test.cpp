#include "cuda/kernels/kernels.h"
#include "tests/kernels/support.h"

using namespace strata;
using namespace strata::test;

namespace {

struct Shape {
  int rows, cols, gap;  // gap: elements between rows; a multiple of 8 keeps the 16-byte path
  double scale = 1;
  Schedules schedules = Schedules::all;
};

// Both widths of the kernels; rows of one element up to rows that no thread keeps whole; huge and tiny
// numbers.
std::vector<Shape> row_shapes() {
  std::vector<Shape> shapes = {{1, 1, 0},
                               {17, 17, 3},
                               {17, 129, 7},
                               {129, 136, 8},
                               {5, 1000, 0, 1e10},
                               {5, 1001, 0, 1e-10},
                               {3, 1033, 3},
                               {3, 4104, 8},
                               {2, 8200, 0, 1, Schedules::few},
                               {1000, 24, 0, 1, Schedules::few}};
  if (thorough) shapes.push_back({2, 20488, 0, 1, Schedules::few});
  return shapes;
}

}  // namespace

TEST_CASE("RMSNorm forward: CPU and double precision agree, the sum may replace the residual") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Shape s = GENERATE(from_range(row_shapes()));
  CAPTURE(name_of(type), s.rows, s.cols, s.gap, s.scale);
  const auto count = static_cast<std::size_t>(s.rows) * s.cols;
  const Vector x = random_values(count, type, 1, s.scale), residual = random_values(count, type, 2, s.scale);
  const Vector weight = random_values(s.cols, type, 3);
  const float eps = 1e-5f;
  Vector h(count);
  for (std::size_t i = 0; i < count; ++i)
    h[i] = rounded(static_cast<float>(x[i]) + static_cast<float>(residual[i]), type);

  Tensor tx(type, s.rows, s.cols, x, s.gap), tr(type, s.rows, s.cols, residual, 2 * s.gap),
      tw(type, 1, s.cols, weight);
  const Tensor empty(type, s.rows, s.cols, s.gap), no_rstd(DType::f32, 1, s.rows);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dx(tx), dr(tr), dw(tw), dy(empty), rstd(no_rstd), plain(empty), plain_rstd(no_rstd),
            sum(empty);
        gpu::rmsnorm_forward(nullptr, plain.matrix(), plain_rstd.as<float>(), {}, dx.matrix(), {}, dw.flat(),
                             eps);
        gpu::rmsnorm_forward(nullptr, dy.matrix(), rstd.as<float>(), {}, dx.matrix(), dr.matrix(), dw.flat(),
                             eps);
        DeviceTensor again(empty), again_rstd(no_rstd);
        gpu::rmsnorm_forward(nullptr, again.matrix(), again_rstd.as<float>(), dr.matrix(), dx.matrix(),
                             dr.matrix(), dw.flat(), eps);
        return std::vector<Tensor>{dy.download(),    rstd.download(),  dr.download(),
                                   again.download(), plain.download(), dx.download()};
      },
      s.schedules);
  const auto expected = reference::rmsnorm(h, weight, s.rows, s.cols, eps);
  CHECK(relative_error(found[0].values(), expected.y) < tolerance(type));
  CHECK(relative_error(found[1].values(), expected.rstd) < 2e-6);
  CHECK(found[2].values() == h);
  CHECK(found[3].values() == found[0].values());
  CHECK(relative_error(found[4].values(), reference::rmsnorm(x, weight, s.rows, s.cols, eps).y) <
        tolerance(type));
  CHECK(found[5].bytes() == tx.bytes());
  for (const Tensor& t : found) CHECK(t.gaps_untouched());

  CpuFixture cpu;
  Tensor y = empty, rstd = no_rstd;
  cpu.ops->rmsnorm_forward(cpu.stream, y.matrix(), static_cast<float*>(rstd.flat().data), {}, tx.matrix(),
                           tr.matrix(), tw.flat(), eps);
  CHECK(relative_error(found[0].values(), y.values()) < tolerance(type));
}

TEST_CASE("RMSNorm backward: CPU and double precision agree, in place and accumulated") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Shape s = GENERATE(from_range(row_shapes()));
  const DType weight_type = s.cols % 2 == 0 ? DType::f32 : DType::bf16;  // of the weight's gradient
  CAPTURE(name_of(type), s.rows, s.cols, s.gap, s.scale);
  const auto count = static_cast<std::size_t>(s.rows) * s.cols;
  const Vector h = random_values(count, type, 1, s.scale), dy = random_values(count, type, 2),
               skip = random_values(count, type, 3), weight = random_values(s.cols, type, 4);
  const Vector old = random_values(s.cols, weight_type, 5);
  const auto forward = reference::rmsnorm(h, weight, s.rows, s.cols, 1e-5);
  Tensor th(type, s.rows, s.cols, h, s.gap), tdy(type, s.rows, s.cols, dy, s.gap),
      tskip(type, s.rows, s.cols, skip), tw(type, 1, s.cols, weight),
      trstd(DType::f32, 1, s.rows, forward.rstd), told(weight_type, 1, s.cols, old);
  const Tensor empty(type, s.rows, s.cols, s.gap), no_dw(weight_type, 1, s.cols);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dh(th), ddy(tdy), dskip(tskip), dw(tw), rstd(trstd), dx(empty), sums(told), fresh(no_dw);
        DeviceArray<unsigned char> scratch(gpu::rmsnorm_backward_scratch_bytes(s.rows, s.cols));
        gpu::rmsnorm_backward(nullptr, dx.matrix(), sums.flat(), ddy.matrix(), dskip.matrix(), dh.matrix(),
                              dw.flat(), rstd.as<float>(), true, scratch.data());
        gpu::rmsnorm_backward(nullptr, ddy.matrix(), fresh.flat(), ddy.matrix(), {}, dh.matrix(), dw.flat(),
                              rstd.as<float>(), false, scratch.data());
        return std::vector<Tensor>{dx.download(), sums.download(), ddy.download(), fresh.download()};
      },
      s.schedules);
  const auto expected = reference::rmsnorm_backward(dy, h, weight, forward.rstd, s.rows, s.cols);
  Vector with_skip = expected.dx, accumulated = expected.dweight;
  for (std::size_t i = 0; i < count; ++i) with_skip[i] += skip[i];
  for (int i = 0; i < s.cols; ++i) accumulated[i] += old[i];
  CHECK(relative_error(found[0].values(), with_skip) < tolerance(type));
  CHECK(relative_error(found[1].values(), accumulated) < 2 * tolerance(weight_type));
  // A single column's gradient is the difference of two equal numbers: only its size can be checked.
  if (s.cols > 1) CHECK(relative_error(found[2].values(), expected.dx) < 2 * tolerance(type));
  CHECK(relative_error(found[3].values(), expected.dweight) < 2 * tolerance(weight_type));
  for (const Tensor& t : found) CHECK(t.gaps_untouched());

  CpuFixture cpu;
  Tensor dx = empty, dw = told;
  cpu.ops->rmsnorm_backward(cpu.stream, dx.matrix(), dw.flat(), tdy.matrix(), tskip.matrix(), th.matrix(),
                            tw.flat(), static_cast<const float*>(trstd.flat().data), true);
  CHECK(relative_error(found[0].values(), dx.values()) < tolerance(type));
  CHECK(relative_error(found[1].values(), dw.values()) < 2 * tolerance(weight_type));
}

TEST_CASE("embedding: forward gathers, backward adds in token order, the CPU's bits") {
  const DType type = GENERATE(DType::f32, DType::bf16), gradient = GENERATE(DType::f32, DType::bf16);
  const bool accumulate = GENERATE(false, true);
  const Shape s =
      GENERATE(Shape{1, 1, 0}, Shape{17, 129, 7}, Shape{129, 2056, 8}, Shape{1000, 24, 0, 1, Schedules::few});
  const int v = 29;
  CAPTURE(name_of(type), name_of(gradient), accumulate, s.rows, s.cols);
  const auto count = static_cast<std::size_t>(s.rows) * s.cols;
  Tensor table(type, v, s.cols, random_values(static_cast<std::size_t>(v) * s.cols, type, 1), s.gap),
      dout(type, s.rows, s.cols, random_values(count, type, 2), s.gap),
      old(gradient, v, s.cols, random_values(static_cast<std::size_t>(v) * s.cols, gradient, 3), s.gap);
  const Tensor empty(type, s.rows, s.cols, s.gap);
  std::vector<std::int32_t> tokens(s.rows);
  for (int i = 0; i < s.rows; ++i)
    tokens[i] = i % 3 == 0 ? 7 : i * i % (v - 1);  // one frequent; the last never
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor dtable(table), dd(dout), sums(old), out(empty), ids(int_tensor(tokens));
        gpu::embedding_forward(nullptr, out.matrix(), dtable.matrix(), ids.as<std::int32_t>());
        gpu::embedding_backward(nullptr, sums.matrix(), dd.matrix(), ids.as<std::int32_t>(), accumulate);
        return std::vector<Tensor>{out.download(), sums.download()};
      },
      s.schedules);
  CpuFixture cpu;
  Tensor out = empty, sums = old;
  cpu.ops->embedding_forward(cpu.stream, out.matrix(), table.matrix(), tokens.data());
  cpu.ops->embedding_backward(cpu.stream, sums.matrix(), dout.matrix(), tokens.data(), accumulate);
  CHECK(found[0].bytes() == out.bytes());
  CHECK(same_values(found[1], sums));
  CHECK(found[1].gaps_untouched());

  const Vector d = dout.values();
  Vector expected = accumulate ? old.values() : Vector(static_cast<std::size_t>(v) * s.cols);
  for (int r = 0; r < s.rows; ++r)
    for (int c = 0; c < s.cols; ++c) expected[tokens[r] * s.cols + c] += d[r * s.cols + c];
  CHECK(relative_error(found[1].values(), expected) < tolerance(gradient));
}

TEST_CASE("a token outside the vocabulary gives NaN and touches nothing in backward") {
  const Tensor table(DType::f32, 3, 16, random_values(48, DType::f32, 1)), empty(DType::f32, 3, 16);
  DeviceTensor dtable(table), out(empty), ids(int_tensor({-1, 3, 2}));
  gpu::embedding_forward(nullptr, out.matrix(), dtable.matrix(), ids.as<std::int32_t>());
  const Vector found = out.download().values(), rows = table.values();
  for (int i = 0; i < 32; ++i) CHECK(std::isnan(found[i]));
  CHECK(Vector(found.begin() + 32, found.end()) == Vector(rows.begin() + 32, rows.end()));
  gpu::embedding_backward(nullptr, dtable.matrix(), DeviceTensor(table).matrix(), ids.as<std::int32_t>(),
                          true);
  const Vector after = dtable.download().values();
  for (int i = 0; i < 32; ++i) CHECK(after[i] == rows[i]);
  CHECK(after[40] == 2 * rows[40]);
}

TEST_CASE("rotary embedding turns pairs by the table, and back") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  struct Case {
    int rows, heads, size, gap;
  };
  const Case s = GENERATE(Case{1, 1, 2, 0}, Case{17, 3, 34, 1}, Case{129, 2, 64, 8}, Case{20, 5, 80, 0},
                          Case{9, 10, 128, 0}, Case{9, 3, 256, 5}, Case{1000, 1, 16, 0}, Case{3, 40, 256, 0});
  const int sequence = 7, half = s.size / 2;
  CAPTURE(name_of(type), s.rows, s.heads, s.size);
  Vector cosine, sine;
  for (int i = 0; i < sequence * half; ++i) {
    cosine.push_back(rounded(std::cos(0.37 * i), DType::f32));
    sine.push_back(rounded(std::sin(0.37 * i), DType::f32));
  }
  const int cols = s.heads * s.size;
  const Vector x = random_values(static_cast<std::size_t>(s.rows) * cols, type, 1);
  Tensor tx(type, s.rows, cols, x, s.gap), tc(DType::f32, 1, sequence * half, cosine),
      ts(DType::f32, 1, sequence * half, sine);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor there(tx), back(tx), c(tc), si(ts);
        gpu::rope(nullptr, there.matrix(), s.size, sequence, c.as<float>(), si.as<float>(), false);
        gpu::rope(nullptr, back.matrix(), s.size, sequence, c.as<float>(), si.as<float>(), true);
        return std::vector<Tensor>{there.download(), back.download()};
      },
      s.rows > 500 ? Schedules::few : Schedules::all);
  for (const bool inverse : {false, true}) {
    const Tensor& t = found[inverse ? 1 : 0];
    CHECK(relative_error(t.values(), reference::rope(x, s.rows, s.heads, s.size, sequence, cosine, sine,
                                                     inverse)) < tolerance(type));
    CHECK(t.gaps_untouched());
    CpuFixture cpu;
    Tensor host = tx;
    cpu.ops->rope(cpu.stream, host.matrix(), s.size, sequence, static_cast<const float*>(tc.flat().data),
                  static_cast<const float*>(ts.flat().data), inverse);
    CHECK(relative_error(t.values(), host.values()) < tolerance(type));
  }
}

TEST_CASE("SwiGLU forward and backward: CPU and double precision agree, for gates of any size") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Shape s = GENERATE(Shape{1, 1, 0}, Shape{17, 17, 3, 1e-6}, Shape{17, 129, 7, 60}, Shape{129, 136, 8},
                           Shape{3, 1000, 0, 1e4}, Shape{3, 2056, 8}, Shape{1000, 24, 0, 1, Schedules::few});
  CAPTURE(name_of(type), s.rows, s.cols, s.scale);
  const auto count = static_cast<std::size_t>(s.rows) * s.cols;
  const Vector gate_up = random_values(2 * count, type, 1, s.scale), dout = random_values(count, type, 2);
  Tensor tg(type, s.rows, 2 * s.cols, gate_up, s.gap), td(type, s.rows, s.cols, dout, 2 * s.gap);
  const Tensor no_out(type, s.rows, s.cols, s.gap), no_d(type, s.rows, 2 * s.cols, s.gap);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor g(tg), d(td), out(no_out), dg(no_d);
        gpu::swiglu_forward(nullptr, out.matrix(), g.matrix());
        gpu::swiglu_backward(nullptr, dg.matrix(), d.matrix(), g.matrix());
        return std::vector<Tensor>{out.download(), dg.download()};
      },
      s.schedules);
  CHECK(relative_error(found[0].values(), reference::swiglu(gate_up, s.rows, s.cols)) < tolerance(type));
  CHECK(relative_error(found[1].values(), reference::swiglu_backward(dout, gate_up, s.rows, s.cols)) <
        tolerance(type));
  for (const Tensor& t : found) CHECK(t.gaps_untouched());
  CpuFixture cpu;
  Tensor out = no_out, dg = no_d;
  cpu.ops->swiglu_forward(cpu.stream, out.matrix(), tg.matrix());
  cpu.ops->swiglu_backward(cpu.stream, dg.matrix(), td.matrix(), tg.matrix());
  CHECK(relative_error(found[0].values(), out.values()) < tolerance(type));
  CHECK(relative_error(found[1].values(), dg.values()) < tolerance(type));
}

namespace {

void check_cross_entropy(DType type, const Shape& s, const Vector& logits,
                         const std::vector<std::int32_t>& targets) {
  Tensor t(type, s.rows, s.cols, logits, s.gap);
  const Tensor no_losses(DType::f32, 1, s.rows);
  const auto found = in_every_schedule(
      [&] {
        DeviceTensor x(t), kept(t), losses(no_losses), only(no_losses), ids(int_tensor(targets));
        gpu::cross_entropy(nullptr, x.matrix(), losses.as<float>(), ids.as<std::int32_t>(), true);
        gpu::cross_entropy(nullptr, kept.matrix(), only.as<float>(), ids.as<std::int32_t>(), false);
        return std::vector<Tensor>{losses.download(), x.download(), only.download(), kept.download()};
      },
      s.schedules);
  const auto expected = reference::cross_entropy(logits, targets, s.rows, s.cols);
  CHECK(worst_error(found[0].values(), expected.losses) < 2e-6);
  CHECK(worst_error(found[1].values(), expected.gradient) < tolerance(type));
  CHECK(same_values(found[2], found[0]));
  CHECK(found[3].bytes() == t.bytes());
  CHECK(found[1].gaps_untouched());
  CpuFixture cpu;
  Tensor x = t, losses = no_losses;
  cpu.ops->cross_entropy(cpu.stream, x.matrix(), static_cast<float*>(losses.flat().data), targets.data(),
                         true);
  CHECK(worst_error(found[0].values(), losses.values()) < 2e-6);
  CHECK(worst_error(found[1].values(), x.values()) < 2 * tolerance(type));
}

std::vector<std::int32_t> some_targets(int rows, int vocabulary) {
  std::vector<std::int32_t> targets(rows);
  for (int i = 0; i < rows; ++i)
    targets[i] = i % 5 != 4 ? (i * 7 + vocabulary - 1) % vocabulary : i % 2 == 0 ? -1 : -100;
  return targets;
}

}  // namespace

TEST_CASE(
    "cross-entropy: CPU and double precision agree on masked rows, huge offsets and wide vocabularies") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  std::vector<Shape> shapes = {{1, 1, 0},
                               {17, 17, 3},
                               {129, 129, 7, 30},
                               {6, 997, 0, 30},
                               {17, 1000, 8},
                               {5, 8192, 0, 1e-3},
                               {1000, 24, 0, 1, Schedules::few}};
  if (thorough) shapes.push_back({2, 128256, 0, 4, Schedules::few});
  const Shape s = GENERATE_REF(from_range(shapes));
  CAPTURE(name_of(type), s.rows, s.cols, s.scale);
  Vector logits = random_values(static_cast<std::size_t>(s.rows) * s.cols, type, 1, s.scale);
  if (s.rows > 3) {
    for (int j = 0; j < s.cols; ++j) logits[3 * s.cols + j] = rounded(logits[3 * s.cols + j] + 1e4, type);
  }
  check_cross_entropy(type, s, logits, some_targets(s.rows, s.cols));
}

TEST_CASE("cross-entropy: logits of -inf have no probability, a row of nothing else and NaN give NaN") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const Shape s{6, 2056, GENERATE(0, 1)};
  Vector logits = random_values(static_cast<std::size_t>(s.rows) * s.cols, type, 1);
  auto row = [&](int r) { return logits.begin() + static_cast<std::ptrdiff_t>(r) * s.cols; };
  std::fill(row(0), row(0) + 1500, -INFINITY);  // whole threads see nothing else
  std::fill(row(1), row(2), -INFINITY);
  row(2)[7] = NAN;
  row(3)[7] = INFINITY;
  std::fill(row(4) + 1, row(5), -INFINITY);  // one logit: loss 0
  std::fill(row(5), row(5) + 10, -INFINITY);
  check_cross_entropy(type, s, logits, {2000, 5, 9, 9, 0, 3});  // the last target is itself at -inf: loss inf
  // outside the vocabulary
  DeviceTensor x(Tensor(type, 1, s.cols, Vector(s.cols, 1.0))), loss(Tensor(DType::f32, 1, 1)),
      ids(int_tensor({s.cols}));
  gpu::cross_entropy(nullptr, x.matrix(), loss.as<float>(), ids.as<std::int32_t>(), true);
  CHECK(std::isnan(loss.download().values()[0]));
  CHECK(std::isnan(x.download().values()[0]));
}
