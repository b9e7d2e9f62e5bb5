// A linear layer for few rows: the experts' kernels with one matrix. The bias is added in float32.

#include "linear.h"

// For sizing buffers: the most bytes of an operand of n elements, whichever kernels compute; and the bytes that a thread
// needs to unpack rows of n weights.
int64_t moe_operand_bytes(int64_t n) { return padded(n, MOST_BLOCK) * (int64_t)sizeof(float) + OPERAND_GAP; }
int64_t moe_scratch_bytes(int64_t dtype, int64_t n) { return scratch_bytes(dtype, n); }

static Product product_of(const LinearCall *c) {
    const bool by_matrix_unit = is_for_matrix_unit(c->dtype, c->features, c->parts, c->n_out, c->n_in);
    Product p = product_with(c->dtype, c->features, c->parts, c->n_out, c->n_in, by_matrix_unit);
    p.weights = c->weight;
    p.bias = c->bias;
    p.operands = by_matrix_unit ? c->rows : c->operands;
    p.packed = c->operands;
    p.out = c->out;
    p.last = c->n_rows;
    p.bias_mode = c->bias ? EXACT_BIAS : NO_BIAS;
    return p;
}

void compute_linear(LinearCall *c, int64_t thread) {
    Product product = product_of(c);
    if (c->parts) product.scratch = c->scratch + thread * scratch_bytes(c->dtype, c->n_in);
    const int64_t item_rows = c->n_threads > 1 ? ITEM_ROWS : c->n_out;
    for (;;) {
        product.from = atomic_fetch_add_explicit(&c->claimed, item_rows, memory_order_relaxed);
        if (product.from >= c->n_out) return;
        product.to = at_most(product.from + item_rows, c->n_out);
        compute(&product);
    }
}

void prepare_linear(LinearCall *c) {
    const Product product = product_of(c);
    const int64_t row_bytes = c->n_in * bytes_of(c->dtype);
    if (product.by_matrix_unit) pack_operands(&product, c->operands);
    for (int64_t row = 0; row < c->n_rows && !product.by_matrix_unit; row++)
        prepare_operand(&product, c->rows + row * row_bytes, c->operands + row * product.stride);
    c->claimed = c->n_started = 0;
}

static void work(void *argument) {
    LinearCall *c = argument;
    compute_linear(c, atomic_fetch_add_explicit(&c->n_started, 1, memory_order_relaxed));
}

// Computes a call: converts the rows to operands in the calling thread, then multiplies in n_threads threads.
void moe_linear(LinearCall *c) {
    prepare_linear(c);
    run_in_threads(c->parallel, c->n_threads, work, c);
}

// Unpacks rows `ids` of a packed matrix that is not in tiles. Returns -1, or the place of the first id that it lacks.
int64_t moe_packed_rows(const Matrix *m, int64_t dtype, int64_t features, const int64_t *ids, int64_t n_ids, char *out) {
    Scales scales;
    for (int64_t i = 0; i < n_ids; i++, out += m->n_in * bytes_of(dtype)) {
        if (ids[i] < 0 || ids[i] >= m->n_out) return i;
        kernels_for(dtype, features)->unpack(m, 0, ids[i], 1, 0, m->n_in, &scales, out, m->n_in, (Ahead){out, 0});
    }
    return -1;
}
