// Attention at every head size and at awkward lengths and ratios: few tokens, so that it runs in every mode.
#include "tests/kernels/attention_fixture.h"

using namespace strata;
using namespace strata::test;

TEST_CASE("flash attention agrees with the reference at every head size") {
  // One token; a part of a 64-key tile; two tiles of 128 queries, the second with one row.
  const int ratios[] = {1, 3, 4, 7};
  int i = 0;
  for (const int head : {32, 64, 80, 96, 128, 256}) {
    for (const int sequence : {1, 17, 129}) {
      const int ratio = ratios[i++ % 4];
      AttentionProblem p(DType::bf16, {1, sequence, ratio, 1, head});
      REQUIRE(gpu::attention_is_flash(p.shape(), {}));
      check_attention(p);
    }
  }
}

TEST_CASE("flash attention agrees with the reference in several sequences and groups of heads") {
  AttentionProblem p(DType::bf16, {2, 70, 6, 2, 64});
  check_attention(p);
}

TEST_CASE("attention on CUDA cores agrees with the reference in fp32 and at other head sizes") {
  AttentionProblem fp32(DType::f32, {2, 37, 6, 2, 64});
  fp32.gap = 3;
  check_attention(fp32);
  AttentionProblem largest(DType::f32, {1, 33, 1, 1, 256});
  check_attention(largest);
  AttentionProblem odd(DType::bf16, {1, 65, 3, 1, 34});
  odd.gap = 1;
  CHECK_FALSE(gpu::attention_is_flash(odd.shape(), {}));
  check_attention(odd);
  AttentionProblem one(DType::f32, {1, 1, 2, 1, 8});
  check_attention(one);
}
