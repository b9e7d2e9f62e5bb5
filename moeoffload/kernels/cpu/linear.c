// A linear layer for few rows: the experts' kernels with one matrix. The bias is added in float32.

#include "tiles.h"

typedef struct {
    int64_t dtype, features;
    const char *weight;  // (n_out, n_in); NULL: packed
    const Matrix *parts;
    const char *bias;    // (n_out), or NULL
    const char *rows;    // (n_rows, n_in)
    char *out;           // (n_rows, n_out)
    int64_t n_in, n_out, n_rows, n_threads;
    Parallel parallel;
    char *operands;  // moe_operand_bytes(.., n_in) bytes for each row
    char *scratch;   // (n_threads, moe_linear_scratch_bytes) for packed weights
    _Atomic int64_t claimed, n_started;
} LinearCall;

// Returns the most bytes that an operand of n elements can need, whichever kernels compute.
int64_t moe_operand_bytes(int64_t dtype, int64_t features, int64_t n) {
    return at_least(operand_bytes(kernels_for(dtype, features), NULL, n, false), n * (int64_t)sizeof(float) + OPERAND_GAP);
}

// Returns the bytes that a thread needs to unpack rows of n weights.
int64_t moe_linear_scratch_bytes(int64_t dtype, int64_t features, int64_t n) {
    return scratch_bytes(kernels_for(dtype, features), n);
}

static bool uses_matrix_unit(const LinearCall *c) {
    return !tiles_for(c->parts, c->dtype, c->features) && matrix_unit_fits(c->dtype, c->features, c->n_in, c->n_out);
}

static int64_t stride_of(const LinearCall *c) {
    const TileKernels *tiles = tiles_for(c->parts, c->dtype, c->features);
    return operand_bytes(kernels_for(c->dtype, c->features), tiles, c->n_in, uses_matrix_unit(c));
}

// Claims and computes blocks of weight rows in one thread until none are left.
static void run(void *argument) {
    LinearCall *c = argument;
    const Kernels *kernels = kernels_for(c->dtype, c->features);
    const TileKernels *tiles = tiles_for(c->parts, c->dtype, c->features);
    const bool by_matrix_unit = uses_matrix_unit(c);
    const int64_t thread = atomic_fetch_add_explicit(&c->n_started, 1, memory_order_relaxed);
    Product product = {
        .kernels = kernels,
        .tiles = tiles,
        .weights = c->weight,
        .parts = c->parts,
        .scratch = c->parts ? c->scratch + thread * scratch_bytes(kernels, c->n_in) : NULL,
        .bias = c->bias,
        .operands = by_matrix_unit ? c->rows : c->operands,
        .packed = c->operands,
        .out = c->out,
        .dtype = c->dtype,
        .n_out = c->n_out,
        .inner = c->n_in,
        .stride = stride_of(c),
        .last = c->n_rows,
        .bias_mode = c->bias ? EXACT_BIAS : NO_BIAS,
    };
    const int64_t item_rows = c->n_threads > 1 ? ITEM_ROWS : c->n_out;
    for (;;) {
        product.from = atomic_fetch_add_explicit(&c->claimed, item_rows, memory_order_relaxed);
        if (product.from >= c->n_out) return;
        product.to = at_most(product.from + item_rows, c->n_out);
        if (tiles)
            tiles->project(&product);
        else if (by_matrix_unit)
            project_by_matrix_unit(&product);
        else
            kernels->project(&product);
    }
}

// Computes a call: converts the rows to operands in the calling thread, then multiplies in n_threads threads.
void moe_linear(LinearCall *c) {
    const Kernels *kernels = kernels_for(c->dtype, c->features);
    const TileKernels *tiles = tiles_for(c->parts, c->dtype, c->features);
    const int64_t stride = stride_of(c);
    if (uses_matrix_unit(c)) {
        const Product rows = {.operands = c->rows, .inner = c->n_in, .stride = c->n_in * kernels->item_bytes, .last = c->n_rows};
        pack_operands(&rows, c->operands);
    } else {
        for (int64_t row = 0; row < c->n_rows; row++) {
            const char *values = c->rows + row * c->n_in * kernels->item_bytes;
            prepare_operand(kernels, tiles, c->dtype, values, c->operands + row * stride, c->n_in, false);
        }
    }
    c->claimed = c->n_started = 0;
    run_in_threads(c->parallel, c->n_threads, run, c);
}
