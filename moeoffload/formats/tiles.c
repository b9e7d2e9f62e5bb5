// Converts packed rows to tiles of 16 rows and back: see formats/tiles.py.
#include <unistd.h>

#include "vectors.h"

enum { TILE = 16, BLOCK = 32 };  // rows of a tile, weights of a block

// The structures are those of formats/tiles.py. A Part is the address of a section of the first row (NULL: there is
// none) and the bytes from one row to the next.
typedef struct {
    uint8_t *at;
    int64_t stride;
} Part;

typedef struct {
    Part codes, high, scales, offsets, factors, min_factors;
    int64_t n_in, code_bits, high_bits, scale_bytes, is_fp8;
    int64_t group_bits;  // 1 << group_bits weights share a scale
} Rows;

// `size` bytes of a file.
typedef struct {
    int64_t file, offset, size;
    uint8_t *to;
} Read;

// `n` pieces of `size` bytes.
typedef struct {
    Part from;
    int64_t to, to_stride, size, n;
} Copy;

typedef struct {
    const Read *reads;
    const Step *steps;
    const Copy *copies;
    const Rows *rows;  // NULL: they are copied
    int64_t n_reads, n_steps, n_copies;
    int64_t n_data;                    // copies that go to the data, the others go to the scales
    int64_t start, n_rows, row_bytes;  // where tiles begin in the data, and their size
} Matrix;

// fold_nibbles turns eight 4-bit codes in order into four bytes, with codes 0 to 3 in their lower and 4 to 7 in their
// upper halves, so that a vector of tiles unpacks by a mask and a shift; unfold_nibbles is its inverse.
INLINE Four fold_nibbles(Four word) { return exchange(exchange(word, 8, 0x0000FF00), 4, 0x00F000F0); }
INLINE Four unfold_nibbles(Four word) { return exchange(exchange(word, 4, 0x00F000F0), 8, 0x0000FF00); }

// fold_bits does with 32 single bits what fold_pairs does with pairs: bit s of byte j is that of weight 4 * s + j;
// unfold_bits is its inverse.
INLINE Four fold_bits(Four word) { return exchange(fold_pairs(exchange(word, 3, 0x0A0A0A0A)), 8, 0x0000FF00); }
INLINE Four unfold_bits(Four word) { return exchange(fold_pairs(exchange(word, 8, 0x0000FF00)), 3, 0x0A0A0A0A); }

// How codes differ in tiles: not at all, by 128, or as fold_nibbles says.
enum { SAME, SIGNS, NIBBLES };

// Copies `size` bytes at `place` of a section from each of 16 rows to the tile at `at`, or back if is_back; returns the
// address behind them in the tile.
INLINE uint8_t *move_bytes(const int is_back, const Part *part, int64_t place, const int64_t size, uint8_t *at) {
    uint8_t *row = part->at + place;
    for (int r = 0; r < TILE; r++, row += part->stride, at += size) memcpy(is_back ? row : at, is_back ? at : row, size);
    return at;
}

// As move_bytes for one word of each row, applying `there` on the way to the tile and `back` on the way back.
INLINE uint8_t *move_word(const int is_back, const Part *part, int64_t place, uint8_t *at, Four there(Four),
                          Four back(Four)) {
    uint8_t *row = part->at + place;
    for (int r = 0; r < TILE; r += 4, row += 4 * part->stride, at += 16) {
        uint32_t w[4];
        Four words;
        if (is_back) {
            memcpy(&words, at, 16), words = back(words);
            for (int i = 0; i < 4; i++) w[i] = words[i], memcpy(row + i * part->stride, &w[i], 4);
        } else {
            for (int i = 0; i < 4; i++) memcpy(&w[i], row + i * part->stride, 4);
            words = there((Four){w[0], w[1], w[2], w[3]}), memcpy(at, &words, 16);
        }
    }
    return at;
}

// Moves the codes of four words of each row; the tile has the first words of all rows, then the second ones, and so on.
INLINE uint8_t *move_codes(const int is_back, const Part *part, int64_t place, uint8_t *at, const int change) {
    uint8_t *row = part->at + place;
    for (int r = 0; r < TILE; r += 4, row += 4 * part->stride, at += 16) {
        Four words[4];
        for (int i = 0; i < 4; i++) memcpy(&words[i], is_back ? at + 4 * TILE * i : row + i * part->stride, 16);
        for (int i = 0; i < 4; i++) {
            if (change == SIGNS) words[i] ^= 0x80808080;
            if (change == NIBBLES) words[i] = is_back ? unfold_nibbles(words[i]) : fold_nibbles(words[i]);
        }
        transpose_words(words);
        for (int i = 0; i < 4; i++) memcpy(is_back ? row + i * part->stride : at + 4 * TILE * i, &words[i], 16);
    }
    return at + 3 * 4 * TILE;
}

typedef uint8_t *MoveCodes(const int is_back, const Part *part, int64_t place, uint8_t *at, const int change);

// As move_bytes, for the scale of a group.
INLINE uint8_t *move_scales(const int is_back, const Rows *of, int64_t group, uint8_t *at) {
    switch (of->scale_bytes) {
    case 1: return move_bytes(is_back, &of->scales, group, 1, at);
    case 2: return move_bytes(is_back, &of->scales, group * 2, 2, at);
    case 4: return move_bytes(is_back, &of->scales, group * 4, 4, at);
    default: return at;
    }
}

// Converts 16 rows to the tile at `at`, or back if is_back; returns the end of the used bytes of the tile.
INLINE uint8_t *move_tile(const int is_back, const Rows *of, uint8_t *at, MoveCodes *move) {
    const int64_t group = (int64_t)1 << of->group_bits, step = group < BLOCK ? group : BLOCK;
    for (int64_t k = 0; k < of->n_in; k += BLOCK) {
        if (k % 256 == 0 && of->factors.at) at = move_bytes(is_back, &of->factors, k / 256 * 2, 2, at);
        if (k % 256 == 0 && of->min_factors.at) at = move_bytes(is_back, &of->min_factors, k / 256 * 2, 2, at);
        for (int64_t start = k; start < k + BLOCK; start += step) {
            if (start & (group - 1)) continue;
            at = move_scales(is_back, of, start >> of->group_bits, at);
            if (of->offsets.at) at = move_bytes(is_back, &of->offsets, start >> of->group_bits, 1, at);
        }
        if (of->high_bits == 1) at = move_word(is_back, &of->high, k / 8, at, fold_bits, unfold_bits);
        for (int i = 0; of->high_bits == 2 && i < 2; i++)
            at = move_word(is_back, &of->high, k / 4 + 4 * i, at, fold_pairs, fold_pairs);
        if (of->code_bits == 4) at = move(is_back, &of->codes, k / 2, at, NIBBLES);
        for (int i = 0; of->code_bits == 8 && i < 2; i++)
            at = move(is_back, &of->codes, k + 16 * i, at, of->is_fp8 ? SAME : SIGNS);
    }
    return at;
}

// Moves to the next 16 rows.
static void advance(Rows *of) {
    Part *parts[] = {&of->codes, &of->high, &of->scales, &of->offsets, &of->factors, &of->min_factors};
    for (int i = 0; i < 6; i++)
        if (parts[i]->at) parts[i]->at += TILE * parts[i]->stride;
}

INLINE void make_tiles(const Rows *rows, uint8_t *tiles, int64_t tile_bytes, int64_t n_tiles, MoveCodes *move) {
    Rows of = *rows;
    for (int64_t i = 0; i < n_tiles; i++, tiles += tile_bytes, advance(&of)) {
        uint8_t *end = move_tile(0, &of, tiles, move);
        memset(end, 0, tiles + tile_bytes - end);
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

// As exchange, of 16 words.
AVX512 INLINE __m512i exchange_16(__m512i word, const int distance, uint32_t mask) {
    const __m512i changed = _mm512_xor_si512(_mm512_srli_epi32(word, distance), word);
    const __m512i moved = _mm512_and_si512(changed, _mm512_set1_epi32(mask));
    return _mm512_xor_si512(_mm512_xor_si512(word, moved), _mm512_slli_epi32(moved, distance));
}

// As move_codes to tiles, of all 16 rows at once: 16 bytes of rows i, 4 + i, 8 + i and 12 + i are in one vector.
AVX512 INLINE uint8_t *move_codes_avx512(const int is_back, const Part *part, int64_t place, uint8_t *at,
                                         const int change) {
    const uint8_t *row = part->at + place;
    __m512i w[4];
    for (int i = 0; i < 4; i++) {
        const __m128i *from[4];
        for (int j = 0; j < 4; j++) from[j] = (const __m128i *)(row + (4 * j + i) * part->stride);
        w[i] = _mm512_inserti32x4(_mm512_castsi128_si512(_mm_loadu_si128(from[0])), _mm_loadu_si128(from[1]), 1);
        w[i] = _mm512_inserti32x4(_mm512_inserti32x4(w[i], _mm_loadu_si128(from[2]), 2), _mm_loadu_si128(from[3]), 3);
        if (change == SIGNS) w[i] = _mm512_xor_si512(w[i], _mm512_set1_epi32(0x80808080));
        if (change == NIBBLES) w[i] = exchange_16(exchange_16(w[i], 8, 0x0000FF00), 4, 0x00F000F0);
    }
    const __m512i a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpackhi_epi32(w[0], w[1]);
    const __m512i c = _mm512_unpacklo_epi32(w[2], w[3]), d = _mm512_unpackhi_epi32(w[2], w[3]);
    _mm512_storeu_si512(at, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(at + 64, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(at + 128, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(at + 192, _mm512_unpackhi_epi64(b, d));
    return at + 256;
}

AVX512 static void make_tiles_avx512(const Rows *rows, uint8_t *tiles, int64_t tile_bytes, int64_t n_tiles) {
    make_tiles(rows, tiles, tile_bytes, n_tiles, move_codes_avx512);
}
#endif

// As moe_make_tiles, on any CPU.
void moe_make_tiles_anywhere(const Rows *rows, uint8_t *tiles, int64_t tile_bytes, int64_t n_tiles) {
    make_tiles(rows, tiles, tile_bytes, n_tiles, move_codes);
}

// Converts rows to tiles at `tiles`, `tile_bytes` each; the rest of each tile is filled with zeros.
void moe_make_tiles(const Rows *rows, uint8_t *tiles, int64_t tile_bytes, int64_t n_tiles) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return make_tiles_avx512(rows, tiles, tile_bytes, n_tiles);
#endif
    moe_make_tiles_anywhere(rows, tiles, tile_bytes, n_tiles);
}

// Converts tiles back to rows; writes the sections that `rows` points to.
void moe_read_tiles(const Rows *rows, uint8_t *tiles, int64_t tile_bytes, int64_t n_tiles) {
    Rows of = *rows;
    for (int64_t i = 0; i < n_tiles; i++, tiles += tile_bytes, advance(&of)) move_tile(1, &of, tiles, move_codes);
}

// Reads the parts of a matrix, converts them, and writes its rows as tiles, or copies them, to places counted from `data`
// and `scales`. Returns whether all bytes could be read.
int moe_read_matrix(const Matrix *of, uint8_t *data, uint8_t *scales) {
    for (const Read *each = of->reads; each < of->reads + of->n_reads; each++)
        if (pread(each->file, each->to, each->size, each->offset) != each->size) return 0;
    moe_convert(of->steps, of->n_steps);
    for (const Copy *each = of->copies; each < of->copies + of->n_copies; each++) {
        uint8_t *to = (each < of->copies + of->n_data ? data : scales) + each->to;
        for (int64_t i = 0; i < each->n; i++)
            memcpy(to + i * each->to_stride, each->from.at + i * each->from.stride, each->size);
    }
    if (of->rows) moe_make_tiles(of->rows, data + of->start, TILE * of->row_bytes, of->n_rows / TILE);
    return 1;
}
