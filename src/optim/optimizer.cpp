#include "optim/optimizer.h"

#include <fmt/format.h>

#include "base/error.h"

namespace strata {

OptimizerOptions OptimizerOptions::from(const Config& config) {
  const OptimizerConfig& c = config.optimizer;
  if (c.kind != "adamw" && c.kind != "sgd")
    throw UsageError(fmt::format("optimizer.kind is \"{}\", allowed are adamw, sgd -> choose one", c.kind));
  return {
      c.kind == "adamw",    c.beta1,    c.beta2, c.eps, c.weight_decay, c.decay_norms, c.stochastic_rounding,
      config.gradient_clip, config.seed};
}

Optimizer::Optimizer(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops,
                     Stream& compute, const OptimizerOptions& options)
    : engine_(engine),
      groups_(groups),
      device_(device),
      ops_(ops),
      compute_(compute),
      control_(device.create_stream("norm", Device::StreamKind::transfer)),
      options_(options),
      sums_(device.allocate(2 * sizeof(double), Purpose::workspace)),
      scale_(device.allocate(sizeof(StepScale), Purpose::workspace)) {
  const DType master = engine.options().precision.master;
  if (options.stochastic_rounding && master != DType::bf16)
    throw UsageError(
        fmt::format("optimizer.stochastic_rounding is on, but parameters are kept in {} -> turn it off, or "
                    "set precision to bf16_pure",
                    name_of(master)));
  if (options.stochastic_rounding && !options.adamw)
    throw UsageError(
        "optimizer.stochastic_rounding is on, but sgd rounds to nearest -> turn it off, or set "
        "optimizer.kind to adamw");
  if (options.adamw && !engine.options().moments)
    throw InternalError("AdamW was built on an engine without moments -> set EngineOptions::moments");
}

void Optimizer::step(std::int64_t step, double lr, const double* local_tokens) {
  double* sums = sums_.as<double>();
  // Replicas hold the same summed gradient: one of them counts, the others add zero.
  if (groups_.at.replicate == 0) {
    bool accumulate = false;
    for (const UnitShard& shard : engine_.shards()) {
      ops_.sum_of_squares(compute_, sums, shard.gradient, accumulate);
      accumulate = true;
    }
  } else {
    device_.fill_zero(compute_, sums, sizeof(double));
  }
  device_.copy(compute_, sums + 1, local_tokens, sizeof(double));
  device_.wait(control_, device_.record(compute_));
  groups_.group->all_reduce_sum(control_, {Traffic::control, "gradient norm", step}, {sums, DType::f64, 2},
                                {});
  device_.wait(compute_, device_.record(control_));

  ops_.clip_scale(compute_, scale_.as<StepScale>(), sums, static_cast<float>(options_.clip));
  for (UnitShard& shard : engine_.shards()) {
    device_.wait(compute_, shard.ready);
    update(shard, step, lr);
    shard.ready = device_.record(compute_);
  }
}

void Optimizer::update(UnitShard& shard, std::int64_t step, double lr) {
  for (const ShardSegment& segment : shard.segments) {
    const ParameterSpec& p = shard.spec->parameters[static_cast<std::size_t>(segment.parameter)];
    const auto part = [&segment](const Flat& flat) {
      return flat ? flat.slice(segment.begin, segment.count) : Flat{};
    };
    const bool decays = !p.is_norm || options_.decay_norms;
    const auto decay = static_cast<float>(decays ? options_.weight_decay : 0);
    if (!options_.adamw) {
      ops_.sgd(compute_, static_cast<float>(lr), decay, part(shard.parameter), part(shard.compute),
               part(shard.gradient), scale());
      continue;
    }
    AdamWStep adamw;
    adamw.lr = static_cast<float>(lr);
    adamw.beta1 = static_cast<float>(options_.beta1);
    adamw.beta2 = static_cast<float>(options_.beta2);
    adamw.eps = static_cast<float>(options_.eps);
    adamw.weight_decay = decay;
    adamw.step = step;
    adamw.stochastic_rounding = options_.stochastic_rounding;
    adamw.key = random_key(options_.seed, "round", p.name, static_cast<std::uint64_t>(step));
    adamw.first_element = segment.first_element;
    ops_.adamw(compute_, adamw, part(shard.parameter), part(shard.compute), part(shard.gradient),
               part(shard.m), part(shard.v), scale());
  }
}

}  // namespace strata
