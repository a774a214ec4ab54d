#include "sharding/engine.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>

#include "base/error.h"
#include "sharding/gradient_reducer.h"
#include "sharding/weight_gatherer.h"

namespace strata {

class ShardingEngine::Impl {
 public:
  explicit Impl(const EngineParts& parts) : parts_(parts), weights_(parts), gradients_(parts) {}

  // What a ticket stands for.
  struct Held {
    std::int64_t ticket = 0, version = 0;
    int unit = 0;
    Pass pass = Pass::forward;
    bool gradient = false;
  };

  const Held* find(std::int64_t ticket) const {
    for (const Held& h : held_)
      if (h.ticket == ticket) return &h;
    return nullptr;
  }

  std::int64_t hold(int unit, Pass pass, bool gradient) {
    held_.push_back({++last_ticket_, version_, unit, pass, gradient});
    return last_ticket_;
  }

  void require_free(int unit, bool gradient) const {
    if (unit < 0 || unit >= static_cast<int>(parts_.units.size()))
      throw InternalError(fmt::format("unit {} was asked for, the model has units 0 to {} -> report this",
                                      unit, parts_.units.size() - 1));
    for (const Held& h : held_)
      if (h.unit == unit && h.gradient == gradient && h.version == version_)
        throw InternalError(fmt::format("the {} of {} {} leased already -> release the first lease",
                                        gradient ? "gradient" : "weights", parts_.unit(unit).name,
                                        gradient ? "is" : "are"));
  }

  void release(std::int64_t ticket) {
    const Held* found = find(ticket);
    if (found == nullptr) return;
    const Held h = *found;
    std::erase_if(held_, [ticket](const Held& other) { return other.ticket == ticket; });
    if (h.version != version_ || std::uncaught_exceptions() > 0) return;
    if (h.gradient) {
      gradients_.release(h.unit);
    } else {
      weights_.release(h.unit, h.pass);
    }
  }

  // Every lease handed out so far is stale from now on.
  void new_version() { ++version_; }

  void allocate_shards();
  void zero(const Flat& flat) {
    if (flat) parts_.device.fill_zero(parts_.compute, flat.data, static_cast<std::size_t>(flat.bytes()));
  }
  std::vector<float> gather(int unit, Flat what);

  EngineParts parts_;
  std::vector<Buffer> memory_;
  WeightGatherer weights_;
  GradientReducer gradients_;
  std::vector<Held> held_;
  std::int64_t last_ticket_ = 0, version_ = 0, step_ = 0;
};

namespace {

std::vector<UnitShard> describe_shards(const std::vector<UnitSpec>& units, const MeshGroups& groups) {
  std::vector<UnitShard> shards(units.size());
  for (std::size_t u = 0; u < units.size(); ++u) {
    shards[u].spec = &units[u];
    shards[u].count = shard_elements(units[u], groups.mesh.shard());
    shards[u].segments = shard_segments(units[u], groups.mesh.shard(), groups.at.shard);
  }
  return shards;
}

const EngineOptions& checked(const EngineOptions& options) {
  if (options.prefetch < 0)
    throw UsageError(
        fmt::format("prefetch is {}, allowed are numbers from 0 -> give the number of units to gather "
                    "ahead",
                    options.prefetch));
  if (options.micro_steps < 1)
    throw UsageError(
        fmt::format("gradient_accumulation is {}, allowed are numbers from 1 -> give the number of "
                    "micro-steps in a step",
                    options.micro_steps));
  return options;
}

}  // namespace

ShardingEngine::ShardingEngine(std::vector<UnitSpec> units, const MeshGroups& groups, Device& device,
                               Ops& ops, Stream& compute, const EngineOptions& options)
    : units_(std::move(units)), options_(checked(options)), shards_(describe_shards(units_, groups)) {
  impl_ = std::make_unique<Impl>(EngineParts{units_, shards_, groups, device, ops, compute, options_,
                                             plan_buffers(units_, groups.mesh, options_)});
  impl_->allocate_shards();
}

ShardingEngine::~ShardingEngine() {
  // Work in flight uses the slots. An error that ends the run has been thrown by an earlier wait.
  try {
    impl_->parts_.device.synchronize();
  } catch (...) {
  }
}

void ShardingEngine::Impl::allocate_shards() {
  const Precision& p = parts_.options.precision;
  for (UnitShard& shard : parts_.shards) {
    const auto allocate = [&](DType dtype, Purpose purpose) {
      memory_.push_back(
          parts_.device.allocate(static_cast<std::size_t>(shard.count) * size_of(dtype), purpose));
      return Flat{memory_.back().data(), dtype, shard.count};
    };
    shard.parameter = allocate(p.master, Purpose::weights);
    if (p.has_compute_copy()) shard.compute = allocate(p.compute, Purpose::weights);
    shard.gradient = allocate(p.gradient, Purpose::gradients);
    if (parts_.options.moments) {
      shard.m = allocate(p.master, Purpose::moments);
      shard.v = allocate(p.master, Purpose::moments);
    }
    for (const Flat& flat : {shard.parameter, shard.compute, shard.gradient, shard.m, shard.v}) zero(flat);
    shard.ready = parts_.device.record(parts_.compute);
  }
}

void ShardingEngine::initialize(std::uint64_t seed) {
  for (UnitShard& shard : shards_) {
    for (const ShardSegment& segment : shard.segments) {
      const ParameterSpec& p = shard.spec->parameters[static_cast<std::size_t>(segment.parameter)];
      const Flat part = shard.parameter.slice(segment.begin, segment.count);
      if (p.initial_std > 0) {
        impl_->parts_.ops.initialize_normal(impl_->parts_.compute, part, p.initial_std,
                                            random_key(seed, "initialize", p.name), segment.first_element);
      } else {
        impl_->parts_.ops.fill(impl_->parts_.compute, part, 1);
      }
    }
    impl_->zero(shard.m);
    impl_->zero(shard.v);
  }
  parameters_changed();
}

void ShardingEngine::parameters_changed() {
  for (UnitShard& shard : shards_) {
    if (shard.compute) impl_->parts_.ops.cast(impl_->parts_.compute, shard.compute, shard.parameter);
    shard.ready = impl_->parts_.device.record(impl_->parts_.compute);
  }
  impl_->new_version();
}

void ShardingEngine::begin_step(std::int64_t step) {
  impl_->step_ = step;
  impl_->new_version();
  impl_->gradients_.begin_step(step);
}

void ShardingEngine::begin_micro_step(int k) {
  if (k < 0 || k >= options_.micro_steps)
    throw InternalError(fmt::format("micro-step {} was begun, a step has micro-steps 0 to {} -> report this",
                                    k, options_.micro_steps - 1));
  impl_->gradients_.begin_micro_step(k);
  impl_->new_version();
  impl_->weights_.begin_pass(WeightGatherer::Kind::training, impl_->step_);
}

void ShardingEngine::finish_gradients() {
  impl_->gradients_.finish();
}

void ShardingEngine::begin_evaluation(std::int64_t step) {
  impl_->new_version();
  impl_->weights_.begin_pass(WeightGatherer::Kind::evaluation, step);
}

void ShardingEngine::end_evaluation() {
  impl_->new_version();
}

Lease ShardingEngine::weights(int unit, Pass pass) {
  impl_->require_free(unit, false);
  const Flat data = impl_->weights_.acquire(unit, pass);
  return {this, impl_->hold(unit, pass, false), data};
}

Lease ShardingEngine::gradient(int unit) {
  impl_->require_free(unit, true);
  const auto target = impl_->gradients_.acquire(unit);
  return {this, impl_->hold(unit, Pass::backward, true), target.data, target.accumulate};
}

void ShardingEngine::release(std::int64_t ticket) {
  impl_->release(ticket);
}

void ShardingEngine::check(std::int64_t ticket) const {
  const Impl::Held* held = impl_->find(ticket);
  if (held == nullptr)
    throw InternalError("a parameter lease was used after its release -> lease the unit again");
  if (held->version != impl_->version_)
    throw InternalError(
        fmt::format("the lease of {} is stale: the weights have moved on since it was given -> release "
                    "it within its step and lease the unit again",
                    impl_->parts_.unit(held->unit).name));
}

std::vector<float> ShardingEngine::Impl::gather(int unit, Flat what) {
  Device& device = parts_.device;
  Stream& stream = weights_.stream();
  const std::int64_t elements = parts_.unit(unit).elements;
  device.wait(stream, device.record(parts_.compute));
  device.wait(stream, parts_.shard(unit).ready);
  Buffer whole;
  const void* source = what.data;
  if (parts_.shard_count() > 1) {
    const Flat full{nullptr, what.dtype, parts_.padded(unit)};
    whole = device.allocate(static_cast<std::size_t>(full.bytes()), Purpose::workspace);
    parts_.groups.shard->all_gather(stream, {Traffic::checkpoint, parts_.unit(unit).name, step_},
                                    {whole.data(), what.dtype, full.count}, what);
    source = whole.data();
  }
  std::vector<std::byte> host(static_cast<std::size_t>(elements) * size_of(what.dtype));
  device.copy_to_host(stream, host.data(), source, host.size());
  device.synchronize(device.record(stream));

  std::vector<float> values(static_cast<std::size_t>(elements));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (what.dtype == DType::bf16) {
      bf16 x;
      std::memcpy(&x, host.data() + i * sizeof x, sizeof x);
      values[i] = to_float(x);
    } else {
      std::memcpy(&values[i], host.data() + i * sizeof(float), sizeof(float));
    }
  }
  return values;
}

std::vector<float> ShardingEngine::gather_parameters(int unit) {
  if (impl_->weights_.before_gather) impl_->weights_.before_gather(unit);
  return impl_->gather(unit, shards_[static_cast<std::size_t>(unit)].parameter);
}

std::vector<float> ShardingEngine::gather_gradients(int unit) {
  return impl_->gather(unit, shards_[static_cast<std::size_t>(unit)].gradient);
}

void ShardingEngine::set_before_gather(std::function<void(int unit)> hook) {
  impl_->weights_.before_gather = std::move(hook);
}

}  // namespace strata
