#pragma once

#include <cstdint>
#include <string>

namespace strata::emulation {

// A code address as the program's file numbers it, which is how nm and addr2line know it.
std::uint64_t address_in_file(const void* address);

std::string program_path();

// "kernel.cu:12 in row_sums" for an address in this program's code: the innermost line that is not in the
// emulation's own headers. Asks addr2line (binutils), and gives the bare address where that or the debug
// information is missing.
std::string symbolize(const void* code_address);

}  // namespace strata::emulation
