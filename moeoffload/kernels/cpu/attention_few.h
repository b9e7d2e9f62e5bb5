// Attention of few queries for one instruction set. The includer also defines SET, and KEY_ROWS and VALUE_ROWS: the
// most rows whose accumulators stay in registers; and IN_PAIRS if the CPU adds products of bfloat16 pairs to float32:
// queries and probabilities then are bfloat16, else float32.

#include "attention_head.h"

#ifdef IN_PAIRS
enum { OPERAND = BF16, OPERAND_BYTES = 2 };
typedef __m512i Operands;
INLINE Operands load_operands(const char *from, const int type) { return _mm512_loadu_si512(from); }
INLINE vec add_operands(vec sums, Operands a, Operands b) {
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#else
enum { OPERAND = F32, OPERAND_BYTES = 4 };
typedef vec Operands;
INLINE Operands load_operands(const char *from, const int type) { return load(from, type); }
INLINE vec add_operands(vec sums, Operands a, Operands b) { return fma_of(a, b, sums); }
#endif
enum { STEP = sizeof(vec) / OPERAND_BYTES };  // operands of a vector
enum { SHARE_BYTES = 4 * KEY_BLOCK };         // from a row of probabilities to the next

// Prefetches rows from..to, as far as there are such, into the second-level cache.
INLINE void fetch(const struct rows *rows, int64_t from, int64_t to, const int type) {
    for (int64_t row = from; row < at_most(to, rows->count); row++)
        for (int64_t at = 0; at < rows->dim * bytes_of(type); at += 64) __builtin_prefetch(rows->at[row] + at, 0, 2);
}

// Adds the products of STEP columns: n_rows rows of operands times four keys.
INLINE void add_products(const int n_rows, const int type, vec (*sums)[4], const char *rows, int64_t stride, const char **at) {
    Operands keys[4];
    UNROLL for (int n = 0; n < 4; n++) keys[n] = load_operands(at[n], type);
    UNROLL for (int m = 0; m < n_rows; m++) {
        const Operands row = load_operands(rows + m * stride, OPERAND);
        UNROLL for (int n = 0; n < 4; n++) sums[m][n] = add_operands(sums[m][n], keys[n], row);
    }
}

// Computes out[m][n] = rows[m] . keys[n] for n_rows rows and four keys.
INLINE void key_tile(
    const int n_rows, const int type, const char *rows, int64_t stride, const char *const *keys, int64_t dim, float *out) {
    const int64_t whole = dim / STEP * STEP;
    const char *at[4];
    vec sums[8][4];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < 4; n++) sums[m][n] = all(0);
    for (int64_t i = 0; i < whole; i += STEP) {
        UNROLL for (int n = 0; n < 4; n++) at[n] = keys[n] + i * bytes_of(type);
        add_products(n_rows, type, sums, rows + OPERAND_BYTES * i, stride, at);
    }
    if (whole < dim) {
        char tails[4][64] = {{0}};
        for (int n = 0; n < 4; n++)
            at[n] = memcpy(tails[n], keys[n] + whole * bytes_of(type), (dim - whole) * bytes_of(type));
        add_products(n_rows, type, sums, rows + OPERAND_BYTES * whole, stride, at);
    }
    UNROLL for (int m = 0; m < n_rows; m++) {
        const four folded = fold(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
        memcpy(out + m * KEY_BLOCK, &folded, sizeof folded);
    }
}

#ifdef IN_PAIRS
// Computes sums[m] += shares[m][key] * values[key] for the next 32 columns, or the n_left that remain.
INLINE void value_tile(
    const int n_rows, const int n_vectors, const int type, const char *shares, const char *const *values,
    int64_t column, int64_t n_keys, int64_t n_left, float *sums, int64_t width) {
    // Interleaving two rows takes 8 columns from each 128 bits: the first four to one vector, the rest to the other.
    const ints first = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ints low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const __mmask32 filled = n_left < 32 ? (1u << n_left) - 1 : ~0u;
    vec totals[8][2];
    UNROLL for (int m = 0; m < n_rows; m++) {
        const vec a = load(sums + m * width, F32), b = load(sums + m * width + LANES, F32);
        totals[m][0] = __builtin_shuffle(a, b, first), totals[m][1] = __builtin_shuffle(a, b, first + 4);
    }
    for (int64_t key = 0; key < n_keys; key += 2) {
        const __m512i a = _mm512_maskz_loadu_epi16(filled, values[key] + 2 * column);
        const __m512i b = _mm512_maskz_loadu_epi16(key + 1 < n_keys ? filled : 0, values[key + 1] + 2 * column);
        const __m512i pairs[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
        UNROLL for (int m = 0; m < n_rows; m++) {
            int32_t both;
            memcpy(&both, shares + m * SHARE_BYTES + 2 * key, 4);
            UNROLL for (int n = 0; n < 2; n++) totals[m][n] = add_operands(totals[m][n], pairs[n], _mm512_set1_epi32(both));
        }
    }
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < 2; n++)
        store(sums + m * width + n * LANES, __builtin_shuffle(totals[m][0], totals[m][1], low + 8 * n), F32);
}
#else
// Computes sums[m] += shares[m][key] * values[key] for one or two vectors of columns; with one, for the n_left that
// remain.
INLINE void value_tile(
    const int n_rows, const int n_vectors, const int type, const char *shares, const char *const *values,
    int64_t column, int64_t n_keys, int64_t n_left, float *sums, int64_t width) {
    vec totals[8][2], columns[2];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        totals[m][n] = load(sums + m * width + n * LANES, F32);
    for (int64_t key = 0; key < n_keys; key++) {
        const char *value = values[key] + column * bytes_of(type);
        UNROLL for (int n = 0; n < n_vectors; n++)
            columns[n] = n_vectors == 1 ? load_some(value, n_left, type) : load(value + n * LANES * bytes_of(type), type);
        UNROLL for (int m = 0; m < n_rows; m++) {
            float share;
            memcpy(&share, shares + m * SHARE_BYTES + 4 * key, 4);
            UNROLL for (int n = 0; n < n_vectors; n++) totals[m][n] = fma_of(columns[n], all(share), totals[m][n]);
        }
    }
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        store(sums + m * width + n * LANES, totals[m][n], F32);
}
#endif

// Computes shares[row][key] = rows[row] . keys[key]; prefetches the values meanwhile.
INLINE void multiply_keys(
    const char *rows, int64_t n_rows, int64_t row_bytes, const struct rows *keys, const struct rows *values,
    float *shares, const int type) {
    for (int64_t key = 0; key < keys->count; key += 4) {
        fetch(values, key, key + 4, type);
        for (int64_t row = 0, size; row < n_rows; row += size) {
            size = part_of(n_rows - row, KEY_ROWS);
#define TILE(n) \
    key_tile(n, type, rows + row * row_bytes, row_bytes, keys->at + key, keys->dim, shares + row * KEY_BLOCK + key)
            WITH_CONSTANT(size, 1, KEY_ROWS, TILE)
#undef TILE
        }
    }
}

// Computes sums[row] += shares[row][key] * values[key]; prefetches the next keys meanwhile.
INLINE void add_values(
    const struct state *state, const float *shares, const struct rows *values, const struct rows *next_keys,
    const int type) {
    enum { SOME = 64 };  // keys whose values stay in the first-level cache while all rows use them
    for (int64_t start = 0; start < values->count; start += SOME) {
        const int64_t count = at_most(SOME, values->count - start);
        for (int64_t row = 0, size; row < state->n_rows; row += size) {
            size = part_of(state->n_rows - row, VALUE_ROWS);
            for (int64_t column = 0, n_vectors; column < values->dim; column += n_vectors * LANES) {
                const int64_t n_left = values->dim - column;
                const char *share = (const char *)(shares + row * KEY_BLOCK) + OPERAND_BYTES * start;
                float *sums = state->sums + row * state->width + column;
                n_vectors = OPERAND_BYTES < 4 || n_left >= 2 * LANES ? 2 : 1;
                if (row == 0) {
                    const int64_t from = start + count * column / values->dim;
                    fetch(next_keys, from, start + count * (column + n_vectors * LANES) / values->dim, type);
                }
#define WIDE_TILE(m, n) value_tile(m, n, type, share, values->at + start, column, count, n_left, sums, state->width)
#define TILE(m) WIDE_TILE(m, 2)
#define NARROW_TILE(m) WIDE_TILE(m, 1)
                if (n_vectors == 2)
                    WITH_CONSTANT(size, 1, VALUE_ROWS, TILE)
                else
                    WITH_CONSTANT(size, 1, VALUE_ROWS, NARROW_TILE)
#undef TILE
#undef NARROW_TILE
#undef WIDE_TILE
            }
        }
    }
}

// Attends few queries to one key head.
INLINE void attend_few(const struct item *item, char *scratch, const int type) {
    const struct attention *c = item->call;
    const int64_t n_queries = item->n_queries, size = bytes_of(type), row_bytes = OPERAND_BYTES * padded(c->dim, 32);
    const int64_t n_rows = c->group * n_queries;
    float *shares = (float *)(scratch + n_rows * row_bytes);
    const struct state state = begin(item, shares + n_rows * KEY_BLOCK);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t head = row / n_queries, query = row % n_queries;
        const char *source = item->query + size * (head * c->query_strides[1] + query * c->query_strides[2]);
        char *target = scratch + row * row_bytes;
        memset(target, 0, row_bytes);
        for (int64_t i = 0; i < c->dim; i += LANES)
            store(target + OPERAND_BYTES * i, load_some(source + i * size, c->dim - i, type), OPERAND);
    }
    struct rows keys[2], values;
    find_rows(&keys[0], c, item->key, c->key_strides, 0, c->dim);
    for (int64_t start = 0, n = 0; start < c->n_keys; start += KEY_BLOCK, n = !n) {
        find_rows(&values, c, item->value, c->value_strides, start, c->value_dim);
        keys[!n].count = 0;
        if (start + KEY_BLOCK < c->n_keys)
            find_rows(&keys[!n], c, item->key, c->key_strides, start + KEY_BLOCK, c->dim);
        multiply_keys(scratch, n_rows, row_bytes, &keys[n], &values, shares, type);
        for (int64_t row = 0; row < n_rows; row++) {
            float *share = shares + row * KEY_BLOCK;
            const int64_t count = values.count;
            become_shares(item, &state, row, row / n_queries, row % n_queries, start, count, c->mask_kind, share);
            for (int64_t key = 0; key < count && OPERAND_BYTES < 4; key += LANES)
                store((char *)share + OPERAND_BYTES * key, load(share + key, F32), OPERAND);
        }
        add_values(&state, shares, &values, &keys[!n], type);
    }
    end(item, &state, type);
}

TARGET void SET(attend)(const struct item *item, char *scratch) {
    switch (item->call->type) {
    case BF16: attend_few(item, scratch, BF16); break;
#ifndef IN_PAIRS
    case F16: attend_few(item, scratch, F16); break;
    case F32: attend_few(item, scratch, F32); break;
#endif
    }
}
