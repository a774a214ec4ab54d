#include "backend/mpi/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <thread>
#include <vector>

#include "backend/cpu/scheduler.h"
#include "backend/mpi/mpi_call.h"
#include "base/error.h"
#include "base/log.h"

namespace strata {
namespace mpi {

void check(int code, const char* call, const char* file, int line) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw NetworkError(fmt::format("{} failed at {}:{}: {} -> look for a rank or a link that failed first",
                                 call, file, line, text));
}

}  // namespace mpi

namespace {

using Clock = std::chrono::steady_clock;

// Longer than what MPICH's transports still deliver on their own after a barrier.
constexpr std::chrono::milliseconds kSilenceBeforeFinalize{150};

// How long rank 0, which leaves with an error, listens for what the others have to say; and how long they
// wait for it to do so. An error that all meet comes to all within moments, for they had just met at the
// start or in a collective.
constexpr double kSecondsToListen = 2, kSecondsToBeHeard = 5;

bool is_set(const char* name) {
  return std::getenv(name) != nullptr;
}

bool has_launcher() {
  for (const char* name : {"PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"})
    if (is_set(name)) return true;
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  if (tasks != nullptr && std::strtol(tasks, nullptr, 10) > 1)
    throw UsageError(
        fmt::format("SLURM started {} tasks in this step, but gave them no way to find each other (no PMI) "
                    "-> start them with "
                    "srun --mpi=pmi2",
                    tasks));
  return false;
}

// Waits politely for `done`; false when the time is up first.
template <class Done>
bool wait_for(double seconds, Done done) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (cpu::PoliteWait polite; !done(); polite.pause())
    if (Clock::now() > end) return false;
  return true;
}

}  // namespace

MpiSession::MpiSession(double timeout_seconds)
    : timeout_seconds_(timeout_seconds), exceptions_(std::uncaught_exceptions()) {
  if (!has_launcher()) return;
  int provided = 0;
  STRATA_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
  started_ = true;
  if (provided < MPI_THREAD_SERIALIZED)
    throw UsageError("this MPI library allows calls from one thread only -> install one built with threads");
  STRATA_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  STRATA_MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank_));
  STRATA_MPI(MPI_Comm_size(MPI_COMM_WORLD, &size_));
  if (size_ > 1) meet_every_peer();
}

MpiSession::~MpiSession() {
  if (!started_ || std::uncaught_exceptions() > exceptions_) return;
  try {
    finish();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
    abort(static_cast<int>(ExitCode::network));
  }
}

// Connections are made here, while every rank polls; afterwards none is ever opened.
void MpiSession::meet_every_peer() const {
  constexpr int kTag = 1;
  const auto n = static_cast<std::size_t>(size_);
  std::vector<MPI_Request> requests(2 * n, MPI_REQUEST_NULL);
  std::vector<int> theirs(n, -1);
  for (int i = 1; i < size_; ++i) {
    const int to = (rank_ + i) % size_, from = (rank_ + size_ - i) % size_;
    const auto f = static_cast<std::size_t>(from);
    STRATA_MPI(MPI_Irecv(&theirs[f], 1, MPI_INT, from, kTag, MPI_COMM_WORLD, &requests[f]));
    STRATA_MPI(
        MPI_Isend(&rank_, 1, MPI_INT, to, kTag, MPI_COMM_WORLD, &requests[n + static_cast<std::size_t>(to)]));
  }
  const bool met = wait_for(timeout_seconds_, [&] {
    int all = 0;
    STRATA_MPI(MPI_Testall(static_cast<int>(2 * n), requests.data(), &all, MPI_STATUSES_IGNORE));
    return all != 0;
  });
  if (met) return;
  std::string missing;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && theirs[static_cast<std::size_t>(r)] != r) missing += fmt::format(" {}", r);
  log_error("start: no message from rank(s){} within {} s -> check these hosts and the network between them",
            missing, timeout_seconds_);
  abort(static_cast<int>(ExitCode::network));
}

int largest_tag() {
  int* largest = nullptr;
  int found = 0;
  STRATA_MPI(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found));
  return found != 0 ? *largest : 32767;  // what the standard promises
}

void MpiSession::leave(int code, const std::string& message) const {
  bool silent = false;
  try {
    if (rank_ == 0) {
      log_error("{}", message);
      gather_last_words(message);
    } else {
      silent = spoken_for(message);
    }
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
  if (silent) {
    std::this_thread::sleep_for(std::chrono::seconds(2));  // rank 0 ends the job: one such message is enough
    ::_exit(code);
  }
  if (rank_ != 0) log_error("{}", message);
  abort(code);
}

// On rank 0: logs what others say that is not the same, and tells them.
void MpiSession::gather_last_words(const std::string& mine) const {
  const int tag = largest_tag();
  std::map<std::string, std::vector<int>> others;
  std::vector<int> heard;
  MPI_Request request = MPI_REQUEST_NULL;  // of the message that is being received
  std::string text;
  int from = 0;
  wait_for(kSecondsToListen, [&] {
    for (;;) {
      int there = 0;
      if (request == MPI_REQUEST_NULL) {
        MPI_Status status;
        STRATA_MPI(MPI_Iprobe(MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &there, &status));
        if (there == 0) break;
        int bytes = 0;
        STRATA_MPI(MPI_Get_count(&status, MPI_BYTE, &bytes));
        text.resize(static_cast<std::size_t>(bytes));
        from = status.MPI_SOURCE;
        STRATA_MPI(MPI_Irecv(text.data(), bytes, MPI_BYTE, from, tag, MPI_COMM_WORLD, &request));
      }
      STRATA_MPI(MPI_Test(&request, &there, MPI_STATUS_IGNORE));
      if (there == 0) break;
      heard.push_back(from);
      if (text != mine) others[text].push_back(from);
    }
    return static_cast<int>(heard.size()) == size_ - 1;
  });
  for (auto& [words, ranks] : others) {
    std::sort(ranks.begin(), ranks.end());
    log_error("rank(s) {}: {}", fmt::join(ranks, " "), words);
  }
  std::vector<MPI_Request> answers(heard.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < heard.size(); ++i)
    STRATA_MPI(MPI_Isend(nullptr, 0, MPI_BYTE, heard[i], tag, MPI_COMM_WORLD, &answers[i]));
  wait_for(1, [&] {
    int sent = 0;
    STRATA_MPI(MPI_Testall(static_cast<int>(answers.size()), answers.data(), &sent, MPI_STATUSES_IGNORE));
    return sent != 0;
  });
}

// On the others: true when rank 0 has logged this, too.
bool MpiSession::spoken_for(const std::string& message) const {
  const int tag = largest_tag();
  std::array<MPI_Request, 2> requests{};
  STRATA_MPI(MPI_Irecv(nullptr, 0, MPI_BYTE, 0, tag, MPI_COMM_WORLD, requests.data()));
  STRATA_MPI(MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE, 0, tag, MPI_COMM_WORLD,
                       &requests[1]));
  return wait_for(kSecondsToBeHeard, [&] {
    int both = 0;
    STRATA_MPI(MPI_Testall(2, requests.data(), &both, MPI_STATUSES_IGNORE));
    return both != 0;
  });
}

void MpiSession::finish() {
  if (size_ > 1) {
    MPI_Request request = MPI_REQUEST_NULL;
    STRATA_MPI(MPI_Ibarrier(MPI_COMM_WORLD, &request));
    const bool met = wait_for(timeout_seconds_, [&] {
      int done = 0;
      STRATA_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      return done != 0;
    });
    if (!met) {
      log_error("end: not every rank reached its end within {} s -> look at the other ranks' last lines",
                timeout_seconds_);
      abort(static_cast<int>(ExitCode::network));
    }
    std::this_thread::sleep_for(kSilenceBeforeFinalize);
  }
  STRATA_MPI(MPI_Finalize());
}

void MpiSession::abort(int code) {
  std::fflush(nullptr);
  // The launcher drops what it has not forwarded yet, and the last lines are the ones that matter.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  // The launcher may be out of reach or MPI itself stuck: leave anyhow.
  std::thread([code] {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    ::_exit(code);
  }).detach();
  int started = 0, ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  // mpiexec passes on the code of MPI_Abort; srun reports 137 for it, and a plain exit as it is.
  const bool srun = is_set("SLURM_STEP_ID") && !is_set("MPI_LOCALNRANKS");
  if (started != 0 && ended == 0 && !srun) MPI_Abort(MPI_COMM_WORLD, code);
  ::_exit(code);
}

}  // namespace strata
