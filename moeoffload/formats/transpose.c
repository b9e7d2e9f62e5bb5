// Transposes matrices of 4-bit codes that files store column by column, (in, out), to rows, (out, in).
#include <stdint.h>
#include <string.h>

// BLOCK: columns of words that are processed together, a cache line of the input. RUN: words of an output row that are
// written together, because single words of rows a power of two apart would evict each other from the cache.
enum { BLOCK = 16, RUN = 16 };
typedef uint32_t Words __attribute__((vector_size(4 * BLOCK)));

// Exchanges nibble i of word k with nibble k of word i in BLOCK sets of eight words: a transpose of 8 x 8 codes.
static void exchange(Words words[8])
{
    static const uint32_t masks[3] = {0x0000FFFF, 0x00FF00FF, 0x0F0F0F0F};
    for (int step = 0, distance = 4; step < 3; step++, distance /= 2)
        for (int k = 0; k < 8; k++)
            if (!(k & distance)) {
                Words moved = (words[k] >> 4 * distance ^ words[k + distance]) & masks[step];
                words[k + distance] ^= moved;
                words[k] ^= moved << 4 * distance;
            }
}

// Transposes words (n_rows, n_columns) to out (n_columns, n_rows).
static void transpose_words(const uint32_t *words, long n_rows, long n_columns, uint32_t *out)
{
    for (long column = 0; column < n_columns; column += BLOCK) {
        long width = n_columns - column < BLOCK ? n_columns - column : BLOCK;
        for (long row = 0; row < n_rows; row += RUN) {
            long height = n_rows - row < RUN ? n_rows - row : RUN;
            uint32_t runs[BLOCK][RUN];
            for (long k = 0; k < height; k++)
                for (long m = 0; m < width; m++)
                    runs[m][k] = words[(row + k) * n_columns + column + m];
            for (long m = 0; m < width; m++)
                memcpy(out + (column + m) * n_rows + row, runs[m], 4 * height);
        }
    }
}

// Transposes `words` (n_rows, n_columns), words of eight codes. Without `places` the eight codes belong to one output
// row, and out is (n_columns, n_rows) of the same words. With `places` they belong to eight output rows, of which the
// i-th is in nibble places[i], and out is (8 * n_columns, n_rows / 8) words of eight codes of one row.
void moe_transpose_codes(const uint32_t *words, long n_rows, long n_columns, uint32_t *out, const int32_t *places)
{
    if (!places) {
        transpose_words(words, n_rows, n_columns, out);
        return;
    }
    long n_blocks = n_rows / 8;
    for (long column = 0; column < n_columns; column += BLOCK) {
        long width = n_columns - column < BLOCK ? n_columns - column : BLOCK;
        for (long first = 0; first < n_blocks; first += RUN) {
            long n = n_blocks - first < RUN ? n_blocks - first : RUN;
            uint32_t runs[8 * BLOCK][RUN];
            for (long block = 0; block < n; block++) {
                Words set[8] = {{0}};
                for (int k = 0; k < 8; k++)
                    memcpy(&set[k], words + (8 * (first + block) + k) * n_columns + column, 4 * width);
                exchange(set);
                for (int m = 0; m < BLOCK; m++)
                    for (int i = 0; i < 8; i++)
                        runs[8 * m + i][block] = set[places[i]][m];
            }
            for (long row = 0; row < 8 * width; row++)
                memcpy(out + (8 * column + row) * n_blocks + first, runs[row], 4 * n);
        }
    }
}
