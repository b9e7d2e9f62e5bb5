// Packed weights in the memory layout of formats/packed.py. The structure is that of kernels/calls.py.
#pragma once

#include "common.h"

// Kinds of codes, scales and offsets, as in formats/packed.py.
enum { CODES_FP8, CODES_INT8, CODES_LEVELS4, CODES_UINT5, CODES_INT6, CODES_BF16, CODES_F16, CODES_F32 };
enum { SCALES_NONE, SCALES_F32, SCALES_F16, SCALES_BF16, SCALES_E8M0, SCALES_SUPER };
enum { OFFSETS_NONE, OFFSETS_ZERO, OFFSETS_MIN };

// SPAN: weights that are unpacked together. SEGMENT: weights of a row whose scales are read together. With
// SCALES_SUPER, 2^SUPER_SHIFT weights share a factor. A group has 16 weights or more.
enum { SPAN = 64, SEGMENT = 512, SUPER_SHIFT = 8, SEGMENT_GROUPS = SEGMENT / 16 };

// One matrix of every expert of a layer. Places of sections are in bytes from the beginning of a row.
typedef struct {
    const char *data;     // (n_experts, n_out, row_bytes)
    const float *shared;  // (n_experts, ceil(n_out / shared_rows), n_groups), or NULL
    int64_t n_out, n_in, row_bytes, codes, scales, offsets;
    int64_t shift;        // a group has 2^shift weights
    int64_t n_groups, shared_rows;
    int64_t high, factors, min_factors, scales_at, offsets_at;  // places
    float levels[16];
    // For rows in tiles, see formats/tiles.py: `kind` is one more than the kind of tiles.h; 0: not in tiles.
    int64_t kind, zero_shift;  // the code of the value 0 is 2^zero_shift, or 0 if zero_shift is 32
    float unit;          // value of one step of the codes, without the scale
    uint8_t table[16];
} Matrix;

// Scales of the groups of a segment of a row. `offset` is subtracted before (OFFSETS_ZERO) or after (OFFSETS_MIN) the
// product with the scale. `is_wild`: products may lie outside the range of normal bfloat16 numbers.
typedef struct {
    float scale[SEGMENT_GROUPS], offset[SEGMENT_GROUPS];
    bool is_wild;
} Scales;

static inline const char *packed_row(const Matrix *m, int64_t expert, int64_t row) {
    return m->data + (expert * m->n_out + row) * m->row_bytes;
}
