// The rules that involve more than one key.
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "config/load.h"

namespace strata {
namespace {

class Rules {
 public:
  explicit Rules(const std::string& source) : source_(source) {}

  template <class Value>
  void need(bool holds, const char* key, const Value& value, const std::string& allowed,
            const std::string& advice) const {
    if (!holds)
      throw UsageError(fmt::format("{}: {} is {}; allowed: {} -> {}", source_, key, value, allowed, advice));
  }

 private:
  const std::string& source_;
};

void check_data(const Config& c, const Rules& rules) {
  rules.need(c.data.sequence_length <= c.model.max_position_embeddings, "data.sequence_length",
             c.data.sequence_length,
             fmt::format("up to model.max_position_embeddings = {}", c.model.max_position_embeddings),
             "shorten the sequences or raise model.max_position_embeddings");
  if (c.data.ignore_token) {
    rules.need(*c.data.ignore_token < c.model.vocab_size, "data.ignore_token", *c.data.ignore_token,
               fmt::format("ids below model.vocab_size = {}", c.model.vocab_size), "correct the id");
  }
  rules.need(c.evaluation.every == 0 || !c.data.validation.empty(), "evaluation.every", c.evaluation.every,
             "0 without data.validation", "give data.validation or leave evaluation.every out");
  const double tokens = static_cast<double>(c.data.sequence_length) * static_cast<double>(c.data.batch_size);
  rules.need(tokens < 2147483648.0, "data.batch_size", c.data.batch_size,
             fmt::format("fewer than 2^31 tokens a micro-step; {} x sequence_length {} is {:g}",
                         c.data.batch_size, c.data.sequence_length, tokens),
             "use gradient_accumulation for larger batches");
  const double world = static_cast<double>(c.mesh.federate) * c.mesh.replicate * c.mesh.shard;
  rules.need(world < 2147483648.0, "mesh",
             fmt::format("{} x {} x {}", c.mesh.federate, c.mesh.replicate, c.mesh.shard),
             "fewer than 2^31 ranks", "correct the mesh");
  const double consumed = world * static_cast<double>(c.data.batch_size) *
                          static_cast<double>(c.gradient_accumulation) *
                          static_cast<double>(c.schedule.steps);
  rules.need(consumed * static_cast<double>(c.data.sequence_length) < 4.6e18, "schedule.steps",
             c.schedule.steps,
             fmt::format("fewer than 2^62 tokens in all; this run would read {:g} sequences", consumed),
             "correct steps, batch_size or gradient_accumulation");
}

void check_schedule(const Config& c, const Rules& rules) {
  const ScheduleConfig& s = c.schedule;
  rules.need(s.warmup_steps <= s.steps, "schedule.warmup_steps", s.warmup_steps,
             fmt::format("up to schedule.steps = {}", s.steps), "shorten the warm-up");
  rules.need(s.decay_steps == 0 || s.kind == "wsd", "schedule.decay_steps", s.decay_steps,
             fmt::format("0 with schedule.kind \"{}\"", s.kind), "leave it out or choose \"wsd\"");
  rules.need(s.warmup_steps + s.decay_steps <= s.steps, "schedule.decay_steps", s.decay_steps,
             fmt::format("up to steps - warmup_steps = {}", s.steps - s.warmup_steps), "shorten the decay");
  rules.need(s.min_lr <= c.optimizer.lr, "schedule.min_lr", s.min_lr,
             fmt::format("up to optimizer.lr = {}", c.optimizer.lr), "lower it");
}

void check_precision(const Config& c, const Rules& rules) {
  rules.need(!c.optimizer.stochastic_rounding || c.precision == "bf16_pure", "optimizer.stochastic_rounding",
             "true", fmt::format("false with precision \"{}\"", c.precision),
             "leave it out or choose \"bf16_pure\": other precisions keep fp32 weights");
  rules.need(c.reduce_rounding == "once" || c.reduce_dtype == "bf16", "reduce_rounding", c.reduce_rounding,
             fmt::format("once with reduce_dtype \"{}\"", c.reduce_dtype), "choose reduce_dtype \"bf16\"");
  rules.need(c.reduce_imitate_hops == 0 || c.reduce_rounding == "hop", "reduce_imitate_hops",
             c.reduce_imitate_hops, "0 with reduce_rounding \"once\"", "choose reduce_rounding \"hop\"");
  rules.need(c.stream_order == "eager" || c.device == "cpu", "stream_order", c.stream_order,
             fmt::format("eager with device \"{}\"", c.device), "leave it out");
}

void check_federation(const Config& c, const Rules& rules) {
  const FederationConfig& f = c.federation;
  const bool streaming = f.schedule == "streaming";
  rules.need(!f.momentum || f.rule != "fedavg", "federation.momentum", f.momentum.value_or(0),
             "none with rule \"fedavg\"", "leave it out or choose fedavgm, fedmom or diloco");
  rules.need(!f.alpha || streaming, "federation.alpha", f.alpha.value_or(0),
             fmt::format("none with schedule \"{}\"", f.schedule), "leave it out or choose \"streaming\"");
  if (!streaming) return;
  // A fragment is applied before it is sent again; one that waits a whole round would overtake itself.
  rules.need(f.tau < f.every, "federation.tau", f.tau,
             fmt::format("below federation.every = {} with schedule \"streaming\"", f.every),
             "lower tau or raise every");
}

}  // namespace

void check_config(const Config& config, const std::string& source) {
  const Rules rules(source);
  check_data(config, rules);
  check_schedule(config, rules);
  check_precision(config, rules);
  check_federation(config, rules);
}

}  // namespace strata
