// Sixteen lanes under one set of names, at whatever width the level compiles for.
//
// VF: 16 floats. VI: 16 int32. VB: 64 bytes, which are the bytes of 16 int32 (lane r holds bytes 4r..4r+3: four
// consecutive inputs of output row r). Every function is static, so the levels never share code at link time.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX2__)
#define VK_INLINE static inline __attribute__((always_inline))
#else
#define VK_INLINE static inline
#endif
#if defined(__AVX512BW__)
#define VK_UNROLL_TEXT(text) _Pragma(#text)
#define VK_UNROLL(n) VK_UNROLL_TEXT(GCC unroll n)
#else
#define VK_UNROLL(n)
#endif

#if defined(__AVX512BW__)

#define VK_MAX_ROWS 16
typedef __m512 VF;
typedef __m512i VI;
typedef __m512i VB;

VK_INLINE VF vf_zero() { return _mm512_setzero_ps(); }
VK_INLINE VF vf_set1(float x) { return _mm512_set1_ps(x); }
VK_INLINE VF vf_load(const float* p) { return _mm512_loadu_ps(p); }
VK_INLINE void vf_store(float* p, VF x) { _mm512_storeu_ps(p, x); }
VK_INLINE VF vf_add(VF a, VF b) { return _mm512_add_ps(a, b); }
VK_INLINE VF vf_sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
VK_INLINE VF vf_mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
VK_INLINE VF vf_div(VF a, VF b) { return _mm512_div_ps(a, b); }
VK_INLINE VF vf_fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
VK_INLINE VF vf_fnma(VF a, VF b, VF c) { return _mm512_fnmadd_ps(a, b, c); }
VK_INLINE VF vf_max(VF a, VF b) { return _mm512_max_ps(a, b); }
VK_INLINE VF vf_min(VF a, VF b) { return _mm512_min_ps(a, b); }
VK_INLINE VF vf_abs(VF a) { return _mm512_abs_ps(a); }
VK_INLINE float vf_sum(VF a) { return _mm512_reduce_add_ps(a); }
VK_INLINE float vf_hmax(VF a) { return _mm512_reduce_max_ps(a); }
VK_INLINE VF vf_from_vi(VI a) { return _mm512_cvtepi32_ps(a); }
VK_INLINE VI vi_from_vf(VF a) { return _mm512_cvtps_epi32(a); }
VK_INLINE VF vf_bits(VI a) { return _mm512_castsi512_ps(a); }
VK_INLINE VI vi_bits(VF a) { return _mm512_castps_si512(a); }
VK_INLINE VF vf_load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
VK_INLINE VF vf_load_bf16(const void* p) {
    return vf_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
VK_INLINE void vf_store_f16(void* p, VF x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
VK_INLINE VI vi_load(const void* p) { return _mm512_loadu_si512(p); }
VK_INLINE VI vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
VK_INLINE VI vi_add(VI a, VI b) { return _mm512_add_epi32(a, b); }
VK_INLINE VI vi_and(VI a, VI b) { return _mm512_and_si512(a, b); }
VK_INLINE VI vi_or(VI a, VI b) { return _mm512_or_si512(a, b); }
VK_INLINE VI vi_xor(VI a, VI b) { return _mm512_xor_si512(a, b); }
VK_INLINE VI vi_shl(VI a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
VK_INLINE VI vi_shr(VI a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
VK_INLINE VI vi_load_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
VK_INLINE VI vi_load_i8(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
VK_INLINE VI vi_load_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
VK_INLINE void vi_store_i8(int8_t* p, VI a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
VK_INLINE void vi_store_u16(void* p, VI a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a)); }
VK_INLINE int32_t vi_sum(VI a) { return _mm512_reduce_add_epi32(a); }
VK_INLINE VI vi_sub(VI a, VI b) { return _mm512_sub_epi32(a, b); }
VK_INLINE VI vi_mul(VI a, VI b) { return _mm512_mullo_epi32(a, b); }
// a < b ? x : y
VK_INLINE VF vf_select_lt(VF a, VF b, VF x, VF y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// sum + x in the lanes where x reaches the cut
VK_INLINE VF vf_add_ge(VF sum, VF x, VF cut) {
    return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, cut, _CMP_GE_OQ), sum, x);
}
VK_INLINE bool vf_any_ge(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0; }
// Lanes with low <= x < high and their ids, side by side; how many. May write 16 of each: the rest means nothing.
VK_INLINE int vf_pick(float* to, int32_t* to_ids, VF x, VI ids, VF low, VF high) {
    const __mmask16 m = _mm512_cmp_ps_mask(x, low, _CMP_GE_OQ) & _mm512_cmp_ps_mask(x, high, _CMP_LT_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(m, x));
    _mm512_storeu_si512(to_ids, _mm512_maskz_compress_epi32(m, ids));
    return __builtin_popcount(m);
}
VK_INLINE VB vb_set1(uint8_t x) { return _mm512_set1_epi8((char)x); }
// The table's floats that the lanes of `index` (0..15) name.
VK_INLINE VF vf_lookup(const float* table16, VI index) { return _mm512_permutexvar_ps(index, vf_load(table16)); }
VK_INLINE VB vb_lookup(const uint8_t* table16, VB index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table16)), index);
}
// x with bit `bit` or-ed in where the matching bit of the 64-bit mask is set.
VK_INLINE VB vb_or_mask(VB x, uint64_t mask, uint8_t bit) {
    return _mm512_mask_add_epi8(x, mask, x, _mm512_set1_epi8((char)bit));
}
// Dot products of unsigned weight bytes and four signed activations, the same four for all lanes.
template <bool WIDE> VK_INLINE VI vi_dot_start(const int32_t* bias) { return _mm512_set1_epi32(*bias); }
template <bool WIDE> VK_INLINE VI vi_dot(VI acc, VB weight, const int8_t* activation) {
    int32_t four;
    memcpy(&four, activation, 4);
    return _mm512_dpbusd_epi32(acc, weight, _mm512_set1_epi32(four));
}
VK_INLINE void vk_prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// Of what is read once: it leaves what the larger caches hold alone.
VK_INLINE void vk_prefetch_once(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }
VK_INLINE void vk_prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#elif defined(__AVX2__)

#define VK_MAX_ROWS 4
struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
typedef VI VB;

VK_INLINE VF vf_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
VK_INLINE VF vf_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
VK_INLINE VF vf_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
VK_INLINE void vf_store(float* p, VF x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
VK_INLINE VF vf_add(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
VK_INLINE VF vf_sub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
VK_INLINE VF vf_mul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
VK_INLINE VF vf_div(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
VK_INLINE VF vf_fma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
VK_INLINE VF vf_fnma(VF x, VF y, VF z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
VK_INLINE VF vf_max(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
VK_INLINE VF vf_min(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
VK_INLINE VF vf_abs(VF x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
VK_INLINE float vf_sum(VF x) {
    // The order of AVX-512's reduction: halves, quarters, pairs.
    const __m256 s = _mm256_add_ps(x.a, x.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 h = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
VK_INLINE float vf_hmax(VF x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 h = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
VK_INLINE VF vf_from_vi(VI x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
VK_INLINE VI vi_from_vf(VF x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
VK_INLINE VF vf_bits(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
VK_INLINE VI vi_bits(VF x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
VK_INLINE VF vf_load_f16(const void* p) {
    const __m128i* q = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
VK_INLINE VF vf_load_bf16(const void* p) {
    const __m128i* q = (const __m128i*)p;
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
VK_INLINE void vf_store_f16(void* p, VF x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
VK_INLINE VI vi_load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
VK_INLINE VI vi_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VK_INLINE VI vi_add(VI x, VI y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
VK_INLINE VI vi_and(VI x, VI y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
VK_INLINE VI vi_or(VI x, VI y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
VK_INLINE VI vi_xor(VI x, VI y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
VK_INLINE VI vi_shl(VI x, int n) {
    const __m128i c = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, c), _mm256_sll_epi32(x.b, c)};
}
VK_INLINE VI vi_shr(VI x, int n) {
    const __m128i c = _mm_cvtsi32_si128(n);
    return {_mm256_srl_epi32(x.a, c), _mm256_srl_epi32(x.b, c)};
}
VK_INLINE VI vi_load_u8(const void* p) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
VK_INLINE VI vi_load_i8(const void* p) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
VK_INLINE VI vi_load_u16(const void* p) {
    const __m128i* q = (const __m128i*)p;
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
VK_INLINE void vi_store_i8(int8_t* p, VI x) {
    int32_t t[16];
    memcpy(t, &x, 64);
    for (int i = 0; i < 16; ++i) p[i] = (int8_t)t[i];
}
VK_INLINE void vi_store_u16(void* p, VI x) {
    int32_t t[16];
    memcpy(t, &x, 64);
    for (int i = 0; i < 16; ++i) ((uint16_t*)p)[i] = (uint16_t)t[i];
}
VK_INLINE int32_t vi_sum(VI x) {
    const __m256i s = _mm256_add_epi32(x.a, x.b);
    const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    const __m128i h = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
VK_INLINE VI vi_sub(VI x, VI y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
VK_INLINE VI vi_mul(VI x, VI y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
VK_INLINE VF vf_select_lt(VF a, VF b, VF x, VF y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
VK_INLINE VF vf_add_ge(VF sum, VF x, VF cut) {
    return {_mm256_add_ps(sum.a, _mm256_and_ps(_mm256_cmp_ps(x.a, cut.a, _CMP_GE_OQ), x.a)),
            _mm256_add_ps(sum.b, _mm256_and_ps(_mm256_cmp_ps(x.b, cut.b, _CMP_GE_OQ), x.b))};
}
VK_INLINE bool vf_any_ge(VF a, VF b) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.a, b.a, _CMP_GE_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_GE_OQ))) != 0;
}
VK_INLINE int vf_pick(float* to, int32_t* to_ids, VF x, VI ids, VF low, VF high) {
    const __m256 a = _mm256_and_ps(_mm256_cmp_ps(x.a, low.a, _CMP_GE_OQ), _mm256_cmp_ps(x.a, high.a, _CMP_LT_OQ));
    const __m256 b = _mm256_and_ps(_mm256_cmp_ps(x.b, low.b, _CMP_GE_OQ), _mm256_cmp_ps(x.b, high.b, _CMP_LT_OQ));
    int mask = _mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8, count = 0;
    if (!mask) return 0;
    float lanes[16];
    int32_t names[16];
    vf_store(lanes, x);
    memcpy(names, &ids, 64);
    for (; mask; mask &= mask - 1, ++count) {
        to[count] = lanes[__builtin_ctz(mask)];
        to_ids[count] = names[__builtin_ctz(mask)];
    }
    return count;
}
VK_INLINE VB vb_set1(uint8_t x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
VK_INLINE __m256 vk_lookup8(VF table, __m256i index) {
    // Bit 3 of the index chooses the half of the table: shifted to the sign, where a blend looks.
    const __m256 low = _mm256_permutevar8x32_ps(table.a, index), high = _mm256_permutevar8x32_ps(table.b, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
VK_INLINE VF vf_lookup(const float* table16, VI index) {
    const VF table = vf_load(table16);
    return {vk_lookup8(table, index.a), vk_lookup8(table, index.b)};
}
VK_INLINE VB vb_lookup(const uint8_t* table16, VB index) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table16));
    return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
VK_INLINE __m256i vk_mask_bytes(uint32_t mask, uint8_t bit) {
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)mask),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
    return _mm256_and_si256(set, _mm256_set1_epi8((char)bit));
}
VK_INLINE VB vb_or_mask(VB x, uint64_t mask, uint8_t bit) {
    return {_mm256_or_si256(x.a, vk_mask_bytes((uint32_t)mask, bit)),
            _mm256_or_si256(x.b, vk_mask_bytes((uint32_t)(mask >> 32), bit))};
}
// maddubs saturates at 16 bits: codes below 64 are safe as they are; full bytes (WIDE) are made signed, and the sign is
// moved to the activations. The bias of WIDE formats is exactly that shift, so it starts from zero here.
template <bool WIDE> VK_INLINE VI vi_dot_start(const int32_t* bias) { return vi_set1(WIDE ? 0 : *bias); }
template <bool WIDE> VK_INLINE __m256i vk_dot256(__m256i acc, __m256i w, __m256i x) {
    __m256i pairs;
    if (WIDE) {
        const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x, s));
    } else {
        pairs = _mm256_maddubs_epi16(w, x);
    }
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <bool WIDE> VK_INLINE VI vi_dot(VI acc, VB weight, const int8_t* activation) {
    int32_t four;
    memcpy(&four, activation, 4);
    const __m256i x = _mm256_set1_epi32(four);
    return {vk_dot256<WIDE>(acc.a, weight.a, x), vk_dot256<WIDE>(acc.b, weight.b, x)};
}
VK_INLINE void vk_prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// Of what is read once: it leaves what the larger caches hold alone.
VK_INLINE void vk_prefetch_once(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }
VK_INLINE void vk_prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#else

#define VK_MAX_ROWS 1
struct VF { float v[16]; };
struct VI { int32_t v[16]; };
typedef VI VB;

#define VK_LANES for (int i = 0; i < 16; ++i)
VK_INLINE float vk_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    float out;
    if (exponent == 0) {
        out = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &out, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    memcpy(&out, &bits, 4);
    return out;
}
VK_INLINE uint16_t vk_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        float small;
        memcpy(&small, &bits, 4);
        return sign | (uint16_t)lrintf(small * 16777216.0f);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
}
VK_INLINE VF vf_set1(float x) { VF r; VK_LANES r.v[i] = x; return r; }
VK_INLINE VF vf_zero() { return vf_set1(0); }
VK_INLINE VF vf_load(const float* p) { VF r; memcpy(&r, p, 64); return r; }
VK_INLINE void vf_store(float* p, VF x) { memcpy(p, &x, 64); }
VK_INLINE VF vf_add(VF a, VF b) { VK_LANES a.v[i] += b.v[i]; return a; }
VK_INLINE VF vf_sub(VF a, VF b) { VK_LANES a.v[i] -= b.v[i]; return a; }
VK_INLINE VF vf_mul(VF a, VF b) { VK_LANES a.v[i] *= b.v[i]; return a; }
VK_INLINE VF vf_div(VF a, VF b) { VK_LANES a.v[i] /= b.v[i]; return a; }
VK_INLINE VF vf_fma(VF a, VF b, VF c) { VK_LANES c.v[i] += a.v[i] * b.v[i]; return c; }
VK_INLINE VF vf_fnma(VF a, VF b, VF c) { VK_LANES c.v[i] -= a.v[i] * b.v[i]; return c; }
VK_INLINE VF vf_max(VF a, VF b) { VK_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
VK_INLINE VF vf_min(VF a, VF b) { VK_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
VK_INLINE VF vf_abs(VF a) { VK_LANES a.v[i] = fabsf(a.v[i]); return a; }
VK_INLINE float vf_sum(VF a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
VK_INLINE float vf_hmax(VF a) { float m = a.v[0]; VK_LANES m = a.v[i] > m ? a.v[i] : m; return m; }
VK_INLINE VF vf_from_vi(VI a) { VF r; VK_LANES r.v[i] = (float)a.v[i]; return r; }
VK_INLINE VI vi_from_vf(VF a) { VI r; VK_LANES r.v[i] = (int32_t)lrintf(a.v[i]); return r; }
VK_INLINE VF vf_bits(VI a) { VF r; memcpy(&r, &a, 64); return r; }
VK_INLINE VI vi_bits(VF a) { VI r; memcpy(&r, &a, 64); return r; }
VK_INLINE VF vf_load_f16(const void* p) {
    uint16_t h[16];
    memcpy(h, p, 32);
    VF r;
    VK_LANES r.v[i] = vk_half(h[i]);
    return r;
}
VK_INLINE VF vf_load_bf16(const void* p) {
    uint16_t h[16];
    memcpy(h, p, 32);
    VI r;
    VK_LANES r.v[i] = (int32_t)((uint32_t)h[i] << 16);
    return vf_bits(r);
}
VK_INLINE void vf_store_f16(void* p, VF x) {
    uint16_t h[16];
    VK_LANES h[i] = vk_to_half(x.v[i]);
    memcpy(p, h, 32);
}
VK_INLINE VI vi_load(const void* p) { VI r; memcpy(&r, p, 64); return r; }
VK_INLINE VI vi_set1(int32_t x) { VI r; VK_LANES r.v[i] = x; return r; }
VK_INLINE VI vi_add(VI a, VI b) { VK_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
VK_INLINE VI vi_and(VI a, VI b) { VK_LANES a.v[i] &= b.v[i]; return a; }
VK_INLINE VI vi_or(VI a, VI b) { VK_LANES a.v[i] |= b.v[i]; return a; }
VK_INLINE VI vi_xor(VI a, VI b) { VK_LANES a.v[i] ^= b.v[i]; return a; }
VK_INLINE VI vi_shl(VI a, int n) { VK_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << n); return a; }
VK_INLINE VI vi_shr(VI a, int n) { VK_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] >> n); return a; }
VK_INLINE VI vi_load_u8(const void* p) { VI r; VK_LANES r.v[i] = ((const uint8_t*)p)[i]; return r; }
VK_INLINE VI vi_load_i8(const void* p) { VI r; VK_LANES r.v[i] = ((const int8_t*)p)[i]; return r; }
VK_INLINE VI vi_load_u16(const void* p) {
    uint16_t h[16];
    memcpy(h, p, 32);
    VI r;
    VK_LANES r.v[i] = h[i];
    return r;
}
VK_INLINE void vi_store_i8(int8_t* p, VI a) { VK_LANES p[i] = (int8_t)a.v[i]; }
VK_INLINE void vi_store_u16(void* p, VI a) {
    uint16_t h[16];
    VK_LANES h[i] = (uint16_t)a.v[i];
    memcpy(p, h, 32);
}
VK_INLINE int32_t vi_sum(VI a) { int32_t s = 0; VK_LANES s += a.v[i]; return s; }
VK_INLINE VI vi_sub(VI a, VI b) { VK_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
VK_INLINE VI vi_mul(VI a, VI b) { VK_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i]); return a; }
VK_INLINE VF vf_select_lt(VF a, VF b, VF x, VF y) { VK_LANES y.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]; return y; }
VK_INLINE VF vf_add_ge(VF sum, VF x, VF cut) { VK_LANES sum.v[i] += x.v[i] >= cut.v[i] ? x.v[i] : 0.0f; return sum; }
VK_INLINE bool vf_any_ge(VF a, VF b) {
    bool any = false;
    VK_LANES any = any || a.v[i] >= b.v[i];
    return any;
}
VK_INLINE int vf_pick(float* to, int32_t* to_ids, VF x, VI ids, VF low, VF high) {
    int count = 0;
    VK_LANES if (x.v[i] >= low.v[i] && x.v[i] < high.v[i]) {
        to[count] = x.v[i];
        to_ids[count++] = ids.v[i];
    }
    return count;
}
VK_INLINE VB vb_set1(uint8_t x) { VB r; memset(&r, x, 64); return r; }
VK_INLINE VF vf_lookup(const float* table16, VI index) {
    int32_t at[16];
    float x[16];
    memcpy(at, &index, 64);
    for (int i = 0; i < 16; ++i) x[i] = table16[at[i] & 15];
    return vf_load(x);
}
VK_INLINE VB vb_lookup(const uint8_t* table16, VB index) {
    uint8_t* b = (uint8_t*)&index;
    for (int i = 0; i < 64; ++i) b[i] = table16[b[i] & 15];
    return index;
}
VK_INLINE VB vb_or_mask(VB x, uint64_t mask, uint8_t bit) {
    uint8_t* b = (uint8_t*)&x;
    for (int i = 0; i < 64; ++i) b[i] |= (uint8_t)((mask >> i & 1) * bit);
    return x;
}
template <bool WIDE> VK_INLINE VI vi_dot_start(const int32_t* bias) { return vi_set1(*bias); }
template <bool WIDE> VK_INLINE VI vi_dot(VI acc, VB weight, const int8_t* activation) {
    const int32_t x0 = activation[0], x1 = activation[1], x2 = activation[2], x3 = activation[3];
    VK_LANES {
        const uint32_t w = (uint32_t)weight.v[i];
        acc.v[i] += (int32_t)(w & 255) * x0 + (int32_t)(w >> 8 & 255) * x1 + (int32_t)(w >> 16 & 255) * x2 +
                    (int32_t)(w >> 24) * x3;
    }
    return acc;
}
VK_INLINE void vk_prefetch(const void*) {}
VK_INLINE void vk_prefetch_once(const void*) {}
VK_INLINE void vk_prefetch_far(const void*) {}

#endif

// Round to nearest even, as every other bf16 producer does; NaN stays NaN.
VK_INLINE void vf_store_bf16(void* p, VF x) {
    const VI bits = vi_bits(x);
    const VI odd = vi_and(vi_shr(bits, 16), vi_set1(1));
    VI rounded = vi_shr(vi_add(vi_add(bits, odd), vi_set1(0x7fff)), 16);
    uint16_t out[16];
    vi_store_u16(out, rounded);
    float v[16];
    vf_store(v, vf_sub(x, x));  // NaN for NaN and infinity
    if (__builtin_expect(!(vf_sum(vf_load(v)) == 0.0f), 0)) {
        vf_store(v, x);
        for (int i = 0; i < 16; ++i)
            if (v[i] != v[i]) out[i] = 0x7fc0;
    }
    memcpy(p, out, 32);
}

// e^x to 2 units in the last place on [-87, 88]; clamped outside. Source: Cody and Waite range reduction, and the Taylor
// series to x^7 on [-ln2/2, ln2/2].
VK_INLINE VF vf_exp(VF x) {
    x = vf_max(vf_min(x, vf_set1(88.0f)), vf_set1(-87.0f));
    const VI n = vi_from_vf(vf_mul(x, vf_set1(1.44269504088896341f)));
    const VF nf = vf_from_vi(n);
    VF r = vf_fma(nf, vf_set1(-0.693359375f), x);
    r = vf_fma(nf, vf_set1(2.12194440e-4f), r);
    VF y = vf_set1(1.0f / 5040);
    y = vf_fma(y, r, vf_set1(1.0f / 720));
    y = vf_fma(y, r, vf_set1(1.0f / 120));
    y = vf_fma(y, r, vf_set1(1.0f / 24));
    y = vf_fma(y, r, vf_set1(1.0f / 6));
    y = vf_fma(y, r, vf_set1(0.5f));
    y = vf_fma(y, r, vf_set1(1.0f));
    y = vf_fma(y, r, vf_set1(1.0f));
    return vf_mul(y, vf_bits(vi_shl(vi_add(n, vi_set1(127)), 23)));
}
