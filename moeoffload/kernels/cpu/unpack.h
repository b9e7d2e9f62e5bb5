// The parts of unpacking that do not depend on the dtype, for one instruction set: scales, and the values of codes.
// Included by formats.h. The computation and its roundings are those of PackedWeights.unpack.

#include "packed.h"

// Loads `count` bytes, at most LANES, and fills up with zeros, as load_some.
INLINE bits bytes_at(const void *from, int64_t count) {
#if LANES == 16
    const __mmask16 mask = (__mmask16)((1u << at_most(count, 16)) - 1);
    return (bits)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from));
#else
    uint8_t some[LANES] = {0};
    memcpy(some, from, count >= LANES ? LANES : count);
#if LANES == 8
    return (bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)some));
#else
    return (bits){some[0], some[1], some[2], some[3]};
#endif
#endif
}
INLINE vec unsigned_at(const void *from, int64_t count) { return __builtin_convertvector((ints)bytes_at(from, count), vec); }
INLINE vec signed_at(const void *from, int64_t count) {
    return __builtin_convertvector((ints)(bytes_at(from, count) << 24) >> 24, vec);
}

// Returns the powers of two of E8M0 scales: 2^(raw - 127), where 255 is NaN.
INLINE vec powers_of(bits raw) {
    const vec power = choose(raw == 0, (vec)((bits){0} + 0x00400000), (vec)(raw << 23));
    return choose(raw == 255, (vec)((bits){0} + 0x7FC00000), power);
}

#if LANES == 16
#define LANE_NUMBERS ((ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define LANE_NUMBERS ((ints){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANE_NUMBERS ((ints){0, 1, 2, 3})
#endif

INLINE bool all_of(ints conditions) {
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)conditions, (__m512i)conditions) == 0xFFFF;
#else
    int32_t all = -1;
    for (int lane = 0; lane < LANES; lane++) all &= conditions[lane];
    return all;
#endif
}

// Returns for each of `count` groups from `group` on the float16 factor that it shares with the 2^shift groups around
// it.
INLINE vec factors_at(const char *factors, int64_t group, int64_t shift, int64_t count) {
    factors += group >> shift << 1;
#if LANES == 16
    const vec some = load_some(factors, ((at_most(count, 16) - 1) >> shift) + 1, F16);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return (vec)_mm512_permutexvar_ps(_mm512_srl_epi32(lanes, _mm_cvtsi64_si128(shift)), (__m512)some);
#else
    if (1 << shift >= LANES) return all(load_some(factors, 1, F16)[0]);  // groups are aligned to LANES
    vec spread = {0};
    for (int64_t i = 0; i < at_most(count, LANES); i++)
        spread[i] = load_some(factors + (((group + i) >> shift) - (group >> shift)) * 2, 1, F16)[0];
    return spread;
#endif
}

// Reads the scales and offsets of the segment of a row at `data` that begins at column `from`, and sets is_wild.
INLINE void read_some_scales(const int kind, const Matrix *m, const char *data, const char *scales, int64_t from, Scales *s) {
    const int64_t to = at_most(from + SEGMENT, m->n_in);
    const int64_t first = from >> m->shift, n = ((to - 1) >> m->shift) + 1 - first;
    const char *offsets = data + m->offsets_at + first;
    ints tame = (ints){0} - 1;
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t at = first + i, count = n - i;
        vec scale;
        if (kind == SCALES_SUPER) {
            const int64_t shift = SUPER_SHIFT - m->shift;
            scale = factors_at(data + m->factors, at, shift, count) * signed_at(scales + at, count);
            tame &= scale - scale == 0.0f;
            if (m->offsets == OFFSETS_MIN) {
                const vec offset = factors_at(data + m->min_factors, at, shift, count) * unsigned_at(offsets + i, count);
                store(s->offset + i, offset, F32);
                tame &= offset - offset == 0.0f;
            }
        } else if (kind == SCALES_E8M0) {
            const bits raw = bytes_at(scales + at, count);
            scale = powers_of(raw);
            tame &= (ints)(raw - 64 < 128) | (LANE_NUMBERS >= (int32_t)at_most(count, LANES));
        } else {
            const int type = kind == SCALES_F32 ? F32 : kind == SCALES_F16 ? F16 : BF16;
            scale = load_some(scales + at * bytes_of(type), count, type);
            const vec size = choose(scale < 0.0f, -scale, scale);
            tame &= ((size < 0x1p60f) & (size > 0x1p-60f)) | (LANE_NUMBERS >= (int32_t)at_most(count, LANES));
            if (m->codes != CODES_FP8) tame |= scale == 0.0f;
        }
        store(s->scale + i, scale, F32);
        if (kind != SCALES_SUPER && m->offsets == OFFSETS_ZERO) store(s->offset + i, unsigned_at(offsets + i, count), F32);
    }
    s->is_wild = !all_of(tame);
}

// Reads the scales of the segment that begins at column `from`, for n_rows rows.
static TARGET void read_scales(const Matrix *m, int64_t expert, int64_t row, int64_t n_rows, int64_t from, Scales *s) {
    const int64_t n_shared = ceil_div(m->n_out, m->shared_rows);
    const char *data = packed_row(m, expert, row);
    for (const int64_t end = row + n_rows; row < end; row++, s++, data += m->row_bytes) {
        const char *scales = data + m->scales_at;
        if (m->shared) scales = (const char *)(m->shared + (expert * n_shared + row / m->shared_rows) * m->n_groups);
        switch (m->scales) {
            case SCALES_F32: read_some_scales(SCALES_F32, m, data, scales, from, s); break;
            case SCALES_F16: read_some_scales(SCALES_F16, m, data, scales, from, s); break;
            case SCALES_BF16: read_some_scales(SCALES_BF16, m, data, scales, from, s); break;
            case SCALES_E8M0: read_some_scales(SCALES_E8M0, m, data, scales, from, s); break;
            case SCALES_SUPER: read_some_scales(SCALES_SUPER, m, data, scales, from, s); break;
        }
    }
}

static inline int64_t code_bits(const int codes) {
    return codes == CODES_F32 ? 32 : codes >= CODES_BF16 ? 16 : codes <= CODES_INT8 ? 8 : 4;
}
static inline int64_t high_bits(const int codes) { return codes == CODES_UINT5 ? 1 : codes == CODES_INT6 ? 2 : 0; }

INLINE vec plain_at(const void *at, int64_t codes) {
    return codes == CODES_BF16 ? load(at, BF16) : codes == CODES_F16 ? load(at, F16) : load(at, F32);
}

// Rounds floats so that the upper 16 bits are bfloat16; if is_tame, without a check for NaN, which would get arbitrary
// bits.
INLINE bits bits_of(vec v, bool is_tame) { return is_tame ? (bits)v + 0x7FFF + ((bits)v >> 16 & 1) : round_bf16(v); }

// Interleaves a vector of even elements and one of odd elements to two vectors in order.
INLINE pair in_order(pair v) {
#if LANES == 16
    const __m512i lanes = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i later = _mm512_add_epi32(lanes, _mm512_set1_epi32(8));
    return (pair){(vec)_mm512_permutex2var_ps((__m512)v.a, lanes, (__m512)v.b),
                  (vec)_mm512_permutex2var_ps((__m512)v.a, later, (__m512)v.b)};
#elif LANES == 8
    const __m256 low = _mm256_unpacklo_ps((__m256)v.a, (__m256)v.b), high = _mm256_unpackhi_ps((__m256)v.a, (__m256)v.b);
    return (pair){(vec)_mm256_permute2f128_ps(low, high, 0x20), (vec)_mm256_permute2f128_ps(low, high, 0x31)};
#else
    return (pair){(vec){v.a[0], v.b[0], v.a[1], v.b[1]}, (vec){v.a[2], v.b[2], v.a[3], v.b[3]}};
#endif
}

INLINE vec level_of(const float *levels, bits number) {
#if LANES == 16
    return (vec)_mm512_permutexvar_ps((__m512i)number, _mm512_loadu_ps(levels));
#elif LANES == 8
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)number);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)number);
    return (vec)_mm256_blendv_ps(low, high, (__m256)(number << 28));
#else
    return (vec){levels[number[0]], levels[number[1]], levels[number[2]], levels[number[3]]};
#endif
}

typedef int8_t bytes __attribute__((vector_size(2 * LANES)));
typedef int16_t words __attribute__((vector_size(4 * LANES)));
INLINE words words_at(const uint8_t *code) {
    bytes raw;
    memcpy(&raw, code, sizeof raw);
    return __builtin_convertvector(raw, words);
}

// Returns the values of 2 * LANES FP8 codes. Shifted to the places of float16, exponent and fraction give 1/256 of the
// value, because of the difference in exponent bias.
INLINE pair fp8_at(const uint8_t *code) {
    const words raw = words_at(code), is_nan = (raw & 0x7F) == 0x7F;
    const words half = (raw << 7 & (int16_t)0xBF80) | (is_nan & 0x7E00);
    halves each[2];
    memcpy(each, &half, sizeof each);
    return (pair){widen_f16(each[0]) * 256.0f, widen_f16(each[1]) * 256.0f};
}

// Returns the values of 2 * LANES other codes: a vector of the even ones, then one of the odd ones.
INLINE pair values_at(int codes, const float *levels, const uint8_t *code, const uint8_t *high) {
    if (codes == CODES_INT8) {
        const bits both = (bits)words_at(code);
        return (pair){__builtin_convertvector((ints)(both << 16) >> 16, vec), __builtin_convertvector((ints)both >> 16, vec)};
    }
    const bits raw = bytes_at(code, LANES);
    bits even = raw & 15, odd = raw >> 4;
    if (codes == CODES_LEVELS4) return (pair){level_of(levels, even), level_of(levels, odd)};
    const int64_t n_bits = codes == CODES_UINT5 ? 1 : 2, lanes = LANES == 16 ? 8 : LANES;
    uint64_t word = 0;
    memcpy(&word, high, LANES * n_bits / 4);
    // The upper bits of 6-bit codes: lanes from the ninth on are in the second half of the 64-bit word.
    const bits words = (bits)choose(LANE_NUMBERS < (int32_t)(n_bits == 2 ? lanes : LANES), (vec)((bits){0} + (uint32_t)word),
                                    (vec)((bits){0} + (uint32_t)(word >> 32)));
    if (codes == CODES_UINT5) {
        const bits upper = words >> (bits)(LANE_NUMBERS * 2);
        even |= (upper & 1) << 4, odd |= (upper & 2) << 3;
        return (pair){__builtin_convertvector((ints)even, vec), __builtin_convertvector((ints)odd, vec)};
    }
    const bits upper = words >> (bits)((LANE_NUMBERS & 7) * 4);
    even |= (upper & 3) << 4, odd |= (upper & 12) << 2;
    return (pair){__builtin_convertvector((ints)even - 32, vec), __builtin_convertvector((ints)odd - 32, vec)};
}

#if LANES == 16
// Returns the values of 16 FP8 codes from `first` on, taken as normal numbers: a table for a code's five lowest bits,
// with the two upper bits of the exponent 0.
INLINE vec fp8_values(int32_t first) { return (vec)(((LANE_NUMBERS + first) << 20) + (120 << 23)); }
// nibbles_at loads 16 bytes of two 4-bit codes, each into a 32-bit lane, where the caller spreads them over the two
// words. words_of joins two halves to one vector of words; words_bf16 and words_f16 round two vectors of floats to such
// a vector.
INLINE __m512i nibbles_at(const uint8_t *code) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)code)); }
INLINE __m512i words_of(halves a, halves b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
}
INLINE __m512i words_bf16(vec a, vec b) { return words_of(narrow_u16(round_bf16(a) >> 16), narrow_u16(round_bf16(b) >> 16)); }
INLINE __m512i words_f16(vec a, vec b) { return words_of(narrow_f16(a), narrow_f16(b)); }
INLINE vec floats_of(__m128i bytes) { return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
#endif
