// Attention to one head of keys for one instruction set: an includer defines what vectors.h needs, KEY_ROWS
// and VALUE_ROWS, so many rows' accumulators stay in registers, SET, and BF16_DOT if pairs of bfloat16 are multiplied.
//
// Keys come in blocks: products -> mask -> running maximum -> probabilities -> sums of values. The blocks do not depend
// on how many queries, heads or threads there are, and an accumulator runs over keys or dimensions in order: so an
// output's bits depend on its query, the keys, the values and the mask alone.

#include "attention.h"
#include "vectors.h"

// Results so far of rows: queries, head by head.
struct state {
    int64_t n_rows, width;
    float *sums;    // of probabilities times values; rows are `width` apart
    float *totals;  // of probabilities, relative to the greatest product
    float *best;    // the greatest product
};

INLINE struct state begin(const struct item *item, void *scratch) {
    const int64_t n_rows = item->call->group * item->n_queries, width = padded(item->call->value_dim, 16);
    float *sums = scratch, *totals = sums + n_rows * width;
    memset(sums, 0, n_rows * (width + 1) * sizeof(float));
    for (int64_t row = 0; row < n_rows; row++) totals[n_rows + row] = -INFINITY;
    return (struct state){n_rows, width, sums, totals, totals + n_rows};
}

// Scales a row's products with `count` keys, adds a mask and finds the greatest; -inf up to a multiple of 16.
INLINE float scale_and_mask(
    float *row, int64_t count, int64_t n_seen, float scale, const char *mask, const int kind, float best) {
    vec most = all(best);
    for (int64_t key = 0; key < count; key++)
        row[key] = kind != BOOLEAN_MASK || mask[key] ? row[key] * scale : -INFINITY;
    for (int64_t key = n_seen; key < padded(count, 16); key++) row[key] = -INFINITY;
    for (int64_t key = 0; key < padded(count, 16); key += LANES) {
        vec values = load(row + key, F32);
        if (kind < BOOLEAN_MASK && key < count) {
            values += load_some(mask + key * bytes_of(kind), count - key, kind);
            store(row + key, values, F32);
        }
        most = choose(values > most, values, most);
    }
    for (int lane = 0; lane < LANES; lane++) best = most[lane] > best ? most[lane] : best;
    return best;
}

// Makes probabilities of row `at`, the products of a query of a head with `count` keys from `start` on.
INLINE void become_shares(
    const struct item *item, const struct state *state, int64_t at, int64_t head, int64_t query, int64_t start,
    int64_t count, int kind, float *row) {
    const struct attention *c = item->call;
    const char *mask =
        item->mask + bytes_of(kind) * (head * c->mask_strides[1] + query * c->mask_strides[2] + start);
    const int64_t n_seen = !c->is_causal ? count : query < start ? 0 : at_most(count, query + 1 - start);
    float *best = state->best + at, *total = state->totals + at, *sums = state->sums + at * state->width, now;
    switch (kind) {
    case BF16: now = scale_and_mask(row, count, n_seen, c->scale, mask, BF16, *best); break;
    case F16: now = scale_and_mask(row, count, n_seen, c->scale, mask, F16, *best); break;
    case F32: now = scale_and_mask(row, count, n_seen, c->scale, mask, F32, *best); break;
    case BOOLEAN_MASK: now = scale_and_mask(row, count, n_seen, c->scale, mask, BOOLEAN_MASK, *best); break;
    default: now = scale_and_mask(row, count, n_seen, c->scale, mask, NO_MASK, *best);
    }
    // A query that has seen no key so far: its probabilities are zero, not undefined.
    const float shift = now == -INFINITY ? 0 : now;
    vec added = {0};
    for (int64_t key = 0; key < padded(count, 16); key += LANES) {
        const vec shares = exp_of_negative(load(row + key, F32) - shift);
        store(row + key, shares, F32);
        added += shares;
    }
    if (now != *best) {
        const float factor = exp_of_negative(all(*best - shift))[0];
        *best = now;
        *total *= factor;
        for (int64_t i = 0; i < state->width; i++) sums[i] *= factor;
    }
    *total += fold(added, added, added, added)[0];
}

// Writes the quotients, rounded; zero for a query that saw no key.
INLINE void end(const struct item *item, const struct state *state, const int type) {
    const struct attention *c = item->call;
    for (int64_t row = 0; row < state->n_rows; row++) {
        const int64_t head = row / item->n_queries, query = item->first + row % item->n_queries, size = bytes_of(type);
        const float *sums = state->sums + row * state->width, total = state->totals[row];
        char *out = item->out + size * (query * c->key_heads * c->group + head) * c->value_dim;
        for (int64_t i = 0; i < c->value_dim; i += LANES) {
            const vec quotient = total == 0 ? all(0) : load(sums + i, F32) / total;
            store_some(out + i * size, quotient, c->value_dim - i, type);
        }
    }
}

// Calls TILE with a constant number of rows.
#define FOR_ROWS(n_rows, most, TILE)             \
    switch (n_rows) {                            \
    case 1: TILE(1); break;                      \
    case 2: TILE(2); break;                      \
    case 3: if (most >= 3) { TILE(3); } break;   \
    case 4: if (most >= 4) { TILE(4); } break;   \
    case 5: if (most >= 5) { TILE(5); } break;   \
    case 6: if (most >= 6) { TILE(6); } break;   \
    case 7: if (most >= 7) { TILE(7); } break;   \
    case 8: if (most >= 8) { TILE(8); } break;   \
    }

// The next of about equal tiles of at most `most` rows.
INLINE int64_t tile_of(int64_t n_left, int64_t most) {
    const int64_t n_tiles = (n_left + most - 1) / most;
    return (n_left + n_tiles - 1) / n_tiles;
}

// Begins to read rows `from` to `to` into the second-level cache.
INLINE void fetch(const char *rows, int64_t stride, int64_t from, int64_t to, int64_t n_bytes) {
    for (int64_t row = from; row < to; row++)
        for (int64_t at = 0; at < n_bytes; at += 64) __builtin_prefetch(rows + row * stride + at, 0, 2);
}

#ifdef BF16_DOT
typedef __m512bh key_vec;
#define LOAD_KEY(from, type) (__m512bh) _mm512_loadu_si512(from)
#define ADD_PRODUCT(sum, a, b) (vec) _mm512_dpbf16_ps((__m512)(sum), a, b)
#define ROW_TYPE BF16
#else
typedef vec key_vec;
#define LOAD_KEY(from, type) load(from, type)
#define ADD_PRODUCT(sum, a, b) fma_of(a, b, sum)
#define ROW_TYPE F32
#endif
enum { STEP = 64 / (ROW_TYPE == F32 ? 4 : 2) * LANES / 16 };  // elements of a vector of a row

INLINE void add_products(const int n_rows, const int type, vec (*sums)[4], const char *rows, int64_t stride, const char **at) {
    key_vec keys[4];
    UNROLL for (int n = 0; n < 4; n++) keys[n] = LOAD_KEY(at[n], type);
    UNROLL for (int m = 0; m < n_rows; m++) {
        const key_vec row = LOAD_KEY(rows + m * stride, ROW_TYPE);
        UNROLL for (int n = 0; n < 4; n++) sums[m][n] = ADD_PRODUCT(sums[m][n], keys[n], row);
    }
}

// out[m][n] = rows[m] . keys[n]
INLINE void key_tile(
    const int n_rows, const int type, const char *rows, int64_t stride, const char **keys, int64_t dim, float *out) {
    const int64_t whole = dim / STEP * STEP;
    const char *at[4];
    vec sums[8][4];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < 4; n++) sums[m][n] = all(0);
    for (int64_t i = 0; i < whole; i += STEP) {
        UNROLL for (int n = 0; n < 4; n++) at[n] = keys[n] + i * bytes_of(type);
        add_products(n_rows, type, sums, rows + i * bytes_of(ROW_TYPE), stride, at);
    }
    if (whole < dim) {
        char tails[4][64] = {{0}};
        for (int n = 0; n < 4; n++)
            at[n] = memcpy(tails[n], keys[n] + whole * bytes_of(type), (dim - whole) * bytes_of(type));
        add_products(n_rows, type, sums, rows + whole * bytes_of(ROW_TYPE), stride, at);
    }
    UNROLL for (int m = 0; m < n_rows; m++) {
        const four folded = fold(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
        memcpy(out + m * KEY_BLOCK, &folded, sizeof folded);
    }
}

// sums[m] += shares[m][key] * values[key] for one or two vectors of columns, or what is left of one.
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

// A head of keys or values from a key on.
struct rows {
    const char *first;
    int64_t stride, count, dim;  // bytes, rows, elements
};

// shares[row][key] = rows[row] . keys[key]. Meanwhile the values come.
INLINE void multiply_keys(
    const char *rows, int64_t n_rows, int64_t row_bytes, struct rows keys, struct rows values, float *shares,
    const int type) {
    for (int64_t key = 0; key < keys.count; key += 4) {
        const char *four_keys[4];  // the last one again where there are fewer
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

// sums[row] += shares[row][key] * values[key]. Meanwhile the next keys come.
INLINE void add_values(
    const struct state *state, const float *shares, struct rows values, struct rows next_keys, const int type) {
    enum { SOME = 64 };  // their values stay in the first-level cache while all rows pass
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

// Few queries: everything is float32 until the end.
INLINE void attend_few(const struct item *item, char *scratch, const int type) {
    const struct attention *c = item->call;
    const int64_t n_queries = item->n_queries, size = bytes_of(type), row_bytes = 4 * padded(c->dim, 32);
    const int64_t n_rows = c->group * n_queries;
    float *shares = (float *)(scratch + n_rows * row_bytes);
    const struct state state = begin(item, shares + n_rows * KEY_BLOCK);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t head = row / n_queries, query = row % n_queries;
        const char *source = item->query + size * (head * c->query_strides[1] + query * c->query_strides[2]);
        char *target = scratch + row * row_bytes;
        memset(target, 0, row_bytes);
        for (int64_t i = 0; i < c->dim; i += LANES)
            store(target + i * bytes_of(ROW_TYPE), load_some(source + i * size, c->dim - i, type), ROW_TYPE);
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

#ifndef BF16_DOT
TARGET void SET(attend)(const struct item *item, char *scratch) {
    switch (item->call->type) {
    case BF16: attend_few(item, scratch, BF16); break;
    case F16: attend_few(item, scratch, F16); break;
    case F32: attend_few(item, scratch, F32); break;
    }
}
#endif
