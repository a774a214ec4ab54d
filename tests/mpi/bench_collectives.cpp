// mpiexec -n N bench_collectives: median milliseconds of collectives, one at a time. Not a test.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "backend/mpi/session.h"

using namespace strata;

int main() {
  MpiSession session;
  const auto device = make_cpu_device();
  const auto world = make_mpi_world(session, *device);
  Stream& stream = device->create_stream("transfer", Device::StreamKind::transfer);
  std::vector<int> ranks;
  for (int r = 0; r < world->size(); ++r) ranks.push_back(r);
  const auto all = world->group("all", ranks);
  if (world->rank() == 0)
    std::puts("bytes       all-reduce fp32  all-reduce bf16  all-gather  reduce-scatter fp32");
  for (const std::int64_t bytes : {64 << 10, 1 << 20, 8 << 20}) {
    const Buffer data = device->allocate(static_cast<std::size_t>(bytes), Purpose::data);
    std::memset(data.data(), 0, data.bytes());
    const std::int64_t n = world->size(), shard = bytes / 4 / n;
    const Flat f32{data.data(), DType::f32, bytes / 4}, bf16{data.data(), DType::bf16, bytes / 2};
    const Buffer part = device->allocate(static_cast<std::size_t>(shard) * 4, Purpose::data);
    const Flat own{part.data(), DType::f32, shard};
    const std::function<void()> calls[] = {
        [&] { all->all_reduce_sum(stream, {}, f32, {}); }, [&] { all->all_reduce_sum(stream, {}, bf16, {}); },
        [&] {
          all->all_gather(stream, {}, f32.slice(0, shard * n), f32.slice(world->rank() * shard, shard));
        },
        [&] { all->reduce_scatter(stream, {}, own, f32.slice(0, shard * n), {}); }};
    std::string line = fmt::format("{:<10}", bytes);
    for (const auto& call : calls) {
      std::vector<double> times;
      for (int round = 0; round < 31; ++round) {
        world->barrier({Traffic::control, "bench", 0});
        const auto begin = std::chrono::steady_clock::now();
        call();
        device->synchronize();
        times.push_back(
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
      }
      std::nth_element(times.begin(), times.begin() + 15, times.end());
      line += fmt::format("  {:>14.2f}", times[15]);
    }
    if (world->rank() == 0) std::puts(line.c_str());
  }
}
