#pragma once
// One rank of a mesh with everything below the model: device, operations, groups, engine. The "model" is a
// toy that uses the engine as a decoder does: it leases weights in order, and adds to every gradient a value
// that depends on the data, the unit, the element and the weight as it was seen in forward and in backward.
#include <memory>
#include <vector>

#include "backend/cpu/ops.h"
#include "sharding/engine.h"
#include "tests/support/thread_world.h"

namespace strata {

class ToyRank {
 public:
  using Pass = ParameterSource::Pass;

  ToyRank(World& world, const Mesh& mesh, std::vector<UnitSpec> units, const EngineOptions& options,
          CpuDeviceOptions device_options)
      : ToyRank(make_cpu_device(device_options), nullptr, world, mesh, std::move(units), options) {}
  // On a device that the world lives on.
  ToyRank(CpuDevice& shared, World& world, const Mesh& mesh, std::vector<UnitSpec> units,
          const EngineOptions& options)
      : ToyRank(nullptr, &shared, world, mesh, std::move(units), options) {}
  ~ToyRank() {
    try {
      device->synchronize();
    } catch (...) {
    }
  }

  // d(loss)/d(weight) of sum_i c_i w_i + curvature w_i^2 / 2, with a c that differs by `data`.
  static double slope(std::int64_t data, int unit, std::int64_t element) {
    return 0.001 * static_cast<double>((data * 131 + unit * 31 + element * 7) % 97 - 48);
  }
  static constexpr double kCurvature = 0.5;

  void micro_step(int k, std::int64_t data) {
    engine->begin_micro_step(k);
    const int n = static_cast<int>(engine->units().size());
    const bool tied = engine->units()[0].kind == UnitKind::root;
    const int first_decoder = 1, last_decoder = tied ? n - 1 : n - 2;
    Lease edge = engine->weights(0, Pass::forward);
    read(0, edge);
    if (!tied) edge.release();
    for (int u = first_decoder; u <= last_decoder; ++u) read(u, engine->weights(u, Pass::forward));
    if (!tied) edge = engine->weights(n - 1, Pass::forward);
    if (!tied) read(n - 1, edge);
    Lease gradient = engine->gradient(tied ? 0 : n - 1);
    add_gradient(tied ? 0 : n - 1, edge, gradient, data, tied ? 0.5 : 1.0, gradient.accumulate());
    if (!tied) gradient.release(), edge.release();
    for (int u = last_decoder; u >= first_decoder; --u) {
      const Lease w = engine->weights(u, Pass::backward);
      Lease g = engine->gradient(u);
      add_gradient(u, w, g, data, 1.0, g.accumulate());
      g.release();
    }
    if (!tied) gradient = engine->gradient(0);
    // The embedding's backward reads no weights: this toy uses those it read in forward.
    add_gradient(0, Lease(), gradient, data, tied ? 0.5 : 1.0, tied || gradient.accumulate());
  }

  void evaluate(std::int64_t step) {
    engine->begin_evaluation(step);
    for (int u = 0; u < static_cast<int>(engine->units().size()); ++u)
      read(u, engine->weights(u, Pass::forward));
    engine->end_evaluation();
  }

  std::unique_ptr<CpuDevice> owned;
  CpuDevice* device;
  std::unique_ptr<Ops> ops;
  Stream& compute;
  MeshGroups groups;
  std::unique_ptr<ShardingEngine> engine;

 private:
  ToyRank(std::unique_ptr<CpuDevice> own, CpuDevice* shared, World& world, const Mesh& mesh,
          std::vector<UnitSpec> units, const EngineOptions& options)
      : owned(std::move(own)),
        device(owned ? owned.get() : shared),
        ops(make_cpu_ops(*device)),
        compute(device->create_stream("compute", Device::StreamKind::compute)),
        groups(make_groups(world, mesh)),
        engine(std::make_unique<ShardingEngine>(std::move(units), groups, *device, *ops, compute, options)) {
    engine->initialize(7);
  }

  // Copies the leased weights aside, on the compute stream.
  void read(int unit, const Lease& lease, Pass pass = Pass::forward) {
    const Flat w = lease.flat();
    auto& copy = copies_[{unit, pass}];
    if (!copy) copy = std::make_shared<std::vector<float>>(static_cast<std::size_t>(w.count));
    cpu_stream(compute).run([w, copy] {
      for (std::int64_t i = 0; i < w.count; ++i)
        (*copy)[static_cast<std::size_t>(i)] = static_cast<float>(read_element(w.data, w.dtype, i));
    });
  }

  void add_gradient(int unit, const Lease& weights, const Lease& gradient, std::int64_t data, double share,
                    bool accumulate) {
    const Flat g = gradient.flat();
    if (weights) read(unit, weights, Pass::backward);
    const auto forward = copies_.at({unit, Pass::forward});
    const auto backward = weights ? copies_.at({unit, Pass::backward}) : forward;
    cpu_stream(compute).run([=] {
      for (std::int64_t i = 0; i < g.count; ++i) {
        const auto e = static_cast<std::size_t>(i);
        const double w = 0.5 * ((*forward)[e] + (*backward)[e]);
        const double value = share * (slope(data, unit, i) + kCurvature * w);
        write_element(g.data, g.dtype, i, (accumulate ? read_element(g.data, g.dtype, i) : 0.0) + value);
      }
    });
  }

  std::map<std::pair<int, Pass>, std::shared_ptr<std::vector<float>>> copies_;
};

}  // namespace strata
