// The GGUF block formats as the packed product wants them: what one of four neighbouring lanes needs of a block.
//
// Lane t of four owns eight elements of every group of 32, in two runs of four: from 4 t and 16 + 4 t on, or from 8 t
// and 8 t + 4 where IS_WIDE. codes() gives a run as four bytes; a weight is scale · (code − ZERO) − least, where code
// is below 128, or signed if IS_SIGNED, and in the bits of MASK. Codes are small integers: bfloat16 holds them exactly.
//
// A row is blocks, or planes: first the first part of every block, then the second of every block, and so on, in the
// order of Layout. Either way a part of a block is found by a start and a step.
// Source: GGUF specification, ggml block types.
#pragma once

#include "device.cuh"

// Numbers that Python sends for a format.
enum VkFormat : int32_t {
    VK_Q4_0, VK_Q4_1, VK_Q5_0, VK_Q5_1, VK_Q8_0, VK_Q4_K, VK_Q5_K, VK_Q6_K, VK_IQ4_NL, VK_IQ4_XS, VK_MXFP4
};

// (first byte, bytes) of each part of a block.
template <int... NUMBERS>
struct Parts {
    static constexpr __host__ __device__ int at(int part) {
        constexpr int numbers[] = {NUMBERS...};
        return numbers[2 * part];
    }
    static constexpr __host__ __device__ int bytes(int part) {
        constexpr int numbers[] = {NUMBERS...};
        return numbers[2 * part + 1];
    }
    static constexpr __host__ __device__ int bytes_before(int part) {
        return part ? bytes_before(part - 1) + bytes(part - 1) : 0;
    }
};

// Where the parts of a row's blocks begin. ALIGNMENT: of every part of every block, 1, 2, 4 or 8.
template <class F, bool IS_PLANES>
struct Reader {
    static constexpr int ALIGNMENT = IS_PLANES ? F::PLANES_ALIGNMENT : F::BLOCKS_ALIGNMENT;
    const uint8_t* row;
    int64_t num_blocks;

    template <int P>
    VK_DEVICE const uint8_t* part(int64_t block) const {
        constexpr int at = F::Layout::at(P), before = F::Layout::bytes_before(P), bytes = F::Layout::bytes(P);
        return IS_PLANES ? row + num_blocks * before + block * bytes : row + block * F::BYTES + at;
    }
    template <int P>
    VK_DEVICE uint32_t word(int64_t block, int offset) const {
        const uint8_t* from = part<P>(block) + offset;
        if (ALIGNMENT >= 4) return *reinterpret_cast<const uint32_t*>(from);
        if (ALIGNMENT == 1) return from[0] | from[1] << 8 | from[2] << 16 | (uint32_t)from[3] << 24;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
        return halves[0] | (uint32_t)halves[1] << 16;
    }
    template <int P>
    VK_DEVICE uint2 two_words(int64_t block, int offset) const {
        if (ALIGNMENT >= 8) return *reinterpret_cast<const uint2*>(part<P>(block) + offset);
        return uint2{word<P>(block, offset), word<P>(block, offset + 4)};
    }
    template <int P>
    VK_DEVICE float half(int64_t block, int offset = 0) const {
        return widen(*reinterpret_cast<const f16*>(part<P>(block) + offset));
    }
};

VK_DEVICE uint32_t low_nibbles(uint32_t x) { return x & 0x0f0f0f0fu; }
VK_DEVICE uint32_t high_nibbles(uint32_t x) { return x >> 4 & 0x0f0f0f0fu; }

// x shifted to the left, or to the right where `by` is negative.
VK_DEVICE uint32_t shifted(uint32_t x, int by) { return by < 0 ? x >> -by : x << by; }

// Bits 0..3 of x in bit 4 of bytes 0..3.
VK_DEVICE uint32_t fifth_bits(uint32_t x) { return (x & 15) * 0x00204081u << 4 & 0x10101010u; }

VK_DEVICE uint32_t byte_of(uint32_t x, int i) { return x >> (8 * i) & 255; }

// Both runs of four entries of a table of sixteen bytes: by the low nibbles of x in .x, by the high ones in .y.
VK_DEVICE uint2 look_up(uint32_t x, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) {
    uint32_t found[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {  // nibbles 0..3 of 16 bits: low and high of a byte, low and high of the next
        const uint32_t nibbles = x >> (16 * half), upper = and_or(nibbles >> 1, 0x4444u, 0x3210u);
        const uint32_t entry = nibbles & 0x7777u;
        found[half] = byte_perm(byte_perm(t0, t1, entry), byte_perm(t2, t3, entry), upper);
    }
    return uint2{byte_perm(found[0], found[1], 0x6420), byte_perm(found[0], found[1], 0x7531)};
}

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

struct Block32 {
    static constexpr int GROUPS = 1, UNIT = 4;
    static constexpr bool IS_WIDE = false, IS_SIGNED = false, HAS_LEAST = false, HAS_SCALE_PER_RUN = false;
    static constexpr int PLANES_ALIGNMENT = 4;
    static constexpr uint32_t MASK = 0xff;
    uint32_t runs[2] = {0, 0};
    float d = 0.0f;
    VK_DEVICE uint32_t codes(int, int run) const { return runs[run]; }
    VK_DEVICE float scale(int, int) const { return d; }
    VK_DEVICE float least(int) const { return 0.0f; }
};

struct Q4_0 : Block32 {
    static constexpr uint32_t MASK = 0x0f;
    static constexpr int BYTES = 18, ZERO = 8, BLOCKS_ALIGNMENT = 2;
    using Layout = Parts<2, 16, 0, 2>;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint32_t x = row.template word<0>(block, 4 * t);
        runs[0] = x, runs[1] = x >> 4, d = row.template half<1>(block);
    }
};

struct Q4_1 : Block32 {
    static constexpr uint32_t MASK = 0x0f;
    static constexpr int UNIT = 2, BYTES = 20, ZERO = 0, BLOCKS_ALIGNMENT = 4;
    static constexpr bool HAS_LEAST = true;
    using Layout = Parts<4, 16, 0, 4>;
    float m = 0.0f;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint32_t x = row.template word<0>(block, 4 * t);
        runs[0] = x, runs[1] = x >> 4;
        d = row.template half<1>(block), m = row.template half<1>(block, 2);
    }
    VK_DEVICE float least(int) const { return -m; }
};

struct Q5_0 : Block32 {
    static constexpr int BYTES = 22, ZERO = 16, BLOCKS_ALIGNMENT = 2;
    using Layout = Parts<6, 16, 2, 4, 0, 2>;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint32_t x = row.template word<0>(block, 4 * t), high = row.template word<1>(block, 0);
        runs[0] = low_nibbles(x) | fifth_bits(high >> (4 * t));
        runs[1] = high_nibbles(x) | fifth_bits(high >> (16 + 4 * t));
        d = row.template half<2>(block);
    }
};

struct Q5_1 : Block32 {
    static constexpr int UNIT = 2, BYTES = 24, ZERO = 0, BLOCKS_ALIGNMENT = 4;
    static constexpr bool HAS_LEAST = true;
    using Layout = Parts<8, 16, 4, 4, 0, 4>;
    float m = 0.0f;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint32_t x = row.template word<0>(block, 4 * t), high = row.template word<1>(block, 0);
        runs[0] = low_nibbles(x) | fifth_bits(high >> (4 * t));
        runs[1] = high_nibbles(x) | fifth_bits(high >> (16 + 4 * t));
        d = row.template half<2>(block), m = row.template half<2>(block, 2);
    }
    VK_DEVICE float least(int) const { return -m; }
};

struct Q8_0 : Block32 {
    static constexpr int BYTES = 34, ZERO = 0, BLOCKS_ALIGNMENT = 2, PLANES_ALIGNMENT = 8;
    static constexpr bool IS_WIDE = true, IS_SIGNED = true;
    using Layout = Parts<2, 32, 0, 2>;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint2 x = row.template two_words<0>(block, 8 * t);
        runs[0] = x.x, runs[1] = x.y, d = row.template half<1>(block);
    }
};

struct IQ4_NL : Block32 {
    static constexpr int BYTES = 18, ZERO = 0, BLOCKS_ALIGNMENT = 2;
    static constexpr bool IS_SIGNED = true;
    using Layout = Parts<2, 16, 0, 2>;
    // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
    static constexpr uint32_t TABLE[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint2 found = look_up(row.template word<0>(block, 4 * t), TABLE[0], TABLE[1], TABLE[2], TABLE[3]);
        runs[0] = found.x, runs[1] = found.y, d = row.template half<1>(block);
    }
};

struct MXFP4 : Block32 {
    static constexpr int BYTES = 17, ZERO = 0, BLOCKS_ALIGNMENT = 1;
    static constexpr bool IS_SIGNED = true;
    using Layout = Parts<1, 16, 0, 1>;
    // Twice the values 0 0.5 1 1.5 2 3 4 6 and their negatives.
    static constexpr uint32_t TABLE[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
        const uint2 found = look_up(row.template word<0>(block, 4 * t), TABLE[0], TABLE[1], TABLE[2], TABLE[3]);
        const uint32_t exponent = *row.template part<1>(block);
        runs[0] = found.x, runs[1] = found.y;
        d = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);  // 2^(exponent - 128)
    }
};

// ---- blocks of 256 -------------------------------------------------------------------------------------------------

struct Block256 {
    static constexpr int GROUPS = 8, UNIT = 1;
    static constexpr bool IS_WIDE = false, IS_SIGNED = false, HAS_LEAST = false, HAS_SCALE_PER_RUN = false;
    static constexpr uint32_t MASK = 0xff;
    VK_DEVICE float least(int) const { return 0.0f; }
};

// Eight groups with a scale and a least value of six bits each.
struct ScaledGroups : Block256 {
    static constexpr int ZERO = 0, PLANES_ALIGNMENT = 4;
    static constexpr bool IS_WIDE = true, HAS_LEAST = true;
    uint32_t scales[2] = {0, 0}, leasts[2] = {0, 0};
    float d = 0.0f, dmin = 0.0f;
    VK_DEVICE void unpack(uint32_t first, uint32_t second, uint32_t third) {
        scales[0] = first & 0x3f3f3f3fu, scales[1] = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
        leasts[0] = second & 0x3f3f3f3fu, leasts[1] = (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u);
    }
    VK_DEVICE float scale(int group, int) const { return d * (float)byte_of(scales[group / 4], group % 4); }
    VK_DEVICE float least(int group) const { return dmin * (float)byte_of(leasts[group / 4], group % 4); }
};

struct Q4_K : ScaledGroups {
    static constexpr uint32_t MASK = 0x0f;
    static constexpr int BYTES = 144, BLOCKS_ALIGNMENT = 8;
    using Layout = Parts<16, 128, 4, 12, 0, 4>;
    uint2 pairs[4] = {};  // of groups 2 c and 2 c + 1
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
#pragma unroll
        for (int c = 0; c < 4; c++) pairs[c] = row.template two_words<0>(block, 32 * c + 8 * t);
        unpack(row.template word<1>(block, 0), row.template word<1>(block, 4), row.template word<1>(block, 8));
        d = row.template half<2>(block), dmin = row.template half<2>(block, 2);
    }
    VK_DEVICE uint32_t codes(int group, int run) const {
        const uint32_t both = run ? pairs[group / 2].y : pairs[group / 2].x;
        return group % 2 ? both >> 4 : both;
    }
};

struct Q5_K : ScaledGroups {
    static constexpr int BYTES = 176, BLOCKS_ALIGNMENT = 8;
    using Layout = Parts<48, 128, 16, 32, 4, 12, 0, 4>;
    uint2 pairs[4] = {}, fifths = {};
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
#pragma unroll
        for (int c = 0; c < 4; c++) pairs[c] = row.template two_words<0>(block, 32 * c + 8 * t);
        fifths = row.template two_words<1>(block, 8 * t);
        unpack(row.template word<2>(block, 0), row.template word<2>(block, 4), row.template word<2>(block, 8));
        d = row.template half<3>(block), dmin = row.template half<3>(block, 2);
    }
    VK_DEVICE uint32_t codes(int group, int run) const {
        const uint32_t both = run ? pairs[group / 2].y : pairs[group / 2].x;
        const uint32_t fifth = shifted(run ? fifths.y : fifths.x, 4 - group) & 0x10101010u;
        return and_or(group % 2 ? both >> 4 : both, 0x0f0f0f0fu, fifth);
    }
};

struct Q6_K : Block256 {
    static constexpr int BYTES = 210, ZERO = 32, BLOCKS_ALIGNMENT = 2, PLANES_ALIGNMENT = 4;
    static constexpr bool HAS_SCALE_PER_RUN = true;
    using Layout = Parts<0, 128, 128, 64, 192, 16, 208, 2>;
    uint32_t low[2][2][2] = {}, high[2][2] = {};  // by half of the block, first or second 32 bytes, run
    uint32_t scales[4] = {};
    float d = 0.0f;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int run = 0; run < 2; run++) {
                const int at = 16 * run + 4 * t;
                low[half][0][run] = row.template word<0>(block, 64 * half + at);
                low[half][1][run] = row.template word<0>(block, 64 * half + 32 + at);
                high[half][run] = row.template word<1>(block, 32 * half + at);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = row.template word<2>(block, 4 * i);
        d = row.template half<3>(block);
    }
    VK_DEVICE uint32_t codes(int group, int run) const {
        const int half = group / 4, quarter = group % 4;
        const uint32_t both = low[half][quarter % 2][run];
        const uint32_t upper = shifted(high[half][run], 4 - 2 * quarter) & 0x30303030u;
        return and_or(quarter / 2 ? both >> 4 : both, 0x0f0f0f0fu, upper);
    }
    VK_DEVICE float scale(int group, int run) const {
        const int i = 2 * group + run;
        return d * (float)(int8_t)byte_of(scales[i / 4], i % 4);
    }
};

struct IQ4_XS : Block256 {
    static constexpr int BYTES = 136, ZERO = 0, BLOCKS_ALIGNMENT = 4, PLANES_ALIGNMENT = 4;
    static constexpr bool IS_SIGNED = true;
    using Layout = Parts<8, 128, 4, 4, 2, 2, 0, 2>;
    uint32_t words[8] = {};
    uint32_t low_scales = 0, high_scales = 0;
    float d = 0.0f;
    template <class R>
    VK_DEVICE void load(const R& row, int64_t block, int t) {
#pragma unroll
        for (int group = 0; group < 8; group++) words[group] = row.template word<0>(block, 16 * group + 4 * t);
        low_scales = row.template word<1>(block, 0);
        high_scales = *reinterpret_cast<const uint16_t*>(row.template part<2>(block));
        d = row.template half<3>(block);
    }
    VK_DEVICE uint32_t codes(int group, int run) const {
        const uint2 found =
            look_up(words[group], IQ4_NL::TABLE[0], IQ4_NL::TABLE[1], IQ4_NL::TABLE[2], IQ4_NL::TABLE[3]);
        return run ? found.y : found.x;
    }
    VK_DEVICE float scale(int group, int) const {
        const int bits = (low_scales >> (4 * group) & 15) | (high_scales >> (2 * group) & 3) << 4;
        return d * (float)(bits - 32);
    }
};
