// Multiplies packed weights in tiles of 16 rows (formats/tiles.py) without unpacking them to memory.
//
// Integers: codes of 4 to 8 bits times activations of 16 bits, 256 of which share a scale. The products of a block of
// 32 are summed exactly, multiplied by the weights' scale and added to a float32 sum in the order of the blocks; the
// sum of each 256 activations is multiplied by their scale. So a result's bits depend neither on what else is computed
// in the call nor on the instruction set. A bfloat16 activation becomes an integer exactly unless it is smaller than
// 1/128 of the largest of its 256; the error of any activation is at most 2^-16 of that largest one.
//
// FP8: codes become float32 or bfloat16, which is exact. A group's products are added to a few sums in the order of the
// weights, these are added in a fixed tree, and the total is scaled: a result's bits depend neither on the rest of the
// call nor, except where bfloat16 pairs are multiplied, on the instruction set.
#pragma once

#include "experts.h"

// TILE: weight rows of a tile. INTEGERS: weights per row, or activations, in a block. SCALED: blocks whose activations
// share a scale. UNPACKED: FP8 weights per row that are unpacked together for many operands.
enum { TILE = 16, INTEGERS = 32, SCALED = 8, UNPACKED = 128 };

// Kinds of codes in tiles.
enum { WEIGHTS_INT8, WEIGHTS_UINT4, WEIGHTS_LEVELS4, WEIGHTS_UINT5, WEIGHTS_INT6, WEIGHTS_FP8 };

// Activations of a block: value = integer * scale, where the integer is 256 * high + low (AVX512-VNNI) or a word
// (AVX2). Each four neighbouring words are in the order 0, 2, 1, 3. Only the first of SCALED blocks has its scale set.
typedef struct {
    union {
        struct {
            int8_t high[INTEGERS], low[INTEGERS];
        };
        int16_t words[INTEGERS];
    };
    int32_t less[INTEGERS / 16], all_less;  // negated sums of each 16 integers, and of all
    float sum, scale;
} Block;

// What to prefetch into the second-level cache while a tile is multiplied: the bytes that lie `far` behind, for those
// steps (of SCALED blocks; of UNPACKED weights for many operands and FP8) whose number is `turn` modulo `every` (a power
// of 2). `past`: past that cache, see prefetch_weights.
typedef struct {
    int64_t far, every, turn;
    bool past;
} Fetch;

// Multiplies a tile by n_x operands. `out` has a vector of LANES rows' results for each operand, for the first part
// (LANES rows) of the tile, with room for the largest number of operands (MANY_X); then the same for the next part.
typedef void MultiplyTile(int n_x, const Matrix *m, const uint8_t *tile, Fetch fetch, const void *const *x, void *out);

enum { MANY = 3, N_SIZES = MANY + 1, MANY_X = 32 };

struct TileKernels {
    int64_t block_bytes;  // bytes of a block of an operand
    // Converts n elements of a type of common.h to an operand.
    void (*prepare)(const void *row, int64_t type, void *operand, int64_t n);
    void (*project)(const Product *product);
    // multiply[kind][i] multiplies by 2^i operands, multiply[kind][MANY] by any number from 5 to MANY_X.
    MultiplyTile *const (*multiply)[N_SIZES];
};

#if defined(__x86_64__)
extern const TileKernels integers_avx2, integers_vnni, fp8_avx2, fp8_avx512, fp8_bf16_dot;
#endif

// Returns the kernels that multiply these weights in tiles; NULL if they are not in tiles.
static inline const TileKernels *tiles_for(const Matrix *parts, int64_t dtype, int64_t features) {
#if defined(__x86_64__)
    const int64_t dot = HAS_AVX512 | HAS_INTEGER_DOT, fp8_dot = dot | HAS_BF16_DOT | HAS_BYTE_LOOKUP;
    if (!parts || !parts->kind) return NULL;
    const bool has_dot = (features & dot) == dot;
    if (parts->codes != CODES_FP8) return has_dot ? &integers_vnni : &integers_avx2;
    if (dtype == BF16 && (features & fp8_dot) == fp8_dot) return &fp8_bf16_dot;
    return has_dot ? &fp8_avx512 : &fp8_avx2;
#endif
    return NULL;
}

// Splits n_x operands, at least 5, evenly into sets of at most MOST_X, and calls multiply(size) for each, where `size` is
// a constant and set_at the set's first operand. No set is smaller than half of MOST_X.
#define EACH_SET(n_x, multiply)                                                              \
    for (int set_at = 0, set_size; set_at < n_x; set_at += set_size) {                       \
        set_size = (int)part_of(n_x - set_at, MOST_X);                                       \
        WITH_CONSTANT(set_size, MOST_X / 2, MOST_X, multiply)                                \
    }

enum { OPERAND_GAP = 64 };  // bytes between operands

// Whether the matrix unit multiplies a matrix, (n_out, inner) elements of dtype, or packed in `parts`.
static inline bool is_for_matrix_unit(int64_t dtype, int64_t features, const Matrix *parts, int64_t n_out, int64_t inner) {
    return !tiles_for(parts, dtype, features) && matrix_unit_fits(dtype, features, inner, n_out);
}

// Returns a product with such a matrix, without its operands and results: the kernels that compute it, and the bytes
// from one operand to the next. An operand of the matrix unit is the row itself. Others are followed by a gap: operands
// at multiples of 4 KiB would compete for the same sets of the first-level cache.
static inline Product product_with(int64_t dtype, int64_t features, const Matrix *parts, int64_t n_out, int64_t inner,
                                   bool by_matrix_unit) {
    const Kernels *kernels = kernels_for(dtype, features);
    const TileKernels *tiles = tiles_for(parts, dtype, features);
    const int64_t by_vectors = padded(inner, kernels->block) * kernels->operand_bytes;
    const int64_t operand_bytes = (tiles ? inner / INTEGERS * tiles->block_bytes : by_vectors) + OPERAND_GAP;
    return (Product){.kernels = kernels, .tiles = tiles, .by_matrix_unit = by_matrix_unit, .parts = parts, .dtype = dtype,
                     .n_out = n_out, .inner = inner,
                     .stride = by_matrix_unit ? inner * bytes_of(dtype) : operand_bytes};
}

// Converts a row to an operand of a product.
static inline void prepare_operand(const Product *p, const void *row, void *operand) {
    if (p->tiles)
        p->tiles->prepare(row, p->dtype, operand, p->inner);
    else if (p->by_matrix_unit)
        memcpy(operand, row, p->stride);
    else
        p->kernels->prepare(row, operand, p->inner);
}

static inline void compute(const Product *p) {
    if (p->tiles)
        p->tiles->project(p);
    else if (p->by_matrix_unit)
        project_by_matrix_unit(p);
    else
        p->kernels->project(p);
}
