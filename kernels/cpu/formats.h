// Block formats: how 16 rows of a GGUF weight are repacked, and how a block of 16 rows x 32 inputs is opened again.
//
// A packed group holds 16 output rows; along the inputs it is cut into super-blocks (32 or 256 inputs, the block of the
// file). Codes of 32 inputs are eight VB vectors: vector j holds inputs 4j..4j+3 of all 16 rows, ready for a dot product
// with four broadcast activations. Four-bit codes are stored two vectors to 64 bytes (j low, j + 4 high), a fifth bit as
// eight 64-bit masks, two high bits as two vectors (j & 1) with fields 2 * (j >> 1). Every format keeps the size it has
// in the file. Source of layouts and values: the GGUF block formats.
//
// value = scale * (code - BIAS) - min, where scale covers 32 inputs, or 16 if HALVES.
#pragma once

#include "simd.h"
#include "vk.h"

// Nameless: functions of a class are inline, and the linker would keep one level's for all.
namespace {

// ---------------------------------------------------------------------------------------------- packing, 32-bit words

VK_INLINE uint32_t vk_u32(const uint8_t* p) { uint32_t v; memcpy(&v, p, 4); return v; }
VK_INLINE uint16_t vk_u16(const uint8_t* p) { uint16_t v; memcpy(&v, p, 2); return v; }
VK_INLINE void vk_put32(uint8_t* p, int64_t i, uint32_t v) { memcpy(p + 4 * i, &v, 4); }
VK_INLINE void vk_put16(uint8_t* p, int64_t i, uint16_t v) { memcpy(p + 2 * i, &v, 2); }

// Row r's 32 codes, given as eight words of four bytes, into the nibble area.
VK_INLINE void vk_put_nibbles(uint8_t* dst, int r, const uint32_t code[8]) {
    for (int j = 0; j < 4; ++j)
        vk_put32(dst, 16 * j + r, (code[j] & 0x0f0f0f0fu) | (code[j + 4] & 0x0f0f0f0fu) << 4);
}
// Bit `shift` of every code into the masks.
VK_INLINE void vk_put_masks(uint8_t* dst, int r, const uint32_t code[8], int shift) {
    for (int j = 0; j < 8; ++j) {
        const uint32_t four = (((code[j] >> shift) & 0x01010101u) * 0x01020408u) >> 24 & 15;
        uint8_t* byte = dst + 8 * j + r / 2;
        *byte = (uint8_t)(r & 1 ? *byte | four << 4 : four);  // rows come in order, so the even one clears
    }
}
// Bits `shift` and `shift` + 1 of every code into the two-bit area.
VK_INLINE void vk_put_pairs(uint8_t* dst, int r, const uint32_t code[8], int shift) {
    for (int h = 0; h < 2; ++h) {
        uint32_t word = 0;
        for (int s = 0; s < 4; ++s) word |= (code[h + 2 * s] >> shift & 0x03030303u) << 2 * s;
        vk_put32(dst, 16 * h + r, word);
    }
}

// ---------------------------------------------------------------------------------------------- opening, 64-byte vectors

VK_INLINE void vk_open_nibbles(const uint8_t* p, VB w[8]) {
    const VB mask = vb_set1(15);
VK_UNROLL(4)
    for (int j = 0; j < 4; ++j) {
        const VB v = vi_load(p + 64 * j);
        w[j] = vi_and(v, mask);
        w[j + 4] = vi_and(vi_shr(v, 4), mask);
    }
}
VK_INLINE void vk_open_masks(const uint8_t* p, VB w[8], uint8_t bit) {
VK_UNROLL(8)
    for (int j = 0; j < 8; ++j) {
        uint64_t mask;
        memcpy(&mask, p + 8 * j, 8);
        w[j] = vb_or_mask(w[j], mask, bit);
    }
}
VK_INLINE VF vk_dwords_scale(VI word, VF scale) { return vf_mul(vf_from_vi(word), scale); }

// The six-bit scales and mins of Q4_K and Q5_K: three words of each row, as three vectors.
VK_INLINE void vk_k_scales(const uint8_t* p, VF d, VF dmin, VF* scale, VF* min) {
    const VI a = vi_load(p), b = vi_load(p + 64), c = vi_load(p + 128);
    const VI six = vi_set1(63), four = vi_set1(15), two = vi_set1(0x30);
    for (int i = 0; i < 4; ++i) {
        const VI wa = vi_shr(a, 8 * i), wb = vi_shr(b, 8 * i), wc = vi_shr(c, 8 * i);
        scale[i] = vk_dwords_scale(vi_and(wa, six), d);
        min[i] = vk_dwords_scale(vi_and(wb, six), dmin);
        scale[i + 4] = vk_dwords_scale(vi_or(vi_and(wc, four), vi_and(vi_shr(wa, 2), two)), d);
        min[i + 4] = vk_dwords_scale(vi_or(vi_and(vi_shr(wc, 4), four), vi_and(vi_shr(wb, 2), two)), dmin);
    }
}

static const uint8_t VK_IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // + 128
static const uint8_t VK_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // doubled, + 12

// ---------------------------------------------------------------------------------------------- the formats
//
// SUPER inputs per super-block; BYTES of 16 packed rows of it; ROW bytes of one row of it in the file.
// pack(dst, r, src): row r's super-block. scales(p, scale, min): all scales of a super-block, HALVES + 1 per 32 inputs.
// codes(p, b, w): the codes of 32 inputs b.

struct NoMin {
    static constexpr bool MIN = false, HALVES = false, WIDE = false, IS_FP8 = false, IS_TABLE = false;
    static constexpr int SUPER = 32;
};

struct Q4_0 : NoMin {
    static constexpr int FORMAT = VK_Q4_0, ROW = 18, BYTES = 288, BIAS = 8;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        for (int j = 0; j < 4; ++j) vk_put32(dst + 32, 16 * j + r, vk_u32(src + 2 + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) { scale[0] = vf_load_f16(p); }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) { vk_open_nibbles(p + 32, w); }
};

struct IQ4_NL : Q4_0 {
    static constexpr int FORMAT = VK_IQ4_NL, BIAS = 128;
    static constexpr bool WIDE = true;
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) {
        vk_open_nibbles(p + 32, w);
VK_UNROLL(8)
        for (int j = 0; j < 8; ++j) w[j] = vb_lookup(VK_IQ4, w[j]);
    }
};

struct Q4_1 : NoMin {
    static constexpr int FORMAT = VK_Q4_1, ROW = 20, BYTES = 320, BIAS = 0;
    static constexpr bool MIN = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put16(dst + 32, r, vk_u16(src + 2));
        for (int j = 0; j < 4; ++j) vk_put32(dst + 64, 16 * j + r, vk_u32(src + 4 + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        scale[0] = vf_load_f16(p);
        min[0] = vf_sub(vf_zero(), vf_load_f16(p + 32));  // the file adds m
    }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) { vk_open_nibbles(p + 64, w); }
};

VK_INLINE void vk_put_masks_direct(uint8_t* dst, int r, uint32_t bits) {
    for (int j = 0; j < 8; ++j) {
        const uint32_t four = bits >> 4 * j & 15;
        uint8_t* byte = dst + 8 * j + r / 2;
        *byte = (uint8_t)(r & 1 ? *byte | four << 4 : four);
    }
}

struct Q5_0 : NoMin {
    static constexpr int FORMAT = VK_Q5_0, ROW = 22, BYTES = 352, BIAS = 16;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put_masks_direct(dst + 32, r, vk_u32(src + 2));
        for (int j = 0; j < 4; ++j) vk_put32(dst + 96, 16 * j + r, vk_u32(src + 6 + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) { scale[0] = vf_load_f16(p); }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) {
        vk_open_nibbles(p + 96, w);
        vk_open_masks(p + 32, w, 16);
    }
};

struct Q5_1 : NoMin {
    static constexpr int FORMAT = VK_Q5_1, ROW = 24, BYTES = 384, BIAS = 0;
    static constexpr bool MIN = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put16(dst + 32, r, vk_u16(src + 2));
        vk_put_masks_direct(dst + 64, r, vk_u32(src + 4));
        for (int j = 0; j < 4; ++j) vk_put32(dst + 128, 16 * j + r, vk_u32(src + 8 + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        scale[0] = vf_load_f16(p);
        min[0] = vf_sub(vf_zero(), vf_load_f16(p + 32));
    }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) {
        vk_open_nibbles(p + 128, w);
        vk_open_masks(p + 64, w, 16);
    }
};

struct Q8_0 : NoMin {
    static constexpr int FORMAT = VK_Q8_0, ROW = 34, BYTES = 544, BIAS = 128;
    static constexpr bool WIDE = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        for (int j = 0; j < 8; ++j) vk_put32(dst + 32, 16 * j + r, vk_u32(src + 2 + 4 * j) ^ 0x80808080u);
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) { scale[0] = vf_load_f16(p); }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) {
VK_UNROLL(8)
        for (int j = 0; j < 8; ++j) w[j] = vi_load(p + 32 + 64 * j);
    }
};

// 64 bytes of d and dmin, 192 of scale words, then eight times the codes.
struct Q4_K : NoMin {
    static constexpr int FORMAT = VK_Q4_K, ROW = 144, BYTES = 2304, BIAS = 0, SUPER = 256;
    static constexpr bool MIN = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put16(dst + 32, r, vk_u16(src + 2));
        for (int i = 0; i < 3; ++i) vk_put32(dst + 64, 16 * i + r, vk_u32(src + 4 + 4 * i));
        for (int pair = 0; pair < 4; ++pair) {
            uint32_t low[8], high[8];
            for (int j = 0; j < 8; ++j) {
                low[j] = vk_u32(src + 16 + 32 * pair + 4 * j);
                high[j] = low[j] >> 4;
            }
            vk_put_nibbles(dst + 256 + 512 * pair, r, low);
            vk_put_nibbles(dst + 512 + 512 * pair, r, high);
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        vk_k_scales(p + 64, vf_load_f16(p), vf_load_f16(p + 32), scale, min);
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) { vk_open_nibbles(p + 256 + 256 * b, w); }
};

struct Q5_K : NoMin {
    static constexpr int FORMAT = VK_Q5_K, ROW = 176, BYTES = 2816, BIAS = 0, SUPER = 256;
    static constexpr bool MIN = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put16(dst + 32, r, vk_u16(src + 2));
        for (int i = 0; i < 3; ++i) vk_put32(dst + 64, 16 * i + r, vk_u32(src + 4 + 4 * i));
        for (int b = 0; b < 8; ++b) {
            uint32_t code[8], high[8];
            for (int j = 0; j < 8; ++j) {
                code[j] = vk_u32(src + 48 + 32 * (b / 2) + 4 * j) >> (b & 1 ? 4 : 0);
                high[j] = vk_u32(src + 16 + 4 * j);
            }
            vk_put_masks(dst + 256 + 320 * b, r, high, b);
            vk_put_nibbles(dst + 320 + 320 * b, r, code);
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        vk_k_scales(p + 64, vf_load_f16(p), vf_load_f16(p + 32), scale, min);
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) {
        vk_open_nibbles(p + 320 + 320 * b, w);
        vk_open_masks(p + 256 + 320 * b, w, 16);
    }
};

// 32 bytes of d, 256 of scales (16 groups of 16 inputs x 16 rows), then eight times nibbles and pairs.
struct Q6_K : NoMin {
    static constexpr int FORMAT = VK_Q6_K, ROW = 210, BYTES = 3360, BIAS = 32, SUPER = 256;
    static constexpr bool HALVES = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src + 208));
        for (int i = 0; i < 16; ++i) dst[32 + 16 * i + r] = src[192 + i];
        for (int b = 0; b < 8; ++b) {
            const uint8_t* low = src + 64 * (b / 4) + 32 * (b & 1);
            const uint8_t* high = src + 128 + 32 * (b / 4);
            uint32_t code[8], top[8];
            for (int j = 0; j < 8; ++j) {
                code[j] = vk_u32(low + 4 * j) >> (b & 2 ? 4 : 0);
                top[j] = vk_u32(high + 4 * j);
            }
            vk_put_pairs(dst + 288 + 384 * b, r, top, 2 * (b & 3));
            vk_put_nibbles(dst + 416 + 384 * b, r, code);
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        const VF d = vf_load_f16(p);
        for (int i = 0; i < 16; ++i) scale[i] = vk_dwords_scale(vi_load_i8(p + 32 + 16 * i), d);
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) {
        vk_open_nibbles(p + 416 + 384 * b, w);
        const VB mask = vb_set1(0x30);
VK_UNROLL(2)
        for (int h = 0; h < 2; ++h) {
            const VB top = vi_load(p + 288 + 384 * b + 64 * h);
            w[h] = vi_or(w[h], vi_and(vi_shl(top, 4), mask));
            w[h + 2] = vi_or(w[h + 2], vi_and(vi_shl(top, 2), mask));
            w[h + 4] = vi_or(w[h + 4], vi_and(top, mask));
            w[h + 6] = vi_or(w[h + 6], vi_and(vi_shr(top, 2), mask));
        }
    }
};

VK_INLINE void vk_open_pairs(const uint8_t* p, VB w[8]) {
    const VB mask = vb_set1(3);
VK_UNROLL(2)
    for (int h = 0; h < 2; ++h) {
        const VB two = vi_load(p + 64 * h);
        w[h] = vi_and(two, mask);
        w[h + 2] = vi_and(vi_shr(two, 2), mask);
        w[h + 4] = vi_and(vi_shr(two, 4), mask);
        w[h + 6] = vi_and(vi_shr(two, 6), mask);
    }
}

// 64 bytes of d and dmin, 256 of scales and mins, then eight times 128 bytes of codes.
struct Q2_K : NoMin {
    static constexpr int FORMAT = VK_Q2_K, ROW = 84, BYTES = 1344, BIAS = 0, SUPER = 256;
    static constexpr bool MIN = true, HALVES = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src + 80));
        vk_put16(dst + 32, r, vk_u16(src + 82));
        for (int i = 0; i < 16; ++i) dst[64 + 16 * i + r] = src[i];
        for (int b = 0; b < 8; ++b) {
            uint32_t code[8];
            for (int j = 0; j < 8; ++j) code[j] = vk_u32(src + 16 + 32 * (b / 4) + 4 * j);
            vk_put_pairs(dst + 320 + 128 * b, r, code, 2 * (b & 3));
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        const VF d = vf_load_f16(p), dmin = vf_load_f16(p + 32);
        for (int i = 0; i < 16; ++i) {
            const VI both = vi_load_u8(p + 64 + 16 * i);
            scale[i] = vk_dwords_scale(vi_and(both, vi_set1(15)), d);
            min[i] = vk_dwords_scale(vi_shr(both, 4), dmin);
        }
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) { vk_open_pairs(p + 320 + 128 * b, w); }
};

// 32 bytes of d, 192 of scale words, then eight times masks and pairs.
struct Q3_K : NoMin {
    static constexpr int FORMAT = VK_Q3_K, ROW = 110, BYTES = 1760, BIAS = 4, SUPER = 256;
    static constexpr bool HALVES = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src + 108));
        for (int i = 0; i < 3; ++i) vk_put32(dst + 32, 16 * i + r, vk_u32(src + 96 + 4 * i));
        for (int b = 0; b < 8; ++b) {
            uint32_t code[8], high[8];
            for (int j = 0; j < 8; ++j) {
                code[j] = vk_u32(src + 32 + 32 * (b / 4) + 4 * j);
                high[j] = vk_u32(src + 4 * j);
            }
            vk_put_masks(dst + 224 + 192 * b, r, high, b);
            vk_put_pairs(dst + 288 + 192 * b, r, code, 2 * (b & 3));
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        const VF d = vf_load_f16(p);
        const VI w[2] = {vi_load(p + 32), vi_load(p + 96)}, top = vi_load(p + 160);
        for (int i = 0; i < 16; ++i) {
            const VI low = vi_and(vi_shr(w[i % 8 / 4], 8 * (i % 4) + (i < 8 ? 0 : 4)), vi_set1(15));
            const VI high = vi_and(vi_shr(top, 8 * (i % 4) + 2 * (i / 4)), vi_set1(3));
            scale[i] = vk_dwords_scale(vi_add(vi_or(low, vi_shl(high, 4)), vi_set1(-32)), d);
        }
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) {
        vk_open_pairs(p + 288 + 192 * b, w);
        vk_open_masks(p + 224 + 192 * b, w, 4);
    }
};

// 32 bytes of d, 32 of scales_h, 64 of scales_l, then eight times 256 bytes of codes.
struct IQ4_XS : NoMin {
    static constexpr int FORMAT = VK_IQ4_XS, ROW = 136, BYTES = 2176, BIAS = 128, SUPER = 256;
    static constexpr bool WIDE = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put16(dst, r, vk_u16(src));
        vk_put16(dst + 32, r, vk_u16(src + 2));
        vk_put32(dst + 64, r, vk_u32(src + 4));
        for (int b = 0; b < 8; ++b)
            for (int j = 0; j < 4; ++j) vk_put32(dst + 128 + 256 * b, 16 * j + r, vk_u32(src + 8 + 16 * b + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        const VF d = vf_load_f16(p);
        const VI high = vi_load_u16(p + 32), low = vi_load(p + 64);
        for (int i = 0; i < 8; ++i) {
            const VI s = vi_or(vi_and(vi_shr(low, 4 * i), vi_set1(15)), vi_shl(vi_and(vi_shr(high, 2 * i), vi_set1(3)), 4));
            scale[i] = vk_dwords_scale(vi_add(s, vi_set1(-32)), d);
        }
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) {
        vk_open_nibbles(p + 128 + 256 * b, w);
VK_UNROLL(8)
        for (int j = 0; j < 8; ++j) w[j] = vb_lookup(VK_IQ4, w[j]);
    }
};

VK_INLINE void vk_open_e2m1(const uint8_t* p, VB w[8]) {
    vk_open_nibbles(p, w);
VK_UNROLL(8)
    for (int j = 0; j < 8; ++j) w[j] = vb_lookup(VK_E2M1, w[j]);
}

// The code table holds doubled values, so the scale is half of 2^(e - 127): 2^(e - 128), a subnormal for e of 0 and 1.
struct MXFP4 : NoMin {
    static constexpr int FORMAT = VK_MXFP4, ROW = 17, BYTES = 272, BIAS = 12;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        dst[r] = src[0];
        for (int j = 0; j < 4; ++j) vk_put32(dst + 16, 16 * j + r, vk_u32(src + 1 + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        uint32_t bits[16];
        for (int i = 0; i < 16; ++i)
            bits[i] = p[i] == 255 ? 0x7fc00000u : p[i] < 2 ? 0x00200000u << p[i] : (uint32_t)(p[i] - 1) << 23;
        scale[0] = vf_bits(vi_load(bits));
    }
    VK_INLINE void codes(const uint8_t* p, int, VB w[8]) { vk_open_e2m1(p + 16, w); }
};

// 64 inputs: four scales (one per 16) of 16 rows, then twice 256 bytes of codes.
struct NVFP4 : NoMin {
    static constexpr int FORMAT = VK_NVFP4, ROW = 36, BYTES = 576, BIAS = 12, SUPER = 64;
    static constexpr bool HALVES = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        for (int i = 0; i < 4; ++i) dst[16 * i + r] = src[i];
        for (int b = 0; b < 2; ++b) {
            uint32_t code[8];
            for (int half = 0; half < 2; ++half)
                for (int j = 0; j < 2; ++j) {
                    const uint32_t word = vk_u32(src + 4 + 16 * b + 8 * half + 4 * j);
                    code[4 * half + j] = word;
                    code[4 * half + 2 + j] = word >> 4;
                }
            vk_put_nibbles(dst + 64 + 256 * b, r, code);
        }
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        for (int i = 0; i < 4; ++i) {
            // UE4M3 seven bits to the left are an f16 of 2^-8 the value; halved, because the code table is doubled.
            uint16_t half[16];
            for (int r = 0; r < 16; ++r) {
                const uint8_t e = p[16 * i + r] & 127;
                half[r] = (uint16_t)(e == 127 ? 0 : e << 7);
            }
            scale[i] = vf_mul(vf_load_f16(half), vf_set1(128.0f));
        }
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) { vk_open_e2m1(p + 64 + 256 * b, w); }
};

// Of quantised safetensors checkpoints: 16 float32 scales (and mins) for S inputs, then the codes of each 32. A row of the
// "file" is what the caller puts together: scale, min, then per 32 inputs 16 bytes (input i low, i + 16 high) or 32.
template <int S>
struct W4 : NoMin {
    static constexpr int FORMAT = S == 32 ? VK_W4_32 : VK_W4_128, ROW = 8 + S / 2, BYTES = 128 + 8 * S, BIAS = 0, SUPER = S;
    static constexpr bool MIN = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        for (int i = 0; i < 2; ++i) vk_put32(dst, 16 * i + r, vk_u32(src + 4 * i));
        for (int b = 0; b < S / 32; ++b)
            for (int j = 0; j < 4; ++j) vk_put32(dst + 128 + 256 * b, 16 * j + r, vk_u32(src + 8 + 16 * b + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF* min) {
        for (int b = 0; b < S / 32; ++b) {
            scale[b] = vf_load((const float*)p);
            min[b] = vf_load((const float*)p + 16);
        }
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) { vk_open_nibbles(p + 128 + 256 * b, w); }
};

template <int S>
struct W8 : NoMin {
    static constexpr int FORMAT = S == 32 ? VK_W8_32 : VK_W8_128, ROW = 4 + S, BYTES = 64 + 16 * S, BIAS = 128, SUPER = S;
    static constexpr bool WIDE = true;
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put32(dst, r, vk_u32(src));
        for (int b = 0; b < S / 32; ++b)
            for (int j = 0; j < 8; ++j) vk_put32(dst + 64 + 512 * b, 16 * j + r, vk_u32(src + 4 + 32 * b + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) {
        for (int b = 0; b < S / 32; ++b) scale[b] = vf_load((const float*)p);
    }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) {
VK_UNROLL(8)
        for (int j = 0; j < 8; ++j) w[j] = vi_load(p + 64 + 512 * b + 64 * j);
    }
};

// E4M3 has no integer form: products with floats only.
template <int S>
struct F8 : W8<S> {
    static constexpr int FORMAT = S == 32 ? VK_F8_32 : VK_F8_128;
    static constexpr bool IS_FP8 = true;
};

// Codes into a table of floats: products with floats only. A row is a scale, then per 32 inputs 16 bytes as in W4.
static const float VK_NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
static const float VK_FP4[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

struct NF4_64 : NoMin {
    static constexpr int FORMAT = VK_NF4_64, ROW = 36, BYTES = 576, BIAS = 0, SUPER = 64;
    static constexpr bool IS_TABLE = true;
    VK_INLINE const float* table() { return VK_NF4; }
    static void pack(uint8_t* dst, int r, const uint8_t* src) {
        vk_put32(dst, r, vk_u32(src));
        for (int b = 0; b < 2; ++b)
            for (int j = 0; j < 4; ++j) vk_put32(dst + 64 + 256 * b, 16 * j + r, vk_u32(src + 4 + 16 * b + 4 * j));
    }
    VK_INLINE void scales(const uint8_t* p, VF* scale, VF*) { scale[0] = scale[1] = vf_load((const float*)p); }
    VK_INLINE void codes(const uint8_t* p, int b, VB w[8]) { vk_open_nibbles(p + 64 + 256 * b, w); }
};

struct FP4_64 : NF4_64 {
    static constexpr int FORMAT = VK_FP4_64;
    VK_INLINE const float* table() { return VK_FP4; }
};

using W4_32 = W4<32>;
using W4_128 = W4<128>;
using W8_32 = W8<32>;
using W8_128 = W8<128>;
using F8_32 = F8<32>;
using F8_128 = F8<128>;

}  // namespace

#define VK_FOR_EACH_CODED(X) X(W4_32) X(W4_128) X(W8_32) X(W8_128)
#define VK_FOR_EACH_FLOAT(X) X(F8_32) X(F8_128) X(NF4_64) X(FP4_64)
#define VK_FOR_EACH_FORMAT(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) X(NVFP4)
