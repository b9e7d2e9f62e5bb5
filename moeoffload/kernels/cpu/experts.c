// Computes a layer's experts for the rows of a call: plan, up projections, activation, down projections, weighted sum.
//
// The plan sorts routes by expert; a position is the index of a route in that order. Each step is divided into items
// that threads claim one by one, and a step begins when all items of the step before are finished, so a thread that
// loses its core delays the others by one item at most. Results do not depend on which thread computed an item.

#include "tiles.h"

#include <sched.h>

// Steps of a call. TAKE replaces ACTIVATE if `values` already holds the activations (n_present, inter).
enum { PLAN = 1, UP = 2, ACTIVATE = 4, TAKE = 8, DOWN = 16, SUM = 32 };

// Counters of claimed and finished items, each in a cache line of its own.
enum { PACK_UP, COMPUTE_UP, ACTIVATED, PACK_DOWN, COMPUTE_DOWN, SUMMED, N_COUNTERS };

typedef struct {
    _Atomic int64_t claimed, finished;
    int64_t unused[6];
} Counter;

typedef struct {
    int64_t n_experts, hidden, inter, up_columns, dtype, features;
    const char *up;         // (n_experts, up_columns, hidden)
    const char *up_bias;    // (n_experts, up_columns), or NULL
    const char *down;       // (n_experts, hidden, inter)
    const char *down_bias;  // (n_experts, hidden), or NULL
    // Packed weights in place of `up` and `down`, see Product; or NULL.
    const Matrix *up_parts, *down_parts;
} Layer;

typedef struct {
    const Layer *layer;
    const char *rows;      // (n_rows, hidden)
    const int64_t *slots;  // (n_rows, top_k); -1: not here
    const char *weights;   // (n_rows, top_k) float32 or of the dtype
    float *out;            // (n_rows, hidden)
    int64_t n_rows, top_k, weights_are_f32;
    int64_t steps;
    int64_t begin, end;          // positions to compute; PLAN sets them to all
    int64_t begin_row, end_row;  // rows to sum; PLAN sets them to all
    int64_t n_threads;
    Parallel parallel;  // NULL: only the calling thread
    // Buffers, see kernels/workspace.py; for operands see product_with().
    int32_t *hit;          // (n_experts) experts that are hit
    int32_t *first;        // (n_experts + 1) their first positions
    int32_t *row_of;       // (n_routes) the row of a position
    int32_t *position_of;  // (n_routes) the position of a route, -1: none
    char *values;          // (n_routes, up_columns), then (n_routes, hidden)
    char *activated;       // (n_routes) operands of `inter` elements
    char *operands;        // (n_rows) operands of `hidden` elements
    char *packed;          // (n_routes, max(hidden, inter)) operands packed for the matrix unit
    char *scratch;         // (n_threads, scratch_bytes()) for packed weights
    // Results of the plan.
    int64_t n_hit, n_present;
    _Atomic int64_t n_started;  // threads that have started
    Counter counters[N_COUNTERS];
} Call;

enum { SUM_COLUMNS = 512, SPINS = 200 };

// A layer uses the matrix unit in both projections or in none.
static bool uses_matrix_unit(const Layer *l) {
    return is_for_matrix_unit(l->dtype, l->features, l->up_parts, l->up_columns, l->hidden) &&
           is_for_matrix_unit(l->dtype, l->features, l->down_parts, l->hidden, l->inter);
}

// Returns the up projection, or the down projection if not `is_up`, without its operands and results.
static Product projection_of(const Layer *l, bool is_up) {
    const Matrix *parts = is_up ? l->up_parts : l->down_parts;
    const int64_t n_out = is_up ? l->up_columns : l->hidden, inner = is_up ? l->hidden : l->inter;
    return product_with(l->dtype, l->features, parts, n_out, inner, uses_matrix_unit(l));
}

int64_t moe_uses_matrix_unit(const Layer *layer) { return uses_matrix_unit(layer); }

static int64_t claim(Counter *counter) { return atomic_fetch_add_explicit(&counter->claimed, 1, memory_order_relaxed); }
static void finish(Counter *counter) { atomic_fetch_add_explicit(&counter->finished, 1, memory_order_release); }
static void wait_for(Counter *counter, int64_t n_items) {
    for (int spins = 0; atomic_load_explicit(&counter->finished, memory_order_acquire) < n_items; spins++)
        if (spins > SPINS) sched_yield();  // the thread with the missing item may be waiting for this core
}

// Sorts routes by expert with a counting sort, which keeps the order of an expert's routes. Returns -1, or the first
// route whose slot does not exist.
static int64_t make_plan(Call *c) {
    const int64_t n_experts = c->layer->n_experts, n_routes = c->n_rows * c->top_k;
    int32_t *counts = c->hit, *next = c->first;  // routes of each expert, the position of its next one; overwritten below
    memset(counts, 0, n_experts * sizeof *counts);
    for (int64_t route = 0; route < n_routes; route++) {
        const int64_t slot = c->slots[route];
        if (slot < -1 || slot >= n_experts) return route;
        if (slot >= 0) counts[slot]++;
    }
    int32_t position = 0;
    for (int64_t expert = 0; expert < n_experts; expert++) {
        next[expert] = position;
        position += counts[expert];
    }
    for (int64_t route = 0; route < n_routes; route++) {
        const int64_t slot = c->slots[route];
        c->position_of[route] = slot < 0 ? -1 : next[slot];
        if (slot >= 0) c->row_of[next[slot]++] = (int32_t)(route / c->top_k);
    }
    // next[expert] is now the end of the expert's positions.
    int64_t group = 0;
    int32_t start = 0;
    for (int64_t expert = 0; expert < n_experts; expert++) {
        const int32_t end = next[expert];
        if (end > start) {
            c->hit[group] = (int32_t)expert;
            c->first[group++] = start;
        }
        start = end;
    }
    c->first[group] = position;
    c->n_hit = group;
    c->n_present = position;
    return -1;
}

// Finds the groups from..to (one per expert that is hit) that positions begin..end belong to.
static void groups_of(const Call *c, int64_t *from, int64_t *to) {
    *from = 0;
    while (*from < c->n_hit && c->first[*from + 1] <= c->begin) ++*from;
    *to = *from;
    while (*to < c->n_hit && c->first[*to] < c->end) ++*to;
}

// Describes the product of one group in the up projection, or in the down projection if not `is_up`.
static Product product_of(const Call *c, int64_t group, bool is_up, int64_t thread) {
    const Layer *l = c->layer;
    Product p = projection_of(l, is_up);
    const int64_t matrix_bytes = p.n_out * p.inner * bytes_of(p.dtype);
    const char *weights = is_up ? l->up : l->down, *bias = is_up ? l->up_bias : l->down_bias;
    p.expert = c->hit[group];
    if (p.parts)
        p.scratch = c->scratch + thread * scratch_bytes(p.dtype, at_least(l->hidden, l->inter));
    else
        p.weights = weights + p.expert * matrix_bytes;
    if (group + 1 < c->n_hit) {
        const int64_t next = c->hit[group + 1];
        p.following = p.parts ? packed_row(p.parts, next, 0) : weights + next * matrix_bytes;
    }
    if (bias) {
        p.bias = bias + p.expert * p.n_out * bytes_of(p.dtype);
        p.bias_mode = ROUNDED_BIAS;
    }
    p.operands = !is_up ? c->activated : p.by_matrix_unit ? c->rows : c->operands;
    p.index = is_up ? c->row_of : NULL;
    p.packed = c->packed;
    p.out = c->values;
    p.first = at_least(c->first[group], c->begin);
    p.last = at_most(c->first[group + 1], c->end);
    p.to = p.n_out;
    return p;
}

// Computes items of a projection until all are claimed; returns their number. With the matrix unit the operands of each
// group are packed first.
static int64_t project(Call *c, bool is_up, int64_t thread) {
    const Product whole = projection_of(c->layer, is_up);
    Counter *packing = &c->counters[is_up ? PACK_UP : PACK_DOWN], *counter = &c->counters[is_up ? COMPUTE_UP : COMPUTE_DOWN];
    int64_t from, to;
    groups_of(c, &from, &to);
    if (whole.by_matrix_unit) {
        for (int64_t item; (item = claim(packing)) < to - from;) {
            const Product product = product_of(c, from + item, is_up, thread);
            pack_operands(&product, c->packed);
            finish(packing);
        }
        wait_for(packing, to - from);
    }
    const int64_t item_rows = c->n_threads > 1 ? ITEM_ROWS : whole.n_out, per_group = ceil_div(whole.n_out, item_rows);
    const int64_t n_items = (to - from) * per_group;
    for (int64_t item; (item = claim(counter)) < n_items;) {
        Product product = product_of(c, from + item / per_group, is_up, thread);
        product.from = item % per_group * item_rows;
        product.to = at_most(product.from + item_rows, product.n_out);
        if (c->n_threads > 1) product.following = NULL;
        compute(&product);
        finish(counter);
    }
    return n_items;
}

// Converts the up projections' results (silu(gate) * up) or, with TAKE, given activations to operands of the down
// projection, until all items are claimed; returns the number of items.
static int64_t activate(Call *c) {
    const Product down = projection_of(c->layer, false);
    const bool takes = c->steps & TAKE;
    Counter *counter = &c->counters[ACTIVATED];
    const int64_t n_items = c->end - c->begin, row_bytes = down.inner * bytes_of(down.dtype);
    for (int64_t item; (item = claim(counter)) < n_items;) {
        const int64_t position = c->begin + item;
        char *values = c->values + position * (takes ? 1 : 2) * row_bytes;
        if (!takes) down.kernels->silu_times_up(values, values + row_bytes, values, down.inner);
        prepare_operand(&down, values, c->activated + position * down.stride);
        finish(counter);
    }
    return n_items;
}

// Computes out[row] = sum of values[position] * weight over the row's routes, in the order of its slots.
static void sum(Call *c) {
    const Layer *l = c->layer;
    const Kernels *kernels = kernels_for(l->dtype, l->features);
    const int64_t per_row = ceil_div(l->hidden, SUM_COLUMNS), n_items = (c->end_row - c->begin_row) * per_row;
    for (int64_t item; (item = claim(&c->counters[SUMMED])) < n_items;) {
        const int64_t row = c->begin_row + item / per_row, start = item % per_row * SUM_COLUMNS;
        const int64_t n = at_most(SUM_COLUMNS, l->hidden - start);
        float *total = c->out + row * l->hidden + start;
        memset(total, 0, n * sizeof *total);
        for (int64_t route = row * c->top_k; route < (row + 1) * c->top_k; route++) {
            const int64_t position = c->position_of[route];
            if (position < 0) continue;
            const char *weight = c->weights + route * bytes_of(c->weights_are_f32 ? F32 : l->dtype);
            const char *values = c->values + (position * l->hidden + start) * bytes_of(l->dtype);
            kernels->add_weighted(total, values, weight, c->weights_are_f32, n);
        }
    }
}

// Runs the steps of a call in one thread; before each step it waits until all threads have finished the step before.
static void run(void *argument) {
    Call *c = argument;
    const int64_t thread = atomic_fetch_add_explicit(&c->n_started, 1, memory_order_relaxed);
    int64_t n_items = 0;
    if (c->steps & UP) n_items = project(c, true, thread);
    if (c->steps & (ACTIVATE | TAKE)) {
        if (c->steps & UP) wait_for(&c->counters[COMPUTE_UP], n_items);
        n_items = activate(c);
    }
    if (c->steps & DOWN) {
        if (c->steps & (ACTIVATE | TAKE)) wait_for(&c->counters[ACTIVATED], n_items);
        n_items = project(c, false, thread);
    }
    if (c->steps & SUM) {
        if (c->steps & DOWN) wait_for(&c->counters[COMPUTE_DOWN], n_items);
        sum(c);
    }
}

// Runs the steps of a call. Returns -1, or the first route whose slot does not exist: then nothing is computed.
int64_t moe_experts(Call *c) {
    if (c->steps & PLAN) {
        const int64_t bad_route = make_plan(c);
        if (bad_route >= 0) return bad_route;
        c->begin = c->begin_row = 0;
        c->end = c->n_present;
        c->end_row = c->n_rows;
        const Product up = projection_of(c->layer, true);
        const int64_t row_bytes = up.inner * bytes_of(up.dtype);
        for (int64_t row = 0; row < c->n_rows && !up.by_matrix_unit; row++)
            prepare_operand(&up, c->rows + row * row_bytes, c->operands + row * up.stride);
    }
    memset(c->counters, 0, sizeof c->counters);
    c->n_started = 0;
    run_in_threads(c->parallel, c->n_threads, run, c);
    return -1;
}
