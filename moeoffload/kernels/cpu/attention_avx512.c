// Attention and norms in AVX-512.

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 16
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")))
#define TILE_ROWS 6
#define VALUE_ROWS 8
#define NAME(name) name##_avx512
#include "attention_head.h"
#include "norm_rows.h"
#endif
