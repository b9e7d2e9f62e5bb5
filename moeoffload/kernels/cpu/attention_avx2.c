// Attention and norms in AVX2, with FMA and F16C.

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define TILE_ROWS 2
#define VALUE_ROWS 4
#define NAME(name) name##_avx2
#include "attention_head.h"
#include "norm_rows.h"
#endif
