#pragma once
// The point-to-point messages of one operation.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/mpi/mpi_call.h"

namespace strata::mpi {

// Non-blocking sends and receives between this rank and the other members of a group, polled together. Knows
// at any time which peers are outstanding, which a collective of MPI would not tell.
class Transfers {
 public:
  static constexpr int kPhases = 2;

  // ranks: world ranks by member; messages longer than message_bytes are cut.
  Transfers(std::span<const int> ranks, std::int64_t message_bytes);
  // Cancels what is outstanding: its memory is about to go.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Messages of a phase carry the tag first_tag + phase. Before the first message.
  void use_tags(int first_tag) { first_tag_ = first_tag; }

  void send(const void* data, std::int64_t bytes, int peer, int phase);
  // `slice` comes back from poll with every message of this receive.
  void receive(void* data, std::int64_t bytes, int peer, int phase, std::int64_t slice = 0);

  struct Received {
    int peer;
    std::int64_t slice;
  };
  // Tests everything outstanding once. True when something has completed; `received` lists what arrived.
  // Throws InternalError when a message is shorter than expected, NetworkError when MPI fails.
  bool poll(std::vector<Received>& received);

  bool idle() const { return outstanding_ == 0; }
  // Whether data of this phase is still to leave for the peer.
  bool sending_to(int peer, int phase) const {
    return sends_[static_cast<std::size_t>(peer)][static_cast<std::size_t>(phase)] != 0;
  }
  // World ranks that still owe messages of the earliest phase that lacks any (those of a later phase may only
  // be waiting themselves); when all have come, those that have not taken ours.
  std::vector<int> missing() const;

  std::int64_t sent_bytes() const { return sent_bytes_; }
  std::int64_t received_bytes() const { return received_bytes_; }

 private:
  struct Message {
    int peer;
    int phase;
    bool receives;
    int bytes;
    std::int64_t slice;
  };
  void post(Message message, MPI_Request request);
  void finish(std::size_t index, const MPI_Status& status, std::vector<Received>& received);
  void compact();

  std::span<const int> ranks_;
  std::int64_t message_bytes_;
  std::vector<MPI_Request> requests_;
  std::vector<Message> messages_;                           // one for each request
  std::vector<std::array<int, kPhases>> sends_, receives_;  // outstanding, by member and phase
  int first_tag_ = 0;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::size_t outstanding_ = 0;
  std::int64_t sent_bytes_ = 0, received_bytes_ = 0;
};

}  // namespace strata::mpi
