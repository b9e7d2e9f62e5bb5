// Rotary embeddings of rows for one instruction set; see vectors.h.

#include "attention.h"
#include "vectors.h"

// Rotates `count` pairs, at most LANES: element i of the first half with element i of the second, as transformers'
// apply_rotary_pos_emb does: every product and sum is rounded.
INLINE void rotate_pairs(char *x, const char *cos, const char *sin, int64_t half_bytes, int64_t count, const int type) {
    const vec a = load_some(x, count, type), b = load_some(x + half_bytes, count, type);
    const vec first = rounded(a * load_some(cos, count, type), type) - rounded(b * load_some(sin, count, type), type);
    const vec second = rounded(b * load_some(cos + half_bytes, count, type), type) +
                       rounded(a * load_some(sin + half_bytes, count, type), type);
    store_some(x, first, count, type);
    store_some(x + half_bytes, second, count, type);
}

INLINE void rotate_rows(const struct rotary *call, const int type) {
    const int64_t size = bytes_of(type), half = call->width / 2;
    for (int64_t row = 0; row < call->n_rows; row++)
        for (int64_t head = 0; head < call->heads; head++) {
            char *x = call->rows + (row * call->heads + head) * call->dim * size;
            const char *cos = call->cos + row * call->width * size, *sin = call->sin + row * call->width * size;
            for (int64_t i = 0; i < half; i += LANES)
                rotate_pairs(x + i * size, cos + i * size, sin + i * size, half * size, at_most(half - i, LANES), type);
        }
}

TARGET void SET(rotate)(const struct rotary *call) {
    call->type == BF16 ? rotate_rows(call, BF16) : rotate_rows(call, F16);
}
