#include "cuda/emulation/launch_log.h"

#include "cuda/emulation/symbolize.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace strata::emulation {

LaunchLog::LaunchLog() {
  if (const char* path = std::getenv("STRATA_EMULATION_LAUNCH_LOG")) path_ = path;
}

LaunchLog::~LaunchLog() {
  if (path_.empty() || kernels_.empty()) return;
  FILE* file = std::fopen(path_.c_str(), "a");
  if (file == nullptr) {
    std::fprintf(stderr, "STRATA_EMULATION_LAUNCH_LOG=%s cannot be written\n", path_.c_str());
    return;
  }
  const std::string program = program_path();
  for (const auto& [kernel, most] : kernels_) {
    std::fprintf(file, "%s\t%" PRIx64 "\t%zu\t%zu\n", program.c_str(), address_in_file(kernel), most.threads,
                 most.dynamic_bytes);
  }
  std::fclose(file);
}

void LaunchLog::note(const Launch& launch) {
  static LaunchLog log;
  if (log.path_.empty()) return;
  const std::lock_guard lock(log.mutex_);
  Most& most = log.kernels_[launch.kernel];
  most.threads = std::max(most.threads, std::size_t{launch.block.x} * launch.block.y * launch.block.z);
  most.dynamic_bytes = std::max(most.dynamic_bytes, launch.dynamic_shared_bytes);
}

}  // namespace strata::emulation
