// Attention's numbers: long and short sequences, every ratio of heads, schedules, magnitudes, and the CPU's
// results.
#include "base/error.h"
#include "tests/kernels/attention_fixture.h"

using namespace strata;
using namespace strata::test;

TEST_CASE("flash attention agrees with the reference for every ratio of heads") {
  for (const int ratio : {1, 3, 4, 7}) {
    for (const int sequence : {17, 129}) {
      AttentionProblem p(DType::bf16, {1, sequence, 2 * ratio, 2, 64});
      check_attention(p);
    }
  }
}

TEST_CASE("flash attention agrees with the reference at tile edges") {
  for (const int sequence : {15, 16, 63, 64, 65, 127, 128, 192, 257}) {
    AttentionProblem p(DType::bf16, {1, sequence, 1, 1, 128});
    check_attention(p);
  }
}

TEST_CASE("flash attention agrees with the reference on a thousand tokens") {
  AttentionProblem p(DType::bf16, {1, 1000, 2, 1, 128});
  check_attention(p);
}

#if defined(STRATA_EMULATE)

using emulation::CopyTime;
using emulation::Options;
using emulation::Order;

TEST_CASE("flash attention gives the same bits in every order of threads, blocks and copies") {
  for (const int head : {64, 80, 128, 256}) {
    AttentionProblem p(DType::bf16, {1, 150, 2, 1, head});
    std::vector<Options> schedules;
    for (const Order order : {Order::forward, Order::reverse}) {
      for (const CopyTime copies : {CopyTime::at_issue, CopyTime::at_wait}) {
        Options options;
        options.threads = options.blocks = order;
        options.copies = copies;
        schedules.push_back(options);
      }
    }
    for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
      Options options;
      options.threads = options.blocks = Order::random;
      options.seed = seed;
      options.copies = seed % 2 == 0 ? CopyTime::at_issue : CopyTime::at_wait;
      schedules.push_back(options);
    }
    check_attention(p);
    const AttentionOutcome first = run_attention(p);
    for (std::size_t i = 0; i < schedules.size(); ++i) {
      CAPTURE(head, i);
      const emulation::ScopedOptions scope(schedules[i]);
      CHECK(run_attention(p).bits == first.bits);
    }
  }
}

TEST_CASE("attention on CUDA cores gives the same bits in every order of threads and blocks") {
  for (const DType type : {DType::f32, DType::bf16}) {
    AttentionProblem p(type, {1, 70, 4, 2, 40});
    const AttentionOutcome first = run_attention(p);
    for (const Order order : {Order::reverse, Order::random}) {
      Options options;
      options.threads = options.blocks = order;
      const emulation::ScopedOptions scope(options);
      CHECK(run_attention(p).bits == first.bits);
    }
  }
}

#else

TEST_CASE("attention gives the same bits again") {
  for (const int head : {64, 80, 128, 256}) {
    AttentionProblem p(DType::bf16, {2, 1500, 4, 2, head});
    CHECK(run_attention(p).bits == run_attention(p).bits);
  }
}

#endif

TEST_CASE("flash attention does not depend on what lies beside its sequence") {
  // The same second sequence behind another first one: the same bits.
  AttentionProblem p(DType::bf16, {2, 100, 2, 2, 64}), changed = p;
  changed.change = [](AttentionProblem& x) {
    for (Vector* m : {&x.q, &x.k, &x.v, &x.dout}) std::fill_n(m->begin(), m->size() / 2, NAN);
  };
  const AttentionOutcome a = run_attention(p), b = run_attention(changed);
  const auto second_half = [](const Vector& x) { return Vector(x.begin() + x.size() / 2, x.end()); };
  for (const auto& [x, y] :
       {std::pair(&a.out, &b.out), {&a.lse, &b.lse}, {&a.dq, &b.dq}, {&a.dk, &b.dk}, {&a.dv, &b.dv}}) {
    CHECK(second_half(*x) == second_half(*y));
  }
}

TEST_CASE("flash attention does not read the future") {
  // From token 64 on everything is NaN: earlier outputs and their gradients with respect to q are as before.
  AttentionProblem p(DType::bf16, {1, 130, 2, 1, 64}), changed = p;
  changed.change = [](AttentionProblem& x) {
    for (Vector* m : {&x.q, &x.k, &x.v, &x.dout}) std::fill(m->begin() + m->size() / 130 * 64, m->end(), NAN);
  };
  const AttentionOutcome a = run_attention(p), b = run_attention(changed);
  const auto past = [](const Vector& x) { return Vector(x.begin(), x.begin() + x.size() / 130 * 64); };
  CHECK(past(a.out) == past(b.out));
  CHECK(past(a.dq) == past(b.dq));
}

TEST_CASE("flash attention survives scores of thousands and almost none") {
  for (const double scale : {1e-3, 6.0, 30.0}) {
    AttentionProblem p(DType::bf16, {1, 140, 2, 1, 128});
    p.scale = scale;
    check_attention(p, scale < 1);
    // Probabilities are nearly one-hot with large scores and the gradients mere rounding, so finite is all
    // they are.
    if (scale > 1) {
      const AttentionOutcome o = run_attention(p);
      for (const Vector* x : {&o.dq, &o.dk, &o.dv}) {
        CHECK(std::all_of(x->begin(), x->end(), [](double e) { return std::isfinite(e); }));
      }
    }
  }
}

TEST_CASE("flash attention survives huge and tiny values and gradients") {
  for (const double scale : {1e-12, 1e12}) {
    AttentionProblem p(DType::bf16, {1, 140, 2, 1, 64});
    p.value_scale = scale;
    check_attention(p);
  }
}

TEST_CASE("flash attention agrees with the reference on rows whose scores are extreme") {
  // Some queries 60 times as long, some zero (uniform probabilities), some keys 40 times as long.
  AttentionProblem p(DType::bf16, {1, 200, 2, 1, 64});
  p.change = [](AttentionProblem& x) {
    for (int row = 0; row < 200; ++row) {
      for (int d = 0; d < x.query_columns(); ++d) {
        double& q = x.q[row * x.query_columns() + d];
        q = rounded(q * (row % 5 == 1 ? 60 : row % 5 == 2 ? 0 : 1), DType::bf16);
      }
      for (int d = 0; d < x.key_columns(); ++d) {
        double& k = x.k[row * x.key_columns() + d];
        k = rounded(k * (row % 7 == 3 ? 40 : 1), DType::bf16);
      }
    }
  };
  check_attention(p, false);
}

TEST_CASE("keys with a score of minus infinity are invisible, even a whole tile of them") {
  AttentionProblem p(DType::bf16, {1, 150, 1, 1, 64}), without = p;
  p.change = [](AttentionProblem& x) {
    for (int row = 0; row < 150; ++row) x.q[row * 64] = 1;
    for (int row = 0; row < 100; ++row) x.k[row * 64] = -INFINITY;
  };
  without.change = [](AttentionProblem& x) {
    for (int row = 0; row < 150; ++row) x.q[row * 64] = 1;
    for (int row = 0; row < 100; ++row) x.k[row * 64] = -1e6;
  };
  const AttentionOutcome a = run_attention(p, false), b = run_attention(without, false);
  const auto seeing = [](const Vector& x) { return Vector(x.begin() + x.size() / 150 * 100, x.end()); };
  CHECK(seeing(a.out) == seeing(b.out));
  CHECK(seeing(a.lse) == seeing(b.lse));
}

TEST_CASE("attention's kernels and the CPU's operations agree") {
  for (const DType type : {DType::f32, DType::bf16}) {
    AttentionProblem p(type, {2, 131, 4, 2, 64});
    const AttentionOutcome found = run_attention(p);
    CpuFixture f;
    const int qc = p.query_columns(), kc = p.key_columns(), n = p.tokens();
    Tensor qkv(type, n, qc + 2 * kc, fuse(p)), dqkv(type, n, qc + 2 * kc), out(type, n, qc),
        dout(type, n, qc, p.dout);
    Tensor lse(DType::f32, 1, n * p.size.query_heads);
    const auto part = [&](Tensor& t, int first, int count) { return t.matrix().block(0, first, n, count); };
    auto* l = static_cast<float*>(lse.flat().data);
    f.ops->attention_forward(f.stream, p.shape(), out.matrix(), l, part(qkv, 0, qc), part(qkv, qc, kc),
                             part(qkv, qc + kc, kc));
    f.ops->attention_backward(f.stream, p.shape(), part(dqkv, 0, qc), part(dqkv, qc, kc),
                              part(dqkv, qc + kc, kc), dout.matrix(), out.matrix(), l, part(qkv, 0, qc),
                              part(qkv, qc, kc), part(qkv, qc + kc, kc));
    f.device->synchronize();
    const Vector gradients = dqkv.values();
    const AttentionTolerance allowed = attention_tolerance(p);
    CHECK(worst_row(found.out, out.values(), 64, 0) < 1.5 * allowed.out);
    CHECK(worst_row(found.lse, lse.values(), 1, 0) < allowed.lse * 10);
    CHECK(worst_row(found.dq, columns_of(gradients, qc + 2 * kc, 0, qc), 64, 1) < 1.5 * allowed.gradient);
    CHECK(worst_row(found.dk, columns_of(gradients, qc + 2 * kc, qc, kc), 64, 1) < 1.5 * allowed.gradient);
    CHECK(worst_row(found.dv, columns_of(gradients, qc + 2 * kc, qc + kc, kc), 64, 1) <
          1.5 * allowed.gradient);
  }
}

TEST_CASE("attention refuses what it cannot do") {
  DeviceArray<float> lse(64), scratch(64);
  DeviceTensor x(DType::bf16, 16, 64, 0, 1.0);
  const Matrix m = x.matrix();
  const auto forward = [&](AttentionShape s, Matrix out, float* l, ConstMatrix q, ConstMatrix k) {
    gpu::attention_forward(nullptr, s, out, l, q, k, k);
  };
  const AttentionShape good{1, 16, 1, 1, 64};
  CHECK_NOTHROW(forward(good, m, lse.data(), m, m));
  CHECK_THROWS_AS(forward({1, 16, 3, 2, 64}, m, lse.data(), m, m), InternalError);  // ratio
  CHECK_THROWS_AS(forward({1, 16, 1, 1, 258}, m, lse.data(), m, m), InternalError);
  CHECK_THROWS_AS(forward({1, 17, 1, 1, 64}, m, lse.data(), m, m), InternalError);  // rows
  CHECK_THROWS_AS(forward({1, 0, 1, 1, 64}, m, lse.data(), m, m), InternalError);
  CHECK_THROWS_AS(forward({1, 4194241, 1, 1, 64}, m, lse.data(), m, m), InternalError);  // tiles
  CHECK_THROWS_AS(forward(good, m, nullptr, m, m), InternalError);
  CHECK_THROWS_AS(forward(good, {}, lse.data(), m, m), InternalError);
  Matrix fp32 = m;
  fp32.dtype = DType::f32;
  CHECK_THROWS_AS(forward(good, m, lse.data(), m, fp32), InternalError);
  CHECK_THROWS_AS(gpu::attention_backward(nullptr, good, m, m, m, m, m, lse.data(), m, m, m, nullptr),
                  InternalError);
}
