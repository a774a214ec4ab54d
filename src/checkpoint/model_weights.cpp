#include "checkpoint/model_weights.h"

#include <fmt/format.h>

#include <cstring>

#include "base/error.h"

namespace strata {

CheckpointWeights::CheckpointWeights(const Checkpoint& checkpoint, const Choice& choice)
    : checkpoint_(checkpoint), choice_(choice) {
  const int groups = checkpoint.groups();
  if (choice.group && choice.average)
    throw UsageError("--group and --average were both given -> choose one of them");
  if (choice.group && (*choice.group < 0 || *choice.group >= groups))
    throw UsageError(fmt::format("--group is {}; {} holds the models of groups 0 to {} -> choose one of them",
                                 *choice.group, checkpoint.folder().string(), groups - 1));
  if (groups > 1 && !choice.group && !choice.average)
    throw UsageError(fmt::format(
        "{} was written between two aggregations and holds {} different models -> choose one with "
        "--group 0 ... {}, or their mean with --average",
        checkpoint.folder().string(), groups, groups - 1));
}

DType CheckpointWeights::dtype() const {
  // A mean of bf16 numbers is none.
  return choice_.average && checkpoint_.groups() > 1 ? DType::f32 : checkpoint_.parameter_dtype();
}

std::vector<float> CheckpointWeights::values(int unit, std::int64_t begin, std::int64_t count) const {
  const auto of_group = [&](int group) {
    return widen(checkpoint_.read(kind::parameter, unit, group, begin, count), checkpoint_.parameter_dtype());
  };
  const int groups = checkpoint_.groups();
  if (!choice_.average || groups == 1) return of_group(choice_.group.value_or(0));
  std::vector<double> sum(static_cast<std::size_t>(count), 0.0);
  for (int group = 0; group < groups; ++group) {
    const std::vector<float> one = of_group(group);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
  }
  std::vector<float> mean(sum.size());
  for (std::size_t i = 0; i < sum.size(); ++i) mean[i] = static_cast<float>(sum[i] / groups);
  return mean;
}

void load_weights(const ModelWeights& weights, ShardingEngine& engine, Device& device, Stream& compute) {
  std::vector<UnitShard>& shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u) {
    const UnitShard& shard = shards[u];
    const DType dtype = shard.parameter.dtype;
    std::vector<std::byte> host(static_cast<std::size_t>(shard.parameter.bytes()));  // padding is zero
    for (const ShardSegment& segment : shard.segments) {
      const ParameterSpec& p = shard.spec->parameters[static_cast<std::size_t>(segment.parameter)];
      const std::vector<float> values =
          weights.values(static_cast<int>(u), p.offset + segment.first_element, segment.count);
      std::byte* to = host.data() + static_cast<std::size_t>(segment.begin) * size_of(dtype);
      if (dtype == DType::f32) {
        std::memcpy(to, values.data(), values.size() * sizeof(float));
        continue;
      }
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bf16 x = to_bf16(values[i]);
        std::memcpy(to + i * sizeof x, &x, sizeof x);
      }
    }
    device.copy_to_device(compute, shard.parameter.data, host.data(), host.size());
    device.synchronize(device.record(compute));
  }
  engine.parameters_changed();
}

}  // namespace strata
