// Multiplies tiles of FP8 codes by 16-bit float rows, for one instruction set; included after integer_body.h. The
// includer defines
//   FP8_OPERAND    type of an operand's element; each four neighbours are in the order 0, 2, 1, 3
//   FP8_WEIGHTS    type of registers with four weights of each row
//   FP8_UNPACK     unpacks codes to FP8_WEIGHTS
//   FP8_SUMS       type of the sums of one operand
//   FP8_ADD        adds the products of FP8_WEIGHTS and four operand elements at an address to FP8_SUMS
//   FP8_TOTAL      reduces FP8_SUMS to one sum per row
//   FP8_SET        the name of a function for this instruction set
// All are undefined at the end.

// Adds the products of 4 * n_steps weights of each row and n_x operands from element k on to `sums`, or begins them if
// these are the first of a group; if a scale is given, they are the last: adds the scaled sums to `totals`. The weights
// are codes, or already unpacked at `ready`. Prefetches as many bytes as codes from `ahead` on, unless that is NULL.
INLINE void FP8_SET(add_steps)(const int n_x, const FP8_WEIGHTS *ready, const uint8_t *codes, int64_t n_steps,
                               const FP8_OPERAND *const *x, int64_t k, const uint8_t *ahead, bool past, bool is_first,
                               FP8_SUMS *sums, const vec *scale, vec *totals) {
    FP8_SUMS own[MOST_X];  // in registers
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) own[i] = is_first ? (FP8_SUMS){0} : sums[i];
#pragma GCC unroll 8
    for (int64_t step = 0; step < n_steps; step++) {
        if (ahead) prefetch_weights(ahead + 4 * TILE * step, past);
        const FP8_WEIGHTS some = ready ? ready[step] : FP8_UNPACK(codes_at(codes + 4 * TILE * step));
#pragma GCC unroll 8
        for (int i = 0; i < n_x; i++) FP8_ADD(own[i], some, x[i] + k + 4 * step);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) {
        if (scale)
            totals[i] = fma_of(FP8_TOTAL(own[i]), *scale, totals[i]);
        else
            sums[i] = own[i];
    }
}

// Multiplies one part (LANES rows) of a tile by n_x operands. For `many`, weights are unpacked once to the first-level
// cache and multiplied by up to MOST_X operands at a time.
INLINE void FP8_SET(multiply)(const int n_x, const bool many, const Matrix *m, const uint8_t *at, int part, Fetch fetch,
                              const void *const *operands, vec *totals) {
    const int64_t group = m->shift < 62 ? (int64_t)1 << m->shift : m->n_in;
    const float *shared = NULL;
    if (m->shared) {
        const int64_t row = ((const char *)at - m->data) / m->row_bytes, n_shared = ceil_div(m->n_out, m->shared_rows);
        shared = m->shared + (row / m->n_out * n_shared + row % m->n_out / m->shared_rows) * m->n_groups;
    }
    const FP8_OPERAND *const *x = (const FP8_OPERAND *const *)operands;
    Group g = {0};
    FP8_WEIGHTS ready[UNPACKED / 4];
    FP8_SUMS sums[MANY_X] = {0};
#pragma GCC unroll 8
    for (int i = 0; i < n_x; i++) totals[i] = (vec){0};
    for (int64_t k = 0, n_chunks = 0; k < m->n_in;) {
        if (shared)
            g.scale = all(*shared++);
        else
            at = read_group(m, at, part, &g);
        const int64_t begin = k, end = at_most(k + group, m->n_in);
        for (int64_t n; k < end; k += n, at += n * TILE) {
            n = at_most(UNPACKED, end - k);
            const uint8_t *codes = at + 4 * LANES * part;
            const bool fetches = part == 0 && (n_chunks++ & (fetch.every - 1)) == fetch.turn, is_first = k == begin;
            const uint8_t *ahead = fetches ? at + fetch.far : NULL;
            const vec *scale = k + n == end ? &g.scale : NULL;
            if (!many) {
                FP8_SET(add_steps)(n_x, NULL, codes, n / 4, x, k, ahead, fetch.past, is_first, sums, scale, totals);
                continue;
            }
            for (int64_t line = 0; ahead && line < n * TILE; line += 64) prefetch_weights(ahead + line, fetch.past);
            for (int step = 0; step < n / 4; step++) ready[step] = FP8_UNPACK(codes_at(codes + 4 * TILE * step));
#define MULTIPLY(size) \
    FP8_SET(add_steps)(size, ready, codes, n / 4, x + set_at, k, NULL, false, is_first, sums + set_at, scale, totals + set_at)
            EACH_SET(n_x, MULTIPLY)
#undef MULTIPLY
        }
    }
}

#define DEFINE(name, ...) DEFINE_TILE(FP8_SET(by_##name), FP8_SET(multiply), __VA_ARGS__)
DEFINE(1, 1, false)
DEFINE(2, 2, false)
DEFINE(4, 4, false)
DEFINE(many, n_x, true)
#undef DEFINE

static MultiplyTile *const FP8_SET(sizes)[][N_SIZES] = {
    [WEIGHTS_FP8] = {FP8_SET(by_1), FP8_SET(by_2), FP8_SET(by_4), FP8_SET(by_many)}};

#undef FP8_OPERAND
#undef FP8_WEIGHTS
#undef FP8_UNPACK
#undef FP8_SUMS
#undef FP8_ADD
#undef FP8_TOTAL
#undef FP8_SET
