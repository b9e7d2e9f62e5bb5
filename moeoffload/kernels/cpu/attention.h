// Definitions shared by the C files of attention and norms. kernels/attention.py and kernels/norm.py fill the
// structures.
#pragma once

#include "common.h"

enum {
    KEY_BLOCK = 256,
    BLOCK_QUERIES = 48,   // many queries: those of a head that meet a block of keys together, in the second-level cache
    PACKED_COLUMNS = 64,  // many queries: columns of a block of packed keys or values
};

struct cpu {
    int64_t features;
    Parallel parallel;  // or NULL
    int64_t n_threads;  // the most threads to use
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
    int64_t is_causal;  // query i sees keys 0 to i
    int64_t is_many;    // many queries
    // NULL, or the pages of page_keys keys each in which the keys of a batch of one, and their values, lie: their
    // tensors are (pages, heads, page_keys, dim) then.
    const int64_t *pages;
    int64_t page_keys;
    double scale;
};

// One key head and n_queries queries, from `first` on, of the query heads that share it. Pointers are to the first of
// these heads and to query 0.
struct item {
    const struct attention *call;
    int64_t first, n_queries;
    const char *query, *key, *value, *mask;
    char *out;
};

// How a norm combines y = x / rms(x) and its weight w: round(w * round(y)), round(w * y), round((1 + w) * y).
enum { ROUNDED, WEIGHTED, SHIFTED };

struct norm {
    struct cpu cpu;
    int64_t item_rows;  // rows that a thread claims at a time
    int64_t type, kind, n_rows, dim;
    const char *rows, *weight;  // (n_rows, dim) and (dim), contiguous
    char *out;                  // like the rows
    double epsilon;             // added to the mean of the squares
};

// Turns pairs of elements of every head, in place; bfloat16 or float16.
struct rotary {
    int64_t type, n_rows, heads, dim, width;  // the first `width` elements of a head are turned
    char *rows;                               // (n_rows, heads, dim)
    const char *cos, *sin;                    // (n_rows, width)
};

void attend_portable(const struct item *item, char *scratch);
void attend_avx2(const struct item *item, char *scratch);
void attend_avx512(const struct item *item, char *scratch);
void attend_pairs(const struct item *item, char *scratch);
void attend_many(const struct item *item, char *scratch);
void norm_portable(const struct norm *call, int64_t first, int64_t end);
void norm_avx2(const struct norm *call, int64_t first, int64_t end);
void norm_avx512(const struct norm *call, int64_t first, int64_t end);
void rotate_portable(const struct rotary *call);
void rotate_avx2(const struct rotary *call);
void rotate_avx512(const struct rotary *call);
void moe_norm(const struct norm *call);
int moe_attention(const struct attention *call);
