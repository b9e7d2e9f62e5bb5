// RMS norms: divides a call into blocks of rows, which threads claim.

#include "attention.h"

struct job {
    const struct norm *call;
    void (*norm)(const struct norm *call, int64_t first, int64_t end);
    int64_t n_claimed;
};

static void work(void *data) {
    struct job *job = data;
    const int64_t n_rows = job->call->n_rows, size = job->call->item_rows;
    for (int64_t first; (first = __atomic_fetch_add(&job->n_claimed, size, __ATOMIC_RELAXED)) < n_rows;)
        job->norm(job->call, first, at_most(first + size, n_rows));
}

void moe_norm(const struct norm *call) {
    struct job job = {call, norm_portable, 0};
#if defined(__x86_64__)
    if (call->cpu.features & HAS_AVX2) job.norm = norm_avx2;
    if (call->cpu.features & HAS_AVX512) job.norm = norm_avx512;
#endif
    run_in_threads(call->cpu.parallel, call->cpu.n_threads, work, &job);
}
