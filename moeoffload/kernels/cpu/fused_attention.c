// Attention of few rows in one call: three linear layers side by side, norms, the rotary embedding, and, where one token
// of each sequence meets keys and values that grow in place, attention and the output's linear layer. Separately they
// cost two dozen calls of torch for each layer of a model.

#include "attention.h"
#include "linear.h"

enum { QUERY, KEY, VALUE, OUTPUT, N_LINEARS };

typedef struct {
    const char *weight;  // as in LinearCall
    const Matrix *parts;
    const char *bias;
    const char *norm;  // weight of the norm of the products, or NULL
    int64_t n_in, n_out, norm_dim, norm_kind;
    double epsilon;
} Projection;

// What is the same for all calls of a layer.
typedef struct {
    int64_t dtype, features, dim;
    Projection linears[N_LINEARS];
} FusedLayer;

typedef struct {
    const FusedLayer *layer;
    const char *rows, *cos, *sin;  // (n_rows, hidden), (n_rows, rotary) twice
    char *out[N_LINEARS];          // (n_rows, n_out)
    int64_t n_rows, rotary;
    // NULL, or the buffers (n_rows, key heads, room, dim) to which keys and values are added after n_kept tokens; each
    // row is another sequence then.
    char *keys, *values;
    char *attended;  // (n_rows, heads, dim)
    int64_t n_kept, room;
    double scale;
    int64_t n_threads, attention_threads;
    Parallel parallel;
    char *operands;  // for each row moe_operand_bytes of the inputs of queries, keys and values, or of that of the output
    char *scratch;   // as in LinearCall
} FusedCall;

typedef struct {
    LinearCall calls[OUTPUT];
    _Atomic int64_t n_started;
} Job;

static void work(void *argument) {
    Job *job = argument;
    const int64_t thread = atomic_fetch_add_explicit(&job->n_started, 1, memory_order_relaxed);
    for (int i = QUERY; i < OUTPUT; i++) compute_linear(&job->calls[i], thread);
}

static LinearCall linear(const FusedCall *c, int i, const char *rows, char *operands) {
    const Projection *p = &c->layer->linears[i];
    return (LinearCall){c->layer->dtype, c->layer->features, p->weight, p->parts, p->bias, rows, c->out[i], p->n_in, p->n_out,
                        c->n_rows, c->n_threads, c->parallel, operands, c->scratch, 0, 0};
}

static void normalise(const FusedCall *c, const Projection *p, char *rows) {
    const int64_t n_rows = c->n_rows * p->n_out / p->norm_dim;
    const struct norm norm = {{c->layer->features, NULL, 1}, n_rows, c->layer->dtype, p->norm_kind, n_rows, p->norm_dim, rows,
                              p->norm, rows, p->epsilon};
    moe_norm(&norm);
}

static void rotate(const FusedCall *c, const Projection *p, char *rows) {
    const FusedLayer *l = c->layer;
    const struct rotary rotary = {l->dtype, c->n_rows, p->n_out / l->dim, l->dim, c->rotary, rows, c->cos, c->sin};
#if defined(__x86_64__)
    if (l->features & HAS_AVX512) rotate_avx512(&rotary);
    else if (l->features & HAS_AVX2) rotate_avx2(&rotary);
    else
#endif
        rotate_portable(&rotary);
}

// Adds one token of each sequence to the keys or values.
static void append(const FusedCall *c, char *buffer, const char *rows, int64_t key_heads) {
    const int64_t row_bytes = c->layer->dim * bytes_of(c->layer->dtype);
    for (int64_t head = 0; head < c->n_rows * key_heads; head++)
        memcpy(buffer + (head * c->room + c->n_kept) * row_bytes, rows + head * row_bytes, row_bytes);
}

static int attend(const FusedCall *c) {
    const FusedLayer *l = c->layer;
    const int64_t dim = l->dim, heads = l->linears[QUERY].n_out / dim, key_heads = l->linears[KEY].n_out / dim;
    append(c, c->keys, c->out[KEY], key_heads);
    append(c, c->values, c->out[VALUE], key_heads);
    const struct attention attention = {
        .cpu = {l->features, c->parallel, c->attention_threads}, .type = l->dtype, .batch = c->n_rows,
        .key_heads = key_heads, .group = heads / key_heads, .n_queries = 1, .n_keys = c->n_kept + 1, .dim = dim,
        .value_dim = dim, .query = c->out[QUERY], .query_strides = {heads * dim, dim, heads * dim}, .key = c->keys,
        .key_strides = {key_heads * c->room * dim, c->room * dim, dim}, .value = c->values,
        .value_strides = {key_heads * c->room * dim, c->room * dim, dim}, .mask_kind = NO_MASK, .out = c->attended,
        .scale = c->scale};
    return moe_attention(&attention);
}

// Returns 0, or another number if there is no memory for intermediate results of attention.
int moe_fused_attention(const FusedCall *c) {
    const FusedLayer *l = c->layer;
    Job job = {.n_started = 0};
    for (int i = QUERY; i < OUTPUT; i++) {
        job.calls[i] = linear(c, i, c->rows, c->operands + i * c->n_rows * moe_operand_bytes(l->linears[i].n_in));
        prepare_linear(&job.calls[i]);
    }
    run_in_threads(c->parallel, c->n_threads, work, &job);
    for (int i = QUERY; i <= KEY; i++) {
        if (l->linears[i].norm) normalise(c, &l->linears[i], c->out[i]);
        rotate(c, &l->linears[i], c->out[i]);
    }
    if (!c->keys) return 0;
    if (attend(c)) return 1;
    LinearCall output = linear(c, OUTPUT, c->attended, c->operands);
    moe_linear(&output);
    return 0;
}
