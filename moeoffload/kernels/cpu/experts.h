// Definitions shared by the C files of the experts and of linear layers.

#pragma once

#include <stdatomic.h>

#include "packed.h"

// How a bias is added to a float32 sum: directly (EXACT_BIAS), or after rounding the sum to the dtype (ROUNDED_BIAS),
// as if the product and the addition were separate operations.
enum { NO_BIAS, EXACT_BIAS, ROUNDED_BIAS };

typedef struct Kernels Kernels;
typedef struct TileKernels TileKernels;  // see tiles.h

// What to prefetch into the second-level cache while computing: `step` bytes further with each row of a span, or with
// each block. Prefetches are spread evenly, because a burst of them would stall on the memory.
typedef struct {
    const char *at;
    int64_t step;
} Ahead;

// A product of operands and rows of one weight matrix. A result is `out[position, weight row]`.
typedef struct {
    const Kernels *kernels;
    const TileKernels *tiles;  // kernels for weights in tiles, or NULL
    bool by_matrix_unit;
    const void *weights;       // (n_out, inner); NULL: packed
    const Matrix *parts;     // packed weights: rows of the first matrix, then those of the second, if there is one
    int64_t expert;          // the expert whose rows of the parts are multiplied
    void *scratch;           // scratch_bytes() bytes of this thread
    const void *bias;        // (n_out)
    const void *operands;    // rows converted by `prepare` of the kernels, `stride` bytes apart
    const int32_t *index;    // the operand of a position; NULL: the position itself
    const void *packed;      // for the matrix unit: operands packed by `pack_operands`, by position
    void *out;               // (positions, n_out)
    const char *following;   // weights that are read after these, to prefetch, or NULL
    int64_t dtype, n_out, inner, stride;
    int64_t first, last;     // range of positions
    int64_t from, to;        // range of weight rows
    int64_t bias_mode;
} Product;

enum { MOST_BLOCK = 64 };

// The functions of one instruction set for one dtype of weights. Rows and results without a type are of that dtype.
struct Kernels {
    int64_t operand_bytes;  // bytes of an element of an operand
    int64_t block;          // operands are padded with zeros to a multiple of this many elements, at most MOST_BLOCK
    void (*project)(const Product *product);
    void (*prepare)(const void *row, void *operand, int64_t n);
    // out = silu(gate) * up, rounded after each step
    void (*silu_times_up)(const void *gate, const void *up, void *out, int64_t n);
    // total += row * weight; each product is rounded first, unless the weight is float32
    void (*add_weighted)(float *total, const void *row, const void *weight, bool is_f32, int64_t n);
    // Unpacks columns from..to of n_rows packed rows to elements of the dtype; output rows are `stride` elements apart.
    // `from` is a multiple of SPAN. `scales` (one per row) are read at the beginning of each SEGMENT; if `from` is
    // inside a segment, they must be those that an earlier call has read for it.
    void (*unpack)(const Matrix *m, int64_t expert, int64_t row, int64_t n_rows, int64_t from, int64_t to, Scales *scales,
                   void *out, int64_t stride, Ahead ahead);
};

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

// The matrix unit needs bfloat16, `inner` a multiple of 32 and `n_out` a multiple of 16.
enum { MATRIX_ROWS = 16, MATRIX_STEP = 32 };
bool matrix_unit_fits(int64_t dtype, int64_t features, int64_t inner, int64_t n_out);
void pack_operands(const Product *product, void *packed);
void project_by_matrix_unit(const Product *product);

enum { ITEM_ROWS = 64 };     // weight rows that a thread claims at a time
enum { BLOCK_ROWS = 32 };    // weight rows that are multiplied by all operands of an expert while they are in the cache
enum { NEAR_BYTES = 64, FAR_BYTES = 2048 };
extern int64_t ahead_bytes;  // prefetch distance, one of these two; see ahead.c
extern int64_t batch_ahead_bytes;  // for several rows: they take long enough for a hardware prefetcher to fall behind
extern int64_t passes_caches;  // whether weights that are read once leave the outer caches to others; see ahead.c

// Prefetches a line of weights: past the outer caches, or into the second-level cache.
static inline __attribute__((always_inline)) void prefetch_weights(const void *at, bool past) {
    if (past)
        __builtin_prefetch(at, 0, 0);
    else
        __builtin_prefetch(at, 0, 2);
}
enum { UNPACKED_ROWS = 4 };  // packed rows unpacked together into whole rows: more would not fit the first-level cache

// Returns the bytes that a thread needs to unpack a block of rows. It leaves room for the matrix unit to place rows a
// cache line further apart than they are long: otherwise they might compete for the same sets of the first-level cache.
static inline int64_t scratch_bytes(int64_t dtype, int64_t inner) {
    return BLOCK_ROWS * padded(inner * bytes_of(dtype) + 64, 64);
}

// As `unpack` of the kernels, for rows of a product, which may extend from its first part into the second.
static inline void unpack_rows(const Product *p, int64_t row, int64_t n_rows, int64_t from, int64_t to, Scales *scales,
                               char *out, int64_t stride, Ahead ahead) {
    for (int64_t some; n_rows > 0; n_rows -= some, row += some, scales += some) {
        const bool is_second = row >= p->parts->n_out;
        const Matrix *m = p->parts + is_second;
        const int64_t own = is_second ? row - p->parts->n_out : row;
        some = at_most(n_rows, m->n_out - own);
        p->kernels->unpack(m, p->expert, own, some, from, to, scales, out, stride, ahead);
        ahead.at += some * ahead.step;
        out += some * stride * bytes_of(p->dtype);
    }
}

// Returns about how many bytes of a packed row, scales included, belong to one span.
static inline int64_t packed_step(const Product *p) { return ceil_div(SPAN * p->parts->row_bytes, p->inner); }

// Returns the address of a packed row, which may be in the first or the second part.
static inline const char *row_of_parts(const Matrix *parts, int64_t expert, int64_t row) {
    return row < parts->n_out ? packed_row(parts, expert, row) : packed_row(parts + 1, expert, row - parts->n_out);
}
