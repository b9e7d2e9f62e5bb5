// The kernels in AVX2 with FMA and F16C.

#if defined(__x86_64__)
#include <immintrin.h>

#include "experts.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define TILE_ROWS 3
#define EACH_TILE(each) each(1) each(2) each(3)
#include "formats.h"

#define KEY_ROWS 2
#define VALUE_ROWS 4
#define SET(name) name##_avx2
#include "attention_head.h"
#include "norm_rows.h"

const Kernels *const avx2_kernels[N_TYPES] = {&kernels_bf16, &kernels_f16, &kernels_f32};
#endif
