// Rows of packed weights as elements of one format; included by format_body.h for each, see there.
//
// Where the includer defines WORDS, 32 elements of 16 bits out of two vectors of floats, AVX-512 does the work: levels
// times a scale are rounded once for a group, and codes are looked up among them.

#ifdef WORDS
INLINE vec NAME(scaled)(const bool has_offsets, const Matrix *m, vec values, const Scales *s, int64_t group) {
    if (!has_offsets) return values * all(s->scale[group]);
    const vec offset = all(s->offset[group]);
    return m->offsets == OFFSETS_ZERO ? (values - offset) * all(s->scale[group]) : values * all(s->scale[group]) - offset;
}

// As unpack_span; returns whether it could.
INLINE bool NAME(unpack_fast)(const int codes, const bool has_offsets, const Matrix *m, const uint8_t *code,
                              const uint8_t *high, int64_t at, int64_t first, const Scales *s, ELEMENT *out) {
    const __m512i low_nibbles = _mm512_set1_epi32(0x000F000F), sixteen = _mm512_set1_epi16(16);
#define GROUP(i) (((at + (i)) >> m->shift) - first)
#define SCALED(values, i) NAME(scaled)(has_offsets, m, values, s, GROUP(i))
    if (codes < CODES_BF16 && s->is_wild) return false;
    if (codes == CODES_LEVELS4 || codes == CODES_UINT5) {
        if (m->shift < 5) return false;
        const vec levels = codes == CODES_LEVELS4 ? load(m->levels, F32) : (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        __m512i table = WORDS(SCALED(levels, 0), codes == CODES_UINT5 ? SCALED(levels + 16.0f, 0) : SCALED(levels, 32));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i raw = nibbles_at(code + 16 * half), shifted = _mm512_slli_epi32(raw, 12);
            __m512i number = _mm512_ternarylogic_epi32(raw, shifted, low_nibbles, 0xA8);  // (raw | shifted) & low_nibbles
            if (codes == CODES_UINT5) {
                uint32_t upper;
                memcpy(&upper, high + 4 * half, sizeof upper);
                if (half) table = WORDS(SCALED(levels, 32), SCALED(levels + 16.0f, 32));
                number = _mm512_mask_add_epi16(number, upper, number, sixteen);
            } else if (half) {  // the second half of the table; bits above it do not count
                number = _mm512_ternarylogic_epi32(raw, shifted, sixteen, 0xFE);
            }
            _mm512_storeu_si512(out + 32 * half, _mm512_permutexvar_epi16(number, table));
        }
        return true;
    }
    if (codes == CODES_INT8) {
#pragma GCC unroll 2
        for (int i = 0; i < SPAN; i += 32) {
            const vec a = floats_of(_mm_loadu_si128((const __m128i *)(code + i)));
            const vec b = floats_of(_mm_loadu_si128((const __m128i *)(code + i + 16)));
            _mm512_storeu_si512(out + i, WORDS(SCALED(a, i), SCALED(b, i + 16)));
        }
        return true;
    }
    if (codes == CODES_INT6) {
        const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)code)), up = nibbles_at(high);
        const __m512i nibbles = _mm512_and_si512(_mm512_or_si512(low, _mm512_slli_epi16(low, 4)), _mm512_set1_epi8(15));
        const __m512i first_two = _mm512_or_si512(_mm512_slli_epi32(up, 4), _mm512_slli_epi32(up, 10));
        const __m512i last_two = _mm512_or_si512(_mm512_slli_epi32(up, 16), _mm512_slli_epi32(up, 22));
        const __m512i pairs = _mm512_ternarylogic_epi32(first_two, last_two, _mm512_set1_epi8(0x30), 0xA8);
        const __m512i whole = _mm512_sub_epi8(_mm512_or_si512(nibbles, pairs), _mm512_set1_epi8(32));
        const vec a = floats_of(_mm512_castsi512_si128(whole)), b = floats_of(_mm512_extracti32x4_epi32(whole, 1));
        const vec c = floats_of(_mm512_extracti32x4_epi32(whole, 2)), d = floats_of(_mm512_extracti32x4_epi32(whole, 3));
        _mm512_storeu_si512(out, WORDS(SCALED(a, 0), SCALED(b, 16)));
        _mm512_storeu_si512(out + 32, WORDS(SCALED(c, 32), SCALED(d, 48)));
        return true;
    }
    if (codes == CODES_FP8) {
        const __m512i raw = _mm512_loadu_si512(code);
        const bool has_nan = _mm512_cmpeq_epi8_mask(_mm512_add_epi8(raw, raw), _mm512_set1_epi8((char)0xFE));
        if (has_nan) return false;
#pragma GCC unroll 2
        for (int i = 0; i < SPAN; i += 32) {
            // As float16, which is a 256th: 4 bits of the exponent and 3 of the fraction below a sign.
            const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(code + i)));
            const __m512i half = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xBF80));
            const vec a = (vec)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
            const vec b = (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
            _mm512_storeu_si512(out + i, WORDS(a * all(s->offset[GROUP(i)]), b * all(s->offset[GROUP(i + 16)])));
        }
        return true;
    }
#undef GROUP
#undef SCALED
    return false;
}
#endif

// SPAN weights from `at` on, a multiple of SPAN; `first` is the group of s->scale[0].
INLINE void NAME(unpack_span)(const int codes, const bool has_offsets, const Matrix *m, const uint8_t *code,
                               const uint8_t *high, int64_t at, int64_t first, const Scales *s, ELEMENT *out) {
#ifdef WORDS
    if (NAME(unpack_fast)(codes, has_offsets, m, code, high, at, first, s, out)) return;
#endif
    float values[SPAN];
    values_of(codes, m, code, high, values);
    for (int i = 0; i < SPAN; i += LANES) {
        const int64_t group = ((at + i) >> m->shift) - first;
        vec some = load(values + i, F32);
        if (has_offsets && m->offsets == OFFSETS_ZERO) some -= s->offset[group];
        if (codes < CODES_BF16) some *= s->scale[group];
        if (has_offsets && m->offsets == OFFSETS_MIN) some -= s->offset[group];
        store(out + i, some, TYPE);
    }
}

// from..to lie in one segment.
INLINE void NAME(unpack_row)(const int codes, const bool has_offsets, const Matrix *m, const char *row, int64_t from,
                             int64_t to, const Scales *s, ELEMENT *out) {
    const int64_t first = from / SEGMENT * SEGMENT >> m->shift;
    int64_t at = from;
    for (; at + SPAN <= to; at += SPAN)
        NAME(unpack_span)(codes, has_offsets, m, (const uint8_t *)row + at * code_bits(codes) / 8,
                           (const uint8_t *)row + m->high + at * high_bits(codes) / 8, at, first, s, out + at - from);
    if (at == to) return;
    uint8_t code[4 * SPAN] = {0}, high[SPAN / 4] = {0};
    ELEMENT rest[SPAN];
    memcpy(code, row + at * code_bits(codes) / 8, ceil_div((to - at) * code_bits(codes), 8));
    memcpy(high, row + m->high + at * high_bits(codes) / 8, ceil_div((to - at) * high_bits(codes), 8));
    NAME(unpack_span)(codes, has_offsets, m, code, high, at, first, s, rest);
    memcpy(out + at - from, rest, (to - at) * sizeof(ELEMENT));
}

#define ROWS(codes)                                                                                             \
    case codes:                                                                                                 \
        for (int64_t r = 0; r < n_rows; r++, row_data += m->row_bytes)                                          \
            if (m->offsets == OFFSETS_NONE || codes == CODES_FP8 || codes >= CODES_BF16)                        \
                NAME(unpack_row)(codes, false, m, row_data, from, end, scales + r, elements + r * stride);      \
            else                                                                                                \
                NAME(unpack_row)(codes, true, m, row_data, from, end, scales + r, elements + r * stride);       \
        break;
// See Kernels.
static TARGET void NAME(unpack)(const Matrix *m, int64_t expert, int64_t row, int64_t n_rows, int64_t from, int64_t to,
                                Scales *scales, void *out, int64_t stride) {
    for (int64_t end; from < to; out = (ELEMENT *)out + end - from, from = end) {
        end = at_most((from / SEGMENT + 1) * SEGMENT, to);
        if (from % SEGMENT == 0 && m->scales != SCALES_NONE)
            for (int64_t r = 0; r < n_rows; r++) read_scales(m, expert, row + r, from, scales + r);
        const char *row_data = packed_row(m, expert, row);
        ELEMENT *elements = out;
        switch (m->codes) {
            ROWS(CODES_FP8)
            ROWS(CODES_INT8)
            ROWS(CODES_LEVELS4)
            ROWS(CODES_UINT5)
            ROWS(CODES_INT6)
            ROWS(CODES_BF16)
            ROWS(CODES_F16)
            ROWS(CODES_F32)
        }
    }
}
#undef ROWS
