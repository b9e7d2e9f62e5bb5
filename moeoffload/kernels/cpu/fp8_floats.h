// Four FP8 codes of each row as floats, and their products with float rows, for fp8_body.h; included before it, after
// integer_body.h, for instruction sets without products of bfloat16 pairs.

// 1/256 of four weights of each of LANES rows: weights 0 and 2 (even) and 1 and 3 (odd), of the first half of the rows
// and of the other.
typedef struct {
    vec even[2], odd[2];
} Fp8Floats;
typedef struct {
    vec parts[2];
} FloatSums;

typedef int16_t words __attribute__((vector_size(4 * LANES)));
typedef int64_t pairs __attribute__((vector_size(4 * LANES)));

// Converts words whose upper bytes are FP8 codes by way of float16: sign, 4 exponent bits and 3 fraction bits at its
// places give 1/256 of the value.
INLINE vec fp8_floats(words codes, const bool has_nan, const int half) {
    words kept = codes >> 1 & (int16_t)0xBF80;
    if (has_nan) kept |= (kept | (int16_t)0x8000) == (int16_t)0xBF80;
#if LANES == 16
    return widen_f16((halves)_mm512_extracti64x4_epi64((__m512i)kept, half));
#else
    return widen_f16((halves)_mm256_extracti128_si256((__m256i)kept, half));
#endif
}
INLINE Fp8Floats unpack_some_floats(words odd, const bool has_nan) {
    const words even = odd << 8;
    return (Fp8Floats){{fp8_floats(even, has_nan, 0), fp8_floats(even, has_nan, 1)},
                       {fp8_floats(odd, has_nan, 0), fp8_floats(odd, has_nan, 1)}};
}
INLINE Fp8Floats unpack_floats(code_bytes codes) {
#if LANES == 16  // one test of all codes takes fewer instructions than making NaN of each, and weights have none
    const bool has_nan = _mm512_cmpeq_epi8_mask((__m512i)(codes + codes), _mm512_set1_epi8((char)0xFE));
    if (!__builtin_expect(has_nan, false)) return unpack_some_floats((words)codes, false);
#endif
    return unpack_some_floats((words)codes, true);
}

INLINE vec float_pair_at(const float *operand) {
    int64_t both;
    memcpy(&both, operand, sizeof both);
    return (vec)((pairs){0} + both);
}
INLINE void add_floats(FloatSums *sums, Fp8Floats weights, const float *x) {
    const vec even = float_pair_at(x), odd = float_pair_at(x + 2);
    for (int half = 0; half < 2; half++)
        sums->parts[half] = fma_of(weights.odd[half], odd, fma_of(weights.even[half], even, sums->parts[half]));
}
INLINE vec total_of_floats(FloatSums sums) {
#if LANES == 16
    const __m512i first = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(1));
    const __m512 a = (__m512)sums.parts[0], b = (__m512)sums.parts[1];
    return ((vec)_mm512_permutex2var_ps(a, first, b) + (vec)_mm512_permutex2var_ps(a, second, b)) * 256.0f;
#else
    const __m256 rows = _mm256_hadd_ps((__m256)sums.parts[0], (__m256)sums.parts[1]);
    return (vec)_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(rows), 0xD8)) * 256.0f;
#endif
}

// Converts a row to float32 operands, each four neighbours in the order 0, 2, 1, 3.
static TARGET void FP8_SET(prepare)(const void *row, int64_t type, void *operand, int64_t n) {
    float *to = operand;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec some = type == BF16 ? load((const uint16_t *)row + i, BF16) : load((const uint16_t *)row + i, F16);
#if LANES == 16
        store(to + i, (vec)_mm512_shuffle_ps((__m512)some, (__m512)some, 0xD8), F32);
#else
        store(to + i, (vec)_mm256_shuffle_ps((__m256)some, (__m256)some, 0xD8), F32);
#endif
    }
}

#define FP8_OPERAND float
#define FP8_WEIGHTS Fp8Floats
#define FP8_UNPACK unpack_floats
#define FP8_SUMS FloatSums
#define FP8_ADD(sums, weights, x) add_floats(&(sums), weights, x)
#define FP8_TOTAL total_of_floats
#include "fp8_body.h"
