// Llama against Hugging Face's Llama on PyTorch (tests/golden): logits, loss, every gradient, ten AdamW
// steps.
#include <cmath>

#include "tests/support/catch.h"
#include "tests/unit/model/rig.h"

using namespace strata;
using namespace strata::test;

namespace {

constexpr Recompute kRecomputes[] = {Recompute::none, Recompute::selective, Recompute::full};

double relative(double found, double expected) {
  return std::abs(found - expected) / std::abs(expected);
}

void divide(std::vector<float>& values, double by) {
  for (float& v : values) v = static_cast<float>(v / by);
}

double norm(const Tensors& tensors, double tokens) {
  double squares = 0;
  for (const auto& [name, values] : tensors) {
    for (const float v : values) squares += static_cast<double>(v) * v;
  }
  return std::sqrt(squares) / tokens;
}

// Tolerances of fp32: 1e-5 by norm for each tensor, no element off by more than 1e-4 of the largest.
void check_fp32(Rig& rig, const Golden& golden) {
  rig.set_weights(golden);
  rig.set_batch(golden);
  CHECK(difference(rig.logits(), golden.values("logits")).norm < 1e-5);
  CHECK(relative(rig.forward_backward() / rig.target_count(), golden.number("loss")) < 1e-5);
  Tensors gradients = rig.gradients();
  CHECK(relative(norm(gradients, rig.target_count()), golden.number("grad_norm")) < 1e-5);
  for (auto& [name, values] : gradients) {
    CAPTURE(name);
    divide(values, rig.target_count());
    const Difference d = difference(values, golden.values("grad." + name));
    CHECK(d.norm < 1e-5);
    CHECK(d.largest < 1e-4);
  }
}

void check_adamw(Rig& rig, const Golden& golden) {
  rig.set_weights(golden);
  rig.set_batch(golden);
  const auto trained = rig.train({10, 3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f});
  for (std::size_t step = 0; step < trained.losses.size(); ++step) {
    CAPTURE(step);
    CHECK(std::abs(trained.losses[step] - golden.number("adamw.losses", step)) < 1e-5);
    CHECK(relative(trained.norms[step], golden.number("adamw.grad_norms", step)) < 1e-4);
  }
  for (const auto& [name, values] : rig.weights()) {
    CAPTURE(name);
    CHECK(difference(values, golden.values("adamw.weight." + name)).norm < 1e-5);
  }
}

// bf16: at most 1.5 times the error that PyTorch's own bf16 makes against the fp32 values.
void check_bf16(Rig& rig, const Golden& golden) {
  const auto allowed = [&](const std::string& key) { return 1.5 * golden.number("bf16_error." + key); };
  rig.set_weights(golden);
  rig.set_batch(golden);
  CHECK(difference(rig.logits(), golden.values("logits")).norm < allowed("logits"));
  CHECK(relative(rig.forward_backward() / rig.target_count(), golden.number("loss")) < allowed("loss"));
  Tensors gradients = rig.gradients();
  CHECK(relative(norm(gradients, rig.target_count()), golden.number("grad_norm")) < allowed("grad_norm"));
  for (auto& [name, values] : gradients) {
    CAPTURE(name);
    divide(values, rig.target_count());
    CHECK(difference(values, golden.values("grad." + name)).norm < allowed("grad." + name));
  }
}

}  // namespace

TEST_CASE("there are goldens") {
  CHECK(golden_names().size() >= 5);
}

TEST_CASE("fp32 logits, loss and gradients are Hugging Face's, whatever is recomputed") {
  for (const std::string& name : golden_names()) {
    for (const Recompute recompute : kRecomputes) {
      CAPTURE(name, static_cast<int>(recompute));
      const Golden golden(name);
      Rig rig(golden.setup(DType::f32, recompute));
      check_fp32(rig, golden);
    }
  }
}

TEST_CASE("the plain reference operations give Hugging Face's values too") {
  const Golden golden("gqa3_d64_untied");
  Rig fp32(golden.setup(), {}, Kernels::reference);
  check_fp32(fp32, golden);
  Rig bf16(golden.setup(DType::bf16), {}, Kernels::reference);
  check_bf16(bf16, golden);
}

TEST_CASE("ten AdamW steps follow PyTorch's") {
  for (const std::string& name : golden_names()) {
    CAPTURE(name);
    const Golden golden(name);
    Rig rig(golden.setup());
    check_adamw(rig, golden);
  }
}

TEST_CASE("bf16 is as close to fp32 as PyTorch's bf16") {
  for (const std::string& name : golden_names()) {
    CAPTURE(name);
    const Golden golden(name);
    Rig rig(golden.setup(DType::bf16));
    check_bf16(rig, golden);
  }
}

TEST_CASE("recomputing changes no bit") {
  for (const std::string& name : golden_names()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Golden golden(name);
      double loss = 0;
      Tensors gradients;
      for (const Recompute recompute : kRecomputes) {
        CAPTURE(name, name_of(dtype), static_cast<int>(recompute));
        Rig rig(golden.setup(dtype, recompute));
        rig.set_weights(golden);
        rig.set_batch(golden);
        const double found = rig.forward_backward();
        if (recompute == Recompute::none) {
          loss = found, gradients = rig.gradients();
          continue;
        }
        CHECK(found == loss);
        CHECK(same_bits(rig.gradients(), gradients));
      }
    }
  }
}

TEST_CASE("any legal order of the streams gives the bits of the eager order") {
  for (const std::string& name : golden_names()) {
    const Golden golden(name);
    const LlamaSetup setup = golden.setup(DType::f32, Recompute::selective);
    const auto run = [&](CpuDeviceOptions options) {
      Rig rig(setup, options);
      rig.set_weights(golden);
      rig.set_batch(golden);
      const auto trained = rig.train({2, 3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f});
      return std::pair(trained.losses, rig.weights());
    };
    const auto eager = run({CpuDeviceOptions::eager, 0, true});
    for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
      CAPTURE(name, seed);
      const auto deferred = run({CpuDeviceOptions::deferred, seed, true});
      CHECK(deferred.first == eager.first);
      CHECK(same_bits(deferred.second, eager.second));
    }
  }
}
