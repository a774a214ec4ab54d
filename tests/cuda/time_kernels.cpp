// Times the kernels and the matrix products on a GPU at Llama 3.1 8B shapes, 2 x 2048 tokens, AdamW on the
// shard of one of 8 ranks.
//
// Prints {"gpu": name, "seconds": {operation: median}}; the operations are those of
// scripts/bench/roofline.py, which sets the times against the limits. Inputs are random (normal, standard
// deviation 1) and larger than the caches save where a kernel's own data is not. Exit code 3: there is no
// GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/attention.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/matrix_product.h"
#include "tests/support/device_array.h"

using namespace strata;
using test::DeviceArray;

namespace {

constexpr std::int64_t batch = 2, sequence = 2048, tokens = batch * sequence;
constexpr std::int64_t hidden = 4096, intermediate = 14336, vocabulary = 128256;
constexpr std::int64_t head_size = 128, query_heads = 32, key_value_heads = 8;
constexpr std::int64_t queries = query_heads * head_size, keys = key_value_heads * head_size;
constexpr std::int64_t piece = 256;                     // tokens whose logits exist at once
constexpr std::int64_t shard_elements = 1'003'782'656;  // 8,030,261,248 parameters / 8

using Bytes = DeviceArray<unsigned char>;

// Device memory with random contents, and views of it.
class Buffer {
 public:
  Buffer(DType dtype, std::int64_t count, float standard_deviation = 1)
      : dtype_(dtype), count_(count), memory_(static_cast<std::size_t>(count) * size_of(dtype)) {
    static std::uint64_t drawn = 0;
    gpu::initialize_normal(nullptr, flat(), standard_deviation, random_key(1, "benchmark", "", ++drawn), 0);
  }
  Buffer(DType dtype, std::int64_t rows, std::int64_t cols) : Buffer(dtype, rows * cols) { cols_ = cols; }

  Flat flat() const { return {memory_.data(), dtype_, count_}; }
  Matrix matrix() const { return strata::matrix(memory_.data(), dtype_, count_ / cols_, cols_); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory_.data());
  }

 private:
  DType dtype_;
  std::int64_t count_, cols_ = 1;
  Bytes memory_;
};

// Milliseconds between two points of a stream.
class Timer {
 public:
  Timer() {
    test::check(cudaEventCreate(&begin_), "cudaEventCreate");
    test::check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  float milliseconds(const std::function<void()>& enqueue) {
    test::check(cudaEventRecord(begin_, nullptr), "cudaEventRecord");
    enqueue();
    test::check(cudaEventRecord(end_, nullptr), "cudaEventRecord");
    test::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float elapsed = 0;
    test::check(cudaEventElapsedTime(&elapsed, begin_, end_), "cudaEventElapsedTime");
    return elapsed;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class Report {
 public:
  // The median of 21 runs after 3 that warm up.
  void time(const std::string& operation, const std::function<void()>& enqueue) {
    for (int i = 0; i < 3; ++i) timer_.milliseconds(enqueue);
    std::vector<float> runs(21);
    for (float& run : runs) run = timer_.milliseconds(enqueue);
    std::nth_element(runs.begin(), runs.begin() + 10, runs.end());
    seconds_.emplace_back(operation, runs[10] * 1e-3);
    std::fprintf(stderr, "%-36s %9.1f us\n", operation.c_str(), runs[10] * 1e3);
  }
  void print(const char* gpu) const {
    std::printf("{\"gpu\": \"%s\", \"seconds\": {", gpu);
    const char* separator = "";
    for (const auto& [operation, seconds] : seconds_) {
      std::printf("%s\n  \"%s\": %.9f", separator, operation.c_str(), seconds);
      separator = ",";
    }
    std::printf("}}\n");
  }

 private:
  Timer timer_;
  std::vector<std::pair<std::string, double>> seconds_;
};

std::vector<std::int32_t> random_tokens(std::int64_t count) {
  std::mt19937 engine(1);
  std::uniform_int_distribution<std::int32_t> id(0, static_cast<std::int32_t>(vocabulary) - 1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  for (std::int32_t& t : ids) t = id(engine);
  return ids;
}

// y (rows, outputs) = x w^T, and its two gradients.
void time_linear(Report& report, const std::string& name, std::int64_t rows, std::int64_t outputs,
                 std::int64_t inputs, gpu::MatrixProducts& products, void* workspace) {
  const Buffer x(DType::bf16, rows, inputs), w(DType::bf16, outputs, inputs), y(DType::bf16, rows, outputs);
  const Buffer dx(DType::bf16, rows, inputs), dw(DType::f32, outputs, inputs);
  const auto time = [&](const char* what, const gpu::Product& product) {
    report.time(name + what, [&] { products.run(nullptr, product, workspace); });
  };
  time("", {.c = y.matrix(), .a = x.matrix(), .b = w.matrix(), .transpose_b = true});
  time(", input gradient", {.c = dx.matrix(), .a = y.matrix(), .b = w.matrix()});
  gpu::Product gradient{.c = dw.matrix(), .a = y.matrix(), .b = x.matrix(), .transpose_a = true};
  time(", weight gradient", gradient);
  if (rows == tokens) return;
  gradient.accumulate = true;
  time(", weight gradient added", gradient);
}

void time_products(Report& report, int compute_capability_major) {
  gpu::MatrixProducts products(gpu::product_workspace_bytes(compute_capability_major));
  const Bytes workspace(products.workspace_bytes());
  const auto linear = [&](const char* name, std::int64_t rows, std::int64_t outputs, std::int64_t inputs) {
    time_linear(report, name, rows, outputs, inputs, products, workspace.data());
  };
  linear("linear q, k, v", tokens, queries + 2 * keys, hidden);
  linear("linear output", tokens, hidden, queries);
  linear("linear gate, up", tokens, 2 * intermediate, hidden);
  linear("linear down", tokens, hidden, intermediate);
  linear("linear vocabulary", piece, vocabulary, hidden);
}

void time_rows(Report& report) {
  const Buffer x(DType::bf16, tokens, hidden), residual(DType::bf16, tokens, hidden),
      sum(DType::bf16, tokens, hidden);
  const Buffer y(DType::bf16, tokens, hidden), weight(DType::bf16, hidden), dweight(DType::f32, hidden);
  const Buffer rstd(DType::f32, tokens);
  const Bytes scratch(gpu::rmsnorm_backward_scratch_bytes(tokens, hidden));
  constexpr float eps = 1e-5f;
  report.time("rmsnorm_forward, first", [&] {
    gpu::rmsnorm_forward(nullptr, y.matrix(), rstd.as<float>(), {}, x.matrix(), {}, weight.flat(), eps);
  });
  report.time("rmsnorm_forward, residual added", [&] {
    gpu::rmsnorm_forward(nullptr, y.matrix(), rstd.as<float>(), sum.matrix(), x.matrix(), residual.matrix(),
                         weight.flat(), eps);
  });
  report.time("rmsnorm_backward, residual added", [&] {
    gpu::rmsnorm_backward(nullptr, y.matrix(), dweight.flat(), x.matrix(), residual.matrix(), sum.matrix(),
                          weight.flat(), rstd.as<float>(), false, scratch.data());
  });
  report.time("rmsnorm_backward, head", [&] {
    gpu::rmsnorm_backward(nullptr, y.matrix(), dweight.flat(), x.matrix(), {}, sum.matrix(), weight.flat(),
                          rstd.as<float>(), false, scratch.data());
  });

  const Buffer qkv(DType::bf16, tokens, queries + 2 * keys);
  const Buffer cosine(DType::f32, sequence * head_size / 2), sine(DType::f32, sequence * head_size / 2);
  const Matrix rotated = qkv.matrix().block(0, 0, tokens, queries + keys);
  for (const bool inverse : {false, true}) {
    report.time(inverse ? "rope, inverse" : "rope", [&] {
      gpu::rope(nullptr, rotated, head_size, sequence, cosine.as<float>(), sine.as<float>(), inverse);
    });
  }

  const Buffer gate_up(DType::bf16, tokens, 2 * intermediate),
      dgate_up(DType::bf16, tokens, 2 * intermediate);
  const Buffer activated(DType::bf16, tokens, intermediate);
  report.time("swiglu_forward", [&] { gpu::swiglu_forward(nullptr, activated.matrix(), gate_up.matrix()); });
  report.time("swiglu_backward", [&] {
    gpu::swiglu_backward(nullptr, dgate_up.matrix(), activated.matrix(), gate_up.matrix());
  });
}

void time_vocabulary(Report& report) {
  const DeviceArray<std::int32_t> ids(random_tokens(tokens));
  const Buffer table(DType::bf16, vocabulary, hidden), dtable(DType::f32, vocabulary, hidden);
  const Buffer rows(DType::bf16, tokens, hidden);
  report.time("embedding_forward",
              [&] { gpu::embedding_forward(nullptr, rows.matrix(), table.matrix(), ids.data()); });
  report.time("embedding_backward",
              [&] { gpu::embedding_backward(nullptr, dtable.matrix(), rows.matrix(), ids.data(), false); });
  // The gradient replaces the logits: later runs see small numbers, which cost the same.
  const Buffer logits(DType::bf16, piece, vocabulary), losses(DType::f32, piece);
  report.time("cross_entropy",
              [&] { gpu::cross_entropy(nullptr, logits.matrix(), losses.as<float>(), ids.data(), true); });
}

void time_attention(Report& report) {
  const AttentionShape shape{batch, sequence, query_heads, key_value_heads, head_size};
  const Buffer qkv(DType::bf16, tokens, queries + 2 * keys), dqkv(DType::bf16, tokens, queries + 2 * keys);
  const Buffer out(DType::bf16, tokens, queries), dout(DType::bf16, tokens, queries);
  const Buffer lse(DType::f32, batch * query_heads * sequence);
  const Bytes scratch(gpu::attention_backward_scratch_bytes(shape));
  const auto part = [](const Buffer& b, std::int64_t first, std::int64_t columns) {
    return b.matrix().block(0, first, tokens, columns);
  };
  const Matrix q = part(qkv, 0, queries), k = part(qkv, queries, keys), v = part(qkv, queries + keys, keys);
  report.time("attention_forward",
              [&] { gpu::attention_forward(nullptr, shape, out.matrix(), lse.as<float>(), q, k, v); });
  report.time("attention_backward", [&] {
    gpu::attention_backward(nullptr, shape, part(dqkv, 0, queries), part(dqkv, queries, keys),
                            part(dqkv, queries + keys, keys), dout.matrix(), out.matrix(), lse.as<float>(), q,
                            k, v, reinterpret_cast<float*>(scratch.data()));
  });
}

void time_shard(Report& report) {
  const Buffer parameter(DType::f32, shard_elements), gradient(DType::f32, shard_elements, 1e-3f);
  const Buffer m(DType::f32, shard_elements, 1e-3f), v(DType::f32, shard_elements);
  const Buffer compute(DType::bf16, shard_elements);
  gpu::fill(nullptr, v.flat(), 1e-6f);
  const DeviceArray<double> sums(std::vector<double>{1.0, 4096.0});
  const DeviceArray<StepScale> scale(1);
  const Bytes scratch(gpu::sums_scratch_bytes);

  report.time("sum_of_squares",
              [&] { gpu::sum_of_squares(nullptr, sums.data(), gradient.flat(), false, scratch.data()); });
  gpu::clip_scale(nullptr, scale.data(), sums.data(), 1.0f);
  AdamWStep step;
  step.lr = 3e-4f, step.beta1 = 0.9f, step.beta2 = 0.95f, step.eps = 1e-8f, step.weight_decay = 0.1f;
  report.time("adamw", [&] {
    gpu::adamw(nullptr, step, parameter.flat(), compute.flat(), gradient.flat(), m.flat(), v.flat(),
               scale.data());
  });
  report.time("sgd", [&] {
    gpu::sgd(nullptr, 3e-4f, 0.1f, parameter.flat(), compute.flat(), gradient.flat(), scale.data());
  });
  report.time("initialize_normal", [&] {
    gpu::initialize_normal(nullptr, m.flat(), 0.02f, random_key(1, "benchmark", "weights"), 0);
  });
  report.time("cast, fp32 to bf16", [&] { gpu::cast(nullptr, compute.flat(), parameter.flat()); });
  report.time("axpby", [&] { gpu::axpby(nullptr, m.flat(), 0.5f, gradient.flat(), 0.5f); });
  report.time("pseudo_gradient",
              [&] { gpu::pseudo_gradient(nullptr, gradient.flat(), m.flat(), parameter.flat()); });
  OuterStep outer;
  outer.rule = OuterRule::diloco, outer.eta = 0.7f, outer.momentum = 0.9f;
  report.time("outer_step, diloco", [&] {
    gpu::outer_step(nullptr, outer, parameter.flat(), compute.flat(), m.flat(), v.flat(), gradient.flat());
  });
  const DeviceArray<std::int8_t> q(static_cast<std::size_t>(shard_elements));
  constexpr std::int64_t block = 256;
  const Buffer scales(DType::f32, (shard_elements + block - 1) / block);
  report.time("quantize_int8", [&] {
    gpu::quantize_int8(nullptr, q.data(), scales.as<float>(), v.flat(), gradient.flat(), block);
  });
  report.time("dequantize_int8, added", [&] {
    gpu::dequantize_int8(nullptr, m.flat(), q.data(), scales.as<float>(), block, 0.5f, true);
  });
  report.time("fill", [&] { gpu::fill(nullptr, v.flat(), 1e-6f); });
}

}  // namespace

int main() {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: cudaGetDeviceCount says \"%s\" -> run this on a machine with one\n",
                 cudaGetErrorString(found));
    return 3;
  }
  cudaDeviceProp properties;
  test::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Report report;
  time_products(report, properties.major);
  time_rows(report);
  time_vocabulary(report);
  time_attention(report);
  time_shard(report);
  report.print(properties.name);
  return 0;
}
