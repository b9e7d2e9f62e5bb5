// The functions of TileKernels for one instruction set; included after vectors.h. The includer defines
//   STEP      the products of 4 weights of each row and of activations, added to sums
//   MOST_X    operands whose sums stay in registers
//   MORE_KINDS  functions for FP8, see fp8_body.h
//   SET       the name of a function for this instruction set
// A tile has LANES rows for each of PARTS vectors.

enum { PARTS = TILE / LANES, MANY_X = 1 << (N_SIZES - 1) };
enum { MOST_INTEGER = 32639 };  // its upper byte and a signed lower one

typedef uint8_t code_bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t shifted __attribute__((vector_size(4 * LANES)));

INLINE code_bytes codes_at(const uint8_t *from) {
    code_bytes codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}
INLINE code_bytes shift_bits(code_bytes codes, const int right) {
    return (code_bytes)(right >= 0 ? (shifted)codes >> right : (shifted)codes << -right);
}

INLINE code_bytes table_of(const uint8_t *levels) {
    code_bytes table;
    for (size_t i = 0; i < sizeof table; i += 16) memcpy((uint8_t *)&table + i, levels, 16);
    return table;
}
INLINE float exp2_of(int exponent) {
    const int32_t raw = (exponent + 127) << 23;
    float power;
    memcpy(&power, &raw, sizeof power);
    return power;
}

// The codes of weights 4 * step..4 * step + 3 of each row of a block, from 0 upwards.
INLINE code_bytes unpack_step(const int kind, const int step, const uint8_t *codes, const uint8_t *high, code_bytes table) {
    if (kind == WEIGHTS_INT8) return codes_at(codes + 4 * TILE * step);
    const code_bytes raw = codes_at(codes + 4 * TILE * (step / 2));
    code_bytes some = (step % 2 ? shift_bits(raw, 4) : raw) & 15;
    if (kind == WEIGHTS_LEVELS4) some = LOOK_UP(table, some);
    if (kind == WEIGHTS_UINT5) some |= shift_bits(codes_at(high), step - 4) & 16;
    if (kind == WEIGHTS_INT6) some |= shift_bits(codes_at(high + 4 * TILE * (step / 4)), step % 4 * 2 - 4) & 48;
    return some;
}

// What a group's codes are multiplied with, and what is subtracted; both for LANES rows.
typedef struct {
    vec factor, min_factor, scale, offset;
} Group;

INLINE vec f16_at(const uint8_t *at) { return load((const uint16_t *)at, F16); }
INLINE vec byte_values(const uint8_t *at, const bool is_signed) {
    return is_signed ? signed_at(at, LANES) : unsigned_at(at, LANES);
}

// As powers_of, but 255 is infinite.
INLINE vec powers_at(const uint8_t *at) {
    const bits raw = bytes_at(at, LANES);
    return (vec)(raw << 23 | ((bits)(raw == 0) & 0x00400000));
}

// Reads the scales of a group for the rows of a part; returns where its offsets or what follows them begin.
INLINE const uint8_t *read_group(const Matrix *m, const uint8_t *at, int part, Group *g) {
    switch (m->scales) {
        case SCALES_F32: g->scale = load((const float *)at + part * LANES, F32), at += 4 * TILE; break;
        case SCALES_F16: g->scale = f16_at(at + part * LANES * 2), at += 2 * TILE; break;
        case SCALES_BF16: g->scale = load((const uint16_t *)at + part * LANES, BF16), at += 2 * TILE; break;
        case SCALES_E8M0: g->scale = powers_at(at + part * LANES), at += TILE; break;
        default: g->scale = g->factor * byte_values(at + part * LANES, true), at += TILE;
    }
    if (m->offsets != OFFSETS_NONE) {
        g->offset = byte_values(at + part * LANES, false) * (m->offsets == OFFSETS_ZERO ? g->scale : g->min_factor);
        at += TILE;
    }
    g->scale *= m->unit;
    return at;
}

// The products of one part of a tile and n_x operands.
INLINE void multiply_tile(const int kind, const int n_x, const Matrix *m, const uint8_t *at, int part, const void *const *operands,
                          vec *out) {
    const Block *const *x = (const Block *const *)operands;
    // Sums are scaled for each 16 weights where groups may be so small.
    const int per_sum = kind == WEIGHTS_INT6 ? 16 : INTEGERS, n_sums = INTEGERS / per_sum;
    const int64_t high_bytes = kind == WEIGHTS_UINT5 ? 4 * TILE : kind == WEIGHTS_INT6 ? 8 * TILE : 0;
    const int64_t n_code_bytes = TILE * INTEGERS / (kind == WEIGHTS_INT8 ? 1 : 2), n_blocks = m->n_in / INTEGERS;
    const int64_t blocks_of_group = m->shift < 62 ? at_least((int64_t)1 << m->shift >> 5, 1) : n_blocks;
    const bool is_fine = m->shift < 5, has_offsets = m->offsets != OFFSETS_NONE;
    const code_bytes table = table_of(m->table);
    Group g = {0};
    vec acc[MOST_X];
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) acc[i] = (vec){0};
    const int64_t far = 2 * ahead_bytes;
    const uint8_t *scales = at, *ahead = at + far;
    for (int64_t block = 0, left = 0; block < n_blocks; block++) {
        if (m->scales == SCALES_SUPER && block % 8 == 0) {
            g.factor = f16_at(at + part * LANES * 2), at += 2 * TILE;
            if (has_offsets) g.min_factor = f16_at(at + part * LANES * 2), at += 2 * TILE;
        }
        if (!left--) {
            left = blocks_of_group - 1;
            scales = read_group(m, at, part, &g);
            at = scales + (is_fine ? scales - at : 0);
        }
        const uint8_t *codes = at + high_bytes, *high = at + part * LANES * 4;
        codes += part * LANES * 4;
        at += high_bytes + n_code_bytes;
#pragma GCC unroll 2
        for (int n = 0; n < n_sums; n++) {
            if (n && is_fine) read_group(m, scales, part, &g);
            SUMS_OF_STEPS sums[MOST_X];
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++) {
                int32_t less = 0;  // what codes from 0 upwards are too much
                for (int s = 0; s < per_sum / 16; s++) less -= x[i][block].sums[n + s] * (int32_t)m->zero;
                sums[i] = START(less);
            }
#pragma GCC unroll 8
            for (int step = n * per_sum / 4; step < (n + 1) * per_sum / 4; step++) {
                if (part == 0 && ahead < at + far) __builtin_prefetch(ahead, 0, 2), ahead += 64;
                const code_bytes some = unpack_step(kind, step, codes, high, table);
#pragma GCC unroll 8
                for (int i = 0; i < n_x; i++) sums[i] = STEP(sums[i], some, x[i] + block, step);
            }
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++)
                acc[i] = fma_of(__builtin_convertvector(TOTAL(sums[i]), vec), g.scale * x[i][block].scale, acc[i]);
        }
        if (has_offsets) {
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++) acc[i] = fma_of(-g.offset, all(x[i][block].sum), acc[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) out[i] = acc[i];
}

INLINE void finish_part(const Product *p, int64_t row, int64_t position, vec total) {
    const int64_t type = p->dtype, bytes = bytes_of(type);
    char *out = (char *)p->out + (position * p->n_out + row) * bytes;
    const char *bias = (const char *)p->bias + row * bytes;
#define FINISH(type, element)                                              \
    if (p->bias_mode == ROUNDED_BIAS) total = rounded(total, type);        \
    if (p->bias_mode != NO_BIAS) total += load((const element *)bias, type); \
    store((element *)out, total, type)
    if (type == BF16) {
        FINISH(BF16, uint16_t);
    } else {
        FINISH(F16, uint16_t);
    }
#undef FINISH
}

#define WITH_X(kind, n)                                                             \
    static TARGET __attribute__((noinline)) void INTEGER_SET(multiply_##kind##_##n)(        \
        const Matrix *m, const uint8_t *tile, const void *const *x, void *out) { \
        for (int part = 0; part < PARTS; part++)                                    \
            multiply_tile(WEIGHTS_##kind, n, m, tile, part, x, (vec *)out + part * MANY_X); \
    }
#define WITH_KIND(kind) EACH_X(WITH_X, kind)
WITH_KIND(INT8)
WITH_KIND(UINT4)
WITH_KIND(LEVELS4)
WITH_KIND(UINT5)
WITH_KIND(INT6)
#undef WITH_X
#undef WITH_KIND


// Those for 1, 2, 4 ... MANY_X operands, where there are some.
#define OF_KIND(kind) {EACH_X(NAME_OF, kind)}
#define NAME_OF(kind, n) INTEGER_SET(multiply_##kind##_##n),
static MultiplyTile *const INTEGER_SET(multiply)[][N_SIZES] = {OF_KIND(INT8), OF_KIND(UINT4), OF_KIND(LEVELS4), OF_KIND(UINT5), OF_KIND(INT6), MORE_KINDS};
#undef OF_KIND
#undef NAME_OF

// A block of weight rows meets all operands while it is near; then the next one.
static TARGET void INTEGER_SET(project_tiles)(const Product *p) {
    for (int64_t start = p->from; start < p->to; start += ITEM_ROWS) {
        const int64_t end = at_most(start + ITEM_ROWS, p->to);
        for (int64_t first = p->first; first < p->last;) {
            MultiplyTile *const *sizes = INTEGER_SET(multiply)[p->parts->kind - 1];
            int size = N_SIZES - 1;
            while (!sizes[size] || 1 << size > p->last - first) size--;
            const int n_x = 1 << size;
            const void *x[MANY_X];
            for (int i = 0; i < n_x; i++) {
                const int64_t number = p->index ? p->index[first + i] : first + i;
                x[i] = (const char *)p->operands + number * p->stride;
            }
            for (int64_t row = start; row < end; row += TILE) {
                const Matrix *m = p->parts + (row >= p->parts->n_out);
                const uint8_t *tile = (const uint8_t *)row_of_parts(p->parts, p->expert, row);
                vec out[PARTS * MANY_X];
                INTEGER_SET(multiply)[m->kind - 1][size](m, tile, x, out);
                for (int i = 0; i < n_x; i++)
                    for (int part = 0; part < PARTS; part++)
                        finish_part(p, row + part * LANES, first + i, out[part * MANY_X + i]);
            }
            first += n_x;
        }
    }
}

// Values of a block as integers of 16 bits, in their order.
static TARGET void INTEGER_SET(prepare_integers)(const void *row, int64_t type, void *operand, int64_t n) {
    Block *block = operand;
    for (int64_t at = 0; at < n; at += INTEGERS, block++) {
        float values[INTEGERS];
        for (int i = 0; i < INTEGERS; i += LANES)
            store(values + i, type == BF16 ? load((const uint16_t *)row + at + i, BF16) : load((const uint16_t *)row + at + i, F16), F32);
        uint32_t most = 0;
        for (int i = 0; i < INTEGERS; i++) {
            uint32_t raw;
            memcpy(&raw, values + i, sizeof raw);
            most = (raw & 0x7FFFFFFF) > most ? raw & 0x7FFFFFFF : most;
        }
        // The largest has 15 bits and a sign.
        const int exponent = (int)at_least(most >> 23, 32) - 127 - 14;
        const bool is_finite = most < 0x7F800000;
        const float scale = exp2_of(exponent), inverse = is_finite ? exp2_of(-exponent) : 0.0f;
        int32_t integers[INTEGERS];
        for (int i = 0; i < INTEGERS; i += LANES) {
            const vec scaled = is_finite ? load(values + i, F32) * inverse : (vec){0};
            const ints whole = NEAREST(scaled);
            memcpy(integers + i, &whole, sizeof whole);
        }
        int32_t total = 0;
        for (int half = 0; half < INTEGERS / 16; half++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) {
                int32_t *each = integers + 16 * half + i;
                *each = *each > MOST_INTEGER ? MOST_INTEGER : *each;
                sum += *each;
            }
            block->sums[half] = sum;
            total += sum;
        }
        store_integers(block, integers);
        block->scale = is_finite ? scale : (float)NAN;
        block->sum = is_finite ? (float)total * scale : (float)NAN;
    }
}

const TileKernels INTEGER_SET(integers) = {sizeof(Block), INTEGER_SET(prepare_integers), INTEGER_SET(project_tiles)};
