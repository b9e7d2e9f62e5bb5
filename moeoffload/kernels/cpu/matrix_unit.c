// Products by the matrix unit (Intel AMX): bfloat16 operand rows times weight rows, which are read in place.
//
// 32 elements of each of 16 weight rows are one tile. The other tile holds up to 16 packed operands: pairs of
// neighbours in the inner dimension, those of one operand beside those of the next. A single operand needs no packing.
// A result is one element of an accumulator that runs over the inner dimension in order, so its bits depend only on its
// two operands.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS, LDTILECFG, TILELOADD.

#include "experts.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 16
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")))
#include "vectors.h"

enum { ITEM_BYTES = 2, LINE_BYTES = 64 };
// STREAMS: places in the weights that are prefetched concurrently; measured to be a fifth faster than one stream.
enum { STREAMS = 8, STREAM_ROWS = 2 * MATRIX_ROWS / STREAMS };

bool matrix_unit_fits(int64_t dtype, int64_t features, int64_t inner, int64_t n_out) {
    return dtype == BF16 && (features & HAS_MATRIX_UNIT) && inner % MATRIX_STEP == 0 && n_out % MATRIX_ROWS == 0;
}

// Transposes 16 x 16 32-bit elements in registers, in four rounds of exchanges between pairs of vectors.
INLINE void transpose(__m512i *rows) {
#pragma GCC unroll 4
    for (int distance = 1; distance < 16; distance *= 2) {
        int low[16], high[16];
        for (int lane = 0; lane < 16; lane++) {
            low[lane] = lane & distance ? 16 + (lane ^ distance) : lane;
            high[lane] = lane & distance ? 16 + lane : lane ^ distance;
        }
        const __m512i from_low = _mm512_loadu_si512(low), from_high = _mm512_loadu_si512(high);
#pragma GCC unroll 16
        for (int at = 0; at < 16; at++)
            if (!(at & distance)) {
                const __m512i one = rows[at], other = rows[at | distance];
                rows[at] = _mm512_permutex2var_epi32(one, from_low, other);
                rows[at | distance] = _mm512_permutex2var_epi32(one, from_high, other);
            }
    }
}

static const char *operand_of(const Product *p, int64_t position) {
    return (const char *)p->operands + (p->index ? p->index[position] : position) * p->stride;
}

// Packs the operands of positions first..last in groups of 16, as (inner / 2, group size) pairs of neighbouring
// elements. A group is stored where its first position's row would be; a group of one is not packed.
TARGET void pack_operands(const Product *p, void *packed) {
    const int64_t row_bytes = p->inner * ITEM_BYTES;
    for (int64_t first = p->first; p->last - first > 1; first += MATRIX_ROWS) {
        const int64_t count = at_most(MATRIX_ROWS, p->last - first);
        const char *from[MATRIX_ROWS];
        for (int64_t i = 0; i < MATRIX_ROWS; i++) from[i] = operand_of(p, first + at_most(i, count - 1));
        const __mmask16 mask = (__mmask16)((1 << count) - 1);
        char *to = (char *)packed + first * row_bytes;
        for (int64_t at = 0; at < row_bytes; at += LINE_BYTES) {
            __m512i rows[MATRIX_ROWS];
#pragma GCC unroll 16
            for (int i = 0; i < MATRIX_ROWS; i++) rows[i] = _mm512_loadu_si512(from[i] + at);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < MATRIX_ROWS; i++, to += 4 * count) _mm512_mask_storeu_epi32(to, mask, rows[i]);
        }
    }
}

// Layout of the AMX tile configuration. Tiles 0 to 3 are accumulators, 4 and 5 weights, 6 and 7 operands.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

// Configures the tiles for `columns` operands in the first operand tile and more_columns in the second.
INLINE void configure(int64_t columns, int64_t more_columns) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = MATRIX_ROWS;
        config.row_bytes[i] = i == 4 || i == 5 ? LINE_BYTES : 4 * (i % 2 ? more_columns : columns);
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC assumes that _tile_loadconfig reads only eight bytes
    _tile_loadconfig(&config);
}

typedef struct {
    const char *weights, *operands[2], *ahead;
    int64_t row_bytes, stride, columns[2], n_ahead;  // `stride` is from one weight row to the next, in bytes
} Tiles;

INLINE void zero_sums(const int n_weights, const int n_operands) {
    _tile_zero(0);
    if (n_operands > 1) _tile_zero(1);
    if (n_weights > 1) _tile_zero(2);
    if (n_weights > 1 && n_operands > 1) _tile_zero(3);
}

// Adds the products of the next MATRIX_STEP columns of one or two tiles each; moves `operands` on by as many.
INLINE void add_products(const int n_weights, const int n_operands, const Tiles *t, const char *weights, int64_t stride,
                         const char **operands) {
    const int64_t width = 4 * t->columns[0], other_width = 4 * t->columns[1];
    _tile_loadd(4, weights, stride);
    if (n_weights > 1) _tile_loadd(5, weights + MATRIX_ROWS * stride, stride);
    _tile_loadd(6, operands[0], width);
    operands[0] += MATRIX_ROWS * width;
    if (n_operands > 1) {
        _tile_loadd(7, operands[1], other_width);
        operands[1] += MATRIX_ROWS * other_width;
    }
    _tile_dpbf16ps(0, 4, 6);
    if (n_operands > 1) _tile_dpbf16ps(1, 4, 7);
    if (n_weights > 1) _tile_dpbf16ps(2, 5, 6);
    if (n_weights > 1 && n_operands > 1) _tile_dpbf16ps(3, 5, 7);
}

// Stores sums[weight tile][operand tile].
INLINE void store_sums(const int n_weights, const int n_operands, float sums[2][2][16][16]) {
    _tile_stored(0, sums[0][0], LINE_BYTES);
    if (n_operands > 1) _tile_stored(1, sums[0][1], LINE_BYTES);
    if (n_weights > 1) _tile_stored(2, sums[1][0], LINE_BYTES);
    if (n_weights > 1 && n_operands > 1) _tile_stored(3, sums[1][1], LINE_BYTES);
}

// Computes the sums of one or two tiles each; prefetches n_ahead lines of each stream at every step.
INLINE void products(const int n_weights, const int n_operands, const Tiles *t, float sums[2][2][16][16]) {
    const int64_t row_bytes = t->row_bytes, ahead_bytes = t->n_ahead * LINE_BYTES;
    const char *ahead = t->ahead, *operands[2] = {t->operands[0], t->operands[1]};
    zero_sums(n_weights, n_operands);
    for (int64_t at = 0; at < row_bytes; at += LINE_BYTES) {
        for (const char *line = ahead; line < ahead + ahead_bytes; line += LINE_BYTES)
#pragma GCC unroll 8
            for (int i = 0; i < STREAMS; i++) _mm_prefetch(line + i * STREAM_ROWS * row_bytes, _MM_HINT_T1);
        ahead += ahead_bytes;
        add_products(n_weights, n_operands, t, t->weights + at, t->stride, operands);
    }
    store_sums(n_weights, n_operands, sums);
}

// As `products` of two weight tiles, for packed rows: SPAN columns are unpacked while those before them are multiplied.
// They are unpacked to t->weights, where later calls find them, or to a temporary buffer if that is NULL. Meanwhile the
// same number of packed rows at t->ahead is prefetched into the second-level cache.
INLINE void products_of_packed(const int n_operands, const Product *p, const Tiles *t, int64_t row, float sums[2][2][16][16]) {
    uint16_t spans[2][2 * MATRIX_ROWS][SPAN] __attribute__((aligned(64)));
    const int64_t stride = t->weights ? t->stride : (int64_t)sizeof spans[0][0];
    Scales scales[2 * MATRIX_ROWS];
    const int64_t n_rows = at_most(2 * MATRIX_ROWS, p->to - row), step = packed_step(p);
    Ahead ahead = {t->ahead ? t->ahead : (const char *)spans, t->ahead ? step : 0};
    const char *operands[2] = {t->operands[0], t->operands[1]};
    zero_sums(2, n_operands);
    for (int64_t next = 0; next < p->inner + SPAN; next += SPAN) {
        if (next < p->inner) {
            char *out = t->weights ? (char *)t->weights + next * ITEM_BYTES : (char *)spans[next / SPAN % 2];
            unpack_rows(p, row, n_rows, next, at_most(next + SPAN, p->inner), scales, out, stride / ITEM_BYTES, ahead);
            ahead.at += n_rows * ahead.step;
            if (!next) continue;
        }
        const int64_t end = at_most(next, p->inner);
        const char *span = t->weights ? t->weights + (next - SPAN) * ITEM_BYTES : (char *)spans[(next / SPAN + 1) % 2];
        for (int64_t at = next - SPAN; at < end; at += MATRIX_STEP, span += LINE_BYTES)
            add_products(2, n_operands, t, span, stride, operands);
    }
    store_sums(2, n_operands, sums);
}

// Writes the results of one accumulator: transposes its 16 lines, one per weight row, to `count` output rows of 16
// results, and adds the bias.
INLINE void write_results(const Product *p, const float sums[16][16], int64_t position, int64_t count, int64_t row) {
    __m512i lines[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) lines[i] = _mm512_load_si512(sums[i]);
    transpose(lines);
    uint16_t *out = (uint16_t *)p->out + position * p->n_out + row;
    const vec bias = p->bias_mode == NO_BIAS ? all(0) : load((const uint16_t *)p->bias + row, BF16);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i == count) break;
        vec total = (vec)lines[i];
        if (p->bias_mode == ROUNDED_BIAS) total = rounded(total, BF16);
        if (p->bias_mode != NO_BIAS) total += bias;
        store(out + i * p->n_out, total, BF16);
    }
}

// Multiplies weight rows from..to by all operands, 32 weight rows and two groups of 16 operands at a time. Packed
// weights are unpacked with the first groups, and kept in the scratch memory if there are more than two groups.
TARGET void project_by_matrix_unit(const Product *p) {
    float sums[2][2][16][16] __attribute__((aligned(64)));
    Tiles t = {.row_bytes = p->inner * ITEM_BYTES, .stride = p->inner * ITEM_BYTES};
    const int64_t n_groups = ceil_div(p->last - p->first, MATRIX_ROWS);
    int64_t columns[2] = {0, 0};
    for (int64_t row = p->from; row < p->to; row += 2 * MATRIX_ROWS) {
        const int n_weights = p->to - row > MATRIX_ROWS ? 2 : 1;
        // While these rows are multiplied, the rows that are read next are prefetched into the second-level cache.
        const bool is_last = row + n_weights * MATRIX_ROWS >= p->to;
        t.weights = (const char *)p->weights + row * t.row_bytes;
        t.ahead = is_last ? p->following : t.weights + n_weights * MATRIX_ROWS * t.row_bytes;
        if (p->parts) {
            t.weights = n_groups > 2 ? p->scratch : NULL;
            t.stride = padded(t.row_bytes, LINE_BYTES) + LINE_BYTES;
            if (!is_last) t.ahead = row_of_parts(p->parts, p->expert, row + n_weights * MATRIX_ROWS);
        }
        int64_t lines = t.ahead && !p->parts ? STREAM_ROWS : 0;
        const int64_t each = ceil_div(lines, ceil_div(n_groups, 2));
        for (int64_t group = 0; group < n_groups; group += 2) {
            const int64_t first = p->first + group * MATRIX_ROWS, second = first + MATRIX_ROWS;
            const int n_operands = group + 1 < n_groups ? 2 : 1;
            t.columns[0] = at_most(MATRIX_ROWS, p->last - first);
            t.columns[1] = n_operands > 1 ? at_most(MATRIX_ROWS, p->last - second) : t.columns[0];
            if (t.columns[0] != columns[0] || t.columns[1] != columns[1]) {
                columns[0] = t.columns[0], columns[1] = t.columns[1];
                configure(columns[0], columns[1]);
            }
            for (int i = 0; i < n_operands; i++) {
                const int64_t position = i ? second : first;
                t.operands[i] =
                    t.columns[i] > 1 ? (const char *)p->packed + position * t.row_bytes : operand_of(p, position);
            }
            t.n_ahead = at_most(each, lines);
            if (p->parts && group == 0) {
                n_operands > 1 ? products_of_packed(2, p, &t, row, sums) : products_of_packed(1, p, &t, row, sums);
            } else if (n_weights > 1 && n_operands > 1)
                products(2, 2, &t, sums);
            else if (n_weights > 1)
                products(2, 1, &t, sums);
            else if (n_operands > 1)
                products(1, 2, &t, sums);
            else
                products(1, 1, &t, sums);
            lines -= t.n_ahead;
            t.ahead += t.n_ahead * t.row_bytes;
            for (int w = 0; w < n_weights; w++)
                for (int i = 0; i < n_operands; i++)
                    write_results(p, sums[w][i], i ? second : first, t.columns[i], row + w * MATRIX_ROWS);
        }
    }
    _tile_release();  // the system then need not save the tile registers
}
#else
bool matrix_unit_fits(int64_t dtype, int64_t features, int64_t inner, int64_t n_out) { return false; }
void pack_operands(const Product *product, void *packed) {}
void project_by_matrix_unit(const Product *product) {}
#endif
