// Attention of few queries for one instruction set. The includer also defines SET, and KEY_ROWS and VALUE_ROWS: the
// most rows whose accumulators stay in registers.

#include "attention_head.h"

// Returns the size of the next tile when n_left rows are divided into about equal tiles of at most `most` rows.
INLINE int64_t tile_of(int64_t n_left, int64_t most) {
    const int64_t n_tiles = (n_left + most - 1) / most;
    return (n_left + n_tiles - 1) / n_tiles;
}

// Prefetches rows from..to into the second-level cache.
INLINE void fetch(const char *rows, int64_t stride, int64_t from, int64_t to, int64_t n_bytes) {
    for (int64_t row = from; row < to; row++)
        for (int64_t at = 0; at < n_bytes; at += 64) __builtin_prefetch(rows + row * stride + at, 0, 2);
}

// Adds the products of one vector of columns: n_rows float32 rows times four keys.
INLINE void add_products(const int n_rows, const int type, vec (*sums)[4], const char *rows, int64_t stride, const char **at) {
    vec keys[4];
    UNROLL for (int n = 0; n < 4; n++) keys[n] = load(at[n], type);
    UNROLL for (int m = 0; m < n_rows; m++) {
        const vec row = load(rows + m * stride, F32);
        UNROLL for (int n = 0; n < 4; n++) sums[m][n] = fma_of(keys[n], row, sums[m][n]);
    }
}

// Computes out[m][n] = rows[m] . keys[n] for n_rows rows and four keys.
INLINE void key_tile(
    const int n_rows, const int type, const char *rows, int64_t stride, const char **keys, int64_t dim, float *out) {
    const int64_t whole = dim / LANES * LANES;
    const char *at[4];
    vec sums[8][4];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < 4; n++) sums[m][n] = all(0);
    for (int64_t i = 0; i < whole; i += LANES) {
        UNROLL for (int n = 0; n < 4; n++) at[n] = keys[n] + i * bytes_of(type);
        add_products(n_rows, type, sums, rows + 4 * i, stride, at);
    }
    if (whole < dim) {
        char tails[4][64] = {{0}};
        for (int n = 0; n < 4; n++)
            at[n] = memcpy(tails[n], keys[n] + whole * bytes_of(type), (dim - whole) * bytes_of(type));
        add_products(n_rows, type, sums, rows + 4 * whole, stride, at);
    }
    UNROLL for (int m = 0; m < n_rows; m++) {
        const four folded = fold(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
        memcpy(out + m * KEY_BLOCK, &folded, sizeof folded);
    }
}

// Computes sums[m] += shares[m][key] * values[key] for one or two vectors of columns; with one, for the n_left that
// remain.
INLINE void value_tile(
    const int n_rows, const int n_vectors, const int type, const float *shares, const char *values, int64_t stride,
    int64_t n_keys, int64_t n_left, float *sums, int64_t width) {
    vec totals[8][2], columns[2];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        totals[m][n] = load(sums + m * width + n * LANES, F32);
    for (int64_t key = 0; key < n_keys; key++, values += stride) {
        UNROLL for (int n = 0; n < n_vectors; n++)
            columns[n] = n_vectors == 1 ? load_some(values, n_left, type) : load(values + n * LANES * bytes_of(type), type);
        UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
            totals[m][n] = fma_of(columns[n], all(shares[m * KEY_BLOCK + key]), totals[m][n]);
    }
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        store(sums + m * width + n * LANES, totals[m][n], F32);
}

// Rows of one head of keys or values, from some key on.
struct rows {
    const char *first;
    int64_t stride, count, dim;  // bytes, rows, elements
};

// Computes shares[row][key] = rows[row] . keys[key]; prefetches the values meanwhile.
INLINE void multiply_keys(
    const char *rows, int64_t n_rows, int64_t row_bytes, struct rows keys, struct rows values, float *shares,
    const int type) {
    for (int64_t key = 0; key < keys.count; key += 4) {
        const char *four_keys[4];  // repeats the last key if fewer than four are left
        for (int n = 0; n < 4; n++) four_keys[n] = keys.first + at_most(key + n, keys.count - 1) * keys.stride;
        fetch(values.first, values.stride, key, at_most(key + 4, values.count), values.dim * bytes_of(type));
        for (int64_t row = 0, size; row < n_rows; row += size) {
            size = tile_of(n_rows - row, KEY_ROWS);
#define TILE(n) key_tile(n, type, rows + row * row_bytes, row_bytes, four_keys, keys.dim, shares + row * KEY_BLOCK + key)
            FOR_ROWS(size, KEY_ROWS, TILE)
#undef TILE
        }
    }
}

// Computes sums[row] += shares[row][key] * values[key]; prefetches the next keys meanwhile.
INLINE void add_values(
    const struct state *state, const float *shares, struct rows values, struct rows next_keys, const int type) {
    enum { SOME = 64 };  // keys whose values stay in the first-level cache while all rows use them
    for (int64_t start = 0; start < values.count; start += SOME) {
        const int64_t count = at_most(SOME, values.count - start);
        for (int64_t row = 0, size; row < state->n_rows; row += size) {
            size = tile_of(state->n_rows - row, VALUE_ROWS);
            for (int64_t column = 0, n_vectors; column < values.dim; column += n_vectors * LANES) {
                const int64_t n_left = values.dim - column;
                const char *first = values.first + start * values.stride + column * bytes_of(type);
                const float *share = shares + row * KEY_BLOCK + start;
                float *sums = state->sums + row * state->width + column;
                n_vectors = n_left >= 2 * LANES ? 2 : 1;
                if (row == 0) {
                    const int64_t from = start + count * column / values.dim;
                    const int64_t to = start + count * (column + n_vectors * LANES) / values.dim;
                    fetch(next_keys.first, next_keys.stride, from, at_most(to, next_keys.count), next_keys.dim * bytes_of(type));
                }
#define TILE(n) value_tile(n, 2, type, share, first, values.stride, count, n_left, sums, state->width)
#define NARROW_TILE(n) value_tile(n, 1, type, share, first, values.stride, count, n_left, sums, state->width)
                if (n_vectors == 2) FOR_ROWS(size, VALUE_ROWS, TILE) else FOR_ROWS(size, VALUE_ROWS, NARROW_TILE)
#undef TILE
#undef NARROW_TILE
            }
        }
    }
}

// Attends few queries to one key head: everything is float32 until the end.
INLINE void attend_few(const struct item *item, char *scratch, const int type) {
    const struct attention *c = item->call;
    const int64_t n_queries = item->n_queries, size = bytes_of(type), row_bytes = 4 * padded(c->dim, 16);
    const int64_t n_rows = c->group * n_queries;
    float *shares = (float *)(scratch + n_rows * row_bytes);
    const struct state state = begin(item, shares + n_rows * KEY_BLOCK);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t head = row / n_queries, query = row % n_queries;
        const char *source = item->query + size * (head * c->query_strides[1] + query * c->query_strides[2]);
        char *target = scratch + row * row_bytes;
        memset(target, 0, row_bytes);
        for (int64_t i = 0; i < c->dim; i += LANES)
            store(target + 4 * i, load_some(source + i * size, c->dim - i, type), F32);
    }
    const int64_t key_bytes = size * c->key_strides[2], value_bytes = size * c->value_strides[2];
    for (int64_t start = 0, count; start < c->n_keys; start += count) {
        count = at_most(KEY_BLOCK, c->n_keys - start);
        const struct rows keys = {item->key + start * key_bytes, key_bytes, count, c->dim};
        const struct rows values = {item->value + start * value_bytes, value_bytes, count, c->value_dim};
        const struct rows next = {keys.first + count * key_bytes, key_bytes, at_most(KEY_BLOCK, c->n_keys - start - count), c->dim};
        multiply_keys(scratch, n_rows, row_bytes, keys, values, shares, type);
        for (int64_t row = 0; row < n_rows; row++)
            become_shares(
                item, &state, row, row / n_queries, row % n_queries, start, count, c->mask_kind, shares + row * KEY_BLOCK);
        add_values(&state, shares, values, next, type);
    }
    end(item, &state, type);
}

TARGET void SET(attend)(const struct item *item, char *scratch) {
    switch (item->call->type) {
    case BF16: attend_few(item, scratch, BF16); break;
    case F16: attend_few(item, scratch, F16); break;
    case F32: attend_few(item, scratch, F32); break;
    }
}
