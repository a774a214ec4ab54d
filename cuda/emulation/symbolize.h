#pragma once

#include <string>

namespace strata::emulation {

// "kernel.cu:12 in row_sums" for an address in this program's code: the innermost line that is not in the
// emulation's own headers. Asks addr2line (binutils), and gives the bare address where that or the debug
// information is missing.
std::string symbolize(const void* code_address);

}  // namespace strata::emulation
