// Warp collectives. Lane layouts are those of the PTX ISA's sections on ldmatrix and mma.sync.
#include "cuda/emulation/executor.h"

#include <bit>
#include <cstring>

namespace strata::emulation {

namespace {

using Operands = void* const (&)[lanes_per_warp];

// ---- shuffles and votes ----

struct ShuffleOperand {
  ShuffleKind kind;
  std::uint64_t value;
  int lane;
  int width;
  std::uint64_t result;
};

void execute_shuffle(Executor& executor, unsigned warp, unsigned lanes, Operands operands, Where where) {
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int self = std::countr_zero(rest);
    auto& mine = *static_cast<ShuffleOperand*>(operands[self]);
    // A warp is cut into segments of `width` lanes; what would leave the segment reads the lane itself.
    const int first = self / mine.width * mine.width;
    int source = self;
    switch (mine.kind) {
      case ShuffleKind::index:
        source = first + (mine.lane & (mine.width - 1));
        break;
      case ShuffleKind::exclusive_or:
        source = self ^ mine.lane;
        // Lower segments may be read, higher ones not.
        if (source >= first + mine.width) source = self;
        break;
      case ShuffleKind::down:
        if (self + mine.lane < first + mine.width) source = self + mine.lane;
        break;
      case ShuffleKind::up:
        if (self - mine.lane >= first) source = self - mine.lane;
        break;
    }
    if (source < 0 || source >= 32 || (lanes >> source & 1) == 0) {
      executor.stop("shuffle at " + format_where(where) + ": " +
                    executor.describe_thread(warp * lanes_per_warp + static_cast<unsigned>(self)) +
                    " reads lane " + std::to_string(source) + ", which takes no part (lanes " +
                    describe_mask(lanes) + " do): the value is undefined");
      return;
    }
    mine.result = static_cast<const ShuffleOperand*>(operands[source])->value;
  }
}

struct BallotOperand {
  bool predicate;
  unsigned result;
};

void execute_ballot(Executor&, unsigned, unsigned lanes, Operands operands, Where) {
  unsigned votes = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (static_cast<const BallotOperand*>(operands[lane])->predicate) votes |= 1u << lane;
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    static_cast<BallotOperand*>(operands[std::countr_zero(rest)])->result = votes;
  }
}

// ---- ldmatrix ----

struct LoadMatrixOperand {
  std::uint32_t* registers;
  int tiles;
  bool transposed;
  const std::uint16_t* row;
};

void execute_ldmatrix(Executor& executor, unsigned warp, unsigned, Operands operands, Where where) {
  const auto& any = *static_cast<const LoadMatrixOperand*>(operands[0]);
  executor.counters().ldmatrix += 1;
  executor.counters().ldmatrix_tiles += static_cast<unsigned>(any.tiles);
  RaceDetector* race = executor.race();
  const Site site = race != nullptr ? race->site(where) : 0;
  for (int tile = 0; tile < any.tiles; ++tile) {
    const auto row = [&](int r) {
      return static_cast<const LoadMatrixOperand*>(operands[tile * 8 + r])->row;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const unsigned thread = warp * lanes_per_warp + static_cast<unsigned>(lane);
      const int a = lane / 4;
      const int b = lane % 4 * 2;
      const std::uint16_t* low = any.transposed ? row(b) + a : row(a) + b;
      const std::uint16_t* high = any.transposed ? row(b + 1) + a : row(a) + b + 1;
      static_cast<LoadMatrixOperand*>(operands[lane])->registers[tile] =
          *low | static_cast<std::uint32_t>(*high) << 16;
      if (race != nullptr) {
        race->access(thread, low, 2, Access::read, site);
        race->access(thread, high, 2, Access::read, site);
      }
    }
  }
}

// ---- mma ----

struct MmaOperand {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

float bf16_low(std::uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
float bf16_high(std::uint32_t bits) {
  return std::bit_cast<float>(bits & 0xffff0000u);
}
float tf32(std::uint32_t bits) {
  return std::bit_cast<float>(bits & 0xffffe000u);
}

// d += a b for a (16, K) and b (K, 8), given and returned in the accumulator's lane layout. Products of bf16
// (and of tf32) are exact in fp32; the sum runs over k in order, starting from d.
template <int K>
void multiply(const float (&a)[16][K], const float (&b)[K][8], Operands operands) {
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const float* r = static_cast<const MmaOperand*>(operands[lane])->d;
    const int g = lane / 4;
    const int t = lane % 4 * 2;
    d[g][t] = r[0], d[g][t + 1] = r[1], d[g + 8][t] = r[2], d[g + 8][t + 1] = r[3];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < K; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* r = static_cast<const MmaOperand*>(operands[lane])->d;
    const int g = lane / 4;
    const int t = lane % 4 * 2;
    r[0] = d[g][t], r[1] = d[g][t + 1], r[2] = d[g + 8][t], r[3] = d[g + 8][t + 1];
  }
}

void execute_mma_bf16(Executor& executor, unsigned, unsigned, Operands operands, Where) {
  executor.counters().mma_bf16 += 1;
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4;
    const int t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int m = g + i % 2 * 8;
      const int k = t + i / 2 * 8;
      a[m][k] = bf16_low(mine.a[i]);
      a[m][k + 1] = bf16_high(mine.a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g] = bf16_low(mine.b[i]);
      b[t + i * 8 + 1][g] = bf16_high(mine.b[i]);
    }
  }
  multiply(a, b, operands);
}

void execute_mma_tf32(Executor& executor, unsigned, unsigned, Operands operands, Where) {
  executor.counters().mma_tf32 += 1;
  float a[16][8];
  float b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(mine.a[i]);
    for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32(mine.b[i]);
  }
  multiply(a, b, operands);
}

constexpr CollectiveKind sync_kind{"__syncwarp()", false, true, nullptr};
constexpr CollectiveKind shuffle_kind{"a shuffle", false, false, &execute_shuffle};
constexpr CollectiveKind ballot_kind{"a vote", false, false, &execute_ballot};
constexpr CollectiveKind ldmatrix_kind{"ldmatrix", true, false, &execute_ldmatrix};
constexpr CollectiveKind mma_bf16_kind{"mma_bf16", true, false, &execute_mma_bf16};
constexpr CollectiveKind mma_tf32_kind{"mma_tf32", true, false, &execute_mma_tf32};

constexpr unsigned full_mask = ~0u;

}  // namespace

void warp_sync(unsigned mask, Where where) {
  in_kernel("__syncwarp").collective(sync_kind, 0, mask, nullptr, where);
}

std::uint64_t warp_shuffle(ShuffleKind kind, unsigned mask, std::uint64_t value, int lane, int width,
                           Where where) {
  Executor& executor = in_kernel("a shuffle");
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width))) {
    executor.fail("shuffle at " + format_where(where) + ": width " + std::to_string(width) +
                  " is not a power of two up to 32");
  }
  ShuffleOperand operand{kind, value, lane, width, 0};
  executor.collective(shuffle_kind, static_cast<unsigned>(kind) * 64 + static_cast<unsigned>(width), mask,
                      &operand, where);
  return operand.result;
}

unsigned warp_ballot(unsigned mask, int predicate, Where where) {
  BallotOperand operand{predicate != 0, 0};
  in_kernel("a vote").collective(ballot_kind, 0, mask, &operand, where);
  return operand.result;
}

void warp_ldmatrix(std::uint32_t* registers, int tiles, bool transposed, const void* row, Where where) {
  Executor& executor = in_kernel("ldmatrix");
  const int lane = static_cast<int>(executor.current() % lanes_per_warp);
  if (lane < tiles * 8) {  // the other lanes' addresses are not used
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) report_misaligned(row, 16, where);
    if (executor.shared_holding(row, 16) == nullptr) {
      executor.fail("ldmatrix at " + format_where(where) + ": the row that " +
                    executor.describe_thread(executor.current()) + " gives, 16 bytes at " +
                    executor.describe_address(row) + ", does not lie in one shared array");
    }
  }
  LoadMatrixOperand operand{registers, tiles, transposed, static_cast<const std::uint16_t*>(row)};
  executor.collective(ldmatrix_kind, static_cast<unsigned>(tiles) * 2 + transposed, full_mask, &operand,
                      where);
}

void warp_mma_bf16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, Where where) {
  MmaOperand operand{d, a, {b0, b1}};
  in_kernel("mma_bf16").collective(mma_bf16_kind, 0, full_mask, &operand, where);
}

void warp_mma_tf32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, Where where) {
  MmaOperand operand{d, a, {b0, b1}};
  in_kernel("mma_tf32").collective(mma_tf32_kind, 0, full_mask, &operand, where);
}

}  // namespace strata::emulation
