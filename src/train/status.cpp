#include "train/status.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <new>
#include <set>
#include <type_traits>

#include "base/error.h"
#include "base/log.h"

namespace strata {
namespace {

static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::is_standard_layout_v<StatusData>,
              "the file holds the record as it lies in memory");

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <std::size_t N>
void store(std::array<char, N>& to, const std::string& text) {
  const std::size_t n = std::min(text.size(), N - 1);
  std::memcpy(to.data(), text.data(), n);
  to[n] = '\0';
}

template <std::size_t N>
std::string load(const std::array<char, N>& from) {
  return {from.data(), strnlen(from.data(), N)};
}

std::string host_name() {
  std::array<char, 64> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

// One that has ended stays in the table until its parent has asked for its code: it counts as gone.
bool is_running(int pid) {
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(in, text);
  const std::size_t name_end = text.rfind(')');
  return name_end != std::string::npos && name_end + 2 < text.size() && text[name_end + 2] != 'Z';
}

std::string describe(const StatusData::Waiting& w, std::int64_t last, std::vector<int>& awaits) {
  std::string text = load(w.what);
  if (const std::string unit = load(w.unit); !unit.empty()) text += " of " + unit;
  text += fmt::format(" in group {}", load(w.group));
  if (w.step >= 0) text += fmt::format(" (step {})", w.step);
  text += fmt::format(" for {:.2f} s", static_cast<double>(std::max<std::int64_t>(last - w.since, 0)) * 1e-9);
  const int known = std::min(w.missing, StatusData::kPeers);
  if (known > 0) {
    std::vector<int> peers(w.peers.begin(), w.peers.begin() + known);
    text += fmt::format(", waiting for rank(s) {}{}", fmt::join(peers, " "), w.missing > known ? " ..." : "");
    awaits.insert(awaits.end(), peers.begin(), peers.end());
  }
  return text;
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  return fmt::format("{:%H:%M:%S}.{:03}", fmt::localtime(whole),
                     static_cast<int>((seconds - static_cast<double>(whole)) * 1000));
}

}  // namespace

const char* name_of(RunPhase phase) {
  switch (phase) {
    case RunPhase::starting:
      return "starting";
    case RunPhase::data:
      return "data";
    case RunPhase::compute:
      return "forward and backward";
    case RunPhase::optimizer:
      return "optimizer";
    case RunPhase::aggregation:
      return "aggregation";
    case RunPhase::control:
      return "report of the step before";
    case RunPhase::evaluation:
      return "evaluation";
    case RunPhase::checkpoint:
      return "checkpoint";
    case RunPhase::done:
      return "done";
    case RunPhase::stopped:
      return "stopped by a signal, checkpoint written";
    case RunPhase::failed:
      return "ended with an error";
  }
  return "?";
}

std::string status_file_name(int rank) {
  return fmt::format("rank_{:05}", rank);
}

StatusRecord::StatusRecord(int rank, int world)
    : memory_(std::make_unique<StatusData>()), data_(memory_.get()), exceptions_(std::uncaught_exceptions()) {
  memory_->rank = rank, memory_->world = world;
  memory_->pid = static_cast<std::int32_t>(::getpid());
  store(memory_->host, host_name());
  memory_->started = now();
  alive();
}

StatusRecord::~StatusRecord() {
  if (std::uncaught_exceptions() > exceptions_) enter(RunPhase::failed);
  if (mapping_ != nullptr) ::munmap(mapping_, sizeof(StatusData));
}

void StatusRecord::keep_in(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  // Its blocks are claimed: without them, a write to the mapping on a full disk would be a SIGBUS.
  int error = file < 0 ? errno : ::posix_fallocate(file, 0, sizeof(StatusData));
  void* mapped = MAP_FAILED;
  if (error == 0) {
    mapped = ::mmap(nullptr, sizeof(StatusData), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    error = errno;
  }
  if (file >= 0) ::close(file);
  if (mapped == MAP_FAILED) {
    log_warning("{}: no status record ({}) -> check the run folder", path, std::strerror(error));
    return;
  }
  mapping_ = mapped;
  auto* data = new (mapped) StatusData;
  const StatusData& old = *memory_;
  data->rank = old.rank, data->world = old.world, data->pid = old.pid;
  data->host = old.host, data->started = old.started;
  data->step = old.step.load(), data->phase = old.phase.load(), data->alive = now();
  data_.store(data, std::memory_order_release);
}

void StatusRecord::enter(RunPhase phase, std::int64_t step) {
  data_.load(std::memory_order_acquire)->step.store(step, std::memory_order_relaxed);
  enter(phase);
}

void StatusRecord::enter(RunPhase phase) {
  data_.load(std::memory_order_acquire)->phase.store(phase, std::memory_order_relaxed);
  alive();
}

void StatusRecord::alive() {
  data_.load(std::memory_order_acquire)->alive.store(now(), std::memory_order_relaxed);
}

int StatusRecord::begins(const std::string& what, const CollectiveLabel& label, const std::string& group) {
  auto& slots = data_.load(std::memory_order_acquire)->waiting;
  const auto free = std::find_if(slots.begin(), slots.end(), [](const auto& w) { return w.active == 0; });
  alive();
  if (free == slots.end()) return -1;
  store(free->what, what), store(free->unit, label.unit), store(free->group, group);
  free->step = label.step, free->since = now(), free->missing = 0, free->active = 1;
  return static_cast<int>(free - slots.begin());
}

void StatusRecord::waits(int number, const std::vector<int>& missing) {
  if (number < 0) return;
  auto& slot = data_.load(std::memory_order_acquire)->waiting[static_cast<std::size_t>(number)];
  for (std::size_t i = 0; i < missing.size() && i < slot.peers.size(); ++i) slot.peers[i] = missing[i];
  slot.missing = static_cast<std::int32_t>(missing.size());
}

void StatusRecord::ends(int number) {
  if (number < 0) return;
  data_.load(std::memory_order_acquire)->waiting[static_cast<std::size_t>(number)].active = 0;
  alive();
}

std::vector<StatusReport> read_status(const std::string& folder) {
  std::vector<StatusReport> reports;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with("rank_")) continue;
    StatusData data;
    std::ifstream in(it->path(), std::ios::binary);
    std::array<char, sizeof(StatusData)> bytes{};
    if (!in.read(bytes.data(), bytes.size()))
      throw DataError(fmt::format("{}: is no status record -> remove it", it->path().string()));
    std::memcpy(static_cast<void*>(&data), bytes.data(), bytes.size());
    if (data.magic != StatusData::kMagic)
      throw DataError(
          fmt::format("{}: is no status record of this program's version -> remove it", it->path().string()));
    StatusReport r;
    r.rank = data.rank;
    const RunPhase phase = data.phase.load();
    r.ended = ended(phase);
    r.running = load(data.host) == host_name() && is_running(data.pid);
    r.silent_since = static_cast<double>(data.alive.load()) * 1e-9;
    r.text = fmt::format("pid {} on {}, last sign of life {}: step {}, {}", data.pid, load(data.host),
                         clock_time(r.silent_since), data.step.load(), name_of(phase));
    for (const auto& w : data.waiting)
      if (w.active != 0 && !r.ended) r.text += "; " + describe(w, data.alive.load(), r.awaits);
    reports.push_back(std::move(r));
  }
  std::sort(reports.begin(), reports.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return reports;
}

std::vector<int> silent_first(const std::vector<StatusReport>& reports) {
  double first = std::numeric_limits<double>::infinity();
  for (const StatusReport& r : reports)
    if (!r.ended) first = std::min(first, r.silent_since);
  std::vector<int> ranks;
  for (const StatusReport& r : reports)
    if (!r.ended && r.silent_since <= first + kStatusResolution) ranks.push_back(r.rank);
  return ranks;
}

std::string describe_status(const std::vector<StatusReport>& reports) {
  std::string text;
  std::set<int> awaited;
  bool all_running = true;
  for (const StatusReport& r : reports) {
    text +=
        fmt::format("  rank {:<5}{}{}\n", r.rank, r.text, r.running && !r.ended ? " (still running)" : "");
    if (r.ended) continue;
    all_running &= r.running;
    awaited.insert(r.awaits.begin(), r.awaits.end());
  }
  if (all_running) return text;
  const std::vector<int> first = silent_first(reports);
  text += "  the run ended without a word on some ranks; silent first: ";
  text += first.size() == 1
              ? fmt::format("rank {}", first[0])
              : fmt::format("one of ranks {} (within {} s)", fmt::join(first, " "), kStatusResolution);
  if (!awaited.empty()) text += fmt::format("; waited for by others: rank(s) {}", fmt::join(awaited, " "));
  return text + "\n";
}

}  // namespace strata
