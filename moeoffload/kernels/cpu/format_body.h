// The functions of `Kernels` for one format of weights and one instruction set; included once for each pair, after
// vectors.h. The includer defines
//   FORMAT      suffix of the functions' names
//   TYPE        element type of weights, rows and results, and ELEMENT, its type in C
//   OPERAND     C type of an operand's element
//   BLOCK       elements of the inner dimension that are multiplied at a time
//   VALUES      type of a register with half a block
//   LOAD        loads VALUES of the first or second half of a block of elements
//   GET         loads VALUES of an operand, likewise
//   ADD_PRODUCT  adds the products of VALUES of weights and of operands to a vector of sums
//   PREPARE     converts a block of elements to operand elements
//   WORDS       optional, see unpack_body.h
// Another format of weights needs another LOAD. FORMAT, TYPE, ELEMENT, LOAD and WORDS are undefined at the end.
//
// Every dot product has two vectors of sums, for the first and the second halves of blocks, which accumulate over the
// inner dimension in order and are then added and folded in one fixed tree. So a result's bits depend only on its two
// operands, not on the rest of the call.

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, FORMAT)

#include "unpack_body.h"

// Bytes of a block, and its number of cache lines.
enum { NAME(BYTES) = BLOCK * sizeof(ELEMENT), NAME(LINES) = (NAME(BYTES) + 63) / 64 };

// Multiplies n_w weight rows by n_x operands. With n_halves 2, sums[w][x] becomes the sum of both vectors of sums. With
// 1, the call for half 0 stores its vectors, and the call for half 1 adds its own and leaves the folded set of four
// rows in sums[0]. With each block n_lines cache lines are prefetched into the second-level cache, since the
// first-level cache allows fewer reads in flight (measured: 13 GB/s instead of 5).
INLINE void NAME(products)(const int n_w, const int n_x, const int half, const int n_halves, const int n_lines,
                           const ELEMENT *const *weights, const OPERAND *const *operands, int64_t inner, Ahead ahead,
                           SUMS *sums) {
    vec acc[4][TILE_ROWS][2];
    // Weights that are streamed are not read again soon. Two rows are still bound by memory, more by arithmetic.
    const bool past = n_w == 1 && n_x <= 2 && passes_caches;
#define EACH_SUM(w, x)                                    \
    _Pragma("GCC unroll 4") for (int w = 0; w < n_w; w++) \
    _Pragma("GCC unroll 8") for (int x = 0; x < n_x; x++)
    EACH_SUM(w, x) acc[w][x][0] = acc[w][x][1] = (vec){0};
    int64_t at = 0;
    for (; at + BLOCK <= inner; at += BLOCK) {
#pragma GCC unroll 2
        for (int line = 0; line < n_lines; line++) prefetch_weights(ahead.at + 64 * line, past);
        ahead.at += ahead.step;
#pragma GCC unroll 2
        for (int i = 0; i < n_halves; i++) {
            VALUES some[4];
#pragma GCC unroll 4
            for (int w = 0; w < n_w; w++) some[w] = LOAD(weights[w] + at, half + i);
#pragma GCC unroll 8
            for (int x = 0; x < n_x; x++) {
                const VALUES operand = GET(operands[x] + at, half + i);
#pragma GCC unroll 4
                for (int w = 0; w < n_w; w++) acc[w][x][i] = ADD_PRODUCT(acc[w][x][i], some[w], operand);
            }
        }
    }
    if (at < inner) {
        ELEMENT rest[4][BLOCK] = {0};
        for (int w = 0; w < n_w; w++) memcpy(rest[w], weights[w] + at, (inner - at) * sizeof(ELEMENT));
#pragma GCC unroll 2
        for (int i = 0; i < n_halves; i++)
            EACH_SUM(w, x) acc[w][x][i] = ADD_PRODUCT(acc[w][x][i], LOAD(rest[w], half + i), GET(operands[x] + at, half + i));
    }
    if (n_halves == 2) {
        EACH_SUM(w, x) sums[w][x] = acc[w][x][0] + acc[w][x][1];
    } else if (!half) {
        EACH_SUM(w, x) sums[w][x] = acc[w][x][0];
    } else {
        EACH_SUM(w, x) acc[w][x][0] += sums[w][x];
#pragma GCC unroll 8
        for (int x = 0; x < n_x; x++) sums[0][x] = fold_set(acc[0][x][0], acc[1][x][0], acc[2][x][0], acc[3][x][0]);
    }
#undef EACH_SUM
}

// Unpacks rows to the scratch memory and returns it; prefetches the packed bytes that come next into the second-level
// cache.
static TARGET const ELEMENT *NAME(unpacked)(const Product *p, int64_t weight_row, int64_t n_rows) {
    Scales scales[UNPACKED_ROWS];
    for (int64_t row = 0; row < n_rows; row += UNPACKED_ROWS) {
        const Ahead ahead = {row_of_parts(p->parts, p->expert, weight_row + row) + 3 * FAR_BYTES, packed_step(p)};
        char *out = (char *)p->scratch + row * p->inner * sizeof(ELEMENT);
        unpack_rows(p, weight_row + row, at_most(UNPACKED_ROWS, n_rows - row), 0, p->inner, scales, out, p->inner, ahead);
    }
    return p->scratch;
}

// For weights from memory: one weight row after the other, which is a single stream of reads.
#define STREAMED(n)                                                                                                  \
    for (int w = 0; w < n_w; w++) {                                                                                  \
        if (!weights && w % UNPACKED_ROWS == 0)                                                                      \
            NAME(unpacked)(p, weight_row + w, at_most(UNPACKED_ROWS, n_w - w));                                      \
        const ELEMENT *row =                                                                                         \
            weights ? weights + w * inner : (const ELEMENT *)p->scratch + w % UNPACKED_ROWS * inner;                 \
        const Ahead far = {(const char *)row + (n > 2 ? batch_ahead_bytes : ahead_bytes), NAME(BYTES)};              \
        NAME(products)(1, n, 0, 2, NAME(LINES), &row, x, inner, far, sums + w);                                      \
    }
// For weights in the cache: TILE_WEIGHTS rows at a time. A pass over one half of the sums reads half an operand, which
// may fit the first-level cache.
#define TILED(n)                                                                                                     \
    for (int half = 0; half < 2; half += HALVES)                                                                     \
        for (int w = 0; w < LANES; w += TILE_WEIGHTS, ahead.at += inner / BLOCK * ahead.step) {                      \
            const ELEMENT *rows[TILE_WEIGHTS];                                                                       \
            for (int i = 0; i < TILE_WEIGHTS; i++) rows[i] = weights + at_most(w + i, n_w - 1) * inner;              \
            if (half)                                                                                                \
                TILE_OF(n, 1);                                                                                       \
            else                                                                                                     \
                TILE_OF(n, 0);                                                                                       \
        }
#define TILE_OF(n, half)                                                                                             \
    ahead.step > 64 ? NAME(products)(TILE_WEIGHTS, n, half, HALVES, 2, rows, x, inner, ahead, sums + w)              \
    : ahead.step    ? NAME(products)(TILE_WEIGHTS, n, half, HALVES, 1, rows, x, inner, ahead, sums + w)              \
                    : NAME(products)(TILE_WEIGHTS, n, half, HALVES, 0, rows, x, inner, ahead, sums + w)

// Multiplies n_w (at most LANES) weight rows by n_x operands and writes the results of positions first..first + n_x.
// Weights that are read `once` come from memory, also packed ones (`weights` is NULL); others come from the caches, and
// `ahead` is prefetched meanwhile.
static TARGET void NAME(group)(const Product *p, const ELEMENT *weights, int64_t weight_row, int n_w, int64_t first, int n_x,
                               bool once, Ahead ahead) {
    SUMS sums[LANES];
    const OPERAND *x[TILE_ROWS];
    const int64_t inner = p->inner;
    for (int i = 0; i < n_x; i++) {
        const int64_t number = p->index ? p->index[first + i] : first + i;
        x[i] = (const OPERAND *)((const char *)p->operands + number * p->stride);
    }
    if (once) {
        memset(sums + n_w, 0, (LANES - n_w) * sizeof *sums);
        WITH_CONSTANT(n_x, 1, TILE_ROWS, STREAMED)
    } else {
        WITH_CONSTANT(n_x, 1, TILE_ROWS, TILED)
    }
    if (once || HALVES == 2)
        for (int w = 0; w < LANES; w += 4)
            for (int i = 0; i < n_x; i++) sums[w][i] = fold_set(sums[w][i], sums[w + 1][i], sums[w + 2][i], sums[w + 3][i]);
    const bool has_bias = p->bias_mode != NO_BIAS;
    const vec bias = has_bias ? load_some((const ELEMENT *)p->bias + weight_row, n_w, TYPE) : all(0);
    for (int i = 0; i < n_x; i++) {
        vec total = join(sums, i);
        if (p->bias_mode == ROUNDED_BIAS) total = rounded(total, TYPE);
        if (has_bias) total += bias;
        store_some((ELEMENT *)p->out + (first + i) * p->n_out + weight_row, total, n_w, TYPE);
    }
}
#undef STREAMED
#undef TILED
#undef TILE_OF

// Multiplies weight rows from..to by all operands. If these are more than one tile, a block of weight rows is
// multiplied by all of them while it is in the second-level cache (packed weights are unpacked first), and the first
// tiles prefetch the next block, a share each.
static TARGET void NAME(project)(const Product *p) {
    const int64_t n_tiles = ceil_div(p->last - p->first, TILE_ROWS), row_bytes = p->inner * sizeof(ELEMENT);
    const int64_t block_rows = n_tiles > 1 ? BLOCK_ROWS : p->to - p->from, n_blocks = p->inner / BLOCK;
    const int64_t n_shares = n_tiles >= 8 ? 8 : n_tiles >= 4 ? 4 : 2;
    for (int64_t start = p->from; start < p->to; start += block_rows) {
        const int64_t end = at_most(start + block_rows, p->to);
        int64_t first = p->first;
        const ELEMENT *weights = p->parts ? NULL : (const ELEMENT *)p->weights + start * p->inner;
        const char *next = p->parts ? NULL : end < p->to ? (const char *)p->weights + end * row_bytes : p->following;
        if (p->parts && n_tiles > 1) weights = NAME(unpacked)(p, start, end - start);
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const int n_x = (int)part_of(p->last - first, TILE_ROWS);
            // There is one pass over the operands per two weight rows; it prefetches `step` bytes with each block.
            const int64_t step = next && tile < n_shares ? 2 * NAME(BYTES) / n_shares : 0;
            for (int64_t row = start; row < end; row += LANES) {
                const int64_t n_passes = (tile * BLOCK_ROWS + row - start) / 2;
                NAME(group)(p, weights ? weights + (row - start) * p->inner : NULL, row, (int)at_most(LANES, end - row), first,
                            n_x, n_tiles == 1, (Ahead){next + n_passes * n_blocks * step, step});
            }
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

static TARGET void NAME(add_weighted)(float *total, const void *row, const void *weight, bool is_f32, int64_t n) {
    const float factor = is_f32 ? *(const float *)weight : load_some(weight, 1, TYPE)[0];
    for (int64_t at = 0; at < n; at += LANES) {
        const vec product = load_some((const ELEMENT *)row + at, n - at, TYPE) * factor;
        const vec sum = load_some(total + at, n - at, F32) + (is_f32 ? product : rounded(product, TYPE));
        store_some(total + at, sum, n - at, F32);
    }
}

static const Kernels NAME(kernels) = {
    sizeof(OPERAND), BLOCK, NAME(project), NAME(prepare), NAME(silu_times_up), NAME(add_weighted), NAME(unpack),
};

#undef PASTE_
#undef PASTE
#undef NAME
#undef FORMAT
#undef TYPE
#undef ELEMENT
#undef LOAD
#undef WORDS
