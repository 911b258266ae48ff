// The products on tiles (AMX). Included by gemm.h at the level that has them.
//
// Quantised weights: a block of 32 inputs is opened once for up to 64 activation rows and multiplied with 16 or 8 of them
// by one tile product (two where scales cover 16 inputs). The sums are integers, and are scaled and added in the order of
// the vector kernel, so a row has the same bits whether it came alone or with others, and as at the level below.
//
// bfloat16 weights lie in memory as tiles do, and a sum stays in its tile until all inputs are done. Every number of rows
// goes through tiles here, since their order of summing is not that of the vector instruction.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace {

// -------------------------------------------------------------------------------------------- quantised weights

constexpr int OPENED = 8;       // blocks of 32 inputs opened at a time: 4 KB, which stays in the first-level cache
constexpr int MAX_PIECES = 4;   // pieces of 16 rows that share them

// Weights of up to OPENED blocks: tiles of eight (four and four) rows, and scales.
template <class F>
struct Opened {
    static constexpr int PARTS = F::HALVES ? 2 : 1;
    alignas(64) uint8_t codes[OPENED][8][64];
    VF scale[OPENED * PARTS], min[F::MIN ? OPENED * PARTS : 1];
};

template <int I>
VK_INLINE void tile_product(const uint8_t* x, const uint8_t* weight, int32_t* sums) {
    constexpr int A = FIRST_ACTIVATION + I % 2, B = FIRST_WEIGHT + I % 2;
    tile_zero<I>();
    tile_load<A>(x, 32);
    tile_load<B>(weight, 64);
    tile_dot_codes<I, A, B>();
    tile_store<I>(sums, 64);
}

// Adds the opened blocks' products to the sums of a piece of H rows.
template <class F, int H>
__attribute__((noinline)) void add_opened(const Opened<F>& w, int num_blocks, const uint8_t* block, VF* sums) {
    constexpr int PARTS = Opened<F>::PARTS, TOGETHER = 4 / PARTS, RECORD = H * BLOCK_BYTES;
    alignas(64) int32_t dots[4][H * 16];
    VF acc[H];
VK_UNROLL(16)
    for (int r = 0; r < H; ++r) acc[r] = sums[r];
    for (int b = 0; b < num_blocks; b += TOGETHER, block += TOGETHER * RECORD) {
        const int count = num_blocks - b < TOGETHER ? num_blocks - b : TOGETHER;
        if constexpr (F::HALVES) {
            tile_product<0>(block, w.codes[b][0], dots[0]);
            tile_product<1>(block + 16, w.codes[b][4], dots[1]);
            if (count > 1) {
                tile_product<2>(block + RECORD, w.codes[b + 1][0], dots[2]);
                tile_product<3>(block + RECORD + 16, w.codes[b + 1][4], dots[3]);
            }
        } else {
            tile_product<0>(block, w.codes[b][0], dots[0]);
            if (count > 1) tile_product<1>(block + RECORD, w.codes[b + 1][0], dots[1]);
            if (count > 2) tile_product<2>(block + 2 * RECORD, w.codes[b + 2][0], dots[2]);
            if (count > 3) tile_product<3>(block + 3 * RECORD, w.codes[b + 3][0], dots[3]);
        }
        for (int i = 0; i < count; ++i) {
            const BlockRows rows = BlockRows::at(block + i * RECORD, H);
            const VF* scale = w.scale + PARTS * (b + i);
            const VF* min = w.min + (F::MIN ? PARTS * (b + i) : 0);
            const int32_t* first = dots[PARTS * i];
            const int32_t* second = dots[PARTS * i + PARTS - 1];
VK_UNROLL(16)
            for (int r = 0; r < H; ++r) {
                VI one = vi_load(first + 16 * r), two = F::HALVES ? vi_load(second + 16 * r) : one;
                if constexpr (F::BIAS != 0) {
                    one = vi_add(one, vi_set1(rows.bias[r]));
                    two = vi_add(two, vi_set1(rows.bias[F::HALVES ? H + r : r]));
                }
                acc[r] = add_block<F>(acc[r], one, two, scale, min, rows, r);
            }
        }
    }
VK_UNROLL(16)
    for (int r = 0; r < H; ++r) sums[r] = acc[r];
}

// out[piece][row] (16 outputs each) of neighbouring pieces of H rows.
template <class F, int H>
void tiled_sums(const uint8_t* weight, const uint8_t* blocks, int64_t num_supers, int num_pieces, VF* out) {
    constexpr int PER_SUPER = F::SUPER / 32, SUPERS = OPENED / PER_SUPER;
    const int64_t piece_bytes = num_supers * PER_SUPER * H * BLOCK_BYTES;
    Opened<F> opened;
    for (int i = 0; i < num_pieces * H; ++i) out[i] = vf_zero();
    tile_use(H, 32 / Opened<F>::PARTS);
    for (int64_t s = 0; s < num_supers; s += SUPERS) {
        const int supers = num_supers - s < SUPERS ? (int)(num_supers - s) : SUPERS;
        for (int i = 0; i < supers; ++i, weight += F::BYTES) {
            F::scales(weight, opened.scale + i * NUM_SCALES<F>, opened.min + (F::MIN ? i * NUM_SCALES<F> : 0));
            for (int b = 0; b < PER_SUPER; ++b) {
                constexpr int BYTES = F::BYTES / PER_SUPER, LINES = (BYTES + 63) / 64;
                for (int line = 0; line < LINES; ++line)
                    prefetch_weight<H>(weight + PREFETCH_BYTES + b * BYTES + 64 * line);
                VB w[8];
                F::codes(weight, b, w);
                memcpy(opened.codes[i * PER_SUPER + b], w, sizeof w);
            }
        }
        const int num_blocks = supers * PER_SUPER;
        for (int p = 0; p < num_pieces; ++p)
            add_opened<F, H>(opened, num_blocks, blocks + p * piece_bytes, out + p * H);
        blocks += num_blocks * H * BLOCK_BYTES;
    }
}

template <class F, int H>
void tiled_pieces(const Gemm& g, int64_t group, int64_t first, int num_pieces) {
    const uint8_t* blocks = g.x + first * (g.k / 32) * BLOCK_BYTES;
    VF acc[MAX_PIECES * H], up[MAX_PIECES * H];
    tiled_sums<F, H>(g.weight + group * g.group_bytes, blocks, g.num_supers, num_pieces, acc);
    if (g.epilogue) tiled_sums<F, H>(g.up_weight + group * g.group_bytes, blocks, g.num_supers, num_pieces, up);
    for (int p = 0; p < num_pieces; ++p)
        finish_piece(g, group, first + p * H, H, acc + p * H, g.epilogue ? up + p * H : nullptr);
}

// Does what tiles are for of rows first .. end - 1: how many rows from `first` on are done.
template <class F>
int64_t tiled_rows(const Gemm& g, int64_t group, int64_t first, int64_t end) {
    const int64_t pieces = (end - first) / 16;
    if (pieces) {
        const int count = pieces < MAX_PIECES ? (int)pieces : MAX_PIECES;
        tiled_pieces<F, 16>(g, group, first, count);
        return 16 * count;
    }
    if (end - first < 8) return 0;
    tiled_pieces<F, 8>(g, group, first, 1);
    return 8;
}

// -------------------------------------------------------------------------------------------- bfloat16 weights
//
// A piece of R activation rows is, per 32 inputs, R times 64 bytes; what is left of K follows as R shorter rows.

namespace pairs_tiled {

constexpr int64_t PAIR_BYTES = 4;
constexpr int64_t INPUTS = 32;  // of a tile

VK_INLINE int64_t whole_inputs(int64_t k) { return k / INPUTS * INPUTS; }

struct Sides {
    const uint8_t *x[2], *weight[2];  // of up to two pieces and two groups
    int64_t stride;                   // from one activation row to the next
};

// Sums of piece p and group g are in tile 2p + g.
template <int P, int G>
VK_INLINE void add_inputs(const Sides& s) {
    tile_load<FIRST_ACTIVATION>(s.x[0], s.stride);
    tile_load<FIRST_WEIGHT>(s.weight[0], 64);
    tile_dot_pairs<0, FIRST_ACTIVATION, FIRST_WEIGHT>();
    if constexpr (G == 2) {
        tile_load<FIRST_WEIGHT + 1>(s.weight[1], 64);
        tile_dot_pairs<1, FIRST_ACTIVATION, FIRST_WEIGHT + 1>();
    }
    if constexpr (P == 2) {
        tile_load<FIRST_ACTIVATION + 1>(s.x[1], s.stride);
        tile_dot_pairs<2, FIRST_ACTIVATION + 1, FIRST_WEIGHT>();
        if constexpr (G == 2) tile_dot_pairs<3, FIRST_ACTIVATION + 1, FIRST_WEIGHT + 1>();
    }
}

// The inputs that do not fill a tile, completed with zeros.
template <int P, int G>
void add_rest(const Sides& s, int64_t rest, int height) {
    alignas(64) uint8_t x[P][16][64] = {}, weight[G][16][64] = {};
    Sides whole = {};
    whole.stride = 64;
    for (int p = 0; p < P; ++p) {
        for (int r = 0; r < height; ++r) memcpy(x[p][r], s.x[p] + r * 2 * rest, (size_t)(2 * rest));
        whole.x[p] = x[p][0];
    }
    for (int g = 0; g < G; ++g) {
        memcpy(weight[g], s.weight[g], (size_t)(rest / 2 * 64));
        whole.weight[g] = weight[g][0];
    }
    add_inputs<P, G>(whole);
}

// out[group][piece][row]: 16 outputs each.
template <int P, int G>
__attribute__((noinline)) void sums(
    const uint8_t* weight, int64_t group_bytes, const uint8_t* x, int64_t k, int height, VF* out) {
    Sides s = {};
    s.stride = 64;
    for (int p = 0; p < P; ++p) s.x[p] = x + p * height * 2 * k;
    for (int g = 0; g < G; ++g) s.weight[g] = weight + g * group_bytes;
    tile_use(height, 64);
    tile_zero<0>();
    if constexpr (G == 2) tile_zero<1>();
    if constexpr (P == 2) tile_zero<2>();
    if constexpr (P == 2 && G == 2) tile_zero<3>();
    for (int64_t i = 0; i < whole_inputs(k); i += INPUTS) {
        for (int g = 0; g < G; ++g)
            for (int line = 0; line < 16; ++line) {
                const uint8_t* ahead = s.weight[g] + PREFETCH_BYTES + 64 * line;
                if (height == 16) prefetch_weight<16>(ahead);
                else prefetch_weight<1>(ahead);
            }
        add_inputs<P, G>(s);
        for (int p = 0; p < P; ++p) s.x[p] += height * 64;
        for (int g = 0; g < G; ++g) s.weight[g] += 1024;
    }
    if (k % INPUTS) add_rest<P, G>(s, k % INPUTS, height);
    tile_store<0>(out, 64);
    if constexpr (P == 2) tile_store<2>(out + height, 64);
    if constexpr (G == 2) tile_store<1>(out + P * height, 64);
    if constexpr (P == 2 && G == 2) tile_store<3>(out + 3 * height, 64);
}

template <int P, int G>
void pieces(const Gemm& g, int64_t group, int64_t first, int height) {
    const uint8_t* x = g.x + first * 2 * g.k;
    VF acc[P * G * 16], up[P * G * 16];
    sums<P, G>(g.weight + group * g.group_bytes, g.group_bytes, x, g.k, height, acc);
    if (g.epilogue) sums<P, G>(g.up_weight + group * g.group_bytes, g.group_bytes, x, g.k, height, up);
    for (int i = 0; i < G; ++i)
        finish_piece(g, group + i, first, P * height, acc + i * P * height, g.epilogue ? up + i * P * height : nullptr);
}

template <int G>
void rows(const Gemm& g, int64_t group, int64_t first, int64_t end) {
    while (first < end) {
        const int height = piece_rows(end - first);
        if (end - first >= 32) {
            pieces<2, G>(g, group, first, 16);
            first += 32;
        } else {
            pieces<1, G>(g, group, first, height);
            first += height;
        }
    }
}

void pack_row(const void* x, int32_t dtype, int64_t k, uint8_t* piece, int height, int index) {
    const int64_t whole = whole_inputs(k);
    for (int64_t i = 0; i < k; i += 16) {
        const __m256bh half = _mm512_cvtneps_pbh(load_upto(x, dtype, i, k));
        const int64_t base = i / INPUTS * INPUTS, row_bytes = i < whole ? 64 : 2 * (k - whole);
        uint8_t* to = piece + base * 2 * height + index * row_bytes + (i - base) * 2;
        memcpy(to, &half, (size_t)(k - i < 16 ? 2 * (k - i) : 32));
    }
}

}  // namespace pairs_tiled
}  // namespace
