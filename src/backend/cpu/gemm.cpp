#include "backend/cpu/gemm.h"

#include <omp.h>

#include <array>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <unordered_map>

#include "backend/cpu/gemm_dots.h"
#include "backend/cpu/gemm_packed.h"
#include "base/error.h"

namespace strata::cpu {
namespace {

// oneDNN's products are cut into bands of rows: enough of them to share out, big enough to lose nothing.
constexpr std::int64_t kBandRows = 1024;

// oneDNN parallelises with OpenMP; our Workers already do.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneOpenMpThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  int before_;
};

std::int64_t blocks(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}
std::size_t round_to_line(std::size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Rows [first, first + count) of the product.
GemmCall band(const GemmCall& call, std::int64_t first, std::int64_t count) {
  GemmCall part = call;
  part.c = call.c.block(first, 0, count, call.n());
  part.a =
      call.transpose_a ? call.a.block(0, first, call.k(), count) : call.a.block(first, 0, count, call.k());
  return part;
}

void sgemm(const GemmCall& call) {
  const OneOpenMpThread single;
  const auto status = dnnl_sgemm(
      call.transpose_a ? 'T' : 'N', call.transpose_b ? 'T' : 'N', call.m(), call.n(), call.k(), 1.0f,
      static_cast<const float*>(call.a.data), call.a.stride, static_cast<const float*>(call.b.data),
      call.b.stride, call.accumulate ? 1.0f : 0.0f, static_cast<float*>(call.c.data), call.c.stride);
  if (status != dnnl_success) {
    throw InternalError("oneDNN sgemm (" + std::to_string(call.m()) + " x " + std::to_string(call.n()) +
                        " x " + std::to_string(call.k()) + ") failed with status " + std::to_string(status) +
                        " -> report this with the configuration");
  }
}

}  // namespace

bool cpu_has_bf16() {
  return dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_bf16 || cpu_has_amx();
}

bool cpu_has_amx() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx512_core_amx:
#if DNNL_VERSION_MAJOR >= 3
    case dnnl::cpu_isa::avx512_core_amx_fp16:
#endif
      return true;
    default:
      return false;
  }
}

// Matmul primitives by shape. Their scratchpads are ours, so that the account of memory holds.
class Gemm::Primitives {
 public:
  std::size_t scratch_bytes(const GemmCall& call) { return find(call).scratch_bytes; }

  void run(const GemmCall& call, void* scratch) {
    const OneOpenMpThread single;
    Primitive& p = find(call);
    dnnl::stream stream(engine_);
    dnnl::memory a(p.a, engine_, const_cast<void*>(call.a.data));
    dnnl::memory b(p.b, engine_, const_cast<void*>(call.b.data));
    dnnl::memory c(p.c, engine_, call.c.data);
    dnnl::memory pad(p.scratchpad, engine_, scratch);
    p.matmul.execute(
        stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}, {DNNL_ARG_SCRATCHPAD, pad}});
    stream.wait();
  }

 private:
  struct Primitive {
    dnnl::memory::desc a, b, c, scratchpad;
    dnnl::matmul matmul;
    std::size_t scratch_bytes = 0;
  };
  using Key = std::array<std::int64_t, 8>;

  static dnnl::memory::desc describe(const ConstMatrix& x, bool transposed) {
    const auto type = x.dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    return transposed ? dnnl::memory::desc({x.cols, x.rows}, type, dnnl::memory::dims{1, x.stride})
                      : dnnl::memory::desc({x.rows, x.cols}, type, dnnl::memory::dims{x.stride, 1});
  }

  Primitive& find(const GemmCall& call) {
    const std::int64_t flags = call.transpose_a + 2 * call.transpose_b + 4 * call.accumulate +
                               8 * (call.a.dtype == DType::bf16) + 16 * (call.c.dtype == DType::bf16);
    const Key key{call.m(), call.n(), call.k(), call.a.stride, call.b.stride, call.c.stride, flags, 0};
    const std::lock_guard lock(mutex_);
    const auto found = cache_.find(key);
    return found != cache_.end() ? found->second : cache_.emplace(key, build(call)).first->second;
  }

  Primitive build(const GemmCall& call) const {
    const OneOpenMpThread single;  // the number of threads is part of a primitive
    Primitive p;
    p.a = describe(call.a, call.transpose_a);
    p.b = describe(call.b, call.transpose_b);
    p.c = describe(call.c, false);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (call.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    try {
#if DNNL_VERSION_MAJOR >= 3
      const dnnl::matmul::primitive_desc description(engine_, p.a, p.b, p.c, attributes);
#else
      const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(p.a, p.b, p.c), attributes, engine_);
#endif
      p.scratchpad = description.scratchpad_desc();
      p.scratch_bytes = p.scratchpad.get_size();
      p.matmul = dnnl::matmul(description);
    } catch (const dnnl::error& e) {
      throw InternalError("oneDNN has no matmul for " + std::string(name_of(call.a.dtype)) +
                          " on this CPU: " + e.what() + " -> let the path be chosen automatically");
    }
    return p;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::mutex mutex_;
  std::map<Key, Primitive> cache_;  // nodes stay where they are while others are added
};

Gemm::Gemm(GemmPath path, Workers& workers)
    : path_(path), workers_(workers), primitives_(std::make_unique<Primitives>()) {}
Gemm::~Gemm() = default;

GemmPath Gemm::path_for(const GemmCall& call) const {
  const bool all_f32 = call.a.dtype == DType::f32 && call.c.dtype == DType::f32;
  if (path_ == GemmPath::automatic) {
    if (all_f32) return GemmPath::sgemm;
    if (call.a.dtype != DType::bf16) return GemmPath::packed;
    if (cpu_has_amx()) return GemmPath::matmul;
    if (cpu_has_bf16_dots()) return GemmPath::dots;
    return cpu_has_bf16() ? GemmPath::matmul : GemmPath::packed;
  }
  if (path_ == GemmPath::dots && !(call.a.dtype == DType::bf16 && cpu_has_bf16_dots())) {
    throw InternalError(
        "GEMM path dots was forced for fp32 operands or on a CPU without bf16 dot products -> let the path "
        "be chosen automatically");
  }
  if (path_ == GemmPath::sgemm && !all_f32) {
    throw InternalError(
        "GEMM path sgemm was forced for a product with bf16 -> use matmul, packed or automatic");
  }
  return path_;
}

std::size_t Gemm::scratch_bytes(const GemmCall& call) {
  const GemmPath path = path_for(call);
  if (path == GemmPath::sgemm || call.m() == 0 || call.n() == 0) return 0;
  const auto threads = static_cast<std::size_t>(workers_.threads());
  if (path == GemmPath::packed) return threads * round_to_line(packed_scratch_floats(call) * sizeof(float));
  if (path == GemmPath::dots) {
    const DotsPlan plan(call);
    return plan.right_bytes + threads * plan.band_bytes();
  }
  std::size_t most = 0;
  for (std::int64_t rows : {std::min(call.m(), kBandRows), call.m() % kBandRows}) {
    if (rows > 0) most = std::max(most, primitives_->scratch_bytes(band(call, 0, rows)));
  }
  return threads * round_to_line(most);
}

void Gemm::run(const GemmCall& call, void* scratch) {
  const GemmPath path = path_for(call);
  if (call.m() == 0 || call.n() == 0) return;
  if (path == GemmPath::dots) return run_dots(call, scratch);
  const std::size_t share = scratch_bytes(call) / static_cast<std::size_t>(workers_.threads());
  auto mine = [&](int worker) {
    return static_cast<char*>(scratch) + share * static_cast<std::size_t>(worker);
  };
  if (path == GemmPath::packed) {
    const std::int64_t across = blocks(call.n(), kPackedBlockCols);
    workers_.run(blocks(call.m(), kPackedBlockRows) * across, [&](std::int64_t i, int worker) {
      packed_block(call, i / across * kPackedBlockRows, i % across * kPackedBlockCols,
                   reinterpret_cast<float*>(mine(worker)));
    });
    return;
  }
  workers_.run(blocks(call.m(), kBandRows), [&](std::int64_t i, int worker) {
    const std::int64_t first = i * kBandRows;
    const GemmCall part = band(call, first, std::min(kBandRows, call.m() - first));
    path == GemmPath::sgemm ? sgemm(part) : primitives_->run(part, mine(worker));
  });
}

void Gemm::run_dots(const GemmCall& call, void* scratch) {
  const DotsPlan plan(call);
  char* const bands = static_cast<char*>(scratch) + plan.right_bytes;
  for (std::int64_t col = 0; col < call.n(); col += plan.cols) {
    workers_.run(dots_pack_tasks(call, plan, col),
                 [&](std::int64_t i, int) { dots_pack(call, plan, col, i, scratch); });
    workers_.run(plan.bands, [&](std::int64_t i, int worker) {
      dots_band(call, plan, i * plan.band, col, scratch,
                bands + plan.band_bytes() * static_cast<std::size_t>(worker));
    });
  }
}

}  // namespace strata::cpu
