// RMS norms of rows for one instruction set; see vectors.h.

#include "attention.h"
#include "vectors.h"

// Multiplies normalised values y by the weight, with the roundings of the kind of norm.
INLINE vec weighted(vec y, vec weight, const int kind, const int type) {
    if (kind == ROUNDED) y = rounded(y, type);
    return y * (kind == SHIFTED ? weight + 1.0f : weight);
}

// Normalises one row: sums its squares in four vectors, which are folded in a fixed tree, then scales it and multiplies
// it by the weight.
INLINE void norm_row(const char *x, const char *w, char *out, int64_t dim, float epsilon, const int kind, const int type) {
    const int64_t size = bytes_of(type);
    vec squares[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        UNROLL for (int n = 0; n < 4; n++) {
            const vec values = load(x + (i + n * LANES) * size, type);
            squares[n] = fma_of(values, values, squares[n]);
        }
    for (; i < dim; i += LANES) {
        const vec values = load_some(x + i * size, dim - i, type);
        squares[0] = fma_of(values, values, squares[0]);
    }
    const four sums = fold(squares[0], squares[1], squares[2], squares[3]);
    const float factor = 1 / sqrtf(((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)dim + epsilon);
    UNROLL for (i = 0; i + LANES <= dim; i += LANES)
        store(out + i * size, weighted(load(x + i * size, type) * factor, load(w + i * size, type), kind, type), type);
    if (i < dim) {
        const vec y = load_some(x + i * size, dim - i, type) * factor, weight = load_some(w + i * size, dim - i, type);
        store_some(out + i * size, weighted(y, weight, kind, type), dim - i, type);
    }
}

INLINE void norm_rows(const struct norm *call, int64_t first, int64_t end, const int kind, const int type) {
    const int64_t row_bytes = call->dim * bytes_of(type);
    for (int64_t at = first * row_bytes; at < end * row_bytes; at += row_bytes)
        norm_row(call->rows + at, call->weight, call->out + at, call->dim, call->epsilon, kind, type);
}

TARGET void SET(norm)(const struct norm *call, int64_t first, int64_t end) {
#define CASE(kind, type) \
    case 3 * kind + type: norm_rows(call, first, end, kind, type); break;
#define CASES(kind) CASE(kind, BF16) CASE(kind, F16) CASE(kind, F32)
    switch (3 * call->kind + call->type) { CASES(ROUNDED) CASES(WEIGHTED) CASES(SHIFTED) }
#undef CASE
#undef CASES
}
