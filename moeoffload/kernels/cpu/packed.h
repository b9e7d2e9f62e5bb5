// Weights of few bits as they lie in memory: formats/packed.py says how. The structure is that of kernels/calls.py.
#pragma once

#include "common.h"

// Kinds of codes, scales and offsets, as in formats/packed.py.
enum { CODES_FP8, CODES_INT8, CODES_LEVELS4, CODES_UINT5, CODES_INT6, CODES_BF16, CODES_F16, CODES_F32 };
enum { SCALES_NONE, SCALES_F32, SCALES_F16, SCALES_BF16, SCALES_E8M0, SCALES_SUPER };
enum { OFFSETS_NONE, OFFSETS_ZERO, OFFSETS_MIN };

// Weights that are unpacked together; weights of a row whose scales are read together; 2 to the SUPER_SHIFT weights
// share a factor of SCALES_SUPER. A group has 16 weights or more.
enum { SPAN = 64, SEGMENT = 512, SUPER_SHIFT = 8, SEGMENT_GROUPS = SEGMENT / 16 };

// One matrix of every expert of a layer. Places are in bytes from the beginning of a row.
typedef struct {
    const char *data;     // (n_experts, n_out, row_bytes)
    const float *shared;  // (n_experts, ceil(n_out / shared_rows), n_groups), or NULL
    int64_t n_out, n_in, row_bytes, codes, scales, offsets;
    int64_t shift;        // a group has 2 to the `shift` weights
    int64_t n_groups, shared_rows;
    int64_t high, factors, min_factors, scales_at, offsets_at;  // places
    float levels[16];
    // Of rows that lie in tiles, see formats/tiles.py: `kind` is one more than that of tiles.h, 0: they do not.
    int64_t kind, zero_shift;  // the code of the value 0 is 2 to this; 0 for 32
    float unit;          // the value of one step of the codes, without the scale
    uint8_t table[16];
} Matrix;

// Of the groups of a segment of a row. `offset` is subtracted before (OFFSETS_ZERO) or after (OFFSETS_MIN) the product. Of
// SCALES_E8M0 without offsets it is the power's exponent, twice, where bfloat16 has its own.
// `is_wild`: exponents of products may leave those of normal numbers in bfloat16.
typedef struct {
    float scale[SEGMENT_GROUPS], offset[SEGMENT_GROUPS];
    bool is_wild;
} Scales;

static inline const char *packed_row(const Matrix *m, int64_t expert, int64_t row) {
    return m->data + (expert * m->n_out + row) * m->row_bytes;
}
