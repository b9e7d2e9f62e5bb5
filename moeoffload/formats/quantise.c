// Quantises rows of floats in groups: see formats/quantise.py.
#include "vectors.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define BEST_CPU __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define BEST_CPU
#endif

enum { LANES = 8, MOST = 128 };  // floats of a vector, weights of the largest group
enum { INT8, INT4, MXFP4, FP8 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

// The structure is that of formats/quantise.py: rows of n_in floats of `item` bytes (bfloat16 or float32), the codes to
// write, the bytes from a row to the next; (n_rows, n_groups) scales and their inverses.
typedef struct {
    const char *rows;
    uint8_t *codes;
    const float *scales, *inverses;
    int64_t item, n_rows, n_in, group, row_bytes, codes_bytes, kind;
} Quantised;

INLINE vec choose(ints condition, vec a, vec b) { return (vec)((condition & (ints)a) | (~condition & (ints)b)); }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec clamped(vec value, float least, float most) {  // NaN becomes `most`
    value = choose(value < most, value, all(most));
    return choose(value > least, value, all(least));
}
// Rounds floats of less than 2^22, ties to even: the sum has no room for a fraction.
INLINE vec to_integer(vec value) { return value + 0x1.8p23f - 0x1.8p23f; }

// Reads the group of a row that begins with weight `at`; behind the row's end there are zeros.
INLINE void read_group(const Quantised *q, int64_t row, int64_t at, const int size, vec *x) {
    char padded[MOST * 4];
    const char *from = q->rows + row * q->row_bytes + at * q->item;
    if (q->n_in - at < size) from = memcpy(memset(padded, 0, sizeof padded), from, (q->n_in - at) * q->item);
    for (int i = 0; i < size / LANES; i++) {
        shorts narrow;
        if (q->item == 4) {
            memcpy(x + i, from + i * sizeof *x, sizeof *x);
        } else {
            memcpy(&narrow, from + i * sizeof narrow, sizeof narrow);
            x[i] = (vec)(__builtin_convertvector(narrow, bits) << 16);
        }
    }
}

// Writes each group's weight of the largest magnitude, of two the negative one, to (n_rows, n_groups).
BEST_CPU void moe_largest_of_groups(const Quantised *q, uint32_t *largest) {
    for (int64_t row = 0; row < q->n_rows; row++)
        for (int64_t at = 0; at < q->n_in; at += q->group, largest++) {
            vec x[MOST / LANES];
            bits most = {0};
            if (q->group == MOST)
                read_group(q, row, at, MOST, x);
            else
                read_group(q, row, at, 32, x);
            for (int i = 0; i < q->group / LANES; i++) {
                const bits key = (bits)x[i] << 1 | (bits)x[i] >> 31;
                most = (bits)choose((ints)(key > most), (vec)key, (vec)most);
            }
            uint32_t key = 0;
            for (int i = 0; i < LANES; i++) key = most[i] > key ? most[i] : key;
            *largest = key >> 1 | key << 31;
        }
}

// Rounds to the nearest values of a kind; returns these, and writes their codes.
INLINE vec round_to(const int kind, vec scaled, ints *codes) {
    if (kind == INT8 || kind == INT4) {
        const vec rounded = to_integer(clamped(scaled, kind == INT8 ? -127 : -8, kind == INT8 ? 127 : 7));
        *codes = __builtin_convertvector(rounded, ints) + (kind == INT8 ? 0 : 8);
        return rounded;
    }
    scaled = clamped(scaled, -448, 448);
    const bits sign = (bits)scaled & 0x80000000, raw = (bits)scaled ^ sign;
    const vec size = (vec)raw;
    if (kind == MXFP4) {
        const vec steps = choose(size < 2, all(2), choose(size < 4, all(1), all(0.5f)));  // of a value of 1
        const vec rounded = clamped(to_integer(size * steps) / steps, 0, 6);
        const vec code = choose(rounded < 2, 2 * rounded, choose(rounded < 4, rounded + 2, rounded / 2 + 4));
        *codes = __builtin_convertvector(code, ints) | (ints)(sign >> 28);
        return (vec)((bits)rounded | sign);
    }
    const vec small = to_integer(size * 512);  // below 2^-6 all values are multiples of 2^-9
    const bits normal = raw + 0x7FFFF + (raw >> 20 & 1);
    const ints is_small = size < 0x1p-6f;
    const vec few = (vec)__builtin_convertvector(small, ints), many = (vec)((normal >> 20) - (120 << 3));
    *codes = (ints)choose(is_small, few, many) | (ints)(sign >> 24);
    return (vec)((bits)choose(is_small, small / 512, (vec)(normal & 0xFFF00000)) | sign);
}

INLINE void quantise_rows(const int kind, const int group, const Quantised *q, double *sums) {
    const float *scale = q->scales, *inverse = q->inverses;
    for (int64_t row = 0; row < q->n_rows; row++) {
        vec wrong = {0}, total = {0};
        for (int64_t at = 0; at < q->n_in; at += group, scale++, inverse++) {
            vec x[MOST / LANES];
            ints words[MOST / LANES];
            int32_t codes[MOST];
            uint8_t bytes[MOST];
            read_group(q, row, at, group, x);
            for (int i = 0; i < group / LANES; i++) {
                const vec error = round_to(kind, x[i] * *inverse, words + i) * *scale - x[i];
                wrong += error * error, total += x[i] * x[i];
            }
            memcpy(codes, words, group * sizeof *codes);
            const int64_t n = q->n_in - at < group ? q->n_in - at : group;
            uint8_t *to = q->codes + row * q->codes_bytes;
            if (kind == INT8 || kind == FP8) {
                for (int i = 0; i < group; i++) bytes[i] = (uint8_t)codes[i];
                memcpy(to + at, bytes, n);
            } else {
                for (int i = 0; i < group / 2; i++) bytes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
                memcpy(to + at / 2, bytes, (n + 1) / 2);
            }
        }
        for (int i = 0; i < LANES; i++) sums[0] += wrong[i], sums[1] += total[i];
    }
}

// Writes the codes of all groups; adds the squared errors to sums[0], and the squares of the weights to sums[1].
BEST_CPU void moe_quantise(const Quantised *q, double *sums) {
    switch (q->kind) {
        case INT8: quantise_rows(INT8, 32, q, sums); break;
        case INT4: quantise_rows(INT4, 32, q, sums); break;
        case MXFP4: quantise_rows(MXFP4, 32, q, sums); break;
        case FP8: quantise_rows(FP8, MOST, q, sums); break;
    }
}
