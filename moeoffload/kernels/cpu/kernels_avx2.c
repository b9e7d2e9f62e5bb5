// The kernels for AVX2 with FMA and F16C.

#if defined(__x86_64__)
#include <immintrin.h>

#include "experts.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define TILE_ROWS 3
#include "formats.h"

#define KEY_ROWS 2
#define VALUE_ROWS 4
#define SET(name) name##_avx2
#include "attention_few.h"
#include "norm_rows.h"
#include "rotary_rows.h"

const Kernels *const avx2_kernels[N_TYPES] = {&kernels_bf16, &kernels_f16, &kernels_f32};

#include "tiles.h"

// Adds the products of 4 unsigned codes of each row and 4 activation words: bytes 0 and 2 of a row, and 1 and 3, become
// words by a mask and a shift, which is why the activations are in the order 0, 2, 1, 3.
INLINE ints add_step(ints sums, __m256i codes, const Block *x, const int step) {
    int32_t even, odd;
    memcpy(&even, x->words + 4 * step, sizeof even);
    memcpy(&odd, x->words + 4 * step + 2, sizeof odd);
    const __m256i lower = _mm256_and_si256(codes, _mm256_set1_epi16(0xFF)), upper = _mm256_srli_epi16(codes, 8);
    return sums + (ints)_mm256_madd_epi16(lower, _mm256_set1_epi32(even)) +
           (ints)_mm256_madd_epi16(upper, _mm256_set1_epi32(odd));
}

INLINE void store_integers(Block *block, const int32_t *integers) {
    for (int i = 0; i < INTEGERS; i++) block->words[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = (int16_t)integers[i];
}

#define SUMS_OF_STEPS ints
#define START(value) (value)
#define SHIFTED(values, counts) ((ints)_mm256_sllv_epi32((__m256i)(values), (__m256i)(counts)))
#define STEP(sums, codes, x, step) add_step(sums, (__m256i)(codes), x, step)
#define TOTAL(sums) (sums)
#define LOOK_UP(table, numbers) ((code_bytes)_mm256_shuffle_epi8((__m256i)(table), (__m256i)(numbers)))
#define NEAREST(values) ((ints)_mm256_cvtps_epi32((__m256)(values)))
#define MOST_X 4
#include "integer_body.h"

const TileKernels integers_avx2 = {sizeof(Block), prepare_integers, project_tiles, multiply_integers};

#define FP8_SET(name) fp8_##name
#include "fp8_floats.h"

const TileKernels fp8_avx2 = {INTEGERS * sizeof(float), fp8_prepare, project_tiles, fp8_sizes};
#endif
