#include "train/control.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/error.h"

namespace strata {

WorldStep summarize(const std::vector<RankReport>& reports) {
  WorldStep out;
  double loss_sum = 0, tokens = 0, norms = 0, counting = 0;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const RankReport& r = reports[rank];
    loss_sum += r.loss_sum;
    tokens += r.tokens;
    norms += r.scale.norm;
    out.grad_norm_max = std::max(out.grad_norm_max, static_cast<double>(r.scale.norm));
    if (r.tokens > 0) out.perplexity_rank_mean += std::exp(r.loss_sum / r.tokens), ++counting;
    if (r.scale.finite == 0 || !std::isfinite(r.loss_sum))
      out.non_finite_ranks.push_back(static_cast<int>(rank));
    out.stop_requested |= r.stop != 0;
  }
  const auto ranks = static_cast<double>(reports.size());
  out.loss = loss_sum / std::max(tokens, 1.0);
  out.tokens = std::llround(tokens);
  out.perplexity_rank_mean /= std::max(counting, 1.0);
  out.grad_norm_mean = norms / ranks;  // groups have equally many ranks
  return out;
}

ControlPlane::ControlPlane(Device& device, Communicator& world)
    : device_(device), world_(world), stream_(device.create_stream("control", Device::StreamKind::transfer)) {
  const std::size_t bytes = static_cast<std::size_t>(world.size()) * sizeof(RankReport);
  all_ = device.allocate(bytes, Purpose::data);
  all_host_ = device.allocate_host(bytes, Purpose::data);
}

void ControlPlane::start(Stream& compute, std::int64_t step, const RankReport* mine) {
  if (pending_) throw InternalError("a control exchange is pending already -> finish it first");
  constexpr std::int64_t kElements = sizeof(RankReport) / sizeof(double);
  device_.wait(stream_, device_.record(compute));
  world_.all_gather(stream_, {Traffic::control, "step report", step},
                    {all_.data(), DType::f64, kElements * world_.size()}, {mine, DType::f64, kElements});
  device_.copy_to_host(stream_, all_host_.data(), all_.data(), all_.bytes());
  done_ = device_.record(stream_);
  pending_ = true;
}

WorldStep ControlPlane::finish() {
  if (!pending_) throw InternalError("no control exchange is pending");
  device_.synchronize(done_);
  pending_ = false;
  const auto* all = all_host_.as<RankReport>();
  return summarize({all, all + world_.size()});
}

}  // namespace strata
