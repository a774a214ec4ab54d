#pragma once
// Which instruction sets the kernels are compiled for; the best one present is chosen at run time. SSE4 is
// the least (every x86-64 server since 2008); SSSE3 and the AVX-512 dialects beyond the first add compile
// time and no speed here.
#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_SSE4
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
