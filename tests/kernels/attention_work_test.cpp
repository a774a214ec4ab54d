// How much work attention's kernels issue: tensor core instructions against what the arithmetic needs.
#include "tests/kernels/attention_fixture.h"

using namespace strata;
using namespace strata::test;

namespace {

// mma m16n8k16 (2048 multiply-adds) in `products` products over all pairs of a query and a key that it sees.
double needed(const AttentionShape& s, int products) {
  const double pairs = 0.5 * static_cast<double>(s.sequence * (s.sequence + 1));
  return products * pairs * static_cast<double>(s.head_size * s.batch * s.query_heads) / 2048;
}

void check_work(int head, int sequence) {
  AttentionProblem p(DType::bf16, {1, sequence, 1, 1, head});
  const AttentionOutcome o = run_attention(p);
  const double forward = static_cast<double>(o.forward.mma_bf16) / needed(p.shape(), 2);
  const double backward = static_cast<double>(o.backward.mma_bf16) / needed(p.shape(), 5);
  CAPTURE(head, forward, backward);
  // No fewer than the arithmetic needs: a kernel that skipped too much would show here too.
  CHECK(forward >= 1);
  CHECK(forward <= 1.10);
  CHECK(backward >= 1.4);  // two passes: 7 products where 5 are needed (attention_backward.cu says why)
  CHECK(backward <= 1.50);
  CHECK(o.forward.atomics + o.backward.atomics == 0);
}

}  // namespace

TEST_CASE("attention on 2048 tokens issues few mma more than it needs") {
  for (const int head : {64, 128}) check_work(head, 2048);
}
TEST_CASE("attention on 1024 tokens issues few mma more than it needs at head size 256") {
  check_work(256, 1024);
}
