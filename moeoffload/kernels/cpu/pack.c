// Rows of a layer's call written into a frame, and sums written into a reply.

#include "experts.h"

enum { CHUNK = 512 };

// n elements of one dtype as another, through float32; returns whether all are finite as they were rounded.
static bool convert(const Kernels *from, const Kernels *to, const char *values, char *out, int64_t n) {
    float exact[CHUNK];
    bool finite = true;
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t some = at_most(CHUNK, n - at);
        from->widen(values + at * from->item_bytes, exact, some);
        finite &= to->narrow(exact, out + at * to->item_bytes, some);
    }
    return finite;
}

typedef struct {
    int64_t features, source, payload;  // dtypes
    int64_t hidden, top_k, n_rows, n_experts, holds_all, weights_are_f32;
    const char *rows;      // (n_rows, hidden) of the source dtype
    const int64_t *ids;    // (n_rows, top_k)
    const char *weights;   // (n_rows, top_k) float32 or of the source dtype
    const int16_t *table;  // (n_experts) slots, -1: elsewhere
    char *body;            // rows (n_hit, hidden) payload, weights (n_hit, top_k) float32, slots (n_hit, top_k) int16
    int64_t *index;        // (n_rows) rows that were written
    int64_t bad_row;       // the first of them that is not finite in the payload dtype, or -1
} PackCall;

// Writes the rows that have an expert in the table. Returns how many, or -1 if an id is no expert's.
int64_t moe_pack_rows(PackCall *c) {
    const Kernels *source = kernels_for(c->source, c->features), *payload = kernels_for(c->payload, c->features);
    int64_t n_hit = 0;
    for (int64_t row = 0; row < c->n_rows; row++) {
        bool hit = c->holds_all;
        for (int64_t at = row * c->top_k; at < (row + 1) * c->top_k; at++) {
            if (c->ids[at] < 0 || c->ids[at] >= c->n_experts) return -1;
            hit |= c->table[c->ids[at]] >= 0;
        }
        if (hit) c->index[n_hit++] = row;
    }
    c->bad_row = -1;
    const int64_t row_bytes = c->hidden * payload->item_bytes, n_routes = n_hit * c->top_k;
    char *weights = c->body + n_hit * row_bytes, *slots = weights + n_routes * sizeof(float);
    for (int64_t i = 0; i < n_hit; i++) {
        const int64_t row = c->index[i];
        if (!convert(source, payload, c->rows + row * c->hidden * source->item_bytes, c->body + i * row_bytes, c->hidden)) {
            c->bad_row = i;
            return n_hit;
        }
        float *exact = (float *)weights + i * c->top_k;
        if (c->weights_are_f32)
            memcpy(exact, c->weights + row * c->top_k * sizeof(float), c->top_k * sizeof(float));
        else
            source->widen(c->weights + row * c->top_k * source->item_bytes, exact, c->top_k);
        for (int64_t k = 0; k < c->top_k; k++)
            ((int16_t *)slots)[i * c->top_k + k] = c->table[c->ids[row * c->top_k + k]];
    }
    return n_hit;
}

// Writes float32 sums (n_rows, width) as another dtype. Returns the first row that is not finite there, or -1.
int64_t moe_encode_sums(int64_t payload, int64_t features, const float *sums, char *out, int64_t n_rows, int64_t width) {
    const Kernels *kernels = kernels_for(payload, features);
    int64_t bad = -1;
    for (int64_t row = 0; row < n_rows; row++)
        if (!kernels->narrow(sums + row * width, out + row * width * kernels->item_bytes, width) && bad < 0) bad = row;
    return bad;
}
