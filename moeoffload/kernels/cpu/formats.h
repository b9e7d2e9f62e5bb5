// Instantiates the kernels of one instruction set for bfloat16, float16 and float32; see vectors.h and format_body.h.
//
// The includer also defines TILE_ROWS: the most operands whose sums stay in registers.

#include "vectors.h"

typedef struct {
    vec a, b;
} pair;

#include "unpack.h"

// TILE_WEIGHTS: weight rows of a tile. HALVES: how many of the two vectors of sums of each product are computed in one
// pass; with one, the sums of twice as many rows fit the registers. Measured: four rows make AVX-512 8 to 16% faster,
// AVX2 a third slower.
#if LANES == 16
enum { TILE_WEIGHTS = 4, HALVES = 1 };
#else
enum { TILE_WEIGHTS = 2, HALVES = 2 };
#endif

typedef vec SUMS[TILE_ROWS];

// fold_set folds four vectors of sums into one vector; `join` completes the sums of operand x from the LANES / 4 such
// vectors that lie in every fourth row of `sums`, and returns one sum per weight row. Together they add in the same
// tree as `fold`.
#if LANES == 16
INLINE vec fold_set(vec a, vec b, vec c, vec d) { return fold_lanes(a, b, c, d); }
INLINE vec join(const SUMS *sums, int x) {
    return fold_quarters(fold_halves(sums[0][x], sums[4][x]), fold_halves(sums[8][x], sums[12][x]));
}
#else
INLINE vec fold_set(vec a, vec b, vec c, vec d) {
    const four folded = fold(a, b, c, d);
    vec set = {0};
    memcpy(&set, &folded, sizeof folded);
    return set;
}
INLINE vec join(const SUMS *sums, int x) {
    vec numbers;
    UNROLL for (int i = 0; i < LANES; i += 4) memcpy((float *)&numbers + i, &sums[i][x], sizeof(four));
    return numbers;
}
#endif

INLINE vec get_floats(const float *at, const int half) { return load(at + half * LANES, F32); }
INLINE vec add_product(vec sum, vec weights, vec operands) { return fma_of(weights, operands, sum); }

// Loads the even (half 0) or the odd elements (half 1) of a block: this takes a shift or a mask instead of a shuffle.
INLINE vec load_bf16(const uint16_t *at, const int half) {
    bits both;
    memcpy(&both, at, sizeof both);
    return (vec)(half ? both & 0xffff0000 : both << 16);
}
INLINE vec load_f16(const uint16_t *at, const int half) { return load(at + half * LANES, F16); }

#define OPERAND float
#define BLOCK (2 * LANES)
#define VALUES vec
#define GET get_floats
#define ADD_PRODUCT add_product
#define PREPARE(to, from) (store(to, LOAD(from, 0), F32), store(to + LANES, LOAD(from, 1), F32))

#define FORMAT bf16
#define TYPE BF16
#define ELEMENT uint16_t
#define LOAD load_bf16
#if LANES == 16
#define WORDS words_bf16
#endif
#include "format_body.h"

#define FORMAT f16
#define TYPE F16
#define ELEMENT uint16_t
#define LOAD load_f16
#if LANES == 16
#define WORDS words_f16
#endif
#include "format_body.h"

#define FORMAT f32
#define TYPE F32
#define ELEMENT float
#define LOAD get_floats
#include "format_body.h"

#undef OPERAND
#undef BLOCK
#undef VALUES
#undef GET
#undef ADD_PRODUCT
#undef PREPARE
