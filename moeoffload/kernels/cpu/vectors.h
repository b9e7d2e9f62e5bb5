// Vectors of floats, and loads and stores that convert them from and to the element types of common.h.
//
// Included once per instruction set by a file that has included its intrinsics and defines LANES (floats per vector)
// and TARGET (the attribute of functions that use the instruction set). Uses the vector types of GCC and Clang. `type`
// is a constant wherever these functions are inlined.
#pragma once

#include "common.h"

#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")

// Calls DO with n as a constant, so that loops up to it are unrolled; n is from `least` to `most`, at most 8.
#define WITH_CONSTANT(n, least, most, DO)                       \
    switch (n) {                                                \
    case 1: if (least <= 1) { DO(1); } break;                   \
    case 2: if (least <= 2 && most >= 2) { DO(2); } break;      \
    case 3: if (least <= 3 && most >= 3) { DO(3); } break;      \
    case 4: if (least <= 4 && most >= 4) { DO(4); } break;      \
    case 5: if (most >= 5) { DO(5); } break;                    \
    case 6: if (most >= 6) { DO(6); } break;                    \
    case 7: if (most >= 7) { DO(7); } break;                    \
    case 8: if (most >= 8) { DO(8); } break;                    \
    default: __builtin_unreachable();                           \
    }

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float four __attribute__((vector_size(16)));

INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(ints where, vec a, vec b) { return (vec)((where & (ints)a) | (~where & (ints)b)); }

// Rounds floats to nearest even so that the upper 16 bits are bfloat16, with the bits of torch's conversion; NaN stays
// NaN. The lower 16 bits are arbitrary.
INLINE bits round_bf16(vec values) {
    const bits raw = (bits)values, is_nan = (bits)(values != values);
    return (is_nan & 0x7FC00000) | (~is_nan & (raw + 0x7FFF + (raw >> 16 & 1)));
}

// Returns a * b + c, rounded once if the CPU has the instruction, independent of the compiler's contraction settings.
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

// Conversions by single instructions: the compilers' generic vector conversions take several.
#if LANES == 16
INLINE bits widen_u16(halves values) { return (bits)_mm512_cvtepu16_epi32((__m256i)values); }
INLINE halves narrow_u16(bits values) { return (halves)_mm512_cvtepi32_epi16((__m512i)values); }
INLINE vec widen_f16(halves values) { return (vec)_mm512_cvtph_ps((__m256i)values); }
INLINE halves narrow_f16(vec values) { return (halves)_mm512_cvtps_ph((__m512)values, 0); }
#elif LANES == 8
INLINE bits widen_u16(halves values) { return (bits)_mm256_cvtepu16_epi32((__m128i)values); }
INLINE halves narrow_u16(bits values) {
    return (halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)values), _mm256_extracti128_si256((__m256i)values, 1));
}
INLINE vec widen_f16(halves values) { return (vec)_mm256_cvtph_ps((__m128i)values); }
INLINE halves narrow_f16(vec values) { return (halves)_mm256_cvtps_ph((__m256)values, 0); }
#else
INLINE bits widen_u16(halves values) { return __builtin_convertvector(values, bits); }
INLINE halves narrow_u16(bits values) { return __builtin_convertvector(values, halves); }
#if defined(__aarch64__)
INLINE vec widen_f16(halves values) { return (vec)vcvt_f32_f16((float16x4_t)values); }
INLINE halves narrow_f16(vec values) { return (halves)vcvt_f16_f32((float32x4_t)values); }
#else
// Conversions by float products and sums, which round correctly, also for subnormal numbers.
INLINE vec widen_f16(halves values) {
    const bits raw = widen_u16(values), magnitude = raw & 0x7FFF;
    const bits is_special = (bits)(magnitude >= 0x7C00) & 0x7F800000;
    return (vec)((bits)((vec)(magnitude << 13) * 0x1p112f) | is_special | (raw & 0x8000) << 16);
}
INLINE halves narrow_f16(vec values) {
    const bits raw = (bits)values, magnitude = raw & 0x7FFFFFFF;
    const bits normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    const bits small = (bits)((vec)magnitude + 0.5f) - 0x3F000000;  // the sum rounds at 2^-24
    vec half = choose((vec)magnitude < 0x1p-14f, (vec)small, (vec)normal);
    half = choose((vec)magnitude >= 65520.0f, (vec)((bits){0} + 0x7C00), half);
    half = choose(values != values, (vec)((bits){0} + 0x7E00), half);
    return narrow_u16((bits)half | (raw >> 16 & 0x8000));
}
#endif
#endif

INLINE vec widened(halves values, const int type) {
    return type == BF16 ? (vec)(widen_u16(values) << 16) : widen_f16(values);
}

INLINE vec load(const void *from, const int type) {
    vec values;
    halves narrow;
    if (type == F32) return memcpy(&values, from, sizeof values), values;
    memcpy(&narrow, from, sizeof narrow);
    return widened(narrow, type);
}

// Loads `count` elements, at most LANES, and fills up with zeros: memory behind them may hold NaN or be unmapped.
INLINE vec load_some(const void *from, int64_t count, const int type) {
#if LANES == 16  // masked loads do not touch that memory
    const __mmask16 mask = (__mmask16)((1u << at_most(count, 16)) - 1);
    if (type == F32) return (vec)_mm512_maskz_loadu_ps(mask, from);
    return widened((halves)_mm256_maskz_loadu_epi16(mask, from), type);
#else
    if (count >= LANES) return load(from, type);
    char filled[4 * LANES] = {0};
    memcpy(filled, from, count * bytes_of(type));
    return load(filled, type);
#endif
}

INLINE void store(void *to, vec values, const int type) {
    if (type == F32) {
        memcpy(to, &values, sizeof values);
    } else {
        const halves narrow = type == F16 ? narrow_f16(values) : narrow_u16(round_bf16(values) >> 16);
        memcpy(to, &narrow, sizeof narrow);
    }
}

INLINE void store_some(void *to, vec values, int64_t count, const int type) {
    char filled[4 * LANES];
    store(count >= LANES ? to : filled, values, type);
    if (count < LANES) memcpy(to, filled, count * bytes_of(type));
}

INLINE vec rounded(vec values, const int type) {
    return type == F32 ? values : type == F16 ? widen_f16(narrow_f16(values)) : (vec)(round_bf16(values) & 0xFFFF0000);
}

#if LANES == 16
// Sums each vector within its 128-bit lanes: lane i of the result is {a, b, c, d summed over lane i}.
INLINE vec fold_lanes(vec a, vec b, vec c, vec d) {
    const __m512d ab = (__m512d)((vec)_mm512_unpacklo_ps(a, b) + (vec)_mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)((vec)_mm512_unpacklo_ps(c, d) + (vec)_mm512_unpackhi_ps(c, d));
    return (vec)_mm512_unpacklo_pd(ab, cd) + (vec)_mm512_unpackhi_pd(ab, cd);
}
// fold_halves adds the two 256-bit halves of two results of fold_lanes; fold_quarters adds neighbouring 128-bit lanes
// of two results of fold_halves, which gives the sums of 16 vectors in order.
INLINE vec fold_halves(vec a, vec b) { return (vec)_mm512_shuffle_f32x4(a, b, 0x44) + (vec)_mm512_shuffle_f32x4(a, b, 0xEE); }
INLINE vec fold_quarters(vec a, vec b) { return (vec)_mm512_shuffle_f32x4(a, b, 0x88) + (vec)_mm512_shuffle_f32x4(a, b, 0xDD); }
#endif

// Returns the sums of the elements of four vectors, each added in the same fixed tree.
INLINE four fold(vec a, vec b, vec c, vec d) {
#if LANES == 4
    return (four){a[0] + a[2], b[0] + b[2], c[0] + c[2], d[0] + d[2]} +
           (four){a[1] + a[3], b[1] + b[3], c[1] + c[3], d[1] + d[3]};
#elif LANES == 8
    const __m256d ab = (__m256d)((vec)_mm256_unpacklo_ps(a, b) + (vec)_mm256_unpackhi_ps(a, b));
    const __m256d cd = (__m256d)((vec)_mm256_unpacklo_ps(c, d) + (vec)_mm256_unpackhi_ps(c, d));
    const __m256 sums = (__m256)_mm256_unpacklo_pd(ab, cd) + (__m256)_mm256_unpackhi_pd(ab, cd);
    return (four)_mm256_castps256_ps128(sums) + (four)_mm256_extractf128_ps(sums, 1);
#else
    const __m512d sums = (__m512d)fold_lanes(a, b, c, d);
    const __m256 half = (__m256)_mm512_castpd512_pd256(sums) + (__m256)_mm512_extractf64x4_pd(sums, 1);
    return (four)_mm256_castps256_ps128(half) + (four)_mm256_extractf128_ps(half, 1);
#endif
}

// Returns r and sets `power` so that e^x = r * 2^power. Steps and constants are those of SLEEF's expf_u10 (Boost
// licence), which torch's vector code calls.
INLINE vec exp_part(vec x, ints *power) {
    const vec shifted = x * 1.44269504088896340736f + 12582912.0f, whole = shifted - 12582912.0f;
    const vec s = fma_of(whole, all(-1.428606765330187e-06f), fma_of(whole, all(-0.693145751953125f), x));
    vec u = fma_of(s, all(0.000198527617612853646278381f), all(0.00139304355252534151077271f));
    u = fma_of(u, s, all(0.00833336077630519866943359f));
    u = fma_of(u, s, all(0.0416664853692054748535156f));
    u = fma_of(u, s, all(0.166666671633720397949219f));
    u = fma_of(u, s, all(0.5f));
    *power = (ints)shifted - 0x4B400000;
    return fma_of(s * s, u, s) + 1.0f;
}

// Returns e^x within one unit in the last place, with the bits of torch.
INLINE vec exp_of(vec x) {
    ints power;
    const vec part = exp_part(x, &power);
    const ints half = power >> 1;
    const vec result = part * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
    return choose(x > 100.0f, all(INFINITY), choose(x < -104.0f, all(0), result));
}

// Returns e^x for x <= 0 within two units in the last place, 0 below the smallest normal number. NaN stays NaN.
INLINE vec exp_of_negative(vec x) {
    ints power;
    const vec part = exp_part(x, &power);
    return choose(x < -87.0f, all(0), part * (vec)((power + 127) << 23));
}
