// Behaviour of Llama that needs no outside values: leases, chunks, accumulation, memory, and that its
// gradient is the slope of its loss.
#include "model/llama.h"

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "model/parameter_table.h"
#include "tests/support/catch.h"
#include "tests/unit/model/rig.h"

using namespace strata;
using namespace strata::test;

namespace {

LlamaSetup tiny(bool tied, std::int64_t batch = 2, std::int64_t sequence = 9) {
  LlamaSetup s;
  s.config.hidden_size = 24, s.config.intermediate_size = 40, s.config.num_hidden_layers = 2;
  s.config.num_attention_heads = 4, s.config.num_key_value_heads = 2, s.config.head_dim = 34;
  s.config.vocab_size = 53, s.config.max_position_embeddings = 64, s.config.tie_word_embeddings = tied;
  s.batch = batch, s.sequence = sequence;
  return s;
}

// Random weights of a size that keeps every part of the model far from trivial, and random tokens.
void fill(Rig& rig, unsigned seed = 7) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  rig.set_weights([&](const ParameterSpec& p) {
    std::vector<float> values(static_cast<std::size_t>(p.count));
    const float scale = p.is_norm ? 0.25f : 1.2f / std::sqrt(static_cast<float>(p.shape[1]));
    for (float& v : values) v = (p.is_norm ? 1.0f : 0.0f) + scale * normal(random);
    return values;
  });
  const LlamaSetup& s = rig.model().setup();
  std::vector<std::int32_t> tokens, targets;
  for (std::int64_t n = 0; n < s.tokens(); ++n) {
    tokens.push_back(static_cast<std::int32_t>(random() % s.config.vocab_size));
    targets.push_back(random() % 5 == 0 ? -100 : static_cast<std::int32_t>(random() % s.config.vocab_size));
  }
  rig.set_batch(tokens, targets);
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "not refused";
}

using Log = std::vector<std::string>;

}  // namespace

TEST_CASE("an untied model leases each unit as the engine plans") {
  Rig rig(tiny(false));
  fill(rig);
  rig.forward_backward();
  CHECK(rig.source().log == Log{"weights embedding forward",  "release weights embedding",
                                "weights decoder.0 forward",  "release weights decoder.0",
                                "weights decoder.1 forward",  "release weights decoder.1",
                                "weights head forward",       "gradient head",
                                "release gradient head",      "release weights head",
                                "weights decoder.1 backward", "gradient decoder.1",
                                "release gradient decoder.1", "release weights decoder.1",
                                "weights decoder.0 backward", "gradient decoder.0",
                                "release gradient decoder.0", "release weights decoder.0",
                                "gradient embedding",         "release gradient embedding"});
}

TEST_CASE("a tied model keeps its root from the start of forward to the end of backward") {
  Rig rig(tiny(true));
  fill(rig);
  rig.forward_backward();
  CHECK(rig.source().log ==
        Log{"weights root forward", "weights decoder.0 forward", "release weights decoder.0",
            "weights decoder.1 forward", "release weights decoder.1", "gradient root",
            "weights decoder.1 backward", "gradient decoder.1", "release gradient decoder.1",
            "release weights decoder.1", "weights decoder.0 backward", "gradient decoder.0",
            "release gradient decoder.0", "release weights decoder.0", "release gradient root",
            "release weights root"});
}

TEST_CASE("evaluation leases weights once, in order, and gives the loss of training") {
  for (const bool tied : {false, true}) {
    Rig rig(tiny(tied));
    fill(rig);
    const double trained = rig.forward_backward();
    rig.source().log.clear();
    CHECK(rig.evaluate() == trained);
    CHECK(rig.source().log.size() == (tied ? 6 : 8));
    for (const std::string& line : rig.source().log) CHECK(line.find("gradient") == std::string::npos);
  }
}

TEST_CASE("the loss is the cross entropy of the logits") {
  Rig rig(tiny(false));
  const LlamaSetup& s = rig.model().setup();
  fill(rig);
  std::vector<std::int32_t> tokens(s.tokens(), 3), targets(s.tokens(), -1);
  tokens[5] = 11, targets[4] = 8, targets[17] = 52;
  rig.set_batch(tokens, targets);
  const std::vector<float> logits = rig.logits();
  double expected = 0;
  for (const std::int64_t n : {4, 17}) {
    const float* row = logits.data() + n * s.config.vocab_size;
    double sum = 0;
    for (std::int64_t v = 0; v < s.config.vocab_size; ++v) sum += std::exp(static_cast<double>(row[v]));
    expected += std::log(sum) - row[targets[n]];
  }
  CHECK(rig.evaluate() == Approx(expected).epsilon(1e-6));
}

TEST_CASE("the gradient is the slope of the loss along any direction") {
  for (const bool tied : {false, true}) {
    LlamaSetup setup = tiny(tied, 1, 7);
    Rig rig(setup);
    fill(rig);
    rig.forward_backward();
    const Tensors weights = rig.weights(), gradients = rig.gradients();
    for (const auto& [name, gradient] : gradients) {
      CAPTURE(name, tied);
      // Along the gradient itself, and with a step that moves the loss by about 0.02: rounding of fp32 losses
      // and the cubic term both stay near 1e-4 of the slope.
      double squares = 0;
      for (const float g : gradient) squares += static_cast<double>(g) * g;
      const double step = 0.01 / squares;
      double losses[2];
      for (const int sign : {0, 1}) {
        rig.set_weights([&, &moved = name, &direction = gradient](const ParameterSpec& p) {
          std::vector<float> values = weights.at(p.name);
          if (p.name != moved) return values;
          for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] += static_cast<float>((sign == 0 ? -step : step) * direction[i]);
          }
          return values;
        });
        rig.source().begin_step(Event{});
        losses[sign] = rig.evaluate();
      }
      CHECK((losses[1] - losses[0]) / (2 * step) == Approx(squares).epsilon(2e-3));
    }
  }
}

TEST_CASE("logits in chunks give the loss and gradients of logits at once") {
  LlamaSetup setup = tiny(false, 3, 101);  // 303 tokens: chunks of 128, 128 and 47
  Rig whole(setup);
  setup.logits_bytes = 1;
  CHECK(loss_chunk_tokens(setup) == 128);
  Rig chunked(setup);
  fill(whole), fill(chunked);
  CHECK(chunked.forward_backward() == Approx(whole.forward_backward()).epsilon(1e-7));
  const Tensors expected = whole.gradients();
  for (const auto& [name, values] : chunked.gradients()) {
    CAPTURE(name);
    CHECK(difference(values, expected.at(name)).norm < 2e-6);
  }
}

TEST_CASE("a second micro-step adds its gradient to the first's") {
  for (const bool tied : {false, true}) {
    Rig rig(tiny(tied));
    fill(rig);
    rig.forward_backward();
    const Tensors once = rig.gradients();
    rig.forward_backward(false);
    for (const auto& [name, values] : rig.gradients()) {
      CAPTURE(name, tied);
      std::vector<float> twice = once.at(name);
      for (float& v : twice) v *= 2;
      CHECK(difference(values, twice).norm < 1e-6);
    }
    rig.forward_backward(true);
    CHECK(same_bits(rig.gradients(), once));
  }
}

TEST_CASE("fully masked targets give no loss and no gradient") {
  Rig rig(tiny(true));
  fill(rig);
  rig.set_batch(std::vector<std::int32_t>(18, 5), std::vector<std::int32_t>(18, -1));
  CHECK(rig.forward_backward() == 0);
  for (const auto& [name, values] : rig.gradients()) {
    CAPTURE(name);
    CHECK(std::all_of(values.begin(), values.end(), [](float v) { return v == 0; }));
  }
}

TEST_CASE("bf16 weight gradients are the fp32 ones, rounded") {
  LlamaSetup setup = tiny(false);
  setup.compute = DType::bf16;
  Rig fp32(setup);
  setup.gradient = DType::bf16;
  Rig bf16(setup);
  fill(fp32), fill(bf16);
  CHECK(fp32.forward_backward() == bf16.forward_backward());
  const Tensors expected = fp32.gradients();
  for (const auto& [name, values] : bf16.gradients()) {
    CAPTURE(name);
    CHECK(difference(values, expected.at(name)).norm < 1.0 / 256);
    for (const float v : values) REQUIRE(to_float(to_bf16(v)) == v);
  }
}

TEST_CASE("a sequence does not see the other sequences of its batch, nor its own future") {
  Rig rig(tiny(false, 2, 9));
  fill(rig);
  std::vector<std::int32_t> tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19},
      targets(18, 1);
  rig.set_batch(tokens, targets);
  const std::vector<float> before = rig.logits();
  tokens[4] = 50;
  rig.set_batch(tokens, targets);
  const std::vector<float> after = rig.logits();
  for (std::size_t n = 0; n < 18; ++n) {
    CAPTURE(n);
    const bool same =
        std::equal(before.begin() + n * 53, before.begin() + (n + 1) * 53, after.begin() + n * 53);
    CHECK(same == (n < 4 || n >= 9));
  }
}

TEST_CASE("after its first step a model allocates nothing") {
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    LlamaSetup setup = tiny(true);
    setup.recompute = recompute;
    Rig rig(setup);
    const auto activations = [&] {
      return rig.device().memory().current[static_cast<int>(Purpose::activations)];
    };
    CHECK(activations() == activation_bytes(setup));
    fill(rig);
    Event forward_done;
    rig.forward_backward(true, &forward_done);
    CHECK(forward_done.state() != nullptr);
    CHECK(rig.device().completed(forward_done));
    rig.evaluate();
    const MemoryUse before = rig.device().memory();
    rig.forward_backward();
    rig.evaluate();
    const MemoryUse after = rig.device().memory();
    CHECK(after.current == before.current);
    CHECK(after.peak == before.peak);
    CHECK(activations() == activation_bytes(setup));
  }
}

TEST_CASE("the activation plan adds up and shrinks as more is recomputed") {
  LlamaSetup s;
  s.config.hidden_size = 4096, s.config.intermediate_size = 14336, s.config.num_hidden_layers = 32;
  s.config.num_attention_heads = 32, s.config.num_key_value_heads = 8, s.config.head_dim = 128;
  s.config.vocab_size = 128256, s.config.max_position_embeddings = 131072;
  s.batch = 2, s.sequence = 2048, s.compute = DType::bf16;
  const std::size_t n = 4096, c = 4096, f = 14336, q = 4096, k = 1024, l = 32, bf16 = 2;

  CHECK(loss_chunk_tokens(s) == 256);  // 256 rows of 128256 bf16: 63 MiB
  const std::size_t statistics = 4 * (n * 2 + n * 32);
  const std::size_t kept = bf16 * n * (q + 2 * k + q + 2 * c + 2 * f) + statistics;  // of a layer, selective
  const std::size_t again = bf16 * n * (2 * c + f);  // and with nothing recomputed
  const std::size_t rest = bf16 * n * 3 * c + 2 * 4 * n + bf16 * n * 3 * f + 2 * 4 * 2048 * 64;
  CHECK(activation_bytes(s) == l * (kept + again) + rest);
  s.recompute = Recompute::selective;
  CHECK(activation_bytes(s) == l * kept + bf16 * n * (c + f) + rest);
  s.recompute = Recompute::full;
  CHECK(activation_bytes(s) == l * bf16 * n * c + (kept - bf16 * n * c + again) + rest);

  const ActivationPlan plan = plan_activations(s);
  std::size_t sum = 0;
  for (const auto& e : plan.entries) sum += e.bytes;
  CHECK(sum == plan.bytes);
  CHECK_THAT(plan.text(),
             Catch::Matchers::Contains("residual stream") && Catch::Matchers::Contains("scratch of loss"));
}

TEST_CASE("set-ups that cannot run are refused") {
  const auto with = [](const std::function<void(LlamaSetup&)>& change) {
    return refusal([&] {
      LlamaSetup s = tiny(false);
      change(s);
      plan_activations(s);
    });
  };
  using Catch::Matchers::Contains;
  CHECK(with([](LlamaSetup&) {}) == "not refused");
  CHECK_THAT(with([](LlamaSetup& s) { s.batch = 0; }), Contains("data.batch_size 0"));
  CHECK_THAT(with([](LlamaSetup& s) { s.sequence = -1; }), Contains("data.sequence_length -1"));
  CHECK_THAT(with([](LlamaSetup& s) { s.batch = s.sequence = 1 << 16; }), Contains("2^31"));
  CHECK_THAT(with([](LlamaSetup& s) { s.compute = DType::f64; }), Contains("fp64"));
  CHECK_THAT(with([](LlamaSetup& s) { s.config.head_dim = 31; }), Contains("model.head_dim"));
  CHECK(recompute_from("selective") == Recompute::selective);
  CHECK_THAT(refusal([] { recompute_from("some"); }), Contains("'some', allowed: none, selective, full"));
}

TEST_CASE("leases used after their release are refused") {
  Rig rig(tiny(false));
  Lease lease = rig.source().weights(1, ParameterSource::Pass::forward);
  CHECK_THROWS_AS(rig.source().weights(1, ParameterSource::Pass::backward), InternalError);
  Lease moved = std::move(lease);
  CHECK_THROWS_AS(lease.flat(), InternalError);
  CHECK(moved.flat().count == rig.model().units()[1].elements);
  moved.release();
  CHECK_THROWS_AS(moved.flat(), InternalError);
}
