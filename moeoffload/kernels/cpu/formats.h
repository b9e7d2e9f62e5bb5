// Instantiates the kernels of one instruction set for bfloat16, float16 and float32; see vectors.h and format_body.h.
//
// The includer also defines TILE_ROWS (operands whose sums stay in registers beside two weight rows), EACH_TILE (a
// macro for each number of them).

#include "vectors.h"

typedef struct {
    vec a, b;
} pair;

#include "unpack.h"

// Operands that meet two weight rows are loaded once, not with each product, where there are registers enough.
#if LANES == 16
#define KEEP_IN_REGISTERS(pair) __asm__("" : "+v"((pair).a), "+v"((pair).b))
#else
#define KEEP_IN_REGISTERS(pair) ((void)0)
#endif

enum { ONCE = -1 };  // for `n_ahead`

typedef vec SUMS[TILE_ROWS][2];

// The sums of LANES vectors, in their order.
INLINE vec fold_all(const vec *v) {
    vec sums;
    UNROLL for (int i = 0; i < LANES; i += 4) {
        const four some = fold(v[i], v[i + 1], v[i + 2], v[i + 3]);
        memcpy((float *)&sums + i, &some, sizeof some);
    }
    return sums;
}

INLINE pair get_floats(const float *at) { return (pair){load(at, F32), load(at + LANES, F32)}; }
INLINE void multiply(vec *sums, pair weights, pair operands) {
    sums[0] = fma_of(weights.a, operands.a, sums[0]);
    sums[1] = fma_of(weights.b, operands.b, sums[1]);
}

// The even elements, then the odd ones: a shift and a mask instead of a shuffle.
INLINE pair load_bf16(const uint16_t *at) {
    bits both;
    memcpy(&both, at, sizeof both);
    return (pair){(vec)(both << 16), (vec)(both & 0xffff0000)};
}
INLINE pair load_f16(const uint16_t *at) { return (pair){load(at, F16), load(at + LANES, F16)}; }
INLINE void store_pair(float *to, pair values) {
    store(to, values.a, F32);
    store(to + LANES, values.b, F32);
}

#define OPERAND float
#define BLOCK (2 * LANES)
#define WEIGHTS pair
#define OPERANDS pair
#define GET get_floats
#define MULTIPLY multiply
#define PREPARE(to, from) store_pair(to, LOAD(from))

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
#undef WEIGHTS
#undef OPERANDS
#undef GET
#undef MULTIPLY
#undef PREPARE
