// The byte counters against the calls that really reach MPI, and against the plan.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "backend/mpi/mpi_call.h"
#include "backend/mpi/wire_plan.h"
#include "tests/mpi/mpi_session.h"
#include "tests/support/catch.h"

using namespace strata;
using strata::test::Ranks;

namespace {

std::atomic<std::int64_t> intercepted_sent{0}, intercepted_received{0};

std::int64_t bytes_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return std::int64_t{count} * size;
}

}  // namespace

// MPI's profiling interface: these take the place of the library's functions.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  intercepted_sent += bytes_of(count, type);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  intercepted_received += bytes_of(count, type);
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}

TEST_CASE("counters equal the plan and what MPI was asked to move, for every collective and dtype") {
  MpiOptions options;
  options.message_bytes = 10000, options.scratch_bytes = 60000;
  Ranks ranks({}, options);
  const auto all = ranks.everyone();
  const int n = ranks.size;
  const CollectiveLabel label{Traffic::edge, "unit", 1};
  for (const DType t : {DType::f32, DType::bf16})
    for (const std::int64_t count : {0, 1, 7, 997, 100003})
      for (int c = 0; c < static_cast<int>(Collective::count_); ++c) {
        const auto collective = static_cast<Collective>(c);
        const bool sharded = collective == Collective::all_gather || collective == Collective::reduce_scatter;
        const std::int64_t full = sharded ? count * n : count;
        const Buffer data = ranks.device->allocate(static_cast<std::size_t>(full + 1) * 4, Purpose::data);
        const Buffer shard = ranks.device->allocate(static_cast<std::size_t>(count + 1) * 4, Purpose::data);
        std::memset(data.data(), 0, data.bytes());
        std::memset(shard.data(), 0, shard.bytes());
        const Flat whole{data.data(), t, full}, part{shard.data(), t, count};
        const auto before = all->counters().at(Traffic::edge, collective);
        intercepted_sent = 0, intercepted_received = 0;
        const int root = n / 2;
        switch (collective) {
          case Collective::all_gather:
            all->all_gather(ranks.transfer, label, whole, part);
            break;
          case Collective::reduce_scatter:
            all->reduce_scatter(ranks.transfer, label, part, whole, {});
            break;
          case Collective::all_reduce:
            all->all_reduce_sum(ranks.transfer, label, whole, {});
            break;
          default:
            all->broadcast(ranks.transfer, label, whole, root);
        }
        ranks.device->synchronize();
        const auto after = all->counters().at(Traffic::edge, collective);
        const WireBytes plan = wire_bytes(collective, full, t, n, ranks.rank, root);
        CHECK(after.received - before.received == plan.received);
        CHECK(after.sent - before.sent == plan.sent);
        CHECK(intercepted_received == plan.received);
        CHECK(intercepted_sent == plan.sent);
        CHECK(after.calls - before.calls == (n > 1 ? 1 : 0));
        ranks.world->barrier({Traffic::control, "next case", 0});
      }
  CHECK(all->counters().at(Traffic::training, Collective::all_gather).received == 0);
}

TEST_CASE("the plan is the equations' physical form where sizes divide, and adds up over the ranks") {
  for (const int n : {2, 3, 4, 8}) {
    const std::int64_t count = 24000, bytes = count * 4;
    for (int r = 0; r < n; ++r) {
      CHECK(wire_bytes(Collective::all_gather, count, DType::f32, n, r).received == bytes * (n - 1) / n);
      CHECK(wire_bytes(Collective::reduce_scatter, count, DType::f32, n, r).received == bytes * (n - 1) / n);
      CHECK(wire_bytes(Collective::all_reduce, count, DType::f32, n, r).received == 2 * bytes * (n - 1) / n);
      CHECK(wire_bytes(Collective::broadcast, count, DType::f32, n, r, 1).received == (r == 1 ? 0 : bytes));
    }
    for (const std::int64_t odd : {1, 7, 8193, 100003})
      for (int c = 0; c < static_cast<int>(Collective::count_); ++c) {
        std::int64_t balance = 0;
        for (int r = 0; r < n; ++r) {
          const WireBytes b = wire_bytes(static_cast<Collective>(c), odd, DType::f32, n, r, 1);
          balance += b.sent - b.received;
        }
        CHECK(balance == 0);
      }
  }
}
