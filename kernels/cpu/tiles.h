// The eight tile registers of AMX behind a few inline functions: nothing else knows how a tile is loaded or multiplied.
//
// Products use tiles 0..3 for sums (16 outputs of `height` rows), 4 and 5 for activations (`bytes` of each row), 6 and 7
// for weights (`bytes` / 4 rows of 16 outputs x 4 bytes, which is how weights are packed). Own assembly rather than the
// compiler's intrinsics: those of gcc 12 do not say which memory they read.
//
// With VK_TILE_EMULATION the registers are memory and the instructions are loops that obey the same rules, faults
// included, so that the products' code can be tested on a processor without tiles. Source: Intel 64 and IA-32
// Architectures Software Developer's Manual, volume 2, LDTILECFG and the TDP instructions.
#pragma once

#include "simd.h"

namespace {

struct alignas(64) TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "what LDTILECFG reads");

constexpr int FIRST_SUM = 0, FIRST_ACTIVATION = 4, FIRST_WEIGHT = 6;

#if defined(VK_TILE_EMULATION)

struct TileRegisters {
    TileShapes shapes;
    alignas(64) uint8_t tile[8][16][64];
};
thread_local TileRegisters tile_registers = {};

VK_INLINE void tile_require(bool holds) {
    if (!holds) __builtin_trap();  // where the processor raises a fault
}
void tile_configure(const TileShapes& shapes) {
    for (int i = 0; i < 16; ++i) {
        const bool is_used = shapes.rows[i] || shapes.row_bytes[i];
        tile_require(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64);
        tile_require(!is_used || (i < 8 && shapes.rows[i] && shapes.row_bytes[i]));
    }
    for (const uint8_t byte : shapes.reserved) tile_require(!byte);
    tile_require(shapes.palette == 1 && !shapes.start_row);
    memset(&tile_registers, 0, sizeof tile_registers);
    tile_registers.shapes = shapes;
}
void tile_release() { memset(&tile_registers, 0, sizeof tile_registers); }
template <int T> void tile_zero() {
    tile_require(tile_registers.shapes.rows[T]);
    memset(tile_registers.tile[T], 0, sizeof tile_registers.tile[T]);
}
template <int T> void tile_load(const void* p, int64_t stride) {
    tile_zero<T>();
    for (int i = 0; i < tile_registers.shapes.rows[T]; ++i)
        memcpy(tile_registers.tile[T][i], (const char*)p + i * stride, tile_registers.shapes.row_bytes[T]);
}
template <int T> void tile_store(void* p, int64_t stride) {
    tile_require(tile_registers.shapes.rows[T]);
    for (int i = 0; i < tile_registers.shapes.rows[T]; ++i)
        memcpy((char*)p + i * stride, tile_registers.tile[T][i], tile_registers.shapes.row_bytes[T]);
}
template <int C, int A, int B> void tile_require_product() {
    const TileShapes& s = tile_registers.shapes;
    tile_require(s.rows[C] && s.rows[A] == s.rows[C] && s.row_bytes[B] == s.row_bytes[C]);
    tile_require(s.row_bytes[A] % 4 == 0 && s.row_bytes[B] % 4 == 0 && s.rows[B] == s.row_bytes[A] / 4);
}
template <int C, int A, int B> void tile_dot_codes() {
    tile_require_product<C, A, B>();
    const TileShapes& s = tile_registers.shapes;
    for (int m = 0; m < s.rows[C]; ++m)
        for (int n = 0; n < s.row_bytes[C] / 4; ++n) {
            int32_t sum;
            memcpy(&sum, tile_registers.tile[C][m] + 4 * n, 4);
            for (int k = 0; k < s.row_bytes[A]; ++k)
                sum += (int8_t)tile_registers.tile[A][m][k] * tile_registers.tile[B][k / 4][4 * n + k % 4];
            memcpy(tile_registers.tile[C][m] + 4 * n, &sum, 4);
        }
}
// Subnormal numbers count as zero, on both sides.
VK_INLINE float tile_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
VK_INLINE float tile_wide(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return tile_flushed(x);
}
template <int C, int A, int B> void tile_dot_pairs() {
    tile_require_product<C, A, B>();
    const TileShapes& s = tile_registers.shapes;
    for (int m = 0; m < s.rows[C]; ++m)
        for (int n = 0; n < s.row_bytes[C] / 4; ++n) {
            float sum, part[2] = {0, 0};
            memcpy(&sum, tile_registers.tile[C][m] + 4 * n, 4);
            for (int k = 0; k < s.row_bytes[A] / 2; ++k) {
                const float a = tile_wide(tile_registers.tile[A][m] + 2 * k);
                const float b = tile_wide(tile_registers.tile[B][k / 2] + 4 * n + 2 * (k % 2));
                part[k % 2] = tile_flushed(fmaf(a, b, part[k % 2]));
            }
            sum = tile_flushed(tile_flushed(sum) + tile_flushed(part[0] + part[1]));
            memcpy(tile_registers.tile[C][m] + 4 * n, &sum, 4);
        }
}

#else

VK_INLINE void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
VK_INLINE void tile_release() { asm volatile("tilerelease"); }
template <int T> VK_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> VK_INLINE void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> VK_INLINE void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
// C += signed bytes of A times unsigned bytes of B.
template <int C, int A, int B> VK_INLINE void tile_dot_codes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// C += bfloat16 of A times bfloat16 of B: even and odd inputs are summed apart, and added to C together.
template <int C, int A, int B> VK_INLINE void tile_dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

thread_local int tile_shape = 0;  // what this thread's tiles are configured for; 0: nothing

// Tiles for rows of `height` (up to 16) and `bytes` (up to 64) of inputs from now on. What they held is lost.
void tile_use(int height, int bytes) {
    const int shape = height << 8 | bytes;
    if (shape == tile_shape) return;
    tile_shape = shape;
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 4; ++i) shapes.rows[FIRST_SUM + i] = (uint8_t)height, shapes.row_bytes[FIRST_SUM + i] = 64;
    for (int i = 0; i < 2; ++i) {
        shapes.rows[FIRST_ACTIVATION + i] = (uint8_t)height;
        shapes.row_bytes[FIRST_ACTIVATION + i] = (uint16_t)bytes;
        shapes.rows[FIRST_WEIGHT + i] = (uint8_t)(bytes / 4);
        shapes.row_bytes[FIRST_WEIGHT + i] = 64;
    }
    tile_configure(shapes);
}

// At the end of an op: a thread that sleeps with tiles in use keeps its core from resting, and is slow to switch.
void tile_done() {
    if (!tile_shape) return;
    tile_shape = 0;
    tile_release();
}

// Whether tiles multiply as they should: both products of small numbers, whose sums every order gives exactly.
int32_t tiles_work() {
    alignas(64) uint8_t codes[2][16][64];
    alignas(64) uint16_t pairs[2][16][32];
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 64; ++j) {
            codes[0][i][j] = (uint8_t)(37 * i + 11 * j), codes[1][i][j] = (uint8_t)(53 * i + 29 * j + 200);
            for (int side = 0; side < 2; ++side) {
                const float small = (float)((7 * i + 5 * j + side) % 9 - 4);
                uint32_t bits;
                memcpy(&bits, &small, 4);
                if (j < 32) pairs[side][i][j] = (uint16_t)(bits >> 16);
            }
        }
    alignas(64) int32_t sums[16][16];
    alignas(64) float values[16][16];
    tile_use(16, 64);
    tile_zero<0>();
    tile_load<4>(codes[0], 64);
    tile_load<6>(codes[1], 64);
    tile_dot_codes<0, 4, 6>();
    tile_store<0>(sums, 64);
    tile_zero<1>();
    tile_load<5>(pairs[0], 64);
    tile_load<7>(pairs[1], 64);
    tile_dot_pairs<1, 5, 7>();
    tile_store<1>(values, 64);
    tile_done();
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            int32_t sum = 0;
            float value = 0;
            for (int k = 0; k < 64; ++k) sum += (int8_t)codes[0][m][k] * codes[1][k / 4][4 * n + k % 4];
            for (int k = 0; k < 32; ++k)
                value += (float)((7 * m + 5 * k) % 9 - 4) * (float)((7 * (k / 2) + 5 * (2 * n + k % 2) + 1) % 9 - 4);
            if (sums[m][n] != sum || values[m][n] != value) return 0;
        }
    return 1;
}

}  // namespace
