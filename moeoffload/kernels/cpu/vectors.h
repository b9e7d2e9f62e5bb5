// Vectors of floats, and rows of bfloat16, float16 and float32 read and written through them.
//
// Included by a file for one instruction set, which defines LANES (floats of a vector) and TARGET (the attribute of
// functions that use it), and before that includes its intrinsics. Written with the vector types of GCC and Clang.

#include <string.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t halves_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(bits mask, vec a, vec b) { return (vec)((mask & (bits)a) | (~mask & (bits)b)); }
INLINE bits when(ints comparison) { return (bits)comparison; }

// a * b + c, rounded once where the CPU can.
INLINE vec fma_of(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// LANES elements as floats.
INLINE vec widen_f32(const float *at) { return *(const vec_at *)at; }
INLINE vec widen_bf16(const uint16_t *at) { return (vec)(__builtin_convertvector(*(const halves_at *)at, bits) << 16); }

INLINE void narrow_f32(float *at, vec values) { *(vec_at *)at = values; }
INLINE void narrow_bf16(uint16_t *at, vec values) {
    const bits raw = (bits)values;
    const bits rounded = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;  // to nearest, ties to even
    const bits is_nan = when(values != values);
    *(halves_at *)at = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), halves);
}

#if LANES == 16
INLINE vec widen_f16(const uint16_t *at) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE void narrow_f16(uint16_t *at, vec values) {
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif LANES == 8
INLINE vec widen_f16(const uint16_t *at) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE void narrow_f16(uint16_t *at, vec values) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
INLINE vec widen_f16(const uint16_t *at) { return (vec)vcvt_f32_f16(vld1_f16((const __fp16 *)at)); }
INLINE void narrow_f16(uint16_t *at, vec values) { vst1_f16((__fp16 *)at, vcvt_f16_f32((float32x4_t)values)); }
#else
// By multiplications, which round and handle subnormal numbers, instead of tables.
INLINE vec widen_f16(const uint16_t *at) {
    const bits raw = __builtin_convertvector(*(const halves_at *)at, bits);
    const bits magnitude = raw & 0x7fff;
    const vec scaled = (vec)(magnitude << 13) * 0x1p112f;
    const vec special = (vec)(magnitude << 13 | 0x7f800000);  // infinities and NaN keep their bits
    return (vec)((bits)choose(when((vec)(magnitude << 13) >= (vec)((bits){0} + 0x0f800000)), special, scaled) |
                 (raw & 0x8000) << 16);
}
INLINE void narrow_f16(uint16_t *at, vec values) {
    const bits sign = (bits)values & 0x80000000, magnitude = (bits)values & 0x7fffffff;
    const vec size = (vec)magnitude;
    const bits normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    const bits small = (bits)(size + 0.5f) - 0x3f000000;  // the sum rounds at 2^-24
    bits half = (bits)choose(when(size < 0x1p-14f), (vec)small, (vec)normal);
    half = (bits)choose(when(size >= 65520.0f), (vec)((bits){0} + 0x7c00), (vec)half);
    half = (bits)choose(when(values != values), (vec)((bits){0} + 0x7e00), (vec)half);
    *(halves_at *)at = __builtin_convertvector(half | sign >> 16, halves);
}
#endif

// The sums of the lanes of LANES vectors, in their order. Every vector is folded in the same tree.
INLINE vec fold(const vec *sums) {
#if LANES == 4
    const vec a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    return (vec){(a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]),
                 (d[0] + d[2]) + (d[1] + d[3])};
#else
#if LANES == 16
#define CALL(name, ...) (vec)_mm512_##name(__VA_ARGS__)
#define FLOATS(x) (__m512)(x)
#define DOUBLES(x) (__m512d)(x)
#else
#define CALL(name, ...) (vec)_mm256_##name(__VA_ARGS__)
#define FLOATS(x) (__m256)(x)
#define DOUBLES(x) (__m256d)(x)
#endif
    vec fours[LANES / 4];
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) {
        const vec a = sums[4 * i], b = sums[4 * i + 1], c = sums[4 * i + 2], d = sums[4 * i + 3];
        const vec ab = CALL(unpacklo_ps, FLOATS(a), FLOATS(b)) + CALL(unpackhi_ps, FLOATS(a), FLOATS(b));
        const vec cd = CALL(unpacklo_ps, FLOATS(c), FLOATS(d)) + CALL(unpackhi_ps, FLOATS(c), FLOATS(d));
        fours[i] = CALL(unpacklo_pd, DOUBLES(ab), DOUBLES(cd)) + CALL(unpackhi_pd, DOUBLES(ab), DOUBLES(cd));
    }
#if LANES == 8
    return CALL(permute2f128_ps, FLOATS(fours[0]), FLOATS(fours[1]), 0x20) +
           CALL(permute2f128_ps, FLOATS(fours[0]), FLOATS(fours[1]), 0x31);
#else
#define BOTH(a, b) (CALL(shuffle_f32x4, FLOATS(a), FLOATS(b), 0x88) + CALL(shuffle_f32x4, FLOATS(a), FLOATS(b), 0xdd))
    const vec low = BOTH(fours[0], fours[1]), high = BOTH(fours[2], fours[3]);
    return BOTH(low, high);
#undef BOTH
#endif
#undef CALL
#undef FLOATS
#undef DOUBLES
#endif
}

// e to the x, within one unit in the last place. Steps and constants are those of SLEEF's expf_u10 (Boost licence),
// which torch's vector code calls: so activations have torch's bits.
INLINE vec exp_of(vec x) {
    const float magic = 12582912.0f;
    const vec shifted = x * 1.442695040888963407359924681001892137426645954152985934135449406931f + magic;
    const vec whole = shifted - magic;
    const ints power = (ints)shifted - 0x4B400000;
    vec s = fma_of(whole, all(-0.693145751953125f), x);
    s = fma_of(whole, all(-1.428606765330187045e-06f), s);
    vec u = all(0.000198527617612853646278381f);
    u = fma_of(u, s, all(0.00139304355252534151077271f));
    u = fma_of(u, s, all(0.00833336077630519866943359f));
    u = fma_of(u, s, all(0.0416664853692054748535156f));
    u = fma_of(u, s, all(0.166666671633720397949219f));
    u = fma_of(u, s, all(0.5f));
    u = fma_of(s * s, u, s) + 1.0f;
    const ints half = power >> 1;
    u = u * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
    u = choose(when(x < all(-104.0f)), all(0.0f), u);
    return choose(when(x > all(100.0f)), all(__builtin_inff()), u);
}
