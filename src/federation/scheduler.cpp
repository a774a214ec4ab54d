#include "federation/scheduler.h"

#include <algorithm>

#include "federation/aggregator.h"
#include "federation/fragments.h"
#include "federation/plan.h"
#include "federation/token_weights.h"

namespace strata {

class FederationScheduler::Impl {
 public:
  Impl(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops, Stream& compute,
       const FederationOptions& options)
      : engine_(engine),
        groups_(groups),
        device_(device),
        compute_(compute),
        options_(options),
        fragments_(engine.units(), options),
        lanes_(federation_lanes(fragments_, options)),
        aggregator_(engine, groups, device, ops, compute, options, lanes_, streaming()),
        tokens_(groups, device, fragments_.count(), weighs_tokens(groups.mesh, options)),
        phases_(engine.units().size(), Phase::idle) {}

  bool streaming() const { return options_.schedule == FederationSchedule::streaming; }
  bool identity() const { return aggregator_.kind().identity; }

  // due: enqueued before the unit's next gather. sent: its reduction is enqueued. shared: all replicas have
  // it.
  enum class Phase : std::uint8_t { idle, due, sent, shared };
  Phase& phase(int unit) { return phases_[static_cast<std::size_t>(unit)]; }

  bool after_step(std::int64_t step) {
    if (identity()) return false;
    enqueue_due();
    step_ = step;
    const bool moved = streaming() ? stream_fragments(step) : aggregate_all(step);
    if (moved && options_.schedule == FederationSchedule::blocking) wait_for_lanes();
    return moved;
  }

  bool aggregate_all(std::int64_t step) {
    if (!fragments_.sent(0, step)) return false;
    weights_ = tokens_.take(0, step);
    for (Phase& p : phases_) p = Phase::due;
    if (options_.schedule == FederationSchedule::blocking) enqueue_due();
    return true;
  }

  void enqueue_due() {
    for (int u = 0; u < static_cast<int>(phases_.size()); ++u) aggregate_if_due(u);
  }

  void aggregate_if_due(int unit) {
    if (phase(unit) != Phase::due) return;
    phase(unit) = Phase::idle;
    const Event begin = begin_span(0, unit);
    aggregator_.reduce(0, unit, step_, weights_);
    aggregator_.share(0, unit, step_);
    aggregator_.apply(0, unit, 0);
    end_span(0, begin);
    tokens_.used(0, spans_.back().end);
  }

  // A fragment arrives before another, or the same, is sent; so the earliest reductions start first.
  bool stream_fragments(std::int64_t step) {
    const bool last = step == options_.last_step;
    bool moved = false;
    for (int p = 0; p < fragments_.count(); ++p) {
      if (!fragments_.applied(p, step)) continue;
      each_unit(p, [&](int lane, int unit) {
        if (phase(unit) == Phase::idle)
          return;  // the run was resumed where it had ended: nothing was in flight
        if (phase(unit) == Phase::sent) aggregator_.share(lane, unit, step);
        phase(unit) = Phase::idle;
        aggregator_.apply(lane, unit, static_cast<float>(options_.alpha));
      });
      moved = true;
    }
    for (int p = 0; p < fragments_.count(); ++p) {
      if (!fragments_.sent(p, step)) continue;
      const auto weights = tokens_.take(p, step);
      const bool at_once = last || options_.tau == 0;
      each_unit(p, [&](int lane, int unit) {
        const Event begin = begin_span(lane, unit);
        aggregator_.reduce(lane, unit, step, weights);
        if (at_once) {
          aggregator_.share(lane, unit, step);
          // At the end of the run nothing local is kept: all groups finish with the same model.
          aggregator_.apply(lane, unit, last ? 0.0f : static_cast<float>(options_.alpha));
        } else {
          phase(unit) = Phase::sent;
        }
        end_span(lane, begin);
        tokens_.used(p, spans_.back().end);
      });
      moved = true;
    }
    return moved;
  }

  template <class F>
  void each_unit(int fragment, F&& act) {
    int lane = fragments_.units_before(fragment);  // neighbours in time meet on different lanes
    for (const int unit : fragments_.units(fragment)) act(lane++ % lanes_, unit);
  }

  Event begin_span(int lane, int unit) {
    // The wait for the optimizer is no part of the aggregation.
    device_.wait(aggregator_.stream(lane), engine_.shards()[static_cast<std::size_t>(unit)].ready);
    return device_.record(aggregator_.stream(lane));
  }
  void end_span(int lane, const Event& begin) {
    spans_.push_back({begin, device_.record(aggregator_.stream(lane))});
  }

  void wait_for_lanes() {
    for (int lane = 0; lane < lanes_; ++lane)
      device_.wait(compute_, device_.record(aggregator_.stream(lane)));
  }

  void finish() {
    enqueue_due();
    for (int p = 0; p < fragments_.count(); ++p)
      each_unit(p, [&](int lane, int unit) {
        if (phase(unit) != Phase::sent) return;
        aggregator_.share(lane, unit, step_);
        phase(unit) = Phase::shared;
      });
    wait_for_lanes();
  }

  void resume(std::int64_t step, const std::function<bool(int)>& in_flight) {
    for (int p = 0; p < fragments_.count(); ++p) {
      for (const int unit : fragments_.units(p)) {
        const bool waits = fragments_.in_flight(p, step) && (!in_flight || in_flight(unit));
        phase(unit) = waits ? Phase::shared : Phase::idle;
      }
    }
    for (UnitShard& shard : engine_.shards()) {
      device_.wait(compute_, shard.ready);
      shard.ready = device_.record(compute_);
    }
  }

  std::vector<NamedState> state() const {
    std::vector<NamedState> states;
    for (int u = 0; u < static_cast<int>(phases_.size()); ++u) {
      const auto& s = aggregator_.state(u);
      const auto& name = engine_.units()[static_cast<std::size_t>(u)].name;
      const auto add = [&](const char* what, const Flat& data, bool host) {
        if (data) states.push_back({"outer." + name + "." + what, u, data, host});
      };
      add("theta_old", s.theta_old, options_.offload);
      add("momentum", s.momentum, options_.offload);
      add("error", s.error, options_.offload);
      const Phase phase = phases_[static_cast<std::size_t>(u)];
      if (phase == Phase::sent || phase == Phase::shared) add("delta", s.delta, false);
    }
    return states;
  }

  ShardingEngine& engine_;
  const MeshGroups& groups_;
  Device& device_;
  Stream& compute_;
  FederationOptions options_;
  Fragments fragments_;
  int lanes_;
  Aggregator aggregator_;
  TokenWeights tokens_;
  std::vector<Phase> phases_;    // by unit
  Aggregator::Weights weights_;  // of the units that are due
  std::int64_t step_ = 0;        // after which they became due
  std::vector<BusySpan> spans_;
};

FederationScheduler::FederationScheduler(ShardingEngine& engine, const MeshGroups& groups, Device& device,
                                         Ops& ops, Stream& compute, const FederationOptions& options)
    : impl_(std::make_unique<Impl>(engine, groups, device, ops, compute, options)) {
  if (!impl_->identity())
    engine.set_before_gather([impl = impl_.get()](int unit) { impl->aggregate_if_due(unit); });
}

FederationScheduler::~FederationScheduler() {
  impl_->engine_.set_before_gather({});
  // Work in flight uses the buffers. An error that ends the run has been thrown by an earlier wait.
  try {
    impl_->device_.synchronize();
  } catch (...) {
  }
}

void FederationScheduler::initialize() {
  impl_->aggregator_.initialize();
}

void FederationScheduler::resume(std::int64_t step, const std::function<bool(int unit)>& in_flight) {
  impl_->resume(step, in_flight);
}

void FederationScheduler::count_tokens(std::int64_t step, std::int64_t tokens) {
  impl_->tokens_.add(tokens);
  for (int p = 0; p < impl_->fragments_.count(); ++p)
    if (impl_->fragments_.sent(p, step)) return impl_->tokens_.exchange(step);
}

bool FederationScheduler::after_step(std::int64_t step) {
  return impl_->after_step(step);
}

void FederationScheduler::finish() {
  impl_->finish();
}

bool FederationScheduler::aggregates(std::int64_t step) const {
  if (impl_->groups_.mesh.federate() == 1) return true;
  return impl_->streaming() ? step == impl_->options_.last_step : impl_->fragments_.sent(0, step);
}

const FederationOptions& FederationScheduler::options() const {
  return impl_->options_;
}

std::vector<NamedState> FederationScheduler::state() const {
  return impl_->state();
}

std::vector<std::int64_t> FederationScheduler::host_state() const {
  return impl_->tokens_.counts();
}

void FederationScheduler::set_host_state(const std::vector<std::int64_t>& counts) {
  auto& mine = impl_->tokens_.counts();
  for (std::size_t p = 0; p < mine.size() && p < counts.size(); ++p) mine[p] = counts[p];
}

std::vector<FederationScheduler::BusySpan> FederationScheduler::take_busy_spans() {
  return std::exchange(impl_->spans_, {});
}

}  // namespace strata
