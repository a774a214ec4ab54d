#pragma once
// Status records: what every rank was doing last, readable after it is gone.
//
// A rank keeps its record in a memory-mapped file, <run>/status/rank_00000, and updates it by plain stores:
// no system calls, nothing to flush, and what was stored stays in the file when the process is killed.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/mpi/session.h"

namespace strata {

enum class RunPhase : std::int32_t {
  starting,
  data,
  compute,  // forward and backward
  optimizer,
  aggregation,
  control,  // waiting for the world's report of the step before
  evaluation,
  checkpoint,
  done,     // of its own will: all steps taken
  stopped,  // of its own will: a signal asked for it
  failed,   // of its own will: with an error
};
const char* name_of(RunPhase phase);
inline bool ended(RunPhase phase) {
  return phase >= RunPhase::done;
}

// A record as it lies in the file. Times are nanoseconds since 1970.
struct StatusData {
  static constexpr std::int64_t kMagic = 0x3153554154535453;  // "STSTATS1"
  static constexpr int kSlots = 8, kPeers = 16;
  struct Waiting {  // a collective in progress
    std::int32_t active = 0;
    std::int32_t missing = 0;  // ranks that have not arrived
    std::int64_t step = -1;    // -1: none
    std::int64_t since = 0;
    std::array<char, 64> what{};
    std::array<char, 48> unit{};
    std::array<char, 16> group{};
    std::array<std::int32_t, kPeers> peers{};  // the first of them
  };
  std::int64_t magic = kMagic;
  std::int32_t rank = 0, world = 0, pid = 0;
  std::array<char, 64> host{};
  std::int64_t started = 0;
  std::atomic<std::int64_t> alive{0};  // last sign of life
  std::atomic<std::int64_t> step{0};
  std::atomic<RunPhase> phase{RunPhase::starting};
  std::array<Waiting, kSlots> waiting{};  // by the communication thread alone
};

// The writing side: one a process.
class StatusRecord final : public CollectiveObserver {
 public:
  StatusRecord(int rank, int world);
  ~StatusRecord() override;  // marks an end by an exception as `failed`
  StatusRecord(const StatusRecord&) = delete;
  StatusRecord& operator=(const StatusRecord&) = delete;

  // From now on the record lies in this file. Without effect when it cannot be made: a status is no reason to
  // stop a run (a warning is logged). Before any collective is in progress.
  void keep_in(const std::string& path);

  void enter(RunPhase phase, std::int64_t step);
  void enter(RunPhase phase);

  int begins(const std::string& what, const CollectiveLabel& label, const std::string& group) override;
  void waits(int number, const std::vector<int>& missing) override;
  void ends(int number) override;
  void alive() override;

 private:
  std::unique_ptr<StatusData> memory_;  // until there is a file
  std::atomic<StatusData*> data_;
  void* mapping_ = nullptr;
  int exceptions_;
};

// "rank_00003"
std::string status_file_name(int rank);

// The reading side.
struct StatusReport {
  int rank = 0;
  bool ended = false;
  bool running = false;     // its process is still there (known on its own host only)
  double silent_since = 0;  // seconds since 1970 of the last sign of life
  std::vector<int> awaits;  // ranks it was waiting for
  std::string text;         // "step 12, forward and backward, in all-gather of decoder.3 ..."
};
// All records of a run, by rank; none when the folder does not exist. Throws DataError for a damaged file.
std::vector<StatusReport> read_status(const std::string& folder);
// A sign of life is stored every few milliseconds, on a busy machine less often: of ranks that fell silent
// within this many seconds the times do not tell who was first. One rank's death often ends its neighbours at
// once.
inline constexpr double kStatusResolution = 0.1;
// The ranks that may have fallen silent first, of those that did not end of their own will.
std::vector<int> silent_first(const std::vector<StatusReport>& reports);
// For people: a line a rank, and which ranks went silent first or were waited for.
std::string describe_status(const std::vector<StatusReport>& reports);

}  // namespace strata
