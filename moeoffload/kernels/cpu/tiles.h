// Packed weights multiplied without being unpacked to memory, out of tiles of 16 rows (formats/tiles.py).
//
// Integers: codes of 4 to 8 bits by activations of 16 bits, of which 256 have one scale.
// The products of a block of 32 are summed exactly, multiplied by the weights' scale and added to a float32 sum in the
// order of the blocks, that of each 256 activations multiplied by theirs: a result's bits depend neither on what is computed
// beside it nor on the instruction set. An activation of bfloat16 becomes an integer without a rounding unless it is less
// than a 128th of the largest of its 256; all err by 2^-16 of that one at most.
//
// FP8: codes become float32 or bfloat16, which is exact. A group's products are summed in a few sums in the order of the
// weights, those in one fixed tree, and scaled: a result's bits do not depend on what is computed beside it.
#pragma once

#include "experts.h"

// Weight rows of a tile; weights of a row, or activations, of a block; blocks whose activations share a scale.
enum { TILE = 16, INTEGERS = 32, SCALED = 8 };

// Kinds of codes in tiles.
enum { WEIGHTS_INT8, WEIGHTS_UINT4, WEIGHTS_LEVELS4, WEIGHTS_UINT5, WEIGHTS_INT6, WEIGHTS_FP8 };

// Activations of a block: value = integer * scale; the integer is 256 * high + low, or a word. Words of four neighbours
// are in the order 0, 2, 1, 3. The scale is that of the first of SCALED blocks.
typedef struct {
    union {
        struct {
            int8_t high[INTEGERS], low[INTEGERS];
        };
        int16_t words[INTEGERS];
    };
    int32_t less[INTEGERS / 16], all_less;  // sums of each 16 integers, and of all, negative
    float sum, scale;
} Block;

// What a tile brings to the second cache: what lies `far` behind one block of every so many (a power of 2), that of `turn`.
typedef struct {
    int64_t far, every, turn;
} Fetch;

// The products of a tile and some operands: vectors of its rows for the first part of them, with a place for each of the
// most operands, then for the next part.
typedef void MultiplyTile(const Matrix *m, const uint8_t *tile, Fetch fetch, const void *const *x, void *out);

struct TileKernels {
    int64_t block_bytes;  // of a block of an operand
    // Elements of a type of common.h as operands.
    void (*prepare)(const void *row, int64_t type, void *operand, int64_t n);
    void (*project)(const Product *product);
};

#if defined(__x86_64__)
extern const TileKernels integers_avx2, integers_vnni, fp8_avx2, fp8_bf16_dot;
#endif

// What multiplies these weights in tiles; NULL if they are in none.
static inline const TileKernels *tiles_for(const Matrix *parts, int64_t dtype, int64_t features) {
#if defined(__x86_64__)
    const int64_t dot = HAS_AVX512 | HAS_INTEGER_DOT, fp8_dot = dot | HAS_BF16_DOT | HAS_BYTE_LOOKUP;
    if (!parts || !parts->kind) return NULL;
    if (parts->codes != CODES_FP8) return (features & dot) == dot ? &integers_vnni : &integers_avx2;
    return dtype == BF16 && (features & fp8_dot) == fp8_dot ? &fp8_bf16_dot : &fp8_avx2;
#endif
    return NULL;
}

enum { OPERAND_GAP = 64 };  // bytes between operands

// Bytes of an operand of n elements, for `tiles` unless that is NULL; one of the matrix unit is a row as it is. Others have
// a gap behind them: at multiples of 4 KiB operands would compete for the same places of the first cache.
static inline int64_t operand_bytes(const Kernels *kernels, const TileKernels *tiles, int64_t n, bool by_matrix_unit) {
    if (by_matrix_unit) return n * kernels->item_bytes;
    return (tiles ? n / INTEGERS * tiles->block_bytes : padded(n, kernels->block) * kernels->operand_bytes) + OPERAND_GAP;
}

static inline void prepare_operand(const Kernels *kernels, const TileKernels *tiles, int64_t dtype, const void *row,
                                   void *operand, int64_t n, bool by_matrix_unit) {
    if (tiles)
        tiles->prepare(row, dtype, operand, n);
    else if (by_matrix_unit)
        memcpy(operand, row, n * kernels->item_bytes);
    else
        kernels->prepare(row, operand, n);
}
