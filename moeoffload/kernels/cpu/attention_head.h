// The steps that attention of few and of many queries to one key head share; the includer defines what vectors.h needs.
//
// Keys are processed in blocks: products -> mask -> running maximum -> probabilities -> sums of values. The blocks do
// not depend on the number of queries, heads or threads, and accumulators run over keys or dimensions in order, so an
// output's bits depend only on its query, the keys, the values and the mask.

#include "attention.h"
#include "vectors.h"

// Intermediate results of the rows (the queries of each head of the group, head by head) after some blocks of keys.
struct state {
    int64_t n_rows, width;
    float *sums;    // of probabilities times values; rows are `width` apart
    float *totals;  // sums of probabilities, relative to the greatest product
    float *best;    // the greatest product
};

// A block of rows of one head of keys or values.
struct rows {
    const char *at[KEY_BLOCK];  // the last one is repeated up to a multiple of 4
    int64_t count, dim;         // rows, elements
};

// Finds the rows of keys or values from `start` on, at most KEY_BLOCK. `first` is the first row of the head, or of the
// head in page 0.
INLINE void find_rows(
    struct rows *rows, const struct attention *c, const char *first, const int64_t *strides, int64_t start, int64_t dim) {
    const int64_t size = bytes_of(c->type), page_keys = c->pages ? c->page_keys : INT64_MAX;
    int64_t page = start / page_keys, key = start % page_keys;
    rows->dim = dim;
    rows->count = at_most(KEY_BLOCK, c->n_keys - start);
    for (int64_t i = 0; i < rows->count; key = 0, page++) {
        const char *place = c->pages ? first + size * c->pages[page] * strides[0] : first;
        for (; key < page_keys && i < rows->count; key++, i++) rows->at[i] = place + size * key * strides[2];
    }
    for (int64_t i = rows->count; i < padded(rows->count, 4); i++) rows->at[i] = rows->at[i - 1];
}

INLINE struct state begin(const struct item *item, void *scratch) {
    const int64_t n_rows = item->call->group * item->n_queries, width = padded(item->call->value_dim, 32);
    float *sums = scratch, *totals = sums + n_rows * width;
    memset(sums, 0, n_rows * (width + 1) * sizeof(float));
    for (int64_t row = 0; row < n_rows; row++) totals[n_rows + row] = -INFINITY;
    return (struct state){n_rows, width, sums, totals, totals + n_rows};
}

// Scales a row's products with `count` keys, applies the mask and returns the greatest of them and `best`. Products of
// keys from n_seen on, up to a multiple of 16, become -inf.
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

// Turns `row`, the products of a query of a head with `count` keys from `start` on, into probabilities relative to the
// greatest product so far, and rescales the earlier results of row `at` of the state if that has grown.
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
    // If the query has seen no key so far, its probabilities are zero instead of NaN.
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

// Writes sums / totals, rounded to the type; zero for a query that saw no key.
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
