// Instantiates the kernels of one instruction set for bfloat16, float16 and float32; see vectors.h and format_body.h.
//
// The includer also defines TILE_ROWS (operands whose sums stay in registers beside two weight rows), EACH_TILE (a
// macro for each number of them), BLOCK_ROWS and AHEAD_BYTES.

#include "vectors.h"

// Operands that meet two weight rows are loaded once, not with each product, where there are registers enough.
#if LANES == 16
#define KEEP_IN_REGISTERS(pair) __asm__("" : "+v"((pair).a), "+v"((pair).b))
#else
#define KEEP_IN_REGISTERS(pair) ((void)0)
#endif

enum { ONCE = -1 };  // for `n_ahead`

typedef vec SUMS[TILE_ROWS][2];

typedef struct {
    vec a, b;
} pair;

INLINE pair get_floats(const float *at) { return (pair){widen_f32(at), widen_f32(at + LANES)}; }
INLINE void multiply(vec *sums, pair weights, pair operands) {
    sums[0] = fma_of(weights.a, operands.a, sums[0]);
    sums[1] = fma_of(weights.b, operands.b, sums[1]);
}

// The even elements, then the odd ones: a shift and a mask instead of a shuffle.
INLINE pair load_bf16(const uint16_t *at) {
    const bits both = *(const bits_at *)at;
    return (pair){(vec)(both << 16), (vec)(both & 0xffff0000)};
}
INLINE pair load_f16(const uint16_t *at) { return (pair){widen_f16(at), widen_f16(at + LANES)}; }
INLINE void store_pair(float *to, pair values) {
    narrow_f32(to, values.a);
    narrow_f32(to + LANES, values.b);
}

#define FORMAT bf16
#define ELEMENT uint16_t
#define OPERAND float
#define BLOCK (2 * LANES)
#define WEIGHTS pair
#define LOAD load_bf16
#define OPERANDS pair
#define GET get_floats
#define MULTIPLY multiply
#define PREPARE(to, from) store_pair(to, load_bf16(from))
#define WIDEN widen_bf16
#define NARROW narrow_bf16
#define IS_FINITE(bits) (((bits)&0x7fff) < 0x7f80)
#include "format_body.h"

#define FORMAT f16
#define ELEMENT uint16_t
#define OPERAND float
#define BLOCK (2 * LANES)
#define WEIGHTS pair
#define LOAD load_f16
#define OPERANDS pair
#define GET get_floats
#define MULTIPLY multiply
#define PREPARE(to, from) store_pair(to, load_f16(from))
#define WIDEN widen_f16
#define NARROW narrow_f16
#define IS_FINITE(bits) (((bits)&0x7fff) < 0x7c00)
#include "format_body.h"

#define FORMAT f32
#define ELEMENT float
#define OPERAND float
#define BLOCK (2 * LANES)
#define WEIGHTS pair
#define LOAD get_floats
#define OPERANDS pair
#define GET get_floats
#define MULTIPLY multiply
#define PREPARE(to, from) store_pair(to, get_floats(from))
#define WIDEN widen_f32
#define NARROW narrow_f32
#define IS_FINITE(value) ((value) - (value) == 0.0f)
#include "format_body.h"
