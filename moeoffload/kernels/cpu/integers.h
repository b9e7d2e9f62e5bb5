// Packed weights multiplied as integers: codes of 4 to 8 bits by activations of 16 bits, blocks of 32 with one scale.
//
// A block's products are summed exactly, scaled and added to a float32 sum in the order of the blocks: a result's bits
// depend neither on what is computed beside it nor on the instruction set. An activation of bfloat16 becomes an integer
// without a rounding unless it is less than a 128th of the largest of its block; all err by 2^-16 of that one at most.
#pragma once

#include "experts.h"

enum { TILE = 16, INTEGERS = 32 };  // weight rows of a tile; weights of a row, or activations, of a block

// Activations of a block: value = integer * scale; the integer is 256 * high + low, or a word. Words of four neighbours
// are in the order 0, 2, 1, 3.
typedef struct {
    union {
        struct {
            int8_t high[INTEGERS], low[INTEGERS];
        };
        int16_t words[INTEGERS];
    };
    float scale, sum;                 // the sum of the values
    int32_t sums[INTEGERS / 16];      // of each 16 integers
} Block;

struct Integers {
    // Elements of a type of common.h as blocks.
    void (*prepare)(const void *row, int64_t type, void *operand, int64_t n);
    void (*project)(const Product *product);
};

#if defined(__x86_64__)
extern const Integers integers_avx2, integers_vnni;
#endif

// What multiplies these weights as integers, or NULL.
static inline const Integers *integers_for(const Matrix *parts, int64_t features) {
#if defined(__x86_64__)
    const int64_t dot = HAS_AVX512 | HAS_INTEGER_DOT;
    if (parts && parts->kind) return (features & dot) == dot ? &integers_vnni : &integers_avx2;
#endif
    return NULL;
}

// Bytes of an operand of n elements: of integers, unless there are none (NULL); one of the matrix unit is a row as it is.
static inline int64_t operand_bytes(const Kernels *kernels, const Integers *integers, int64_t n, bool by_matrix_unit) {
    if (integers) return n / INTEGERS * (int64_t)sizeof(Block);
    if (by_matrix_unit) return n * kernels->item_bytes;
    return padded(n, kernels->block) * kernels->operand_bytes;
}

static inline void prepare_operand(const Kernels *kernels, const Integers *integers, int64_t dtype, const void *row,
                                   void *operand, int64_t n, bool by_matrix_unit) {
    if (integers)
        integers->prepare(row, dtype, operand, n);
    else if (by_matrix_unit)
        memcpy(operand, row, n * kernels->item_bytes);
    else
        kernels->prepare(row, operand, n);
}
