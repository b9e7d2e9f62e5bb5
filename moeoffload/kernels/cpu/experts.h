// What the C files of the experts and of linear layers share. The structures are those of kernels/calls.py.

#pragma once

#include <stdatomic.h>

#include "common.h"

// How a bias is added to a float32 sum: rounded to the dtype first, as a product and a sum of their own do, or not.
enum { NO_BIAS, EXACT_BIAS, ROUNDED_BIAS };

// Rows of operands times rows of one matrix of weights. A result is `out[position, weight row]`.
typedef struct {
    const void *weights;     // (n_out, inner)
    const void *bias;        // (n_out)
    const void *operands;    // rows as `prepare` of the kernels makes them, `stride` bytes apart
    const int32_t *index;    // the operand of a position; NULL: its own number
    const void *packed;      // for the matrix unit: operands packed by `pack_operands`, by position
    void *out;               // (positions, n_out)
    const char *following;   // what is read afterwards, or NULL
    int64_t n_out, inner, stride;
    int64_t first, last;     // positions
    int64_t from, to;        // weight rows
    int64_t bias_mode;
} Product;

// The functions of one instruction set for one dtype of weights. Elements are of that dtype unless a type says more.
typedef struct {
    int64_t item_bytes;     // of an element
    int64_t operand_bytes;  // of an element of an operand
    int64_t block;          // operands are filled with zeros up to a multiple of so many elements
    void (*project)(const Product *product);
    void (*prepare)(const void *row, void *operand, int64_t n);
    // out = silu(gate) * up, rounded after each step
    void (*silu_times_up)(const void *gate, const void *up, void *out, int64_t n);
    // total += row * weight; each product is rounded first if `rounds`
    void (*add_weighted)(float *total, const void *row, float weight, bool rounds, int64_t n);
    void (*widen)(const void *row, float *out, int64_t n);
    // Returns whether all values are finite as they were rounded.
    bool (*narrow)(const float *row, void *out, int64_t n);
} Kernels;

extern const Kernels *const portable_kernels[N_TYPES];
#if defined(__x86_64__)
extern const Kernels *const avx2_kernels[N_TYPES], *const avx512_kernels[N_TYPES], *const bf16_dot_kernels;
#endif

static inline const Kernels *kernels_for(int64_t dtype, int64_t features) {
#if defined(__x86_64__)
    if (dtype == BF16 && (features & HAS_BF16_DOT)) return bf16_dot_kernels;
    if (features & HAS_AVX512) return avx512_kernels[dtype];
    if (features & HAS_AVX2) return avx2_kernels[dtype];
#endif
    return portable_kernels[dtype];
}

// The matrix unit: bfloat16, `inner` a multiple of 32 and `n_out` of 16.
enum { MATRIX_ROWS = 16, MATRIX_STEP = 32 };
bool matrix_unit_fits(int64_t dtype, int64_t features, int64_t inner, int64_t n_out);
void pack_operands(const Product *product, void *packed);
void project_by_matrix_unit(const Product *product);

enum { ITEM_ROWS = 64 };  // weight rows that a thread claims at a time

// Bytes of an operand of n elements; one of the matrix unit is a row as it is.
static inline int64_t operand_bytes(const Kernels *kernels, int64_t n, bool by_matrix_unit) {
    if (by_matrix_unit) return n * kernels->item_bytes;
    return padded(n, kernels->block) * kernels->operand_bytes;
}

static inline void prepare_operand(const Kernels *kernels, const void *row, void *operand, int64_t n, bool by_matrix_unit) {
    if (by_matrix_unit)
        memcpy(operand, row, n * kernels->item_bytes);
    else
        kernels->prepare(row, operand, n);
}
