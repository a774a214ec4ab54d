#include "backend/mpi/operation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

namespace strata::mpi {

Context::Context(MpiSession& s, CpuDevice& d, const MpiOptions& o)
    : session(s), device(d), options(o), scratch(d) {
  if (options.message_bytes < 16 || options.message_bytes > (std::int64_t{1} << 30) ||
      options.scratch_bytes < 0)
    throw InternalError(
        fmt::format("MpiOptions: message_bytes {} is outside 16 ... 2^30, or scratch_bytes {} is "
                    "negative -> leave them at their defaults",
                    options.message_bytes, options.scratch_bytes));
  if (session.size() == 1) return;
  sequence_numbers = largest_tag() / kMaxGroups / Transfers::kPhases;
}

Operation::Operation(std::shared_ptr<Group> group, std::string what, CollectiveLabel label)
    : group_(std::move(group)),
      transfers_(group_->ranks, group_->context->options.message_bytes),
      what_(std::move(what)),
      label_(std::move(label)) {}

void Operation::start() {
  const int numbers = group_->context->sequence_numbers;
  const std::int64_t sequence = group_->started++;
  const int place = group_->id * numbers + static_cast<int>(sequence % numbers);
  transfers_.use_tags(fixed_tags_ ? 0 : place * Transfers::kPhases);
  last_poll_ = Clock::now();
  if (auto* observer = group_->context->options.observer)
    number_ = observer->begins(what_, label_, group_->name);
  begin();
}

void Operation::observe_wait() {
  constexpr std::chrono::milliseconds kBetween{20};
  auto* observer = group_->context->options.observer;
  if (observer == nullptr) return;
  observer->alive();
  if (waited_ < next_observed_ || waited_ < kBetween) return;
  next_observed_ = waited_ + kBetween;
  observer->waits(number_, transfers_.missing());
}

AsyncOperation::Progress Operation::progress() {
  bool moved = transfers_.poll(received_);
  for (const auto& message : received_) arrived(message);
  const Progress next = advance();
  if (next == Progress::done && transfers_.idle()) {
    account();
    if (auto* observer = group_->context->options.observer) observer->ends(number_);
    return Progress::done;
  }
  moved |= next == Progress::some;
  // A process that was itself held up (stopped, or not waiting in deferred mode) has not waited for its
  // peers.
  const auto now = Clock::now();
  waited_ = moved ? Clock::duration{}
                  : waited_ + std::min<Clock::duration>(now - last_poll_, std::chrono::seconds(1));
  last_poll_ = now;
  if (moved) next_observed_ = {};
  observe_wait();
  if (waited_ > std::chrono::duration<double>(group_->context->options.timeout_seconds)) expire();
  return moved ? Progress::some : Progress::none;
}

void Operation::expire() const {
  const std::vector<int> missing = transfers_.missing();
  log_error(
      "step {}, unit {}: {} in group {} (ranks {}): nothing for {} s; rank(s) {} did not arrive -> look for "
      "them in the other logs and at their hosts; timeout_seconds sets the limit",
      label_.step, label_.unit, what_, group_->name, fmt::join(group_->ranks, " "),
      group_->context->options.timeout_seconds, fmt::join(missing, " "));
  group_->context->session.abort(static_cast<int>(ExitCode::network));
}

}  // namespace strata::mpi
