// Tiles of FP8 multiplied by rows of 16 bits for one instruction set; included after integer_body.h. The includer defines
//   FP8_OPERAND    the element of an operand; four neighbours are in the order 0, 2, 1, 3
//   FP8_WEIGHTS    four weights of each row in registers
//   FP8_UNPACK     FP8_WEIGHTS of codes
//   FP8_SUMS       sums of an operand
//   FP8_ADD        adds the products of FP8_WEIGHTS and four elements at an address to FP8_SUMS in a numbered step
//   FP8_TOTAL      one sum for each row
//   FP8_SET        the name of a function for this instruction set

// The products of one part of a tile and n_x operands.
INLINE void multiply_fp8(const int n_x, const Matrix *m, const uint8_t *at, int part, const void *const *operands, vec *out) {
    const int64_t group = m->shift < 62 ? (int64_t)1 << m->shift : m->n_in;
    const float *shared = NULL;
    if (m->shared) {
        const int64_t row = ((const char *)at - m->data) / m->row_bytes, n_shared = ceil_div(m->n_out, m->shared_rows);
        shared = m->shared + (row / m->n_out * n_shared + row % m->n_out / m->shared_rows) * m->n_groups;
    }
    const FP8_OPERAND *const *x = (const FP8_OPERAND *const *)operands;
    Group g = {0};
    vec total[MOST_X];
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) total[i] = (vec){0};
    for (int64_t k = 0; k < m->n_in;) {
        if (shared)
            g.scale = all(*shared++);
        else
            at = read_group(m, at, part, &g);
        FP8_SUMS sums[MOST_X];
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) sums[i] = (FP8_SUMS){0};
        for (const int64_t end = at_most(k + group, m->n_in); k < end; k += INTEGERS, at += INTEGERS * TILE) {
#pragma GCC unroll 8
            for (int step = 0; step < INTEGERS / 4; step++) {
                if (part == 0) __builtin_prefetch(at + 4 * TILE * step + 2 * AHEAD_BYTES, 0, 2);
                const FP8_WEIGHTS some = FP8_UNPACK(codes_at(at + 4 * TILE * step + 4 * LANES * part));
#pragma GCC unroll 8
                for (int i = 0; i < n_x; i++) FP8_ADD(sums[i], step, some, x[i] + k + 4 * step);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) total[i] = fma_of(FP8_TOTAL(sums[i]), g.scale, total[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) out[i] = total[i];
}

#define WITH_X(n)                                                                                                   \
    static TARGET void FP8_SET(n)(const Matrix *m, const uint8_t *tile, const void *const *x, void *out) {          \
        for (int part = 0; part < PARTS; part++) multiply_fp8(n, m, tile, part, x, (vec *)out + part * MOST_X);     \
    }
WITH_X(1)
WITH_X(2)
WITH_X(4)
#undef WITH_X
