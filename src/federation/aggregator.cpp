#include "federation/aggregator.h"

#include <algorithm>

#include "sharding/layout.h"

namespace strata {
namespace {

std::int64_t blocks(std::int64_t count) {
  return (count + kQuantizationBlock - 1) / kQuantizationBlock;
}

}  // namespace

std::int64_t quantized_bytes(std::int64_t count) {
  return count + blocks(count) * static_cast<std::int64_t>(sizeof(float));
}

FederationOptions effective_options(FederationOptions options, const Mesh& mesh) {
  if (mesh.federate() == 1) options.wire = DType::f32;
  return options;
}

AggregationKind aggregation_kind(const Mesh& mesh, const Precision& precision,
                                 const FederationOptions& options) {
  const bool streaming = options.schedule == FederationSchedule::streaming;
  AggregationKind kind;
  kind.identity = mesh.federate() == 1 && options.eta == 1 && options.momentum == 0 && !streaming;
  kind.parameters = options.rule == OuterRule::fedavg && options.eta == 1 && !streaming &&
                    options.wire != DType::i8 &&
                    (options.wire == precision.master || precision.master == DType::bf16);
  kind.broadcasts = options.one_replica && mesh.replicate() > 1 && mesh.federate() > 1;
  kind.reduced = kind.parameters ? precision.master : options.wire;
  kind.broadcast = kind.reduced == DType::i8 ? DType::f32 : kind.reduced;
  return kind;
}

Aggregator::Aggregator(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops,
                       Stream& compute, const FederationOptions& options, int lanes, bool keep_deltas)
    : engine_(engine),
      groups_(groups),
      device_(device),
      ops_(ops),
      compute_(compute),
      options_(effective_options(options, groups.mesh)),
      kind_(aggregation_kind(groups.mesh, engine.options().precision, options_)),
      states_(engine.shards().size()) {
  for (int i = 0; i < lanes; ++i)
    lanes_.push_back({device.create_stream("federate." + std::to_string(i), Device::StreamKind::transfer),
                      {},
                      {},
                      {},
                      {},
                      {},
                      {},
                      {}});
  if (!kind_.identity && !kind_.parameters) allocate(lanes, keep_deltas);
}

// federation_memory repeats this sum.
void Aggregator::allocate(int lanes, bool keep_deltas) {
  std::int64_t largest = 0;
  for (const UnitShard& shard : engine_.shards()) largest = std::max(largest, shard.count);
  const auto take = [this](DType dtype, std::int64_t count, bool host) {
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
    memory_.push_back(host ? device_.allocate_host(bytes, Purpose::outer)
                           : device_.allocate(bytes, Purpose::outer));
    return Flat{memory_.back().data(), dtype, count};
  };
  const bool has_momentum = options_.rule != OuterRule::fedavg, quantized = options_.wire == DType::i8;
  const bool offload = options_.offload;

  for (std::size_t u = 0; u < states_.size(); ++u) {
    const std::int64_t count = engine_.shards()[u].count;
    states_[u].theta_old = take(DType::f32, count, offload);
    if (has_momentum) states_[u].momentum = take(DType::f32, count, offload);
    if (quantized) states_[u].error = take(DType::f32, count, offload);
    if (keep_deltas) states_[u].delta = take(DType::f32, count, false);
  }
  for (int i = 0; i < lanes; ++i) {
    Lane& lane = lanes_[static_cast<std::size_t>(i)];
    if (!keep_deltas) lane.delta = take(DType::f32, largest, false);
    if (options_.wire == DType::bf16) lane.wire = take(DType::bf16, largest, false);
    if (quantized) {
      lane.quantized = take(DType::i8, quantized_bytes(largest), false);
      lane.gathered = take(DType::i8, quantized_bytes(largest) * groups_.mesh.federate(), false);
    }
    if (!offload) continue;
    lane.theta_old = take(DType::f32, largest, false);
    if (has_momentum) lane.momentum = take(DType::f32, largest, false);
    if (quantized) lane.error = take(DType::f32, largest, false);
  }
}

void Aggregator::initialize() {
  const auto set = [this](const Flat& state, const Flat& staging, ConstFlat value) {
    if (!state) return;
    const Flat target = options_.offload ? staging.slice(0, state.count) : state;
    if (value) {
      ops_.cast(compute_, target, value);
    } else {
      ops_.fill(compute_, target, 0);
    }
    if (options_.offload)
      device_.copy_to_host(compute_, state.data, target.data, static_cast<std::size_t>(state.bytes()));
  };
  for (std::size_t u = 0; u < states_.size(); ++u) {
    UnitShard& s = engine_.shards()[u];
    const Lane& lane = lanes_.front();
    device_.wait(compute_, s.ready);
    set(states_[u].theta_old, lane.theta_old, s.parameter);
    // FedMom's momentum is the previous look-ahead point, which starts where the model starts.
    set(states_[u].momentum, lane.momentum,
        options_.rule == OuterRule::fedmom ? ConstFlat(s.parameter) : ConstFlat{});
    set(states_[u].error, lane.error, {});
    if (states_[u].delta) ops_.fill(compute_, states_[u].delta, 0);
    s.ready = device_.record(compute_);
  }
}

CollectiveLabel Aggregator::label(int unit, std::int64_t step) const {
  const UnitSpec& spec = engine_.units()[static_cast<std::size_t>(unit)];
  return {is_edge(spec) ? Traffic::edge : Traffic::training, spec.name, step};
}

bool Aggregator::sender() const {
  if (groups_.mesh.federate() == 1) return false;
  return !kind_.broadcasts || groups_.mesh.sender_replica(groups_.at.shard) == groups_.at.replicate;
}

Flat Aggregator::delta(const Lane& lane, int unit) const {
  const State& s = state(unit);
  return s.delta ? s.delta : lane.delta.slice(0, s.theta_old.count);
}

Flat Aggregator::fetch(const Lane& lane, const Flat& staging, const Flat& state) {
  if (!state || !options_.offload) return state;
  device_.copy_to_device(lane.stream, staging.data, state.data, static_cast<std::size_t>(state.bytes()));
  return staging.slice(0, state.count);
}

void Aggregator::store(const Lane& lane, const Flat& state, const Flat& staged) {
  if (state && options_.offload)
    device_.copy_to_host(lane.stream, state.data, staged.data, static_cast<std::size_t>(state.bytes()));
}

void Aggregator::reduce(int lane_index, int unit, std::int64_t step, const Weights& weights) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_index)];
  UnitShard& s = shard(unit);
  device_.wait(lane.stream, s.ready);
  device_.wait(lane.stream, weights.ready);
  const auto to = label(unit, step);
  if (kind_.parameters) {
    if (sender())
      groups_.federate->all_reduce_mean(lane.stream, to, s.parameter, weights.device, options_.reduce);
    return;
  }
  const Flat d = delta(lane, unit);
  ops_.pseudo_gradient(lane.stream, d, fetch(lane, lane.theta_old, state(unit).theta_old), s.parameter);
  // The next optimizer step must not overtake this read; the reduction itself holds nobody up.
  s.ready = device_.record(lane.stream);
  if (options_.wire == DType::i8) {
    reduce_quantized(lane, to, unit, weights);
  } else if (options_.wire == DType::bf16) {
    const Flat wire = lane.wire.slice(0, d.count);
    ops_.cast(lane.stream, wire, d);
    if (sender()) groups_.federate->all_reduce_mean(lane.stream, to, wire, weights.device, options_.reduce);
    ops_.cast(lane.stream, d, wire);
  } else if (sender()) {
    groups_.federate->all_reduce_mean(lane.stream, to, d, weights.device, options_.reduce);
  }
}

// Every replica quantizes, so that all keep the same error feedback; only senders exchange. Peers' values are
// added in fp32 in rank order.
void Aggregator::reduce_quantized(const Lane& lane, const CollectiveLabel& to, int unit,
                                  const Weights& weights) {
  const Flat d = delta(lane, unit);
  const std::int64_t bytes = quantized_bytes(d.count);
  const Flat mine = lane.quantized.slice(0, bytes);
  const Flat error = fetch(lane, lane.error, state(unit).error);
  ops_.quantize_int8(lane.stream, static_cast<std::int8_t*>(mine.data), static_cast<float*>(mine.at(d.count)),
                     error, d, kQuantizationBlock);
  store(lane, state(unit).error, error);
  if (!sender()) return;

  const int peers = groups_.mesh.federate();
  const Flat all = lane.gathered.slice(0, bytes * peers);
  groups_.federate->all_gather(lane.stream, to, all, mine);
  double total = 0;
  for (int i = 0; i < peers; ++i)
    total += weights.host == nullptr ? 1.0 : static_cast<double>(weights.host[i]);
  for (int i = 0; i < peers; ++i) {
    const Flat theirs = all.slice(i * bytes, bytes);
    const double weight = (weights.host == nullptr ? 1.0 : static_cast<double>(weights.host[i])) / total;
    ops_.dequantize_int8(lane.stream, d, static_cast<const std::int8_t*>(theirs.data),
                         static_cast<const float*>(theirs.at(d.count)), kQuantizationBlock,
                         static_cast<float>(weight), i > 0);
  }
}

void Aggregator::share(int lane_index, int unit, std::int64_t step) {
  if (!kind_.broadcasts) return;
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_index)];
  const int root = groups_.mesh.sender_replica(groups_.at.shard);
  const auto to = label(unit, step);
  if (kind_.parameters) {
    groups_.replicate->broadcast(lane.stream, to, shard(unit).parameter, root);
    return;
  }
  const Flat d = delta(lane, unit);
  if (options_.wire == DType::bf16) {
    const Flat wire = lane.wire.slice(0, d.count);  // holds what bf16 can: the cast is exact on the sender
    ops_.cast(lane.stream, wire, d);
    groups_.replicate->broadcast(lane.stream, to, wire, root);
    ops_.cast(lane.stream, d, wire);
  } else {
    groups_.replicate->broadcast(lane.stream, to, d, root);
  }
}

void Aggregator::apply(int lane_index, int unit, float alpha) {
  const Lane& lane = lanes_[static_cast<std::size_t>(lane_index)];
  UnitShard& s = shard(unit);
  device_.wait(lane.stream, s.ready);
  if (kind_.parameters) {
    if (s.compute) ops_.cast(lane.stream, s.compute, s.parameter);
  } else {
    const State& outer = state(unit);
    const Flat theta_old = fetch(lane, lane.theta_old, outer.theta_old);
    const Flat momentum = fetch(lane, lane.momentum, outer.momentum);
    const OuterStep rule{options_.rule, static_cast<float>(options_.eta),
                         static_cast<float>(options_.momentum), alpha};
    ops_.outer_step(lane.stream, rule, s.parameter, s.compute, theta_old, momentum, delta(lane, unit));
    store(lane, outer.theta_old, theta_old);
    store(lane, outer.momentum, momentum);
  }
  s.ready = device_.record(lane.stream);
}

}  // namespace strata
