// What unpacking needs whatever the dtype is, for one instruction set: scales, and the values of codes. Included by
// formats.h. What is computed, and where it is rounded, is what PackedWeights.unpack does.

#include "packed.h"

// Up to LANES bytes, then zeros.
INLINE bits bytes_at(const void *from, int64_t count) {
    uint8_t some[LANES] = {0};
    memcpy(some, from, at_most(count, LANES));
#if LANES == 16
    return (bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)some));
#elif LANES == 8
    return (bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)some));
#else
    return (bits){some[0], some[1], some[2], some[3]};
#endif
}
INLINE vec unsigned_at(const void *from, int64_t count) { return __builtin_convertvector((ints)bytes_at(from, count), vec); }
INLINE vec signed_at(const void *from, int64_t count) {
    return __builtin_convertvector((ints)(bytes_at(from, count) << 24) >> 24, vec);
}

// Powers of two: 0 is 2^-127, 255 is NaN.
INLINE vec powers_at(const void *from, int64_t count) {
    const bits raw = bytes_at(from, count);
    const vec power = choose(raw == 0, (vec)((bits){0} + 0x00400000), (vec)(raw << 23));
    return choose(raw == 255, (vec)((bits){0} + 0x7FC00000), power);
}

INLINE bool all_of(ints conditions) {
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)conditions, (__m512i)conditions) == 0xFFFF;
#else
    int32_t all = -1;
    for (int lane = 0; lane < LANES; lane++) all &= conditions[lane];
    return all;
#endif
}

INLINE vec one_f16(const char *at) {
    uint16_t raw;
    memcpy(&raw, at, sizeof raw);
    return all(widen_f16((halves){0} + raw)[0]);
}

// Scales of the segment that begins at `from`.
static TARGET void read_scales(const Matrix *m, int64_t expert, int64_t row, int64_t from, Scales *s) {
    const char *data = packed_row(m, expert, row);
    const int64_t to = at_most(from + SEGMENT, m->n_in);
    const int64_t first = from >> m->shift, n = ((to - 1) >> m->shift) + 1 - first;
    const char *scales = data + m->scales_at, *offsets = data + m->offsets_at;
    s->is_wild = false;
    if (m->scales == SCALES_SUPER) {
        const int64_t each = SUPER_GROUP >> m->shift;
        for (int64_t done = 0; done < n; done += each) {
            const int64_t at = first + done, super = at / each, count = at_most(each, n - done);
            const vec factor = one_f16(data + m->factors + 2 * super);
            for (int64_t i = 0; i < count; i += LANES)
                store(s->scale + done + i, factor * signed_at(scales + at + i, count - i), F32);
            if (m->offsets != OFFSETS_MIN) continue;
            const vec min_factor = one_f16(data + m->min_factors + 2 * super);
            for (int64_t i = 0; i < count; i += LANES)
                store(s->offset + done + i, min_factor * unsigned_at(offsets + at + i, count - i), F32);
        }
        return;
    }
    if (m->shared) {
        const int64_t n_rows = ceil_div(m->n_out, m->shared_rows);
        scales = (const char *)(m->shared + (expert * n_rows + row / m->shared_rows) * m->n_groups);
    }
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t at = first + i;
        const vec scale = m->scales == SCALES_F32    ? load_some(scales + at * 4, n - i, F32)
                          : m->scales == SCALES_F16  ? load_some(scales + at * 2, n - i, F16)
                          : m->scales == SCALES_BF16 ? load_some(scales + at * 2, n - i, BF16)
                                                     : powers_at(scales + at, n - i);
        store(s->scale + i, scale, F32);
        if (m->offsets == OFFSETS_ZERO) store(s->offset + i, unsigned_at(offsets + at, n - i), F32);
        if (m->codes == CODES_FP8) store(s->offset + i, scale * 256.0f, F32);
        const vec size = choose(scale < 0.0f, -scale, scale);
        s->is_wild |= !all_of((size < 0x1p119f) & ((size > 0x1p-100f) | (size == 0.0f) | -(m->scales == SCALES_E8M0)));
    }
}

static inline int64_t code_bits(const int codes) {
    return codes == CODES_F32 ? 32 : codes >= CODES_BF16 ? 16 : codes <= CODES_INT8 ? 8 : 4;
}
static inline int64_t high_bits(const int codes) { return codes == CODES_UINT5 ? 1 : codes == CODES_INT6 ? 2 : 0; }

// The values of SPAN codes.
INLINE void values_of(const int codes, const Matrix *m, const uint8_t *code, const uint8_t *high, float *values) {
    if (codes >= CODES_BF16) {
        for (int i = 0; i < SPAN; i += LANES) store(values + i, load(code + i * code_bits(codes) / 8, codes - CODES_BF16), F32);
    } else if (codes == CODES_FP8) {  // as float16: that is a 256th of it
        for (int i = 0; i < SPAN; i += LANES) {
            const bits raw = bytes_at(code + i, LANES), magnitude = raw & 0x7F;
            const vec value = widen_f16(narrow_u16(magnitude << 7 | (raw & 0x80) << 8)) * 256.0f;
            store(values + i, choose(magnitude == 0x7F, (vec)((bits){0} + 0x7FC00000), value), F32);
        }
    } else if (codes == CODES_INT8) {
        for (int i = 0; i < SPAN; i += LANES) store(values + i, signed_at(code + i, LANES), F32);
    } else {
        for (int i = 0; i < SPAN; i++) {
            const int low = code[i / 2] >> i % 2 * 4 & 15;
            values[i] = codes == CODES_LEVELS4 ? m->levels[low]
                        : codes == CODES_UINT5 ? (float)(low | (high[i / 8] >> i % 8 & 1) << 4)
                                               : (float)((low | (high[i / 4] >> i % 4 * 2 & 3) << 4) - 32);
        }
    }
}

#if LANES == 16
// Numbers of 16 levels: dwords of two nibbles become words; bits above the lowest four of a word are noise.
INLINE __m512i nibbles_at(const uint8_t *code) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)code)); }
INLINE __m512i words_of(halves a, halves b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
}
INLINE __m512i words_bf16(vec a, vec b) { return words_of(narrow_u16(round_bf16(a) >> 16), narrow_u16(round_bf16(b) >> 16)); }
INLINE __m512i words_f16(vec a, vec b) { return words_of(narrow_f16(a), narrow_f16(b)); }
INLINE vec floats_of(__m128i bytes) { return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
#endif
