// The functions of `Kernels` for one format of weights and one instruction set; included once for each pair, after
// vectors.h. The includer defines
//   FORMAT      the name that the functions end in
//   TYPE        of a weight, of a row and of a result, and ELEMENT, its type in C
//   OPERAND     the element of an operand
//   BLOCK       elements of the inner dimension that are multiplied at a time
//   WEIGHTS     a block of a weight row in registers
//   LOAD        WEIGHTS of a block of elements at an address
//   OPERANDS    a block of operands in registers
//   GET         OPERANDS of those at an address
//   MULTIPLY    adds the products of WEIGHTS and OPERANDS to two vectors of sums
//   PREPARE     writes a block of elements as operands
//   WORDS       maybe, see unpack_body.h
// Another format of weights is another LOAD. FORMAT, TYPE, ELEMENT, LOAD and WORDS are undefined at the end.
//
// Every dot product is two vectors of sums that run over the inner dimension in order, added and folded in one fixed
// tree. So a result's bits depend on its two operands only, not on what is computed beside it.

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, FORMAT)

#include "unpack_body.h"

// Adds the products of n_w weight rows, `inner` elements apart, and n_x operands over from..to to their sums.
// As many rows at `ahead` are prefetched meanwhile, into the second-level cache: into the first one fewer reads can be
// under way. Measured: 13 GB/s, not 5.
INLINE void NAME(products)(const int n_w, const int n_x, const int n_ahead, const ELEMENT *weights, int64_t inner,
                           const OPERAND *const *operands, int64_t from, int64_t to, const char *ahead, SUMS *sums) {
    vec acc[2][TILE_ROWS][2];
#pragma GCC unroll 2
    for (int w = 0; w < n_w; w++)
#pragma GCC unroll 8
        for (int x = 0; x < n_x; x++) {
            acc[w][x][0] = from ? sums[w][x][0] : (vec){0};
            acc[w][x][1] = from ? sums[w][x][1] : (vec){0};
        }
    int64_t at = from;
    for (; at + BLOCK <= to; at += BLOCK) {
        for (size_t line = 0; line < n_ahead * BLOCK * sizeof(ELEMENT); line += 64)
            __builtin_prefetch(ahead + at * n_ahead * sizeof(ELEMENT) + line, 0, 2);
        WEIGHTS some[2];
#pragma GCC unroll 2
        for (int w = 0; w < n_w; w++) some[w] = LOAD(weights + w * inner + at);
#pragma GCC unroll 8
        for (int x = 0; x < n_x; x++) {
            OPERANDS both = GET(operands[x] + at);
            if (n_w > 1) KEEP_IN_REGISTERS(both);
#pragma GCC unroll 2
            for (int w = 0; w < n_w; w++) MULTIPLY(acc[w][x], some[w], both);
        }
    }
    if (at < to) {
        ELEMENT rest[BLOCK];
#pragma GCC unroll 2
        for (int w = 0; w < n_w; w++) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, weights + w * inner + at, (to - at) * sizeof(ELEMENT));
            const WEIGHTS some = LOAD(rest);
#pragma GCC unroll 8
            for (int x = 0; x < n_x; x++) MULTIPLY(acc[w][x], some, GET(operands[x] + at));
        }
    }
#pragma GCC unroll 2
    for (int w = 0; w < n_w; w++)
#pragma GCC unroll 8
        for (int x = 0; x < n_x; x++) {
            sums[w][x][0] = acc[w][x][0];
            sums[w][x][1] = acc[w][x][1];
        }
}

// Packed rows as elements, in the scratch memory; brings what comes next of them into the second-level cache.
static TARGET const ELEMENT *NAME(unpacked)(const Product *p, int64_t weight_row, int64_t n_rows) {
    Scales scales[UNPACKED_ROWS];
    for (int64_t row = 0; row < n_rows; row += UNPACKED_ROWS) {
        const Ahead ahead = {row_of_parts(p->parts, p->expert, weight_row + row) + 3 * FAR_BYTES, packed_step(p)};
        char *out = (char *)p->scratch + row * p->inner * sizeof(ELEMENT);
        unpack_rows(p, weight_row + row, at_most(UNPACKED_ROWS, n_rows - row), 0, p->inner, scales, out, p->inner, ahead);
    }
    return p->scratch;
}

// One weight row after the other out of the memory: a single stream of reads.
#define STREAMED(n)                                                                                                  \
    case n:                                                                                                          \
        for (int w = 0; w < n_w; w++) {                                                                              \
            if (!weights && w % UNPACKED_ROWS == 0) {                                                                \
                NAME(unpacked)(p, weight_row + w, at_most(UNPACKED_ROWS, n_w - w));                                  \
            }                                                                                                        \
            const ELEMENT *row =                                                                                     \
                weights ? weights + w * inner : (const ELEMENT *)p->scratch + w % UNPACKED_ROWS * inner;             \
            NAME(products)(1, n, 1, row, inner, x, 0, inner, (const char *)row + ahead_bytes, sums + w);          \
        }                                                                                                            \
        break;
// Two weight rows at a time out of the caches, in parts for which the operands stay in the first one.
#define TILED(n)                                                                                                     \
    case n:                                                                                                          \
        for (int64_t from = 0; from < inner; from += PART)                                                           \
            for (int w = 0; w < n_w; w += 2) {                                                                       \
                const int64_t to = at_most(from + PART, inner);                                                      \
                const ELEMENT *row = weights + w * inner;                                                            \
                const char *next = ahead + w / 2 * n_ahead * inner * sizeof(ELEMENT);                                \
                if (w + 1 == n_w)                                                                                    \
                    NAME(products)(1, n, 0, row, inner, x, from, to, NULL, sums + w);                                \
                else if (n_ahead == 2)                                                                               \
                    NAME(products)(2, n, 2, row, inner, x, from, to, next, sums + w);                                \
                else if (n_ahead == 1)                                                                               \
                    NAME(products)(2, n, 1, row, inner, x, from, to, next, sums + w);                                \
                else                                                                                                 \
                    NAME(products)(2, n, 0, row, inner, x, from, to, NULL, sums + w);                                \
            }                                                                                                        \
        break;

// At most LANES weight rows times n_x operands: the results of positions first..first + n_x. Meanwhile as many rows at
// `ahead` are prefetched: n_ahead for each two weight rows, or, if the weights are read ONCE, those that come next.
// `weights` are those rows; NULL: packed, and read ONCE.
static TARGET void NAME(group)(const Product *p, const ELEMENT *weights, int64_t weight_row, int n_w, int64_t first, int n_x,
                               int n_ahead, const char *ahead) {
    enum { PART = 2048 / sizeof(OPERAND) };
    SUMS sums[LANES];
    const OPERAND *x[TILE_ROWS];
    const int64_t inner = p->inner;
    for (int i = 0; i < n_x; i++) {
        const int64_t number = p->index ? p->index[first + i] : first + i;
        x[i] = (const OPERAND *)((const char *)p->operands + number * p->stride);
    }
    if (n_ahead == ONCE) {
        switch (n_x) { EACH_TILE(STREAMED) }
    } else {
        switch (n_x) { EACH_TILE(TILED) }
    }
    const bool has_bias = p->bias_mode != NO_BIAS;
    const vec bias = has_bias ? load_some((const ELEMENT *)p->bias + weight_row, n_w, TYPE) : all(0);
    for (int i = 0; i < n_x; i++) {
        vec both[LANES];
        for (int w = 0; w < LANES; w++) both[w] = w < n_w ? sums[w][i][0] + sums[w][i][1] : (vec){0};
        vec total = fold_all(both);
        if (p->bias_mode == ROUNDED_BIAS) total = rounded(total, TYPE);
        if (has_bias) total += bias;
        store_some((ELEMENT *)p->out + (first + i) * p->n_out + weight_row, total, n_w, TYPE);
    }
}
#undef STREAMED
#undef TILED

// With more operands than a tile has, a block of weight rows meets all of them while it lies in the second-level cache,
// and the second or the next two tiles bring the next block there. Packed weights are unpacked to there.
static TARGET void NAME(project)(const Product *p) {
    const int64_t n_tiles = ceil_div(p->last - p->first, TILE_ROWS), row_bytes = p->inner * sizeof(ELEMENT);
    const int64_t block_rows = n_tiles > 1 ? BLOCK_ROWS : p->to - p->from;
    for (int64_t start = p->from; start < p->to; start += block_rows) {
        const int64_t end = at_most(start + block_rows, p->to);
        int64_t first = p->first;
        const ELEMENT *weights = p->parts ? NULL : (const ELEMENT *)p->weights + start * p->inner;
        if (p->parts && n_tiles > 1) weights = NAME(unpacked)(p, start, end - start);
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const int n_x = (int)((p->last - first + n_tiles - tile - 1) / (n_tiles - tile));
            const bool brings = !p->parts && tile > 0 && tile <= 2 && end < p->to;
            const int n_ahead = n_tiles == 1 ? ONCE : !brings ? 0 : n_tiles == 2 ? 2 : 1;
            const char *next = (const char *)p->weights + (end + (tile == 2 ? block_rows / 2 : 0)) * row_bytes;
            for (int64_t row = start; row < end; row += LANES)
                NAME(group)(p, weights ? weights + (row - start) * p->inner : NULL, row, (int)at_most(LANES, end - row), first,
                            n_x, n_ahead, brings ? next + (row - start) / 2 * n_ahead * row_bytes : NULL);
            first += n_x;
        }
    }
}

static TARGET void NAME(prepare)(const void *row, void *operand, int64_t n) {
    const ELEMENT *from = row;
    OPERAND *to = operand;
    for (; n > 0; n -= BLOCK, from += BLOCK, to += BLOCK) {
        if (n >= BLOCK) {
            PREPARE(to, from);
        } else {
            ELEMENT rest[BLOCK] = {0};
            memcpy(rest, from, n * sizeof(ELEMENT));
            PREPARE(to, rest);
        }
    }
}

static TARGET void NAME(silu_times_up)(const void *gate, const void *up, void *out, int64_t n) {
    for (int64_t at = 0; at < n; at += LANES) {
        const vec x = load_some((const ELEMENT *)gate + at, n - at, TYPE), y = load_some((const ELEMENT *)up + at, n - at, TYPE);
        store_some((ELEMENT *)out + at, rounded(x / (exp_of(-x) + 1.0f), TYPE) * y, n - at, TYPE);
    }
}

static TARGET void NAME(add_weighted)(float *total, const void *row, float weight, bool rounds, int64_t n) {
    for (int64_t at = 0; at < n; at += LANES) {
        const vec product = load_some((const ELEMENT *)row + at, n - at, TYPE) * weight;
        const vec sum = load_some(total + at, n - at, F32) + (rounds ? rounded(product, TYPE) : product);
        store_some(total + at, sum, n - at, F32);
    }
}

static TARGET void NAME(widen_row)(const void *row, float *out, int64_t n) {
    for (int64_t at = 0; at < n; at += LANES)
        store_some(out + at, load_some((const ELEMENT *)row + at, n - at, TYPE), n - at, F32);
}

static TARGET bool NAME(narrow_row)(const float *row, void *out, int64_t n) {
    ints finite = (ints){0} - 1;
    for (int64_t at = 0; at < n; at += LANES) {
        const vec values = rounded(load_some(row + at, n - at, F32), TYPE);
        finite &= values - values == 0;
        store_some((ELEMENT *)out + at, values, n - at, TYPE);
    }
    int32_t is_finite = -1;
    for (int i = 0; i < LANES; i++) is_finite &= finite[i];
    return is_finite;
}

static const Kernels NAME(kernels) = {
    sizeof(ELEMENT),     sizeof(OPERAND),    BLOCK,       NAME(project), NAME(prepare),
    NAME(silu_times_up), NAME(add_weighted), NAME(widen_row), NAME(narrow_row), NAME(unpack),
};

#undef PASTE_
#undef PASTE
#undef NAME
#undef FORMAT
#undef TYPE
#undef ELEMENT
#undef LOAD
#undef WORDS
