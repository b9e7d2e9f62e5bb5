// What the C files of attention and norms share. kernels/attention.py and kernels/norm.py fill the structures.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "features.h"

enum { BF16, F16, F32 };                // types of elements
enum { BOOLEAN_MASK = 3, NO_MASK = 4 };  // kinds of mask; one of a type above is added to the scaled products

enum {
    KEY_BLOCK = 256,
    BLOCK_QUERIES = 48,   // of many: those of a head that pass a block of keys together, in the second-level cache
    PACKED_COLUMNS = 64,  // of many: columns of a block of packed keys or values
};

// GOMP_parallel of the OpenMP runtime that torch has loaded.
typedef void (*parallel_fn)(void (*work)(void *), void *job, unsigned n_threads, unsigned flags);

struct cpu {
    int64_t features;
    parallel_fn parallel;  // or NULL
    int64_t n_threads;     // at most
};

// Tensors are (batch, heads, queries or keys, dim); strides are in elements, the last one is 1.
struct attention {
    struct cpu cpu;
    int64_t type, batch, key_heads, group, n_queries, n_keys, dim, value_dim;
    const char *query;  // of key_heads * group heads
    int64_t query_strides[3];
    const char *key;
    int64_t key_strides[3];
    const char *value;
    int64_t value_strides[3];
    const char *mask;  // (batch, heads, queries, keys)
    int64_t mask_strides[3], mask_kind;
    char *out;          // (batch, queries, heads, value_dim), contiguous
    int64_t is_causal;  // query i sees the keys up to i
    int64_t is_many;    // probabilities are rounded to bfloat16
    double scale;
};

// One head of keys and some queries of the heads that share it. Pointers are to the first of these heads and query 0.
struct item {
    const struct attention *call;
    int64_t first, n_queries;
    const char *query, *key, *value, *mask;
    char *out;
};

// What a norm does with y = x / rms(x) and its weight w: round(w * round(y)), round(w * y), round((1 + w) * y).
enum { ROUNDED, WEIGHTED, SHIFTED };

struct norm {
    struct cpu cpu;
    int64_t item_rows;  // that a thread claims at a time
    int64_t type, kind, n_rows, dim;
    const char *rows, *weight;  // (n_rows, dim) and (dim), contiguous
    char *out;                  // like the rows
    double epsilon;             // added to the mean of the squares
};

void attend_portable(const struct item *item, char *scratch);
void attend_avx2(const struct item *item, char *scratch);
void attend_avx512(const struct item *item, char *scratch);
void attend_bf16_dot(const struct item *item, char *scratch);
void norm_portable(const struct norm *call, int64_t first, int64_t end);
void norm_avx2(const struct norm *call, int64_t first, int64_t end);
void norm_avx512(const struct norm *call, int64_t first, int64_t end);

static inline void run_in_threads(const struct cpu *cpu, void (*work)(void *), void *job) {
    cpu->parallel && cpu->n_threads > 1 ? cpu->parallel(work, job, cpu->n_threads, 0) : work(job);
}

static inline int64_t bytes_of(int64_t type) { return type == F32 ? 4 : type == NO_MASK ? 0 : type == BOOLEAN_MASK ? 1 : 2; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
