#include "train/evaluate.h"

#include <algorithm>
#include <chrono>
#include <span>

namespace strata {

Evaluator::Evaluator(Device& device, Stream& compute, Llama& model, ShardingEngine& engine,
                     const MeshGroups& groups, const SequenceReader& reader, std::int64_t sequences)
    : device_(device),
      compute_(compute),
      transfer_(device.create_stream("evaluation", Device::StreamKind::transfer)),
      model_(model),
      engine_(engine),
      groups_(groups),
      reader_(reader),
      sequences_(sequences) {
  const LlamaSetup& s = model.setup();
  host_ = device.allocate_host(static_cast<std::size_t>(2 * s.batch * s.sequence) * sizeof(std::int32_t),
                               Purpose::data);
  batch_ = device.allocate(host_.bytes(), Purpose::data);
  const std::size_t sums = 2 * static_cast<std::size_t>(groups.mesh.federate()) * sizeof(double);
  sums_ = device.allocate(sums, Purpose::data);
  sums_host_ = device.allocate_host(sums, Purpose::data);
}

EvaluationResult Evaluator::run(std::int64_t step, bool one_model) {
  const auto began = std::chrono::steady_clock::now();
  const std::int64_t B = model_.setup().batch, T = model_.setup().sequence;
  const int F = groups_.mesh.federate(), f = groups_.at.federate;
  const Communicator& pool = one_model ? *groups_.world : *groups_.group;
  // Every rank makes the same number of passes, because weights are gathered; what lies past the set is
  // masked.
  const std::int64_t passes = (sequences_ + pool.size() * B - 1) / (pool.size() * B);

  device_.fill_zero(compute_, sums_.data(), sums_.bytes());
  double* loss_sum = sums_.as<double>() + 2 * f;
  std::int64_t counted = 0;
  auto* tokens = host_.as<std::int32_t>();
  auto* targets = tokens + B * T;
  const auto* device_tokens = batch_.as<std::int32_t>();
  Event uploaded;
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    device_.synchronize(uploaded);
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t sequence = (pass * pool.size() + pool.rank()) * B + b;
      if (sequence < sequences_) {
        reader_.read(sequence, std::span(tokens + b * T, static_cast<std::size_t>(T)),
                     std::span(targets + b * T, static_cast<std::size_t>(T)));
      } else {
        std::fill_n(tokens + b * T, T, 0);
        std::fill_n(targets + b * T, T, -1);
      }
    }
    counted += std::count_if(targets, targets + B * T, [](std::int32_t t) { return t >= 0; });
    device_.copy_to_device(compute_, batch_.data(), host_.data(), host_.bytes());
    uploaded = device_.record(compute_);
    engine_.begin_evaluation(step);
    model_.evaluate(compute_, engine_, device_tokens, device_tokens + B * T, loss_sum);
    engine_.end_evaluation();
  }

  auto* sums = sums_host_.as<double>();
  const double count = static_cast<double>(counted);
  sums[0] = count;
  device_.copy_to_device(compute_, loss_sum + 1, sums, sizeof(double));
  device_.wait(transfer_, device_.record(compute_));
  groups_.world->all_reduce_sum(transfer_, {Traffic::evaluation, "evaluation", step},
                                {sums_.data(), DType::f64, 2 * F}, {});
  const Event reduced = device_.record(transfer_);
  device_.synchronize(reduced);  // also: `sums` has been uploaded and may be written again
  device_.copy_to_host(transfer_, sums, sums_.data(), sums_.bytes());
  device_.synchronize(device_.record(transfer_));
  device_.wait(compute_, reduced);

  EvaluationResult out;
  if (one_model) {
    double loss = 0, all = 0;
    for (int g = 0; g < F; ++g) loss += sums[2 * g], all += sums[2 * g + 1];
    out.loss = loss / all;
    out.tokens = static_cast<std::int64_t>(all);
  } else {
    double low = 0, high = 0;
    for (int g = 0; g < F; ++g) {
      const double loss = sums[2 * g] / sums[2 * g + 1];
      out.loss += loss / F;
      low = g == 0 ? loss : std::min(low, loss);
      high = g == 0 ? loss : std::max(high, loss);
    }
    out.loss_spread = high - low;
    out.tokens = static_cast<std::int64_t>(sums[1]);
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return out;
}

}  // namespace strata
