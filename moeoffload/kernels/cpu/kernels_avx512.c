// The kernels for AVX-512; for bfloat16 also with the instruction for products of bfloat16 pairs (AVX512-BF16).

#if defined(__x86_64__)
#include <immintrin.h>

#include "experts.h"

#define LANES 16
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")))
#define TILE_ROWS 6
#include "formats.h"

#define KEY_ROWS 6
#define VALUE_ROWS 8
#define SET(name) name##_avx512
#include "attention_few.h"
#include "norm_rows.h"
#include "rotary_rows.h"

const Kernels *const avx512_kernels[N_TYPES] = {&kernels_bf16, &kernels_f16, &kernels_f32};

#undef TARGET
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")))

INLINE __m512i load_raw(const uint16_t *at, const int half) { return _mm512_loadu_si512(at + 32 * half); }

// The instruction treats subnormal factors as zero.
INLINE vec add_raw(vec sum, __m512i weights, __m512i operands) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)operands);
}

// The instruction treats subnormal numbers as zero, as that of the products does.
INLINE __m512i words_bf16_dot(vec a, vec b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

#define FORMAT bf16_dot
#define WORDS words_bf16_dot
#define TYPE BF16
#define ELEMENT uint16_t
#define OPERAND uint16_t
#define BLOCK 64
#define VALUES __m512i
#define LOAD load_raw
#define GET load_raw
#define ADD_PRODUCT add_raw
#define PREPARE(to, from) memcpy(to, from, BLOCK * sizeof(uint16_t))
#include "format_body.h"

const Kernels *const bf16_dot_kernels = &kernels_bf16_dot;

#undef TARGET
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

#include "tiles.h"

typedef struct {
    ints high, low;
} HalfSums;

// Adds the products of 4 unsigned codes of each row and 4 activations, separately for their high and low signed bytes.
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
#define START(value) ((HalfSums){(ints){0}, value})
#define SHIFTED(values, counts) ((ints)_mm512_sllv_epi32((__m512i)(values), (__m512i)(counts)))
#define STEP(sums, codes, x, step) add_step(sums, (__m512i)(codes), x, step)
#define TOTAL(sums) (((sums).high << 8) + (sums).low)
#define LOOK_UP(table, numbers) ((code_bytes)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(numbers)))
#define NEAREST(values) ((ints)_mm512_cvtps_epi32((__m512)(values)))
#define MOST_X 8
#include "integer_body.h"

const TileKernels integers_vnni = {sizeof(Block), prepare_integers, project_tiles, multiply_integers};

#define FP8_SET(name) fp8_##name
#include "fp8_floats.h"

const TileKernels fp8_avx512 = {INTEGERS * sizeof(float), fp8_prepare, project_tiles, fp8_sizes};

#undef TARGET
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx512vbmi")))

// Upper and lower bytes of 1/256 of FP8 codes' values as bfloat16, without the sign.
static const uint8_t fp8_upper[128] = {
    [1 ... 3] = 0x37,   [4 ... 15] = 0x38,  [16 ... 31] = 0x39,  [32 ... 47] = 0x3A,   [48 ... 63] = 0x3B,
    [64 ... 79] = 0x3C, [80 ... 95] = 0x3D, [96 ... 111] = 0x3E, [112 ... 126] = 0x3F, [127] = 0x7F,
};
#define ONE_TO_SEVEN 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
#define EIGHT_TO_E 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0
#define ALL_LOWER 0x00, ONE_TO_SEVEN, EIGHT_TO_E, 0xF0
static const uint8_t fp8_lower[128] = {
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x20, 0x40, 0x60, EIGHT_TO_E, 0xF0, ALL_LOWER, ALL_LOWER, ALL_LOWER,
    ALL_LOWER, ALL_LOWER, ALL_LOWER, 0x00, ONE_TO_SEVEN, EIGHT_TO_E, 0xC0,
};

// Four weights of each row as pairs: 0 and 2 (even), 1 and 3 (odd).
typedef struct {
    __m512bh even, odd;
} Fp8Pairs;
typedef struct {
    vec even, odd;
} Fp8Sums;

// Unpacks any codes.
INLINE Fp8Pairs look_up_fp8(__m512i raw) {
    const __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(fp8_lower), raw, _mm512_loadu_si512(fp8_lower + 64));
    const __m512i plain = _mm512_permutex2var_epi8(_mm512_loadu_si512(fp8_upper), raw, _mm512_loadu_si512(fp8_upper + 64));
    // The ternary operations are a | (b & c) and (b & c) | (a & ~c).
    const __m512i upper = _mm512_ternarylogic_epi32(plain, raw, _mm512_set1_epi8((char)0x80), 0xF8);
    const __m512i low_bytes = _mm512_set1_epi16(0xFF);
    const __m512i even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(upper, 8), lower, low_bytes, 0xF8);
    const __m512i odd = _mm512_ternarylogic_epi32(upper, _mm512_srli_epi16(lower, 8), low_bytes, 0xD8);
    return (Fp8Pairs){(__m512bh)even, (__m512bh)odd};
}

// Unpacks normal numbers: sign, 4 exponent bits and 3 fraction bits go to their places below the exponent's upper bits.
INLINE __m512bh normal_fp8(__m512i upper_bytes) {
    const __m512i shifted = _mm512_srai_epi16(upper_bytes, 4);
    return (__m512bh)_mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16((short)0x87F0), _mm512_set1_epi16(0x3800), 0xEA);
}

INLINE Fp8Pairs unpack_fp8(__m512i raw) {
    const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(raw | _mm512_set1_epi8((char)0x80), _mm512_set1_epi8(-1));
    const __mmask64 is_small = _mm512_testn_epi8_mask(raw, _mm512_set1_epi8(0x78));
    if (__builtin_expect((is_nan | is_small) != 0, false)) return look_up_fp8(raw);
    return (Fp8Pairs){normal_fp8(_mm512_slli_epi16(raw, 8)), normal_fp8(raw)};
}

INLINE __m512bh pair_at(const uint16_t *operand) {
    int32_t both;
    memcpy(&both, operand, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}
INLINE void add_fp8(Fp8Sums *sums, Fp8Pairs weights, const uint16_t *x) {
    sums->even = (vec)_mm512_dpbf16_ps((__m512)sums->even, weights.even, pair_at(x));
    sums->odd = (vec)_mm512_dpbf16_ps((__m512)sums->odd, weights.odd, pair_at(x + 2));
}

// Copies a bfloat16 row to an operand, each four neighbours in the order 0, 2, 1, 3.
static TARGET void fp8_dot_prepare(const void *row, int64_t type, void *operand, int64_t n) {
    (void)type;
    for (int64_t i = 0; i < n; i += 4) {
        uint64_t some;
        memcpy(&some, (const uint16_t *)row + i, sizeof some);
        some = (some & 0xFFFF00000000FFFF) | (some & 0xFFFF0000) << 16 | (some >> 16 & 0xFFFF0000);
        memcpy((uint16_t *)operand + i, &some, sizeof some);
    }
}

#define FP8_OPERAND uint16_t
#define FP8_WEIGHTS Fp8Pairs
#define FP8_UNPACK(codes) unpack_fp8((__m512i)(codes))
#define FP8_SUMS Fp8Sums
#define FP8_ADD(sums, weights, x) add_fp8(&(sums), weights, x)
#define FP8_TOTAL(sums) (((sums).even + (sums).odd) * 256.0f)
#define FP8_SET(name) fp8_dot_##name
#include "fp8_body.h"

const TileKernels fp8_bf16_dot = {INTEGERS * sizeof(uint16_t), fp8_dot_prepare, project_tiles, fp8_dot_sizes};
#endif
