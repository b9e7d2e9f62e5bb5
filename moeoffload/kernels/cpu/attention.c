// Attention on the CPU: divides a call into key heads and parts of the queries, which threads claim.

#include <stdlib.h>

#include "attention.h"

// Many queries: rows (queries of all heads of a group) of a part, which share packed keys, so that packing costs
// little.
enum { PART_ROWS = 2048 };

struct job {
    const struct attention *call;
    void (*attend)(const struct item *item, char *scratch);
    int64_t part, n_parts, n_items, scratch_bytes, n_claimed;
};

// Claims and computes parts in one thread until none are left, or stops if there is no memory for intermediate results.
static void work(void *data) {
    struct job *job = data;
    const struct attention *c = job->call;
    char *scratch = aligned_alloc(64, job->scratch_bytes);
    const int64_t size = bytes_of(c->type), mask_size = bytes_of(c->mask_kind), n_heads = c->batch * c->key_heads;
    while (scratch) {
        const int64_t number = __atomic_fetch_add(&job->n_claimed, 1, __ATOMIC_RELAXED);
        if (number >= job->n_items) break;
        // The last queries, which see most keys, come first, so that the last part to be claimed is a short one.
        const int64_t first = (job->n_parts - 1 - number / n_heads) * job->part;
        const int64_t batch = number % n_heads / c->key_heads, key_head = number % c->key_heads;
        const int64_t head = key_head * c->group, sequence = c->pages ? 0 : batch;
        const struct item item = {
            c, first, at_most(job->part, c->n_queries - first),
            c->query + size * (batch * c->query_strides[0] + head * c->query_strides[1]),
            c->key + size * (sequence * c->key_strides[0] + key_head * c->key_strides[1]),
            c->value + size * (sequence * c->value_strides[0] + key_head * c->value_strides[1]),
            c->mask + mask_size * (batch * c->mask_strides[0] + head * c->mask_strides[1]),
            c->out + size * (batch * c->n_queries * c->key_heads * c->group + head) * c->value_dim,
        };
        job->attend(&item, scratch);
    }
    free(scratch);
}

// Computes a call. Returns 0, or -1 if no thread could allocate memory.
int moe_attention(const struct attention *call) {
    struct job job = {.call = call, .attend = attend_portable, .part = call->n_queries};
#if defined(__x86_64__)
    if (call->cpu.features & HAS_AVX2) job.attend = attend_avx2;
    if (call->cpu.features & HAS_AVX512) job.attend = attend_avx512;
    if (call->type == BF16 && call->cpu.features & HAS_BF16_DOT) job.attend = attend_pairs;
    if (call->is_many) job.attend = attend_many;
#endif
    if (call->is_many && PART_ROWS / call->group < job.part)
        job.part = at_least(PART_ROWS / call->group, BLOCK_QUERIES);
    job.n_parts = ceil_div(call->n_queries, job.part);
    job.n_items = job.n_parts * call->batch * call->key_heads;
    const int64_t n_rows = call->group * job.part, dim = padded(call->dim, 32), width = padded(call->value_dim, 32);
    const int64_t few = 4 * n_rows * (dim + KEY_BLOCK);
    const int64_t many = 6 * BLOCK_QUERIES * KEY_BLOCK + 2 * KEY_BLOCK * (dim + width);
    job.scratch_bytes = padded(4 * n_rows * (width + 2) + (call->is_many ? many : few), 64);
    run_in_threads(call->cpu.parallel, call->cpu.n_threads, work, &job);
    return job.n_claimed < job.n_items ? -1 : 0;
}
