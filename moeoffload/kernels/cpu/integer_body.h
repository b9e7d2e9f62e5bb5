// The functions of TileKernels for one instruction set; included after vectors.h. The includer defines
//   SUMS_OF_STEPS  type of the sums of one operand
//   STEP      adds the products of 4 weights of each row and 4 activations to the sums
//   START     sums with these initial values
//   TOTAL     reduces the sums to one integer per row
//   SHIFTED   shifts integers left by less than 32
//   LOOK_UP   looks up 4-bit codes in a table
//   NEAREST   rounds floats to integers
//   MOST_X    the most operands whose sums stay in registers
// The 16 rows of a tile are PARTS vectors of LANES rows.

enum { PARTS = TILE / LANES };
#define MOST_INTEGER 32639.0f  // the largest that fits a signed upper and a signed lower byte: 127 * 256 + 127

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

// Returns the codes, as unsigned bytes, of weights 4 * step..4 * step + 3 of each row of a part of a block; not for INT8.
INLINE code_bytes unpack_step(const int kind, const int step, const uint8_t *codes, const uint8_t *high, code_bytes table) {
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

// As powers_of, but 255 is infinity.
INLINE vec powers_at(const uint8_t *at) {
    const bits raw = bytes_at(at, LANES);
    return (vec)(raw << 23 | ((bits)(raw == 0) & 0x00400000));
}

// Reads the scales and offsets of a group for the rows of a part; returns the address behind those of the whole tile.
INLINE const uint8_t *read_group(const Matrix *m, const uint8_t *at, int part, Group *g) {
    switch (m->scales) {
        case SCALES_F32: g->scale = load(at + part * LANES * 4, F32), at += 4 * TILE; break;
        case SCALES_F16: g->scale = load(at + part * LANES * 2, F16), at += 2 * TILE; break;
        case SCALES_BF16: g->scale = load(at + part * LANES * 2, BF16), at += 2 * TILE; break;
        case SCALES_E8M0: g->scale = powers_at(at + part * LANES), at += TILE; break;
        default: g->scale = g->factor * signed_at(at + part * LANES, LANES), at += TILE;
    }
    if (m->offsets != OFFSETS_NONE) {
        g->offset = unsigned_at(at + part * LANES, LANES) * (m->offsets == OFFSETS_ZERO ? g->scale : g->min_factor);
        at += TILE;
    }
    g->scale *= m->unit;
    return at;
}

// Reads a part (LANES rows) of a tile, block by block in the order in which they are stored. The scales of a block are
// those of the block before while blocks of its group are `left`; those at `scales` are of its last 16 weights if groups
// have only 16. What is to be prefetched meanwhile lies between `ahead` and ahead_end.
typedef struct {
    const Matrix *m;
    const uint8_t *at, *scales, *ahead, *ahead_end;
    int64_t part, left, blocks_of_group;
    Fetch fetch;
    Group g;
    code_bytes table;
} Reader;

INLINE void prefetch_next(Reader *r) {
    if (r->ahead < r->ahead_end) prefetch_weights(r->ahead, r->fetch.past), r->ahead += 64;
}

// A block of LANES rows: codes as unsigned bytes, 4 of each row in a vector (those of INT8 stay `in_tile`); scales of the
// first and the last 16 weights, which differ only for INT6; offsets.
typedef struct {
    code_bytes codes[INTEGERS / 4];
    const uint8_t *in_tile;
    vec scale[2], offset;
} Unpacked;

// Sums of INT6 are scaled after each 16 weights, since its groups may be so small.
INLINE int sums_of(const int kind) { return kind == WEIGHTS_INT6 ? 2 : 1; }

INLINE void unpack_block(const int kind, Reader *r, int64_t block, Unpacked *to) {
    const Matrix *m = r->m;
    const uint8_t *const begin = r->at;
    const int64_t part = r->part, high_bytes = kind == WEIGHTS_UINT5 ? 4 * TILE : kind == WEIGHTS_INT6 ? 8 * TILE : 0;
    if (m->scales == SCALES_SUPER && block % SCALED == 0) {
        r->g.factor = load(r->at + part * LANES * 2, F16), r->at += 2 * TILE;
        if (m->offsets != OFFSETS_NONE) r->g.min_factor = load(r->at + part * LANES * 2, F16), r->at += 2 * TILE;
    }
    const bool is_fine = kind == WEIGHTS_INT6 && m->shift < 5;
    if (!r->left--) {
        r->left = r->blocks_of_group - 1;
        r->scales = read_group(m, r->at, part, &r->g);
        r->at = r->scales + (is_fine ? r->scales - r->at : 0);
    }
    to->scale[0] = r->g.scale, to->offset = r->g.offset;
    if (is_fine) read_group(m, r->scales, part, &r->g);
    to->scale[1] = r->g.scale;
    const uint8_t *high = r->at + part * LANES * 4, *codes = high + high_bytes;
    r->at += high_bytes + TILE * INTEGERS / (kind == WEIGHTS_INT8 ? 1 : 2);
    to->in_tile = codes;
    if (part == 0 && (block / SCALED & (r->fetch.every - 1)) == r->fetch.turn) {
        if (block % SCALED == 0) r->ahead = begin + r->fetch.far;
        r->ahead_end = r->at + r->fetch.far;
    }
    prefetch_next(r);  // a block is longer than what its steps prefetch
#pragma GCC unroll 8
    for (int step = 0; step < INTEGERS / 4; step++)
        if (kind != WEIGHTS_INT8) to->codes[step] = unpack_step(kind, step, codes, high, r->table);
}

// Adds the products of a block and n_x operands to `acc`, and prefetches; see tiles.h for the order of sums.
INLINE void multiply_block(const int kind, const int n_x, Reader *r, const Unpacked *b, const Block *const *x, vec *acc) {
    const Matrix *m = r->m;
    const int n_sums = sums_of(kind), steps = INTEGERS / 4 / n_sums;
    const ints zero = (ints){0} + (int32_t)m->zero_shift;
#pragma GCC unroll 2
    for (int n = 0; n < n_sums; n++) {
        SUMS_OF_STEPS sums[MOST_X];
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) sums[i] = START((ints){0});
        if (m->zero_shift < 32) {  // codes are unsigned: subtracts the zero
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++)
                sums[i] = START(SHIFTED((ints){0} + (n_sums > 1 ? x[i]->less[n] : x[i]->all_less), zero));
        }
#pragma GCC unroll 8
        for (int step = n * steps; step < (n + 1) * steps; step++) {
            prefetch_next(r);
            const code_bytes some = kind == WEIGHTS_INT8 ? codes_at(b->in_tile + 4 * TILE * step) : b->codes[step];
#pragma GCC unroll 8
            for (int i = 0; i < n_x; i++) sums[i] = STEP(sums[i], some, x[i], step);
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) acc[i] = fma_of(__builtin_convertvector(TOTAL(sums[i]), vec), b->scale[n], acc[i]);
    }
    if (m->offsets != OFFSETS_NONE) {
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) acc[i] = fma_of(-b->offset, all(x[i]->sum), acc[i]);
    }
}

// Multiplies blocks first..first + n by n_x operands and adds the scaled sums to `total`. Unpacks the blocks if `ready` is
// NULL.
INLINE void multiply_blocks(const int kind, const int n_x, Reader *r, const Unpacked *ready, int64_t first, int64_t n,
                            const void *const *operands, vec *total) {
    const Block *x[MOST_X];
    vec acc[MOST_X];
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) x[i] = (const Block *)operands[i] + first, acc[i] = (vec){0};
    for (int64_t block = 0; block < n; block++) {
        Unpacked own;
        if (!ready) unpack_block(kind, r, first + block, &own);
        multiply_block(kind, n_x, r, ready ? ready + block : &own, x, acc);
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) x[i]++;
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) total[i] = fma_of(acc[i], all(((const Block *)operands[i])[first].scale), total[i]);
}

// Multiplies a part of a tile by n_x operands. For `many`, blocks are unpacked once to the first-level cache and multiplied
// by up to MOST_X operands at a time.
INLINE void multiply_part(const int kind, const int n_x, const bool many, const Matrix *m, const uint8_t *tile, int part,
                          Fetch fetch, const void *const *operands, vec *total) {
    const int64_t blocks_of_group = m->shift < 62 ? at_least((int64_t)1 << m->shift >> 5, 1) : m->n_in / INTEGERS;
    Reader r = {.m = m, .at = tile, .part = part, .blocks_of_group = blocks_of_group, .fetch = fetch,
                .table = table_of(m->table)};
    Unpacked ready[SCALED];
#pragma GCC unroll 4
    for (int i = 0; i < n_x; i++) total[i] = (vec){0};
    for (int64_t first = 0, n_blocks = m->n_in / INTEGERS; first < n_blocks; first += SCALED) {
        const int64_t n = at_most(SCALED, n_blocks - first);
        if (!many) {
            multiply_blocks(kind, n_x, &r, NULL, first, n, operands, total);
            continue;
        }
        for (int64_t block = 0; block < n; block++) unpack_block(kind, &r, first + block, ready + block);
#define MULTIPLY(size) multiply_blocks(kind, size, &r, ready, first, n, operands + set_at, total + set_at)
        EACH_SET(n_x, MULTIPLY)
#undef MULTIPLY
    }
}

INLINE void finish_part(const Product *p, int64_t row, int64_t position, vec total, const int type) {
    if (p->bias_mode == ROUNDED_BIAS) total = rounded(total, type);
    if (p->bias_mode != NO_BIAS) total += load((const char *)p->bias + row * bytes_of(type), type);
    store((char *)p->out + (position * p->n_out + row) * bytes_of(type), total, type);
}

// Defines a function MultiplyTile that multiplies each part by multiply_part, with these first arguments.
#define DEFINE_TILE(name, multiply_part, ...)                                                                  \
    static TARGET __attribute__((noinline)) void name(                                                         \
        int n_x, const Matrix *m, const uint8_t *tile, Fetch fetch, const void *const *x, void *out) {          \
        for (int part = 0; part < PARTS; part++)                                                               \
            multiply_part(__VA_ARGS__, m, tile, part, fetch, x, (vec *)out + part * MANY_X);                    \
    }

#define DEFINE(kind, name, ...) DEFINE_TILE(multiply_##kind##_##name, multiply_part, WEIGHTS_##kind, __VA_ARGS__)
#define WITH_KIND(kind) \
    DEFINE(kind, 1, 1, false) DEFINE(kind, 2, 2, false) DEFINE(kind, 4, 4, false) DEFINE(kind, many, n_x, true)
WITH_KIND(INT8)
WITH_KIND(UINT4)
WITH_KIND(LEVELS4)
WITH_KIND(UINT5)
WITH_KIND(INT6)
#undef WITH_KIND
#undef DEFINE

#define OF_KIND(kind) {multiply_##kind##_1, multiply_##kind##_2, multiply_##kind##_4, multiply_##kind##_many}
static MultiplyTile *const multiply_integers[][N_SIZES] = {
    OF_KIND(INT8), OF_KIND(UINT4), OF_KIND(LEVELS4), OF_KIND(UINT5), OF_KIND(INT6)};
#undef OF_KIND

// Chooses what to prefetch while a tile is multiplied by n_x operands: the bytes shortly behind if there is only one set
// of operands (as far as measured for one, batch_ahead_bytes for more), else a share of the tile that is a block of rows (ITEM_ROWS) further on.
INLINE Fetch fetch_of(const Product *p, const uint8_t *tile, int64_t row, int64_t n_x, int64_t turn) {
    int64_t every = 1;
    if (p->last - p->first == 1) return (Fetch){2 * ahead_bytes, every, 0, passes_caches};
    if (p->last - p->first <= n_x) return (Fetch){batch_ahead_bytes, every, 0, false};
    while (every < 8 && 2 * every * MANY_X <= p->last - p->first) every *= 2;
    const int64_t next = row + ITEM_ROWS;
    const char *from = next < p->to ? row_of_parts(p->parts, p->expert, next) : p->following;
    if (!from) return (Fetch){0, every, every, false};
    if (next >= p->to) from += row % ITEM_ROWS * p->parts->row_bytes;
    return (Fetch){(const uint8_t *)from - tile, every, turn, false};
}

// Multiplies weight rows from..to by all operands: each block of ITEM_ROWS rows by all of them while it is in the
// cache.
static TARGET void project_tiles(const Product *p) {
    for (int64_t start = p->from; start < p->to; start += ITEM_ROWS) {
        const int64_t end = at_most(start + ITEM_ROWS, p->to);
        for (int64_t first = p->first, turn = 0; first < p->last; turn++) {
            const int64_t left = p->last - first;
            const int size = left > 4 ? MANY : left == 4 ? 2 : left >= 2;
            const int n_x = size == MANY ? (int)part_of(left, MANY_X) : 1 << size;
            const void *x[MANY_X];
            for (int i = 0; i < n_x; i++) {
                const int64_t number = p->index ? p->index[first + i] : first + i;
                x[i] = (const char *)p->operands + number * p->stride;
            }
            for (int64_t row = start; row < end; row += TILE) {
                const Matrix *m = p->parts + (row >= p->parts->n_out);
                const uint8_t *tile = (const uint8_t *)row_of_parts(p->parts, p->expert, row);
                vec out[PARTS * MANY_X];
                p->tiles->multiply[m->kind - 1][size](n_x, m, tile, fetch_of(p, tile, row, n_x, turn), x, out);
                for (int i = 0; i < n_x; i++)
                    for (int part = 0; part < PARTS; part++) {
                        const vec total = out[part * MANY_X + i];
                        if (p->dtype == BF16)
                            finish_part(p, row + part * LANES, first + i, total, BF16);
                        else
                            finish_part(p, row + part * LANES, first + i, total, F16);
                    }
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
    const int exponent = (int)at_least((most + 0x10200) >> 23, 32) - 127 - 14;
    const bool is_finite = most < 0x7F800000;
    const float inverse = is_finite ? exp2_of(-exponent) : 0.0f;
    blocks->scale = is_finite ? exp2_of(exponent) : (float)NAN;
    for (int64_t at = 0; at < n; at += INTEGERS) {
        Block *block = blocks + at / INTEGERS;
        int32_t integers[INTEGERS];
        vec whole[4] = {0};
        for (int i = 0; i < INTEGERS / LANES; i++) {
            const vec scaled = is_finite ? load(values + at + i * LANES, F32) * inverse : (vec){0};
            const ints some = NEAREST(choose(scaled > MOST_INTEGER, all(MOST_INTEGER), scaled));
            memcpy(integers + i * LANES, &some, sizeof some);
            whole[i] = __builtin_convertvector(some, vec);  // whose sums are exact
        }
        const four sums = fold(whole[0], whole[1], whole[2], whole[3]);
        for (int half = 0; half < INTEGERS / 16; half++)
            block->less[half] = -(int32_t)(LANES == 16 ? sums[half] : sums[2 * half] + sums[2 * half + 1]);
        block->all_less = block->less[0] + block->less[1];
        block->sum = -(float)block->all_less;
        store_integers(block, integers);
    }
}
static TARGET void prepare_integers(const void *row, int64_t type, void *operand, int64_t n) {
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
