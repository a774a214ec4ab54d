#pragma once
// MPI's life in this process: start, end, and leaving in an emergency; and the way to a World.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/cpu/device.h"

namespace strata {

// Told of every collective, barrier and exchange over MPI, on the thread that runs them: status records hang
// here.
class CollectiveObserver {
 public:
  virtual ~CollectiveObserver() = default;
  // Returns a number that stands for it in the calls below. `what`: "all-gather", "barrier".
  virtual int begins(const std::string& what, const CollectiveLabel& label, const std::string& group) = 0;
  // Now and then while nothing arrives: the world ranks that are waited for.
  virtual void waits(int number, const std::vector<int>& missing) = 0;
  virtual void ends(int number) = 0;
  // Every few milliseconds, with or without work: this rank's communication thread is running.
  virtual void alive() = 0;
};

struct MpiOptions {
  // A wait with no progress for this long ends the job with exit code 4.
  double timeout_seconds = 300;
  // Messages are cut into pieces of at most this many bytes: any count works, and a slow link shows progress.
  std::int64_t message_bytes = std::int64_t{16} << 20;
  // Scratch that one reduction in flight may use for what it receives (at least two elements a peer).
  std::int64_t scratch_bytes = std::int64_t{8} << 20;
  CollectiveObserver* observer = nullptr;
};

// One for a process, created before and destroyed after everything that communicates. Without a launcher
// (mpiexec, srun --mpi=pmi2) the world has one rank and MPI is never called. Starting exchanges a message
// with every peer, so that no connection is made later; ending meets all ranks, keeps still for a moment and
// finalizes: MPICH over TCP hangs otherwise. Destroyed while an exception is passing, it ends nothing: main
// is to call abort with the error's code.
class MpiSession {
 public:
  // Throws UsageError when several ranks were started in a way that does not connect them, NetworkError when
  // MPI fails.
  explicit MpiSession(double timeout_seconds = 300);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Ends the whole job with an error, once this rank communicates no more. An error that all ranks meet is
  // logged once, by rank 0; what only some have met is logged, too, and says which. A rank that rank 0 does
  // not speak for (it may be waiting in a collective) speaks for itself after a few seconds.
  [[noreturn]] void leave(int code, const std::string& message) const;

  // Ends the whole job at once with this exit code. For main, too: when an error left a session without its
  // end, returning the code alone lets the launcher report, now and then, the signal with which it kills the
  // others.
  [[noreturn]] static void abort(int code);

 private:
  void meet_every_peer() const;
  void gather_last_words(const std::string& mine) const;
  bool spoken_for(const std::string& message) const;
  void finish();

  int rank_ = 0, size_ = 1;
  bool started_ = false;
  double timeout_seconds_;
  int exceptions_ = 0;
};

// The largest tag there is; MpiSession::leave has it, collectives use those below.
int largest_tag();

// The world of a session over a CPU device. One world at a time; session and device outlive it. All MPI calls
// are made by the device's communication thread (in deferred mode by the waiting host).
std::unique_ptr<World> make_mpi_world(MpiSession& session, CpuDevice& device, const MpiOptions& options = {});

}  // namespace strata
