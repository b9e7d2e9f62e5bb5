// Unpacks rows of packed weights to elements of one format; included by format_body.h for each format, see there.
//
// If the includer defines WORDS (which rounds two vectors of floats to a vector of 32 16-bit elements), AVX-512 unpacks
// by tables: the levels times a group's scale are rounded once, and codes are looked up in this table. Of FP8 in
// bfloat16 only the lower five bits are looked up; the upper two bits of the exponent are added to the exponents, which
// is exact. Without WORDS codes become floats, which are scaled and rounded.

// What all rows of a span share: the groups of its four runs of 16 weights, counted from the first group of the
// segment; the levels in which codes are looked up, before scaling (`low`, `high`).
typedef struct {
    int64_t group[4];
#ifdef WORDS
    vec low, high;
#endif
} NAME(Span);

// Applies a group's scale and offset to values of codes.
INLINE vec NAME(scaled)(const int offsets, vec values, const Scales *s, int64_t group) {
    const vec scale = all(s->scale[group]);
    if (offsets == OFFSETS_NONE) return values * scale;
    const vec offset = all(s->offset[group]);
    return offsets == OFFSETS_ZERO ? (values - offset) * scale : values * scale - offset;
}

// Unpacks the weights of a span by way of floats; if is_tame, no weight is NaN, except for FP8 codes of NaN.
INLINE void NAME(unpack_floats)(const int codes, const int offsets, const bool is_tame, const Matrix *m, const uint8_t *code,
                                const uint8_t *high, const NAME(Span) *g, const Scales *s, ELEMENT *out) {
    // Groups have 16 weights or more, so both vectors have one scale if they are shorter: even and odd elements can stay
    // apart and become pairs of bfloat16 by a shift and a mask, without a shuffle.
    const bool is_split = TYPE == BF16 && LANES < 16 && codes != CODES_FP8;
#pragma GCC unroll 1
    for (int i = 0; i < SPAN; i += 2 * LANES) {
        const uint8_t *some = code + i * code_bits(codes) / 8, *some_high = high + i * high_bits(codes) / 8;
        pair v = codes == CODES_FP8 ? fp8_at(some) : values_at(codes, m->levels, some, some_high);
        if (!is_split && codes != CODES_FP8) v = in_order(v);
        v.a = NAME(scaled)(offsets, v.a, s, g->group[i / 16]);
        v.b = NAME(scaled)(offsets, v.b, s, g->group[(i + LANES) / 16]);
        if (is_split) {
            const bits both = bits_of(v.a, is_tame) >> 16 | (bits_of(v.b, is_tame) & 0xFFFF0000);
            memcpy(out + i, &both, sizeof both);
        } else {
            store(out + i, v.a, TYPE);
            store(out + i + LANES, v.b, TYPE);
        }
    }
}

#ifdef WORDS
// Unpacks a span of SPAN weights of one row by tables; returns false if that cannot handle its codes (FP8 NaN).
INLINE bool NAME(unpack_fast)(const int codes, const int offsets, const Matrix *m, const uint8_t *code,
                              const uint8_t *high, const NAME(Span) *g, const Scales *s, ELEMENT *out) {
    const __m512i low_nibbles = _mm512_set1_epi32(0x000F000F), sixteen = _mm512_set1_epi16(16);
#define SCALED(values, i) NAME(scaled)(offsets, values, s, g->group[i])
    if (codes == CODES_LEVELS4 || codes == CODES_UINT5) {
        __m512i table = WORDS(SCALED(g->low, 0), codes == CODES_UINT5 ? SCALED(g->high, 0) : SCALED(g->low, 2));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i raw = nibbles_at(code + 16 * half), shifted = _mm512_slli_epi32(raw, 12);
            __m512i number = _mm512_ternarylogic_epi32(raw, shifted, low_nibbles, 0xA8);  // (raw | shifted) & low_nibbles
            if (codes == CODES_UINT5) {
                uint32_t upper;
                memcpy(&upper, high + 4 * half, sizeof upper);
                if (half) table = WORDS(SCALED(g->low, 2), SCALED(g->high, 2));
                number = _mm512_mask_add_epi16(number, upper, number, sixteen);
            } else if (half) {  // selects the second half of the table; the look-up ignores higher bits
                number = _mm512_ternarylogic_epi32(raw, shifted, sixteen, 0xFE);
            }
            _mm512_storeu_si512(out + 32 * half, _mm512_permutexvar_epi16(number, table));
        }
        return true;
    }
    if (codes == CODES_INT8) {
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const vec a = floats_of(_mm_loadu_si128((const __m128i *)code + i));
            const vec b = floats_of(_mm_loadu_si128((const __m128i *)code + i + 1));
            _mm512_storeu_si512(out + 16 * i, WORDS(SCALED(a, i), SCALED(b, i + 1)));
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
        _mm512_storeu_si512(out, WORDS(SCALED(a, 0), SCALED(b, 1)));
        _mm512_storeu_si512(out + 32, WORDS(SCALED(c, 2), SCALED(d, 3)));
        return true;
    }
    if (codes == CODES_FP8 && TYPE == BF16) {
        // Without the sign, codes 0x08 to 0x7E are normal numbers, 0x7F is NaN, and smaller codes are zero or
        // subnormal.
        const __m512i raw = _mm512_loadu_si512(code), twice = _mm512_add_epi8(raw, raw);
        const __mmask64 odd = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(twice, _mm512_set1_epi8(0x10)), _mm512_set1_epi8((char)0xEC));
        if (odd && _mm512_cmpeq_epi8_mask(twice, _mm512_set1_epi8((char)0xFE))) return false;
        __m512i table = WORDS(SCALED(g->low, 0), SCALED(g->high, 0));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(code + 32 * half)));
            const __m512i rest = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16((short)0x8600));
            if (half && g->group[2] != g->group[0]) table = WORDS(SCALED(g->low, 2), SCALED(g->high, 2));
            __m512i words = _mm512_add_epi16(_mm512_permutexvar_epi16(wide, table), rest);
            if (__builtin_expect((uint32_t)(odd >> 32 * half), 0)) {
                const vec small = __builtin_convertvector(LANE_NUMBERS, vec) * 0x1p-9f;
                const __m512i few = _mm512_permutexvar_epi16(wide, WORDS(SCALED(small, 2 * half), small));
                words = _mm512_mask_add_epi16(words, odd >> 32 * half, few, rest);
            }
            _mm512_storeu_si512(out + 32 * half, words);
        }
        return true;
    }
#undef SCALED
    NAME(unpack_floats)(codes, offsets, true, m, code, high, g, s, out);
    return true;
}

// Returns the tables of a span, which depend only on the codes and levels.
INLINE NAME(Span) NAME(tables_of)(const int codes, const Matrix *m) {
    const vec numbers = __builtin_convertvector(LANE_NUMBERS, vec);
    NAME(Span) span;
    span.low = codes == CODES_LEVELS4 ? load(m->levels, F32) : codes == CODES_FP8 ? fp8_values(0) : numbers;
    span.high = codes == CODES_LEVELS4 ? span.low : codes == CODES_FP8 ? fp8_values(16) : numbers + 16.0f;
    return span;
}
#endif

INLINE void NAME(find_groups)(NAME(Span) *span, int64_t column, int64_t shift) {
    for (int i = 0; i < 4; i++) span->group[i] = ((column & (SEGMENT - 1)) + 16 * i) >> shift;
}

// Unpacks columns from..to of a row, within a segment, for any scales and codes; `from` is a multiple of SPAN.
static TARGET __attribute__((noinline)) void NAME(any_spans)(const Matrix *m, const uint8_t *row, int64_t from, int64_t to,
                                                             const Scales *s, ELEMENT *out) {
    const int codes = (int)m->codes;
    for (int64_t at = from; at < to; at += SPAN, out += SPAN) {
        const int64_t count = at_most(to - at, SPAN);
        uint8_t code[4 * SPAN] = {0}, high[SPAN / 4] = {0};
        memcpy(code, row + at * code_bits(codes) / 8, ceil_div(count * code_bits(codes), 8));
        memcpy(high, row + m->high + at * high_bits(codes) / 8, ceil_div(count * high_bits(codes), 8));
        ELEMENT some[SPAN];
        if (codes < CODES_BF16) {
            NAME(Span) span;
            NAME(find_groups)(&span, at, m->shift);
            NAME(unpack_floats)(codes, (int)m->offsets, false, m, code, high, &span, s, some);
        } else {
            for (int i = 0; i < SPAN; i += LANES) store(some + i, plain_at(code + i * code_bits(codes) / 8, codes), TYPE);
        }
        memcpy(out, some, count * sizeof(ELEMENT));
    }
}

// As any_spans, but faster as long as possible, and prefetches `ahead`.
INLINE void NAME(spans)(const int codes, const int offsets, const Matrix *m, const uint8_t *row,
                        int64_t from, int64_t to, const Scales *s, ELEMENT *out, Ahead *ahead) {
    bool is_fast = !s->is_wild;
#ifdef WORDS
    NAME(Span) span = NAME(tables_of)(codes, m);
    // Two groups would meet in a vector of codes that are looked up in one table.
    if (codes != CODES_INT8 && codes != CODES_INT6) is_fast &= m->shift >= 5;
#else
    NAME(Span) span;
#endif
    const uint8_t *code = row + from * code_bits(codes) / 8, *high = row + m->high + from * high_bits(codes) / 8;
    for (; is_fast && from + SPAN <= to; from += SPAN, out += SPAN) {
        NAME(find_groups)(&span, from, m->shift);
        __builtin_prefetch(ahead->at, 0, 2);
        // Moves the next codes from the second-level to the first-level cache.
        __builtin_prefetch((const char *)code + 64, 0, 3);
        ahead->at += ahead->step;
#ifdef WORDS
        if (!NAME(unpack_fast)(codes, offsets, m, code, high, &span, s, out)) break;
#else
        NAME(unpack_floats)(codes, offsets, true, m, code, high, &span, s, out);
#endif
        code += SPAN * code_bits(codes) / 8, high += SPAN * high_bits(codes) / 8;
    }
    if (__builtin_expect(from < to, false)) NAME(any_spans)(m, row, from, to, s, out);
}

// Unpacks columns from..to of a row, within a segment, by way of `spans` with constant codes and offsets.
INLINE void NAME(unpack_row)(const int codes, const Matrix *m, const uint8_t *row, int64_t from, int64_t to, const Scales *s,
                             ELEMENT *out, Ahead *ahead) {
    if (codes != CODES_FP8 && m->offsets == OFFSETS_ZERO)
        NAME(spans)(codes, OFFSETS_ZERO, m, row, from, to, s, out, ahead);
    else if (codes != CODES_FP8 && m->offsets == OFFSETS_MIN)
        NAME(spans)(codes, OFFSETS_MIN, m, row, from, to, s, out, ahead);
    else
        NAME(spans)(codes, OFFSETS_NONE, m, row, from, to, s, out, ahead);
}

// Unpacks columns from..to of n_rows rows; see `unpack` of Kernels.
static TARGET void NAME(unpack)(const Matrix *m, int64_t expert, int64_t row, int64_t n_rows, int64_t from, int64_t to,
                                Scales *scales, void *out, int64_t stride, Ahead ahead) {
    ELEMENT *elements = out;
    for (int64_t end; from < to; elements += end - from, from = end) {
        end = at_most((from / SEGMENT + 1) * SEGMENT, to);
        if (from % SEGMENT == 0) read_scales(m, expert, row, n_rows, from, scales);
        for (int64_t r = 0; r < n_rows; r++) {
            const uint8_t *data = (const uint8_t *)packed_row(m, expert, row + r);
            ELEMENT *to_row = elements + r * stride;
            switch (m->codes) {
                case CODES_FP8: NAME(unpack_row)(CODES_FP8, m, data, from, end, scales + r, to_row, &ahead); break;
                case CODES_INT8: NAME(unpack_row)(CODES_INT8, m, data, from, end, scales + r, to_row, &ahead); break;
                case CODES_LEVELS4: NAME(unpack_row)(CODES_LEVELS4, m, data, from, end, scales + r, to_row, &ahead); break;
                case CODES_UINT5: NAME(unpack_row)(CODES_UINT5, m, data, from, end, scales + r, to_row, &ahead); break;
                case CODES_INT6: NAME(unpack_row)(CODES_INT6, m, data, from, end, scales + r, to_row, &ahead); break;
                default: NAME(any_spans)(m, data, from, end, scales + r, to_row);
            }
        }
    }
}
