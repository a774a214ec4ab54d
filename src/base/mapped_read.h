#pragma once
// Reading from a file mapping whose pages may be gone: the file was cut after it was mapped, or its disk
// fails. The kernel then sends SIGBUS, which would end the process without a word.
#include <cstddef>

namespace strata {

// Copies `bytes` bytes out of a mapping. False when a page could not be read; `to` is then undefined. The
// first call installs the process's SIGBUS handler; a SIGBUS from elsewhere goes to the handler that was
// there before.
[[nodiscard]] bool copy_from_mapping(void* to, const void* from, std::size_t bytes);

}  // namespace strata
