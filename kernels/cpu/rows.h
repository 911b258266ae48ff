// Rows of activations: loading and storing any float type, and the int8 block form that quantised products read.
#pragma once

#include "formats.h"

namespace {

#if defined(__AVX512BW__)
const bool HAS_BF16 = __builtin_cpu_supports("avx512bf16");
#endif

VK_INLINE float load_one(const void* p, int32_t dtype, int64_t i) {
    if (dtype == VK_F32) return ((const float*)p)[i];
    uint16_t half[16] = {((const uint16_t*)p)[i]};
    float wide[16];
    vf_store(wide, dtype == VK_BF16 ? vf_load_bf16(half) : vf_load_f16(half));
    return wide[0];
}
VK_INLINE int64_t dtype_size(int32_t dtype) { return dtype == VK_F32 ? 4 : 2; }
VK_INLINE void* row_at(const void* p, int64_t index, int32_t dtype) { return (char*)p + index * dtype_size(dtype); }

// Where row `row` begins: rows `stride` apart, or `inner` of them `inner_stride` apart, again every `stride`.
VK_INLINE int64_t row_offset(int64_t row, int64_t stride, int64_t inner, int64_t inner_stride) {
    return inner > 1 ? row / inner * stride + row % inner * inner_stride : row * stride;
}

VK_INLINE VF load16(const void* p, int32_t dtype, int64_t i) {
    if (dtype == VK_F32) return vf_load((const float*)p + i);
    const uint16_t* half = (const uint16_t*)p + i;
    return dtype == VK_BF16 ? vf_load_bf16(half) : vf_load_f16(half);
}
VK_INLINE void store16(void* p, int32_t dtype, int64_t i, VF x) {
    if (dtype == VK_F32) vf_store((float*)p + i, x);
    else if (dtype == VK_BF16) vf_store_bf16((uint16_t*)p + i, x);
    else vf_store_f16((uint16_t*)p + i, x);
}
// The last n < 16 values of a row; lanes past them are zero.
__attribute__((noinline)) VF load_part(const void* p, int32_t dtype, int64_t i, int n) {
    const int64_t size = dtype_size(dtype);
    char part[64] = {};
    memcpy(part, (const char*)p + i * size, (size_t)(n * size));
    return load16(part, dtype, 0);
}
__attribute__((noinline)) void store_part(void* p, int32_t dtype, int64_t i, VF x, int n) {
    const int64_t size = dtype_size(dtype);
    char part[64];
    store16(part, dtype, 0, x);
    memcpy((char*)p + i * size, part, (size_t)(n * size));
}
VK_INLINE VF load_upto(const void* p, int32_t dtype, int64_t i, int64_t end) {
    return i + 16 <= end ? load16(p, dtype, i) : load_part(p, dtype, i, (int)(end - i));
}
VK_INLINE void store_upto(void* p, int32_t dtype, int64_t i, int64_t end, VF x) {
    if (i + 16 <= end) store16(p, dtype, i, x);
    else store_part(p, dtype, i, x, (int)(end - i));
}

// -------------------------------------------------------------------------------------------- int8 blocks
//
// M rows are cut into pieces of 16, 8, 4, 2 and 1 rows (a kernel exists for each height). A piece of R rows is, per 32
// inputs: R x 32 int8, R scales, R first sums, R second sums. What a sum holds depends on the weight format (KIND):
// -BIAS times the codes' sum as int32, or scale times the sum as float where the format has minimums.

constexpr int64_t BLOCK_BYTES = 44;

VK_INLINE int piece_rows(int64_t left) {
    int rows = VK_MAX_ROWS;
    while (rows > left) rows /= 2;
    return rows;
}
// The piece that holds `row` of M: its first row, and through `height` its number of rows.
VK_INLINE int64_t piece_of(int64_t m, int64_t row, int* height) {
    const int64_t full = m / VK_MAX_ROWS * VK_MAX_ROWS;
    if (row < full) {
        *height = VK_MAX_ROWS;
        return row / VK_MAX_ROWS * VK_MAX_ROWS;
    }
    int64_t first = full;
    for (;;) {
        *height = piece_rows(m - first);
        if (row < first + *height) return first;
        first += *height;
    }
}

// Kinds of other products than those of quantised weights: pairs for bfloat16 (gemm_pairs.h), plain float32 rows.
constexpr int64_t KIND_PAIRS = -1, KIND_FLOATS = -2;

VK_INLINE int64_t kind_bias(int64_t kind) { return kind >> 2; }
VK_INLINE bool kind_is_min(int64_t kind) { return kind & 2; }
VK_INLINE bool kind_is_halves(int64_t kind) { return kind & 1; }

// Quantises 32 inputs (a, b) of row `index` of a piece of R rows into the record at `block`.
VK_INLINE void quantize_block(uint8_t* block, int height, int index, int64_t kind, VF a, VF b) {
    const float peak = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    const float scale = peak / 127.0f;
    const VF inverse = vf_set1(peak > 0.0f ? 127.0f / peak : 0.0f);
    const VI qa = vi_from_vf(vf_mul(a, inverse)), qb = vi_from_vf(vf_mul(b, inverse));
    int8_t* codes = (int8_t*)block + 32 * index;
    vi_store_i8(codes, qa);
    vi_store_i8(codes + 16, qb);
    float* scales = (float*)(block + 32 * height);
    scales[index] = scale;
    int32_t first = vi_sum(qa), second = vi_sum(qb);
    if (!kind_is_halves(kind)) first += second;
    if (kind_is_min(kind)) {
        scales[height + index] = scale * (float)first;
        scales[2 * height + index] = scale * (float)second;
    } else {
        ((int32_t*)scales)[height + index] = (int32_t)-kind_bias(kind) * first;
        ((int32_t*)scales)[2 * height + index] = (int32_t)-kind_bias(kind) * second;
    }
}

// Where row `row` of M rows x K inputs writes its blocks.
struct QuantRow {
    uint8_t* block;
    int height, index;
    int64_t kind;
    VK_INLINE QuantRow at(void* base, int64_t m, int64_t row, int64_t k, int64_t kind) {
        QuantRow q;
        const int64_t first = piece_of(m, row, &q.height);
        q.block = (uint8_t*)base + first * (k / 32) * BLOCK_BYTES;
        q.index = (int)(row - first);
        q.kind = kind;
        return q;
    }
    VK_INLINE void put(QuantRow* q, VF a, VF b) {
        quantize_block(q->block, q->height, q->index, q->kind, a, b);
        q->block += q->height * BLOCK_BYTES;
    }
};

}  // namespace
