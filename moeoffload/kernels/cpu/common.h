// Definitions shared by all C files of the kernels. kernels/calls.py repeats these numbers and declares the call
// structures.
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// CPU features, as moe_cpu_features returns them.
enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_BF16_DOT = 4, HAS_INTEGER_DOT = 8, HAS_MATRIX_UNIT = 16, HAS_BYTE_LOOKUP = 32 };

enum { BF16, F16, F32, N_TYPES };        // element types
enum { BOOLEAN_MASK = 3, NO_MASK = 4 };  // kinds of mask; a mask of an element type is added to the scaled products

// GOMP_parallel of the OpenMP runtime that torch has loaded.
typedef void (*Parallel)(void (*work)(void *), void *job, unsigned n_threads, unsigned flags);

// Runs `work` in up to n_threads threads; in the calling thread if `parallel` is NULL.
static inline void run_in_threads(Parallel parallel, int64_t n_threads, void (*work)(void *), void *job) {
    parallel && n_threads > 1 ? parallel(work, job, (unsigned)n_threads, 0) : work(job);
}

static inline int64_t bytes_of(int64_t type) { return type == F32 ? 4 : type == NO_MASK ? 0 : type == BOOLEAN_MASK ? 1 : 2; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t padded(int64_t count, int64_t to) { return ceil_div(count, to) * to; }
// Returns the size of the next part if n_left are divided into nearly equal parts of at most `most`.
static inline int64_t part_of(int64_t n_left, int64_t most) { return ceil_div(n_left, ceil_div(n_left, most)); }
