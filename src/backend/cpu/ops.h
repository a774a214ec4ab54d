#pragma once
// The CPU implementation of Ops: products by oneDNN or by our own packed kernel (gemm.h), everything else by
// Highway kernels (ops_kernels.h), on one thread unless asked for more.
#include <memory>

#include "backend/cpu/device.h"
#include "backend/cpu/gemm.h"
#include "backend/ops.h"

namespace strata {

struct CpuOpsOptions {
  int threads = 1;
  cpu::GemmPath gemm = cpu::GemmPath::automatic;  // forced only by tests and benchmarks
};

// The device must outlive the result. Calls come from one thread at a time (the host's); the work itself runs
// wherever the streams run it. Throws UsageError when threads < 1.
std::unique_ptr<Ops> make_cpu_ops(CpuDevice& device, const CpuOpsOptions& options = {});

}  // namespace strata
