// Attention of few and of many bfloat16 queries with the instruction that adds products of bfloat16 pairs to float32
// (AVX512-BF16).

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 16
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")))
#define IN_PAIRS
#define KEY_ROWS 6
#define VALUE_ROWS 8
#define SET(name) name##_pairs
#include "attention_few.h"

// Packs keys: for each 64 keys (dim / 2, 64) pairs of neighbouring elements; zeros after the last key.
INLINE void pack_keys(const struct rows *keys, uint32_t *packed) {
    const int64_t n_pairs = keys->dim / 2;
    for (int64_t first = 0; first < keys->count; first += PACKED_COLUMNS, packed += PACKED_COLUMNS * n_pairs) {
        memset(packed, 0, 4 * PACKED_COLUMNS * n_pairs);
        for (int64_t key = 0; key < at_most(PACKED_COLUMNS, keys->count - first); key++)
            for (int64_t pair = 0; pair < n_pairs; pair++)
                memcpy(packed + pair * PACKED_COLUMNS + key, keys->at[first + key] + 4 * pair, 4);
    }
}

// Packs values: for each 64 columns (or the rest, padded to a multiple of 16) (filled / 2, columns) pairs of the values
// of two neighbouring keys.
INLINE void pack_values(const struct rows *values, int64_t filled, uint32_t *packed) {
    for (int64_t first = 0; first < values->dim; first += PACKED_COLUMNS) {
        const int64_t n_columns = at_most(PACKED_COLUMNS, padded(values->dim - first, 16));
        const int64_t size = 2 * at_most(n_columns, values->dim - first);
        for (int64_t key = 0; key < filled; key += 2, packed += n_columns) {
            uint16_t pairs[2][PACKED_COLUMNS] = {{0}};
            for (int64_t i = 0; i < at_most(2, values->count - key); i++)
                memcpy(pairs[i], values->at[key + i] + 2 * first, size);
            for (int64_t i = 0; i < n_columns; i++) packed[i] = pairs[0][i] | (uint32_t)pairs[1][i] << 16;
        }
    }
}

// Computes out[m] = rows[m] . packed, or adds to out if `adds`, for n_rows rows and n_vectors vectors of columns.
INLINE void packed_tile(
    const int n_rows, const int n_vectors, const char *rows, int64_t row_bytes, const uint32_t *packed,
    int64_t n_pairs, float *out, int64_t stride, int adds) {
    vec sums[6][4];
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        sums[m][n] = adds ? load(out + m * stride + n * LANES, F32) : all(0);
    for (int64_t pair = 0; pair < n_pairs; pair++, packed += n_vectors * LANES) {
        __m512bh columns[4];
        UNROLL for (int n = 0; n < n_vectors; n++) columns[n] = (__m512bh)_mm512_loadu_si512(packed + n * LANES);
        UNROLL for (int m = 0; m < n_rows; m++) {
            int32_t both;
            memcpy(&both, rows + m * row_bytes + 4 * pair, 4);
            UNROLL for (int n = 0; n < n_vectors; n++)
                sums[m][n] = (vec)_mm512_dpbf16_ps((__m512)sums[m][n], columns[n], (__m512bh)_mm512_set1_epi32(both));
        }
    }
    UNROLL for (int m = 0; m < n_rows; m++) UNROLL for (int n = 0; n < n_vectors; n++)
        store(out + m * stride + n * LANES, sums[m][n], F32);
}

// As packed_tile, for any number of rows and columns.
INLINE void multiply_packed(
    int64_t n_rows, const char *rows, int64_t row_bytes, const uint32_t *packed, int64_t n_pairs, int64_t n_columns,
    float *out, int64_t stride, int adds) {
    for (int64_t first = 0; first < n_columns; first += PACKED_COLUMNS) {
        const int64_t n_vectors = at_most(PACKED_COLUMNS, n_columns - first) / LANES;
        for (int64_t row = 0, size; row < n_rows; row += size) {
            size = at_most(6, n_rows - row);
#define WIDE_TILE(m, n) \
    packed_tile(m, n, rows + row * row_bytes, row_bytes, packed + first * n_pairs, n_pairs, out + row * stride + first, stride, adds)
#define TILE(m)                                \
    switch (n_vectors) {                       \
    case 1: WIDE_TILE(m, 1); break;            \
    case 2: WIDE_TILE(m, 2); break;            \
    case 3: WIDE_TILE(m, 3); break;            \
    default: WIDE_TILE(m, 4);                  \
    }
            WITH_CONSTANT(size, 1, 6, TILE)
#undef TILE
#undef WIDE_TILE
        }
    }
}

enum sight { NOTHING, SOMETHING, EVERYTHING };

// Returns whether the n_queries queries from `first` on can see none, some or all of `count` keys from `start` on, by
// the mask; a causal call is NOTHING if all keys come after the queries.
static enum sight sight_of(
    const struct item *item, int64_t head, int64_t first, int64_t n_queries, int64_t start, int64_t count) {
    const struct attention *c = item->call;
    if (c->is_causal && first + n_queries <= start) return NOTHING;
    if (c->mask_kind != BOOLEAN_MASK) return c->mask_kind == NO_MASK ? EVERYTHING : SOMETHING;
    uint8_t any = 0, every = 1;
    for (int64_t query = first; query < first + n_queries; query++) {
        const char *mask = item->mask + head * c->mask_strides[1] + query * c->mask_strides[2] + start;
        for (int64_t key = 0; key < count; key++) any |= mask[key], every &= mask[key];
    }
    return every ? EVERYTHING : any ? SOMETHING : NOTHING;
}

// Attends many queries to one key head: a block of keys is packed once for all queries and heads, and skipped for
// blocks of queries from which the mask hides it.
TARGET void attend_many(const struct item *item, char *scratch) {
    const struct attention *c = item->call;
    const int64_t n_queries = item->n_queries, dim = c->dim, width = padded(c->value_dim, 16);
    uint32_t *keys = (uint32_t *)scratch, *values = keys + KEY_BLOCK * dim / 2;
    float *products = (float *)(values + KEY_BLOCK * width / 2);
    uint16_t *shares = (uint16_t *)(products + BLOCK_QUERIES * KEY_BLOCK);
    const struct state state = begin(item, shares + BLOCK_QUERIES * KEY_BLOCK);
    for (int64_t start = 0; start < c->n_keys; start += KEY_BLOCK) {
        const int64_t count = at_most(KEY_BLOCK, c->n_keys - start), filled = padded(count, 16);
        int is_packed = 0;
        for (int64_t some = 0; some < n_queries; some += BLOCK_QUERIES) {
            const int64_t size = at_most(BLOCK_QUERIES, n_queries - some), first = item->first + some;
            enum sight sight = NOTHING;
            for (int64_t head = 0; head < c->group; head++) {
                if (!head || c->mask_strides[1]) sight = sight_of(item, head, first, size, start, count);
                if (sight == NOTHING) continue;
                if (!is_packed) {
                    struct rows rows;
                    find_rows(&rows, c, item->key, c->key_strides, start, dim);
                    pack_keys(&rows, keys);
                    find_rows(&rows, c, item->value, c->value_strides, start, c->value_dim);
                    pack_values(&rows, filled, values);
                    is_packed = 1;
                }
                const char *query = item->query + 2 * (head * c->query_strides[1] + first * c->query_strides[2]);
                const int64_t row_bytes = 2 * c->query_strides[2], at = head * n_queries + some;
                multiply_packed(
                    size, query, row_bytes, keys, dim / 2, padded(count, PACKED_COLUMNS), products, KEY_BLOCK, 0);
                for (int64_t row = 0; row < size; row++) {
                    float *product = products + row * KEY_BLOCK;
                    const int kind = sight == EVERYTHING ? NO_MASK : c->mask_kind;
                    become_shares(item, &state, at + row, head, first + row, start, count, kind, product);
                    for (int64_t key = 0; key < filled; key += LANES)
                        store(shares + row * KEY_BLOCK + key, load(product + key, F32), BF16);
                }
                float *sums = state.sums + at * state.width;
                multiply_packed(size, (char *)shares, 2 * KEY_BLOCK, values, filled / 2, width, sums, state.width, 1);
            }
        }
    }
    end(item, &state, BF16);
}
#endif
