#pragma once
// What the processor can do, where a choice outside the CPU backend depends on it.

namespace strata {

// True when the processor and the operating system offer AVX-512's bf16 products. Every processor with AMX
// has them too. False on other architectures.
bool cpu_has_bf16_instructions();

}  // namespace strata
