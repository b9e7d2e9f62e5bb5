// The functions of TileKernels for one instruction set; included after vectors.h. The includer defines
//   SUMS_OF_STEPS  type of the sums of one operand
//   STEP      adds the products of 4 weights of each row and 4 activations to the sums
//   START     sums with these initial values
//   TOTAL     reduces the sums to one integer per row
//   SHIFTED   shifts integers left; a shift by 32 or more gives 0
//   LOOK_UP   looks up 4-bit codes in a table
//   NEAREST   rounds floats to integers
//   MOST_X    the most operands whose sums stay in registers
//   EACH_X    applies a macro to each supported number of operands
//   INTEGER_SET  the name of a function for this instruction set
// The 16 rows of a tile are PARTS vectors of LANES rows.

enum { PARTS = TILE / LANES };
enum { MOST_INTEGER = 32639 };  // the largest that fits a signed upper and a signed lower byte: 127 * 256 + 127

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

// Returns the codes, as unsigned bytes, of weights 4 * step..4 * step + 3 of each row of a part of a block.
INLINE code_bytes unpack_step(const int kind, const int step, const uint8_t *codes, const uint8_t *high, code_bytes table) {
    if (kind == WEIGHTS_INT8) return codes_at(codes + 4 * TILE * step);
    const code_bytes raw = codes_at(codes + 4 * TILE * (step / 2));
    code_bytes some = (step % 2 ? shift_bits(raw, 4) : raw) & 15;
    if (kind == WEIGHTS_LEVELS4) some = LOOK_UP(table, some);
    if (kind == WEIGHTS_UINT5) some |= shift_bits(codes_at(high), step - 4) & 16;
    if (kind == WEIGHTS_INT6) some |= shift_bits(codes_at(high + 4 * TILE * (step / 4)), step % 4 * 2 - 4) & 48;
    return some;
}

// Scale and offset of a group, and the factors that super-groups share, for LANES rows each.
typedef struct {
    vec factor, min_factor, scale, offset;
} Group;

INLINE vec f16_at(const uint8_t *at) { return load((const uint16_t *)at, F16); }
INLINE vec byte_values(const uint8_t *at, const bool is_signed) {
    return is_signed ? signed_at(at, LANES) : unsigned_at(at, LANES);
}

// As powers_of, but 255 is infinity.
INLINE vec powers_at(const uint8_t *at) {
    const bits raw = bytes_at(at, LANES);
    return (vec)(raw << 23 | ((bits)(raw == 0) & 0x00400000));
}

// Reads the scales and offsets of a group for the rows of a part; returns the address behind those of the whole tile.
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

// Multiplies one part (LANES rows) of a tile by n_x operands, block by block in the order in which the tile is stored;
// see tiles.h for the order of sums.
INLINE void multiply_tile(const int kind, const int n_x, const Matrix *m, const uint8_t *at, int part, Fetch fetch,
                          const void *const *operands, vec *out) {
    const Block *x[MOST_X];
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) x[i] = operands[i];
    // INT6 may have groups of 16 weights, so its sums are scaled after each 16.
    const int per_sum = kind == WEIGHTS_INT6 ? 16 : INTEGERS, n_sums = INTEGERS / per_sum;
    const int64_t high_bytes = kind == WEIGHTS_UINT5 ? 4 * TILE : kind == WEIGHTS_INT6 ? 8 * TILE : 0;
    const int64_t n_code_bytes = TILE * INTEGERS / (kind == WEIGHTS_INT8 ? 1 : 2), n_blocks = m->n_in / INTEGERS;
    const int64_t blocks_of_group = m->shift < 62 ? at_least((int64_t)1 << m->shift >> 5, 1) : n_blocks;
    const bool is_fine = m->shift < 5, has_offsets = m->offsets != OFFSETS_NONE;
    const code_bytes table = table_of(m->table);
    const ints zero = (ints){0} + (int32_t)m->zero_shift;
    Group g = {0};
    vec total[MOST_X];
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) total[i] = (vec){0};
    const uint8_t *scales = at, *begin = at;
    for (int64_t first = 0, left = 0; first < n_blocks; first += SCALED) {
        vec acc[MOST_X];
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) acc[i] = (vec){0};
        if (m->scales == SCALES_SUPER) {
            g.factor = f16_at(at + part * LANES * 2), at += 2 * TILE;
            if (has_offsets) g.min_factor = f16_at(at + part * LANES * 2), at += 2 * TILE;
        }
        for (int64_t block = first; block < at_most(first + SCALED, n_blocks); block++) {
            if (!left--) {
                left = blocks_of_group - 1;
                scales = read_group(m, at, part, &g);
                at = scales + (is_fine ? scales - at : 0);
            }
            const uint8_t *codes = at + high_bytes, *high = at + part * LANES * 4;
            codes += part * LANES * 4;
            at += high_bytes + n_code_bytes;
            const bool fetches = part == 0 && (block & (fetch.every - 1)) == fetch.turn;
            const uint8_t *ahead = begin + fetch.far, *const ahead_end = fetches ? at + fetch.far : ahead;
            if (fetches) prefetch_weights(ahead, fetch.past), ahead += 64;
            begin = at;
#pragma GCC unroll 2
            for (int n = 0; n < n_sums; n++) {
                if (n && is_fine) read_group(m, scales, part, &g);
                SUMS_OF_STEPS sums[MOST_X];
#pragma GCC unroll 8
                for (int i = 0; i < n_x; i++) {
                    const int32_t less = n_sums > 1 ? x[i]->less[n] : x[i]->all_less;
                    sums[i] = START(SHIFTED((ints){0} + less, zero));  // codes are unsigned: subtracts the zero
                }
#pragma GCC unroll 8
                for (int step = n * per_sum / 4; step < (n + 1) * per_sum / 4; step++) {
                    if (ahead < ahead_end) prefetch_weights(ahead, fetch.past), ahead += 64;
                    const code_bytes some = unpack_step(kind, step, codes, high, table);
#pragma GCC unroll 8
                    for (int i = 0; i < n_x; i++) sums[i] = STEP(sums[i], some, x[i], step);
                }
#pragma GCC unroll 8
                for (int i = 0; i < n_x; i++) acc[i] = fma_of(__builtin_convertvector(TOTAL(sums[i]), vec), g.scale, acc[i]);
            }
            if (has_offsets) {
#pragma GCC unroll 8
                for (int i = 0; i < n_x; i++) acc[i] = fma_of(-g.offset, all(x[i]->sum), acc[i]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++) x[i]++;
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) total[i] = fma_of(acc[i], all(((const Block *)operands[i])[first].scale), total[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) out[i] = total[i];
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
    static TARGET __attribute__((noinline)) void INTEGER_SET(multiply_##kind##_##n)(                  \
        int n_x, const Matrix *m, const uint8_t *tile, Fetch fetch, const void *const *x, void *out) { \
        for (int part = 0; part < PARTS; part++)                                                      \
            multiply_tile(WEIGHTS_##kind, n, m, tile, part, fetch, x, (vec *)out + part * MANY_X);     \
    }
#define WITH_KIND(kind) EACH_X(WITH_X, kind)
WITH_KIND(INT8)
WITH_KIND(UINT4)
WITH_KIND(LEVELS4)
WITH_KIND(UINT5)
WITH_KIND(INT6)
#undef WITH_X
#undef WITH_KIND


#define OF_KIND(kind) {EACH_X(NAME_OF, kind)}
#define NAME_OF(kind, n) INTEGER_SET(multiply_##kind##_##n),
static MultiplyTile *const INTEGER_SET(multiply)[][N_SIZES] = {OF_KIND(INT8), OF_KIND(UINT4), OF_KIND(LEVELS4), OF_KIND(UINT5), OF_KIND(INT6)};
#undef OF_KIND
#undef NAME_OF

// Chooses what to prefetch while a tile is multiplied by n_x operands, `most` in other turns: the bytes shortly behind if
// there is only one set of operands, else a share of the tile that is a block of rows (ITEM_ROWS) further on.
INLINE Fetch fetch_of(const Product *p, const uint8_t *tile, int64_t row, int64_t n_x, int64_t most, int64_t turn) {
    int64_t every = 1;
    if (p->last - p->first <= n_x) return (Fetch){2 * ahead_bytes, every, 0, passes_caches};
    while (every < 8 && 2 * every * most <= p->last - p->first) every *= 2;
    const int64_t next = row + ITEM_ROWS;
    const char *from = next < p->to ? row_of_parts(p->parts, p->expert, next) : p->following;
    if (!from) return (Fetch){0, every, every, false};
    if (next >= p->to) from += row % ITEM_ROWS * p->parts->row_bytes;
    return (Fetch){(const uint8_t *)from - tile, every, turn, false};
}

// Multiplies weight rows from..to by all operands: each block of ITEM_ROWS rows by all of them while it is in the
// cache.
static TARGET void INTEGER_SET(project_tiles)(const Product *p) {
    for (int64_t start = p->from; start < p->to; start += ITEM_ROWS) {
        const int64_t end = at_most(start + ITEM_ROWS, p->to);
        MultiplyTile *const *sizes = p->tiles->multiply[p->parts->kind - 1];
        int largest = MANY - 1;
        while (!sizes[largest]) largest--;
        const int64_t most = sizes[MANY] ? MANY_X : 1 << largest;
        for (int64_t first = p->first, turn = 0; first < p->last; turn++) {
            const int64_t left = p->last - first;
            int size = largest;
            while (1 << size > left) size--;
            if (sizes[MANY] && left > 1 << largest) size = MANY;
            const int n_x = size == MANY ? (int)ceil_div(left, ceil_div(left, MANY_X)) : 1 << size;
            const void *x[MANY_X];
            for (int i = 0; i < n_x; i++) {
                const int64_t number = p->index ? p->index[first + i] : first + i;
                x[i] = (const char *)p->operands + number * p->stride;
            }
            for (int64_t row = start; row < end; row += TILE) {
                const Matrix *m = p->parts + (row >= p->parts->n_out);
                const uint8_t *tile = (const uint8_t *)row_of_parts(p->parts, p->expert, row);
                vec out[PARTS * MANY_X];
                p->tiles->multiply[m->kind - 1][size](n_x, m, tile, fetch_of(p, tile, row, n_x, most, turn), x, out);
                for (int i = 0; i < n_x; i++)
                    for (int part = 0; part < PARTS; part++)
                        finish_part(p, row + part * LANES, first + i, out[part * MANY_X + i]);
            }
            first += n_x;
        }
    }
}

// Converts n values, at most SCALED blocks, to 16-bit integers with one common scale, a power of two. If a value is not
// finite, the scale is NaN and the integers are 0.
INLINE void prepare_blocks(const void *row, int64_t type, Block *blocks, int64_t n) {
    float values[INTEGERS * SCALED];
    for (int64_t i = 0; i < n; i += LANES) store(values + i, load((const uint16_t *)row + i, type), F32);
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t raw;
        memcpy(&raw, values + i, sizeof raw);
        most = (raw & 0x7FFFFFFF) > most ? raw & 0x7FFFFFFF : most;
    }
    // The largest integer has 15 bits and a sign.
    const int exponent = (int)at_least(most >> 23, 32) - 127 - 14;
    const bool is_finite = most < 0x7F800000;
    const float inverse = is_finite ? exp2_of(-exponent) : 0.0f;
    blocks->scale = is_finite ? exp2_of(exponent) : (float)NAN;
    for (int64_t at = 0; at < n; at += INTEGERS) {
        Block *block = blocks + at / INTEGERS;
        int32_t integers[INTEGERS];
        for (int i = 0; i < INTEGERS; i += LANES) {
            const vec scaled = is_finite ? load(values + at + i, F32) * inverse : (vec){0};
            const ints whole = NEAREST(scaled);
            memcpy(integers + i, &whole, sizeof whole);
        }
        for (int half = 0; half < INTEGERS / 16; half++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) {
                int32_t *each = integers + 16 * half + i;
                *each = *each > MOST_INTEGER ? MOST_INTEGER : *each;
                sum += *each;
            }
            block->less[half] = -sum;
        }
        block->all_less = block->less[0] + block->less[1];
        block->sum = -(float)block->all_less;
        store_integers(block, integers);
    }
}
static TARGET void INTEGER_SET(prepare_integers)(const void *row, int64_t type, void *operand, int64_t n) {
    for (int64_t at = 0; at < n; at += INTEGERS * SCALED) {
        const uint16_t *from = (const uint16_t *)row + at;
        Block *blocks = (Block *)operand + at / INTEGERS;
        const int64_t some = at_most(INTEGERS * SCALED, n - at);
        if (type == BF16)
            prepare_blocks(from, BF16, blocks, some);
        else
            prepare_blocks(from, F16, blocks, some);
    }
}

const TileKernels INTEGER_SET(integers) = {
    sizeof(Block), INTEGER_SET(prepare_integers), INTEGER_SET(project_tiles), INTEGER_SET(multiply)};
