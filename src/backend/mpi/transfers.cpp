#include "backend/mpi/transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "base/error.h"

namespace strata::mpi {

Transfers::Transfers(std::span<const int> ranks, std::int64_t message_bytes)
    : ranks_(ranks), message_bytes_(message_bytes), sends_(ranks.size()), receives_(ranks.size()) {}

Transfers::~Transfers() {
  for (MPI_Request& request : requests_) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
}

void Transfers::send(const void* data, std::int64_t bytes, int peer, int phase) {
  const int to = ranks_[static_cast<std::size_t>(peer)];
  std::int64_t done = 0;
  do {  // an empty message is sent, too: it says that this rank has arrived
    const int n = static_cast<int>(std::min(message_bytes_, bytes - done));
    MPI_Request request = MPI_REQUEST_NULL;
    STRATA_MPI(MPI_Isend(static_cast<const char*>(data) + done, n, MPI_BYTE, to, first_tag_ + phase,
                         MPI_COMM_WORLD, &request));
    post({peer, phase, false, n, 0}, request);
    sent_bytes_ += n;
    done += n;
  } while (done < bytes);
}

void Transfers::receive(void* data, std::int64_t bytes, int peer, int phase, std::int64_t slice) {
  const int from = ranks_[static_cast<std::size_t>(peer)];
  std::int64_t done = 0;
  do {
    const int n = static_cast<int>(std::min(message_bytes_, bytes - done));
    MPI_Request request = MPI_REQUEST_NULL;
    STRATA_MPI(MPI_Irecv(static_cast<char*>(data) + done, n, MPI_BYTE, from, first_tag_ + phase,
                         MPI_COMM_WORLD, &request));
    post({peer, phase, true, n, slice}, request);
    received_bytes_ += n;
    done += n;
  } while (done < bytes);
}

void Transfers::post(Message message, MPI_Request request) {
  requests_.push_back(request);
  messages_.push_back(message);
  const auto peer = static_cast<std::size_t>(message.peer);
  ++(message.receives ? receives_ : sends_)[peer][static_cast<std::size_t>(message.phase)];
  ++outstanding_;
}

bool Transfers::poll(std::vector<Received>& received) {
  received.clear();
  if (outstanding_ == 0) return false;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int completed = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &completed,
                                indices_.data(), statuses_.data());
  if (code == MPI_ERR_IN_STATUS)
    for (int i = 0; i < completed; ++i)
      check(statuses_[static_cast<std::size_t>(i)].MPI_ERROR, "MPI_Testsome", __FILE__, __LINE__);
  check(code, "MPI_Testsome", __FILE__, __LINE__);
  if (completed == MPI_UNDEFINED || completed == 0) return false;
  for (int i = 0; i < completed; ++i)
    finish(static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]),
           statuses_[static_cast<std::size_t>(i)], received);
  compact();
  return true;
}

void Transfers::finish(std::size_t index, const MPI_Status& status, std::vector<Received>& received) {
  const Message& message = messages_[index];
  const auto peer = static_cast<std::size_t>(message.peer);
  --outstanding_;
  if (!message.receives) {
    --sends_[peer][static_cast<std::size_t>(message.phase)];
    return;
  }
  --receives_[peer][static_cast<std::size_t>(message.phase)];
  int bytes = 0;
  STRATA_MPI(MPI_Get_count(&status, MPI_BYTE, &bytes));
  if (bytes != message.bytes)
    throw InternalError(
        fmt::format("a message of {} bytes came from rank {} where {} were expected -> all ranks of "
                    "a group must enqueue the same collectives with the same counts",
                    bytes, ranks_[peer], message.bytes));
  received.push_back({message.peer, message.slice});
}

// Drops completed requests once they are most of the list, which Testsome walks every time.
void Transfers::compact() {
  if (outstanding_ * 2 > requests_.size()) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    messages_[kept] = messages_[i];
    ++kept;
  }
  requests_.resize(kept);
  messages_.resize(kept);
}

std::vector<int> Transfers::missing() const {
  for (const auto* open : {&receives_, &sends_})
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      std::vector<int> ranks;
      for (std::size_t p = 0; p < open->size(); ++p)
        if ((*open)[p][phase] != 0) ranks.push_back(ranks_[p]);
      if (!ranks.empty()) return ranks;
    }
  return {};
}

}  // namespace strata::mpi
