// CudaOps: products through cuBLASLt's interface, and every other operation through the contract, against the
// CPU's Ops.
#include "cuda/ops/ops.h"

#include <map>

#include "cuda/check.h"
#include "cuda/stream.h"
#include "tests/kernels/support.h"

using namespace strata;
using namespace strata::test;

namespace {

// Device memory with an account; one stream, the default one.
class PlainDevice final : public Device {
 public:
  Buffer allocate(std::size_t bytes, Purpose purpose) override {
    void* p = nullptr;
    STRATA_CUDA(cudaMalloc(&p, bytes));
    allocated += bytes;
    ++allocations;
    return Buffer(this, p, bytes, purpose, false);
  }
  Buffer allocate_host(std::size_t, Purpose) override { throw InternalError("not here"); }
  MemoryUse memory() const override { return {}; }
  Stream& create_stream(std::string, StreamKind) override { return stream; }
  Event record(Stream&) override { return {}; }
  void wait(Stream&, const Event&) override {}
  void synchronize(const Event&) override { STRATA_CUDA(cudaDeviceSynchronize()); }
  void synchronize() override { STRATA_CUDA(cudaDeviceSynchronize()); }
  bool completed(const Event&) override { return true; }
  double seconds_between(const Event&, const Event&) override { return 0; }
  void copy(Stream&, void* to, const void* from, std::size_t bytes) override {
    STRATA_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }
  void copy_to_device(Stream&, void* to, const void* from, std::size_t bytes) override {
    STRATA_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  }
  void copy_to_host(Stream&, void* to, const void* from, std::size_t bytes) override {
    STRATA_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
  void fill_zero(Stream&, void* to, std::size_t bytes) override { STRATA_CUDA(cudaMemset(to, 0, bytes)); }

  CudaStream stream{"compute", nullptr};
  std::size_t allocated = 0;
  int allocations = 0;

 private:
  void release(void* data, std::size_t bytes, Purpose, bool) noexcept override {
    cudaFree(data);
    allocated -= bytes;
  }
};

struct CudaFixture {
  PlainDevice device;
  Stream& stream = device.stream;
  std::unique_ptr<Ops> ops = make_cuda_ops(device, {});
};

}  // namespace

TEST_CASE("linear layers: forward and both gradients agree with double precision, for any stride") {
  struct Case {
    int n, in, out, gap;
  };
  const Case s = GENERATE(Case{1, 1, 1, 0}, Case{17, 129, 24, 3}, Case{129, 17, 40, 8}, Case{64, 96, 17, 0});
  const DType type = GENERATE(DType::f32, DType::bf16), gradient = GENERATE(DType::f32, DType::bf16);
  const bool accumulate = GENERATE(false, true);
  CAPTURE(s.n, s.in, s.out, name_of(type), name_of(gradient), accumulate);
  const Vector x = random_values(static_cast<std::size_t>(s.n) * s.in, type, 1),
               w = random_values(static_cast<std::size_t>(s.out) * s.in, type, 2),
               dy = random_values(static_cast<std::size_t>(s.n) * s.out, type, 3),
               old_dx = random_values(x.size(), type, 4), old_dw = random_values(w.size(), gradient, 5);
  CudaFixture f;
  DeviceTensor tx(Tensor(type, s.n, s.in, x, s.gap)), tw(Tensor(type, s.out, s.in, w, s.gap)),
      tdy(Tensor(type, s.n, s.out, dy, s.gap)), ty(Tensor(type, s.n, s.out, s.gap)),
      tdx(Tensor(type, s.n, s.in, old_dx, s.gap)), tdw(Tensor(gradient, s.out, s.in, old_dw));
  for (int again = 0; again < 2; ++again) {  // the second time from the cache
    f.ops->linear_forward(f.stream, ty.matrix(), tx.matrix(), tw.matrix());
  }
  f.ops->linear_backward_input(f.stream, tdx.matrix(), tdy.matrix(), tw.matrix(), accumulate);
  f.ops->linear_backward_weight(f.stream, tdw.matrix(), tdy.matrix(), tx.matrix(), accumulate);
  Vector dx = reference::product(dy, false, w, false, s.n, s.in, s.out),
         dw = reference::product(dy, true, x, false, s.out, s.in, s.n);
  if (accumulate) {
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += old_dx[i];
    for (std::size_t i = 0; i < dw.size(); ++i) dw[i] += old_dw[i];
  }
  CHECK(relative_error(ty.download().values(), reference::product(x, false, w, true, s.n, s.out, s.in)) <
        tolerance(type));
  CHECK(relative_error(tdx.download().values(), dx) < tolerance(type));
  CHECK(relative_error(tdw.download().values(), dw) < tolerance(gradient));
  CHECK((ty.download().gaps_untouched() && tdx.download().gaps_untouched()));
}

TEST_CASE("one shape at addresses and strides of every alignment, one after another") {
  CudaFixture f;
  const int n = 8, k = 16, room = 512;
  const Vector x = random_values(room, DType::bf16, 1), w = random_values(room, DType::bf16, 2);
  DeviceTensor tx(Tensor(DType::bf16, 1, room, x)), tw(Tensor(DType::bf16, 1, room, w));
  struct Case {
    int skip, gap_x, gap_w, gap_y;
  };
  for (const Case c :
       {Case{0, 0, 0, 0}, Case{1, 0, 0, 0}, Case{8, 0, 0, 0}, Case{0, 8, 0, 0}, Case{0, 0, 8, 0},
        Case{0, 0, 0, 8}, Case{3, 5, 1, 2}, Case{64, 0, 0, 0}, Case{0, 0, 0, 0}}) {
    CAPTURE(c.skip, c.gap_x, c.gap_w, c.gap_y);
    DeviceTensor y(Tensor(DType::bf16, n, n, c.gap_y));
    const auto view = [&](DeviceTensor& t, int gap) {
      return Matrix{t.flat().at(c.skip), DType::bf16, n, k, k + gap};
    };
    const auto values = [&](const Vector& all, int gap) {
      Vector v;
      for (int r = 0; r < n; ++r)
        for (int i = 0; i < k; ++i) v.push_back(all[c.skip + r * (k + gap) + i]);
      return v;
    };
    f.ops->linear_forward(f.stream, y.matrix(), view(tx, c.gap_x), view(tw, c.gap_w));
    const Vector expected = reference::product(values(x, c.gap_x), false, values(w, c.gap_w), true, n, n, k);
    CHECK(relative_error(y.download().values(), expected) < tolerance(DType::bf16));
    CHECK(y.download().gaps_untouched());
  }
}

TEST_CASE("scratch is allocated once and is what workspace_bytes says") {
  CudaFixture f;
  Workload w;
  w.tokens = 64, w.hidden = 32, w.intermediate = 48, w.vocabulary = 100, w.loss_chunk_tokens = 32;
  w.attention = {2, 32, 2, 1, 16};
  const auto step = [&] {
    DeviceTensor x(Tensor(DType::f32, 64, 32, 0, 0.5)), weight(Tensor(DType::f32, 1, 32, 0, 1.0)),
        rstd(Tensor(DType::f32, 1, 64, 0, 1.0)), dw(Tensor(DType::f32, 1, 32)),
        square(Tensor(DType::f32, 32, 32, 0, 1.0)), sums(Tensor(DType::f32, 1, 2)),
        y(Tensor(DType::f32, 64, 32));
    f.ops->rmsnorm_backward(f.stream, y.matrix(), dw.flat(), x.matrix(), {}, x.matrix(), weight.flat(),
                            rstd.as<float>(), false);
    f.ops->linear_forward(f.stream, y.matrix(), x.matrix(), square.matrix());
    f.ops->sum_of_squares(f.stream, sums.as<double>(), x.flat(), false);
  };
  step();
  step();
  const int allocations = f.device.allocations;
  step();
  CHECK(f.device.allocations == allocations);
  CHECK(f.device.allocated == f.ops->workspace_bytes(w));
}

TEST_CASE("operands that do not fit are refused at the call") {
  CudaFixture f;
  DeviceTensor x(Tensor(DType::f32, 4, 8)), w(Tensor(DType::f32, 16, 8)), narrow(Tensor(DType::f32, 4, 15)),
      half(Tensor(DType::bf16, 4, 16)), y(Tensor(DType::f32, 4, 16));
  CHECK_THROWS_AS(f.ops->linear_forward(f.stream, narrow.matrix(), x.matrix(), w.matrix()), InternalError);
  CHECK_THROWS_AS(f.ops->linear_forward(f.stream, half.matrix(), x.matrix(), w.matrix()), InternalError);
  CHECK_THROWS_AS(f.ops->cast(f.stream, x.flat(), w.flat()), InternalError);
  CHECK_THROWS_AS(f.ops->rope(f.stream, x.matrix(), 3, 2, x.as<float>(), x.as<float>(), false),
                  InternalError);
  CHECK_THROWS_AS(f.ops->swiglu_forward(f.stream, x.matrix(), w.matrix()), InternalError);
}

TEST_CASE("a decoder's operations through the contract give what the CPU's give") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  const int rows = 34, hidden = 32, wide = 48, vocabulary = 40;
  const AttentionShape shape{2, 17, 2, 1, 16};
  CAPTURE(name_of(type));
  std::vector<std::int32_t> tokens(rows), targets(rows);
  for (int i = 0; i < rows; ++i)
    tokens[i] = i * 5 % vocabulary, targets[i] = i % 7 == 3 ? -1 : i * 11 % vocabulary;
  unsigned seed = 1;
  const auto random = [&](int r, int c, double scale = 1) {
    return Tensor(type, r, c, random_values(static_cast<std::size_t>(r) * c, type, seed++, scale));
  };
  const Tensor table = random(vocabulary, hidden), weight = random(1, hidden),
               qkv_weight = random(64, hidden, 0.3), out_weight = random(hidden, hidden, 0.3),
               gate_up_weight = random(2 * wide, hidden, 0.3), down_weight = random(hidden, wide, 0.3);
  Vector angles(17 * 8), cosines, sines;
  for (int i = 0; i < 17 * 8; ++i)
    cosines.push_back(rounded(std::cos(0.3 * i), DType::f32)),
        sines.push_back(rounded(std::sin(0.3 * i), DType::f32));
  const Tensor cosine(DType::f32, 1, 17 * 8, cosines), sine(DType::f32, 1, 17 * 8, sines);

  // The same calls on either backend; `Memory` makes a tensor that its operations can reach.
  const auto decoder = [&](Ops& ops, Stream& s, auto memory) {
    auto x = memory(Tensor(type, rows, hidden)), h = memory(Tensor(type, rows, hidden)),
         qkv = memory(Tensor(type, rows, 64)), attended = memory(Tensor(type, rows, hidden)),
         branch = memory(Tensor(type, rows, hidden)), gate_up = memory(Tensor(type, rows, 2 * wide)),
         active = memory(Tensor(type, rows, wide)), logits = memory(Tensor(type, rows, vocabulary)),
         dx = memory(Tensor(type, rows, hidden)), dactive = memory(Tensor(type, rows, wide)),
         dgate_up = memory(Tensor(type, rows, 2 * wide)), dqkv = memory(Tensor(type, rows, 64)),
         dattended = memory(Tensor(type, rows, hidden)),
         dtable = memory(Tensor(DType::f32, vocabulary, hidden)),
         dweight = memory(Tensor(DType::f32, 1, hidden)),
         dlinear = memory(Tensor(DType::f32, 64, hidden, 0, 0.5)), rstd = memory(Tensor(DType::f32, 1, rows)),
         lse = memory(Tensor(DType::f32, 2 * 2, 17)), losses = memory(Tensor(DType::f32, 1, rows)),
         ids = memory(int_tensor(tokens)), goals = memory(int_tensor(targets));
    auto wt = memory(table), wn = memory(weight), wqkv = memory(qkv_weight), wo = memory(out_weight),
         wgu = memory(gate_up_weight), wd = memory(down_weight), co = memory(cosine), si = memory(sine);
    const auto q = [&](Matrix m) { return m.block(0, 0, rows, 32); };
    const auto k = [&](Matrix m) { return m.block(0, 32, rows, 16); };
    const auto v = [&](Matrix m) { return m.block(0, 48, rows, 16); };
    const auto floats = [](auto& t) { return static_cast<float*>(t.flat().data); };
    const auto ints = [](auto& t) { return static_cast<const std::int32_t*>(t.flat().data); };

    ops.embedding_forward(s, x.matrix(), wt.matrix(), ints(ids));
    ops.rmsnorm_forward(s, h.matrix(), floats(rstd), {}, x.matrix(), {}, wn.flat(), 1e-5f);
    ops.linear_forward(s, qkv.matrix(), h.matrix(), wqkv.matrix());
    ops.rope(s, qkv.matrix().block(0, 0, rows, 48), 16, 17, floats(co), floats(si), false);
    ops.attention_forward(s, shape, attended.matrix(), floats(lse), q(qkv.matrix()), k(qkv.matrix()),
                          v(qkv.matrix()));
    ops.linear_forward(s, branch.matrix(), attended.matrix(), wo.matrix());
    ops.rmsnorm_forward(s, h.matrix(), floats(rstd), x.matrix(), x.matrix(), branch.matrix(), wn.flat(),
                        1e-5f);
    ops.linear_forward(s, gate_up.matrix(), h.matrix(), wgu.matrix());
    ops.swiglu_forward(s, active.matrix(), gate_up.matrix());
    ops.linear_forward(s, branch.matrix(), active.matrix(), wd.matrix());
    ops.linear_forward(s, logits.matrix(), branch.matrix(), wt.matrix());
    ops.cross_entropy(s, logits.matrix(), floats(losses), ints(goals), true);
    ops.linear_backward_input(s, dx.matrix(), logits.matrix(), wt.matrix(), false);
    ops.linear_backward_input(s, dactive.matrix(), dx.matrix(), wd.matrix(), false);
    ops.swiglu_backward(s, dgate_up.matrix(), dactive.matrix(), gate_up.matrix());
    ops.linear_backward_input(s, branch.matrix(), dgate_up.matrix(), wgu.matrix(), false);
    ops.rmsnorm_backward(s, dx.matrix(), dweight.flat(), branch.matrix(), dx.matrix(), x.matrix(), wn.flat(),
                         floats(rstd), false);
    ops.linear_backward_input(s, dattended.matrix(), dx.matrix(), wo.matrix(), false);
    ops.attention_backward(s, shape, q(dqkv.matrix()), k(dqkv.matrix()), v(dqkv.matrix()), dattended.matrix(),
                           attended.matrix(), floats(lse), q(qkv.matrix()), k(qkv.matrix()), v(qkv.matrix()));
    ops.rope(s, dqkv.matrix().block(0, 0, rows, 48), 16, 17, floats(co), floats(si), true);
    ops.linear_backward_weight(s, dlinear.matrix(), dqkv.matrix(), h.matrix(), true);
    ops.embedding_backward(s, dtable.matrix(), dx.matrix(), ints(ids), false);
    std::vector<Vector> results;
    for (auto* t : {&losses, &logits, &dx, &dweight, &dqkv, &dlinear, &dtable})
      results.push_back(t->download().values());
    return results;
  };
  struct HostTensor : Tensor {
    explicit HostTensor(const Tensor& t) : Tensor(t) {}
    Tensor download() const { return *this; }
  };
  CudaFixture cuda;
  CpuFixture cpu;
  const auto found = decoder(*cuda.ops, cuda.stream, [](const Tensor& t) { return DeviceTensor(t); });
  const auto expected = decoder(*cpu.ops, cpu.stream, [](const Tensor& t) { return HostTensor(t); });
  // bf16 tensors in between round differently: their last bit is 2^-8, and errors add up over a dozen
  // operations
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(relative_error(found[i], expected[i]) < (type == DType::bf16 ? 3e-2 : 1e-5));
  }
}

TEST_CASE("optimizer and federation through the contract give the CPU's bits") {
  const int n = 1000;
  CudaFixture cuda;
  CpuFixture cpu;
  const auto run = [&](Ops& ops, Stream& s, auto memory) {
    auto p = memory(Tensor(DType::f32, 1, n)), c = memory(Tensor(DType::bf16, 1, n)),
         g = memory(Tensor(DType::f32, 1, n)), m = memory(Tensor(DType::f32, 1, n)),
         v = memory(Tensor(DType::f32, 1, n)), old = memory(Tensor(DType::f32, 1, n)),
         delta = memory(Tensor(DType::f32, 1, n)), momentum = memory(Tensor(DType::f32, 1, n)),
         sums = memory(Tensor(DType::f32, 1, 4)), scale = memory(Tensor(DType::f32, 1, 3)),
         q = memory(Tensor(DType::f32, 1, n / 4)), scales = memory(Tensor(DType::f32, 1, 8));
    auto* const totals = static_cast<double*>(sums.flat().data);
    auto* const step_scale = static_cast<StepScale*>(scale.flat().data);
    ops.initialize_normal(s, p.flat(), 0.02f, random_key(1, "a", "b"), 0);
    ops.initialize_normal(s, g.flat(), 1.0f, random_key(2, "a", "b"), 5);
    ops.cast(s, old.flat(), p.flat());
    for (auto* t : {&m, &v, &momentum}) ops.fill(s, t->flat(), 0);
    ops.sum_of_squares(s, totals, g.flat(), false);
    ops.sum(s, totals + 1, static_cast<const float*>(g.flat().data), n, false);
    ops.fill(s, sums.flat().slice(2, 2), 2.75f);  // a positive fp64 as the number of tokens
    ops.clip_scale(s, step_scale, totals, 1.0f);
    ops.adamw(s,
              {.lr = 1e-2f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .eps = 1e-8f,
               .weight_decay = 0.1f,
               .step = 1,
               .key = {}},
              p.flat(), c.flat(), g.flat(), m.flat(), v.flat(), step_scale);
    ops.sgd(s, 0.1f, 0.01f, p.flat(), c.flat(), g.flat(), step_scale);
    ops.pseudo_gradient(s, delta.flat(), old.flat(), p.flat());
    ops.quantize_int8(s, static_cast<std::int8_t*>(q.flat().data), static_cast<float*>(scales.flat().data),
                      momentum.flat(), delta.flat(), 128);
    ops.dequantize_int8(s, delta.flat(), static_cast<const std::int8_t*>(q.flat().data),
                        static_cast<const float*>(scales.flat().data), 128, 0.5f, false);
    ops.axpby(s, g.flat(), 0.5f, delta.flat(), 0.25f);
    ops.outer_step(s, {OuterRule::diloco, 0.7f, 0.9f, 0.25f}, p.flat(), c.flat(), old.flat(), momentum.flat(),
                   delta.flat());
    std::vector<Tensor> results;
    for (auto* t : {&p, &c, &g, &m, &v, &old, &momentum}) results.push_back(t->download());
    return results;
  };
  struct HostTensor : Tensor {
    explicit HostTensor(const Tensor& t) : Tensor(t) {}
    Tensor download() const { return *this; }
  };
  const auto found = run(*cuda.ops, cuda.stream, [](const Tensor& t) { return DeviceTensor(t); });
  const auto expected = run(*cpu.ops, cpu.stream, [](const Tensor& t) { return HostTensor(t); });
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(same_values(found[i], expected[i]));
  }
}
