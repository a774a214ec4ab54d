#include "base/cpu.h"

namespace strata {

bool cpu_has_bf16_instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

}  // namespace strata
