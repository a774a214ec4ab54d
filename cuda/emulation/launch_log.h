// Which kernels a program launched, how wide and with how much dynamic shared memory: what a table of the
// kernels' resources (tests/cuda/ptxas_gate.py) needs and ptxas does not know.
#pragma once

#include "cuda/emulation/launch.h"

#include <map>
#include <mutex>
#include <string>

namespace strata::emulation {

// With STRATA_EMULATION_LAUNCH_LOG=FILE a program appends to FILE, when it ends, one line a kernel that it
// launched:
//   program TAB address of the kernel in the program's file, hexadecimal TAB most threads TAB most dynamic
//   bytes
class LaunchLog {
 public:
  static void note(const Launch& launch);

  LaunchLog();
  ~LaunchLog();
  LaunchLog(const LaunchLog&) = delete;
  LaunchLog& operator=(const LaunchLog&) = delete;

 private:
  struct Most {
    std::size_t threads = 0;
    std::size_t dynamic_bytes = 0;
  };

  std::string path_;
  std::mutex mutex_;
  std::map<const void*, Most> kernels_;
};

}  // namespace strata::emulation
