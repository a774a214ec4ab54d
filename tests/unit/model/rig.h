#pragma once
// A Llama on the CPU device with everything around it that a test needs: golden values, a strict parameter
// source, batches, a plain AdamW, and results on the host.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/device.h"
#include "checkpoint/safetensors.h"
#include "model/llama.h"
#include "tests/support/memory_source.h"

namespace strata::test {

// A folder of tests/golden: Hugging Face's model, batch and results.
struct Golden {
  std::string name;
  LlamaConfig config;
  SafetensorsFile file;
  std::int64_t batch, sequence;

  explicit Golden(const std::string& name);
  LlamaSetup setup(DType compute = DType::f32, Recompute recompute = Recompute::none) const;
  std::vector<float> values(const std::string& key) const { return file.values<float>(key); }
  double number(const std::string& key, std::size_t i = 0) const { return file.values<double>(key).at(i); }
};
std::vector<std::string> golden_names();

using Tensors = std::map<std::string, std::vector<float>>;

enum class Kernels { reference, cpu };  // tests/support/reference_ops.h or the CPU backend

class Rig {
 public:
  explicit Rig(const LlamaSetup& setup, CpuDeviceOptions options = {}, Kernels kernels = Kernels::cpu);

  void set_weights(const std::function<std::vector<float>(const ParameterSpec&)>& values);
  void set_weights(const Golden& golden);
  void set_batch(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& targets);
  void set_batch(const Golden& golden);

  // Each waits for its result. Losses are sums over tokens; gradients are sums since the last step began.
  double forward_backward(bool new_step = true, Event* forward_done = nullptr);
  double evaluate();
  std::vector<float> logits();
  Tensors gradients();
  Tensors weights();

  struct AdamW {
    int steps;
    float lr, beta1, beta2, eps, weight_decay, clip;
  };
  struct Trained {
    std::vector<double> losses, norms;  // mean loss before each step's update, norm before clipping
  };
  Trained train(const AdamW& adamw);

  Llama& model() { return *model_; }
  MemorySource& source() { return *source_; }
  CpuDevice& device() { return *device_; }
  double target_count() const { return target_count_; }

 private:
  void upload(void* to, const void* from, std::size_t bytes);
  void upload(Flat to, const std::vector<float>& values);
  std::vector<float> download(ConstFlat from);
  double download_loss();
  Tensors download_units(bool gradients);

  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Ops> ops_;
  Stream* stream_;
  std::unique_ptr<Llama> model_;
  std::unique_ptr<MemorySource> source_;
  Buffer tokens_, targets_, loss_;
  double target_count_ = 0;
};

// ||found - expected|| / ||expected||, and the largest difference over the largest expected magnitude.
struct Difference {
  double norm = 0, largest = 0;
};
Difference difference(const std::vector<float>& found, const std::vector<float>& expected);
bool same_bits(const Tensors& a, const Tensors& b);

}  // namespace strata::test
