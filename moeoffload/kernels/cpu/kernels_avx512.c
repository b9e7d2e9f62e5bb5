// The kernels in AVX-512; for bfloat16 also by the CPU's own products of pairs (AVX512-BF16).

#if defined(__x86_64__)
#include <immintrin.h>

#include "experts.h"

#define LANES 16
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")))
#define TILE_ROWS 6
#define EACH_TILE(each) each(1) each(2) each(3) each(4) each(5) each(6)
#include "formats.h"

#define KEY_ROWS 6
#define VALUE_ROWS 8
#define SET(name) name##_avx512
#include "attention_few.h"
#include "norm_rows.h"

const Kernels *const avx512_kernels[N_TYPES] = {&kernels_bf16, &kernels_f16, &kernels_f32};

#undef TARGET
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")))

typedef struct {
    __m512i a, b;
} raw_pair;

INLINE raw_pair load_raw(const uint16_t *at) {
    return (raw_pair){_mm512_loadu_si512(at), _mm512_loadu_si512(at + 32)};
}

// They take subnormal factors for zero.
INLINE void multiply_raw(vec *sums, raw_pair weights, raw_pair operands) {
    sums[0] = (vec)_mm512_dpbf16_ps((__m512)sums[0], (__m512bh)weights.a, (__m512bh)operands.a);
    sums[1] = (vec)_mm512_dpbf16_ps((__m512)sums[1], (__m512bh)weights.b, (__m512bh)operands.b);
}

// It takes subnormal numbers for zero, as the products do.
INLINE __m512i words_bf16_dot(vec a, vec b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

#define FORMAT bf16_dot
#define WORDS words_bf16_dot
#define TYPE BF16
#define ELEMENT uint16_t
#define OPERAND uint16_t
#define BLOCK 64
#define WEIGHTS raw_pair
#define LOAD load_raw
#define OPERANDS raw_pair
#define GET load_raw
#define MULTIPLY multiply_raw
#define PREPARE(to, from) memcpy(to, from, BLOCK * sizeof(uint16_t))
#include "format_body.h"

const Kernels *const bf16_dot_kernels = &kernels_bf16_dot;

#undef TARGET
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

#include "integers.h"

typedef struct {
    ints high, low;
} HalfSums;

INLINE HalfSums add_step(HalfSums sums, __m512i codes, const Block *x, const int step) {
    int32_t high, low;
    memcpy(&high, x->high + 4 * step, sizeof high);
    memcpy(&low, x->low + 4 * step, sizeof low);
    sums.high = (ints)_mm512_dpbusd_epi32((__m512i)sums.high, codes, _mm512_set1_epi32(high));
    sums.low = (ints)_mm512_dpbusd_epi32((__m512i)sums.low, codes, _mm512_set1_epi32(low));
    return sums;
}

INLINE void store_integers(Block *block, const int32_t *integers) {
    for (int i = 0; i < INTEGERS; i++) {
        const int32_t high = (integers[i] + 128) >> 8;
        block->high[i] = (int8_t)high;
        block->low[i] = (int8_t)(integers[i] - 256 * high);
    }
}

#define SUMS_OF_STEPS HalfSums
#define START(value) ((HalfSums){(ints){0}, (ints){0} + (value)})
#define STEP(sums, codes, x, step) add_step(sums, (__m512i)(codes), x, step)
#define TOTAL(sums) (((sums).high << 8) + (sums).low)
#define LOOK_UP(table, numbers) ((code_bytes)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(numbers)))
#define NEAREST(values) ((ints)_mm512_cvtps_epi32((__m512)(values)))
#define MOST_X 8
#define N_SIZES 4
#define EACH_X(each, kind) each(kind, 1) each(kind, 2) each(kind, 4) each(kind, 8)
#define INTEGER_SET(name) name##_vnni
#include "integer_body.h"
#endif
