// The kernels for AVX2 with FMA and F16C.

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
#include "attention_few.h"
#include "norm_rows.h"

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
#define N_SIZES 6
#define EACH_X(each, kind) each(kind, 1) each(kind, 2) each(kind, 4)
static MultiplyTile fp8_1, fp8_2, fp8_4, fp8_32;
#define MORE_KINDS {fp8_1, fp8_2, fp8_4, NULL, NULL, fp8_32}
#define INTEGER_SET(name) name##_avx2
#include "integer_body.h"

// 1/256 of four weights of each of 8 rows: weights 0 and 2 (even) and 1 and 3 (odd), of the first four rows and of the
// others.
typedef struct {
    vec even[2], odd[2];
} Fp8Floats;
typedef struct {
    vec parts[2];
} Fp8Sums;

// Converts the FP8 codes in the upper bytes of words by way of float16: sign, 4 exponent bits and 3 fraction bits at
// its places give 1/256 of the value.
INLINE vec fp8_floats(__m256i halves, const int half) {
    const __m256i kept = _mm256_set1_epi16((short)0xBF80), sign = _mm256_set1_epi16((short)0x8000);
    const __m256i some = _mm256_and_si256(_mm256_srai_epi16(halves, 1), kept);
    const __m256i bits = _mm256_or_si256(some, _mm256_cmpeq_epi16(_mm256_or_si256(some, sign), kept));  // or NaN
    return (vec)_mm256_cvtph_ps(half ? _mm256_extracti128_si256(bits, 1) : _mm256_castsi256_si128(bits));
}
INLINE Fp8Floats unpack_fp8(__m256i raw) {
    const __m256i even = _mm256_slli_epi16(raw, 8);
    return (Fp8Floats){{fp8_floats(even, 0), fp8_floats(even, 1)}, {fp8_floats(raw, 0), fp8_floats(raw, 1)}};
}

INLINE vec pair_at(const float *operand) {
    double both;
    memcpy(&both, operand, sizeof both);
    return (vec)_mm256_set1_pd(both);
}
INLINE void add_fp8(Fp8Sums *sums, Fp8Floats weights, const float *x) {
    const vec even = pair_at(x), odd = pair_at(x + 2);
    for (int half = 0; half < 2; half++)
        sums->parts[half] = fma_of(weights.odd[half], odd, fma_of(weights.even[half], even, sums->parts[half]));
}
INLINE vec total_of(Fp8Sums sums) {
    const __m256 rows = _mm256_hadd_ps((__m256)sums.parts[0], (__m256)sums.parts[1]);
    return (vec)_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(rows), 0xD8)) * 256.0f;
}

// Converts a row to float32 operands, each four neighbours in the order 0, 2, 1, 3.
static TARGET void prepare_fp8(const void *row, int64_t type, void *operand, int64_t n) {
    float *to = operand;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec some = type == BF16 ? load((const uint16_t *)row + i, BF16) : load((const uint16_t *)row + i, F16);
        for (int j = 0; j < LANES; j++) to[i + j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = some[j];
    }
}

#define FP8_OPERAND float
#define FP8_WEIGHTS Fp8Floats
#define FP8_UNPACK(codes) unpack_fp8((__m256i)(codes))
#define FP8_SUMS Fp8Sums
#define FP8_ADD(sums, weights, x) add_fp8(&(sums), weights, x)
#define FP8_TOTAL(sums) total_of(sums)
#define EACH_FP8_X(each) each(1) each(2) each(4) each(32)
#define FP8_SET(n) fp8_##n
#include "fp8_body.h"

const TileKernels fp8_avx2 = {INTEGERS * sizeof(float), prepare_fp8, project_tiles_avx2};
#endif
