#include "tests/unit/model/rig.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "backend/cpu/ops.h"
#include "tests/support/reference_ops.h"

namespace strata::test {
namespace {

const std::filesystem::path kFolder = STRATA_SOURCE_DIR "/tests/golden";

LlamaConfig read_config(const std::filesystem::path& path) {
  std::ifstream file(path);
  const auto j = nlohmann::json::parse(file);
  LlamaConfig c;
  c.hidden_size = j.at("hidden_size"), c.intermediate_size = j.at("intermediate_size");
  c.num_hidden_layers = j.at("num_hidden_layers"), c.num_attention_heads = j.at("num_attention_heads");
  c.num_key_value_heads = j.at("num_key_value_heads"), c.head_dim = j.at("head_dim");
  c.vocab_size = j.at("vocab_size"), c.max_position_embeddings = j.at("max_position_embeddings");
  c.rope_theta = j.at("rope_theta"), c.rms_norm_eps = j.at("rms_norm_eps");
  c.tie_word_embeddings = j.at("tie_word_embeddings");
  if (const auto& s = j.at("rope_scaling"); !s.is_null()) {
    c.rope_scaling = RopeScaling{s.at("factor"), s.at("low_freq_factor"), s.at("high_freq_factor"),
                                 s.at("original_max_position_embeddings")};
  }
  return c;
}

std::unique_ptr<Ops> make_ops(CpuDevice& device, Kernels kernels) {
  if (kernels == Kernels::reference) return std::make_unique<ReferenceOps>();
  return make_cpu_ops(device);
}

}  // namespace

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    if (std::filesystem::exists(entry.path() / "golden.safetensors"))
      names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Golden::Golden(const std::string& folder)
    : name(folder),
      config(read_config(kFolder / folder / "config.inline.json")),
      file(kFolder / folder / "golden.safetensors"),
      batch(file.at("input.tokens").shape.at(0)),
      sequence(file.at("input.tokens").shape.at(1)) {}

LlamaSetup Golden::setup(DType compute, Recompute recompute) const {
  LlamaSetup s;
  s.config = config, s.batch = batch, s.sequence = sequence, s.compute = compute, s.recompute = recompute;
  return s;
}

Rig::Rig(const LlamaSetup& setup, CpuDeviceOptions options, Kernels kernels)
    : device_(make_cpu_device(options)),
      ops_(make_ops(*device_, kernels)),
      stream_(&device_->create_stream("compute", Device::StreamKind::compute)),
      model_(std::make_unique<Llama>(setup, *device_, *ops_)),
      source_(
          std::make_unique<MemorySource>(*device_, *stream_, model_->units(), setup.compute, setup.gradient)),
      tokens_(device_->allocate(4 * static_cast<std::size_t>(setup.tokens()), Purpose::data)),
      targets_(device_->allocate(4 * static_cast<std::size_t>(setup.tokens()), Purpose::data)),
      loss_(device_->allocate(sizeof(double), Purpose::data)) {}

void Rig::upload(void* to, const void* from, std::size_t bytes) {
  device_->copy_to_device(*stream_, to, from, bytes);
  device_->synchronize(device_->record(*stream_));
}

void Rig::upload(Flat to, const std::vector<float>& values) {
  if (static_cast<std::int64_t>(values.size()) != to.count)
    throw InternalError("a parameter of another size");
  std::vector<std::byte> stored(static_cast<std::size_t>(to.bytes()));
  for (std::size_t i = 0; i < values.size(); ++i) set(stored.data(), to.dtype, i, values[i]);
  upload(to.data, stored.data(), stored.size());
}

std::vector<float> Rig::download(ConstFlat from) {
  std::vector<std::byte> stored(static_cast<std::size_t>(from.bytes()));
  device_->copy_to_host(*stream_, stored.data(), from.data, stored.size());
  device_->synchronize(device_->record(*stream_));
  std::vector<float> values(static_cast<std::size_t>(from.count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(get(stored.data(), from.dtype, i));
  return values;
}

void Rig::set_weights(const std::function<std::vector<float>(const ParameterSpec&)>& values) {
  for (std::size_t unit = 0; unit < model_->units().size(); ++unit) {
    for (const ParameterSpec& p : model_->units()[unit].parameters) {
      upload(source_->weights(static_cast<int>(unit)).slice(p.offset, p.count), values(p));
    }
  }
}

void Rig::set_weights(const Golden& golden) {
  set_weights([&](const ParameterSpec& p) {
    if (golden.file.at("weight." + p.name).shape != p.shape)
      throw InternalError(p.name + " has another shape");
    return golden.values("weight." + p.name);
  });
}

void Rig::set_batch(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& targets) {
  upload(tokens_.data(), tokens.data(), tokens_.bytes());
  upload(targets_.data(), targets.data(), targets_.bytes());
  target_count_ =
      static_cast<double>(std::count_if(targets.begin(), targets.end(), [](auto t) { return t >= 0; }));
}

void Rig::set_batch(const Golden& golden) {
  set_batch(golden.file.values<std::int32_t>("input.tokens"),
            golden.file.values<std::int32_t>("input.targets"));
}

double Rig::download_loss() {
  double loss = 0;
  device_->copy_to_host(*stream_, &loss, loss_.data(), sizeof loss);
  device_->synchronize(device_->record(*stream_));
  return loss;
}

double Rig::forward_backward(bool new_step, Event* forward_done) {
  if (new_step) source_->begin_step(device_->record(*stream_));
  device_->fill_zero(*stream_, loss_.data(), loss_.bytes());
  model_->forward_backward(*stream_, *source_, tokens_.as<std::int32_t>(), targets_.as<std::int32_t>(),
                           loss_.as<double>(), forward_done);
  return download_loss();
}

double Rig::evaluate() {
  device_->fill_zero(*stream_, loss_.data(), loss_.bytes());
  model_->evaluate(*stream_, *source_, tokens_.as<std::int32_t>(), targets_.as<std::int32_t>(),
                   loss_.as<double>());
  return download_loss();
}

std::vector<float> Rig::logits() {
  const LlamaSetup& s = model_->setup();
  const std::int64_t count = s.tokens() * s.config.vocab_size;
  const Buffer out = device_->allocate(size_of(s.compute) * static_cast<std::size_t>(count), Purpose::data);
  model_->logits(*stream_, *source_, tokens_.as<std::int32_t>(),
                 matrix(out.data(), s.compute, s.tokens(), s.config.vocab_size));
  auto values = download({out.data(), s.compute, count});
  device_->synchronize();
  return values;
}

Tensors Rig::download_units(bool gradients) {
  source_->end_step();
  Tensors result;
  for (std::size_t unit = 0; unit < model_->units().size(); ++unit) {
    const int u = static_cast<int>(unit);
    const Flat flat = gradients ? source_->gradient_sum(u) : source_->weights(u);
    for (const ParameterSpec& p : model_->units()[unit].parameters) {
      result[p.name] = download(flat.slice(p.offset, p.count));
    }
  }
  return result;
}

Tensors Rig::gradients() {
  return download_units(true);
}
Tensors Rig::weights() {
  return download_units(false);
}

Rig::Trained Rig::train(const AdamW& a) {
  const auto& units = model_->units();
  std::vector<Buffer> m, v;
  for (const UnitSpec& unit : units) {
    for (auto* moments : {&m, &v}) {
      moments->push_back(device_->allocate(4 * static_cast<std::size_t>(unit.elements), Purpose::moments));
      device_->fill_zero(*stream_, moments->back().data(), moments->back().bytes());
    }
  }
  const Buffer sums = device_->allocate(2 * sizeof(double), Purpose::data);
  const Buffer scale = device_->allocate(sizeof(StepScale), Purpose::data);
  upload(sums.as<double>() + 1, &target_count_, sizeof(double));

  Trained trained;
  for (int step = 1; step <= a.steps; ++step) {
    trained.losses.push_back(forward_backward() / target_count_);
    source_->end_step();
    for (std::size_t u = 0; u < units.size(); ++u) {
      ops_->sum_of_squares(*stream_, sums.as<double>(), source_->gradient_sum(static_cast<int>(u)), u > 0);
    }
    ops_->clip_scale(*stream_, scale.as<StepScale>(), sums.as<double>(), a.clip);
    for (std::size_t u = 0; u < units.size(); ++u) {
      const Flat weights = source_->weights(static_cast<int>(u)),
                 gradient = source_->gradient_sum(static_cast<int>(u));
      const Flat first{m[u].data(), DType::f32, weights.count},
          second{v[u].data(), DType::f32, weights.count};
      for (const ParameterSpec& p : units[u].parameters) {
        AdamWStep s;
        s.lr = a.lr, s.beta1 = a.beta1, s.beta2 = a.beta2, s.eps = a.eps, s.step = step;
        s.weight_decay = p.is_norm ? 0 : a.weight_decay;
        ops_->adamw(*stream_, s, weights.slice(p.offset, p.count), {}, gradient.slice(p.offset, p.count),
                    first.slice(p.offset, p.count), second.slice(p.offset, p.count), scale.as<StepScale>());
      }
    }
    StepScale seen;
    device_->copy_to_host(*stream_, &seen, scale.data(), sizeof seen);
    device_->synchronize(device_->record(*stream_));
    trained.norms.push_back(seen.norm);
  }
  return trained;
}

Difference difference(const std::vector<float>& found, const std::vector<float>& expected) {
  if (found.size() != expected.size()) throw InternalError("tensors of different sizes");
  double squares = 0, scale = 0;
  Difference d;
  double largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double gap = static_cast<double>(found[i]) - expected[i];
    if (!std::isfinite(gap)) return {INFINITY, INFINITY};
    squares += gap * gap, scale += static_cast<double>(expected[i]) * expected[i];
    d.largest = std::max(d.largest, std::abs(gap));
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  d.norm = std::sqrt(squares / scale);
  d.largest /= largest;
  return d;
}

bool same_bits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.size() == y.second.size() &&
           std::memcmp(x.second.data(), y.second.data(), 4 * x.second.size()) == 0;
  });
}

}  // namespace strata::test
