// Rows of a narrow KV cache: fp8 in two forms, and int8 with a float scale of the row behind its codes.
//
// An fp8 byte is widened by shifting it into a half: e5m2 is the upper byte of one, e4m3 one with an exponent that is
// eight too small. Written values saturate; ties go to the even code.
#pragma once

#include "rows.h"

namespace {

constexpr int32_t CACHE_E4M3 = 101, CACHE_E5M2 = 102, CACHE_I8 = 103;

VK_INLINE bool is_narrow(int32_t dtype) { return dtype >= CACHE_E4M3; }
VK_INLINE int64_t cache_size(int32_t dtype) { return is_narrow(dtype) ? 1 : dtype_size(dtype); }
VK_INLINE const void* cache_row(const void* p, int64_t index, int32_t dtype) { return (const char*)p + index * cache_size(dtype); }
// Bytes of a row of `width` values.
VK_INLINE int64_t cache_row_bytes(int32_t dtype, int64_t width) { return width * cache_size(dtype) + (dtype == CACHE_I8 ? 4 : 0); }

VK_INLINE VF widen16(const uint8_t* codes, int32_t dtype) {
    uint16_t half[16];
    if (dtype == CACHE_E5M2) {
        for (int i = 0; i < 16; ++i) half[i] = (uint16_t)(codes[i] << 8);
        return vf_load_f16(half);
    }
    // The one code of e4m3 that is no number is a number as a half; it becomes one that is none.
    for (int i = 0; i < 16; ++i) {
        const uint16_t low = codes[i] & 0x7f;
        half[i] = (uint16_t)((codes[i] & 0x80) << 8 | (low == 0x7f ? 0x7e00 : low << 7));
    }
    return vf_mul(vf_load_f16(half), vf_set1(256.0f));
}
VK_INLINE VF signed16(const int8_t* codes) {
    float wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = (float)codes[i];
    return vf_load(wide);
}
// Values i .. i + 15 of a row of `end`; lanes past it are zero.
VK_INLINE VF load_cached(const void* row, int32_t dtype, int64_t i, int64_t end) {
    if (!is_narrow(dtype)) return load_upto(row, dtype, i, end);
    uint8_t part[16] = {};
    const uint8_t* codes = (const uint8_t*)row + i;
    if (i + 16 > end) {
        memcpy(part, codes, (size_t)(end - i));
        codes = part;
    }
    if (dtype != CACHE_I8) return widen16(codes, dtype);
    float scale;
    memcpy(&scale, (const uint8_t*)row + end, 4);
    return vf_mul(signed16((const int8_t*)codes), vf_set1(scale));
}

// The code nearest to x among numbers of `digits` bits of fraction whose smallest normal one is 2^low.
VK_INLINE uint8_t fp8_code(float x, int digits, int low, float largest) {
    if (x != x) return 0x7f;
    const uint8_t sign = __builtin_signbit(x) ? 0x80 : 0;
    const float size = fminf(fabsf(x), largest);
    int exponent = low;
    if (size > 0) {
        const int own = ilogbf(size);
        exponent = own > low ? own : low;
    }
    const int steps = (int)nearbyintf(ldexpf(size, digits - exponent));
    return (uint8_t)(sign | (((exponent - low) << digits) + steps));
}

void store_cached(void* row, int32_t cache_dtype, const void* from, int32_t dtype, int64_t n) {
    uint8_t* to = (uint8_t*)row;
    float wide[16];
    if (cache_dtype == CACHE_I8) {
        VF peaks = vf_zero();
        for (int64_t i = 0; i < n; i += 16) peaks = vf_max(vf_abs(load_upto(from, dtype, i, n)), peaks);
        const float peak = vf_hmax(peaks), scale = peak / 127.0f;
        const VF inverse = vf_set1(peak > 0.0f ? 127.0f / peak : 0.0f);
        for (int64_t i = 0; i < n; i += 16) {
            int8_t codes[16];
            vi_store_i8(codes, vi_from_vf(vf_mul(load_upto(from, dtype, i, n), inverse)));
            memcpy(to + i, codes, (size_t)(n - i < 16 ? n - i : 16));
        }
        memcpy(to + n, &scale, 4);
        return;
    }
    for (int64_t i = 0; i < n; i += 16) {
        vf_store(wide, load_upto(from, dtype, i, n));
        for (int64_t j = 0; j < 16 && i + j < n; ++j)
            to[i + j] = cache_dtype == CACHE_E4M3 ? fp8_code(wide[j], 3, -6, 448.0f) : fp8_code(wide[j], 2, -14, 57344.0f);
    }
}

}  // namespace
