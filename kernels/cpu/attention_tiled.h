// Attention over a tiled cache: no gathering, no transposing. Included with VK_DOT 0 and, where there is a bfloat16 dot
// product, once more with VK_DOT 1; VK_TILED is the namespace.
//
// Per block and kv head (block size a multiple of 16):
//   bfloat16: K [S / 16][D / 2][16 keys][2], V [S / 2][Dv][2 keys]    (pairs along what is summed over)
//   float32:  K [S / 16][D][16 keys],        V [S][Dv]
// so a vector of K holds one or two inputs of 16 keys, and scores come out with a key per lane.

namespace {
namespace VK_TILED {

// A pair of bfloat16, as the 32 bits of a lane, times a pair of the other operand: bfloat16 with VK_DOT, else float32.
#if VK_DOT
typedef uint32_t Pair;
VK_INLINE Pair pair_of(const float* x) {
    const __m128bh h = _mm_cvtneps_pbh(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)x)));
    return (uint32_t)_mm_cvtsi128_si32((__m128i)h);
}
VK_INLINE VF dot_pair(VF acc, VI pairs, const Pair* other) {
    return _mm512_dpbf16_ps(acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)*other));
}
#else
struct Pair { float first, second; };
VK_INLINE Pair pair_of(const float* x) { return {x[0], x[1]}; }
VK_INLINE VF dot_pair(VF acc, VI pairs, const Pair* other) {
    acc = vf_fma(vf_bits(vi_shl(pairs, 16)), vf_set1(other->first), acc);
    return vf_fma(vf_bits(vi_and(pairs, vi_set1((int32_t)0xffff0000u))), vf_set1(other->second), acc);
}
#endif

// score[r][16 c + key] for R rows and C tiles of 16 keys; n vectors per tile. ONE: float32 cache, else pairs.
template <bool ONE, int R, int C>
VK_INLINE void scores(const char* q, int64_t q_stride, const char* const* key, int64_t n, float* score) {
    VF acc[R * C];
VK_UNROLL(16)
    for (int i = 0; i < R * C; ++i) acc[i] = vf_zero();
    for (int64_t i = 0; i < n; ++i) {
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) {
            const VI k = vi_load(key[c] + 64 * i);
VK_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                if constexpr (ONE) acc[r * C + c] = vf_fma(vf_bits(k), vf_set1(((const float*)(q + r * q_stride))[i]), acc[r * C + c]);
                else acc[r * C + c] = dot_pair(acc[r * C + c], k, (const Pair*)(q + r * q_stride) + i);
            }
        }
    }
VK_UNROLL(16)
    for (int r = 0; r < R; ++r)
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) vf_store(score + r * KEYS + 16 * c, acc[r * C + c]);
}

template <bool ONE>
VK_INLINE void all_scores(const char* q, int64_t q_stride, int rows, const char* const key[KEYS / 16], int tiles, int64_t n, float* score) {
    int r = 0;
#if VK_MAX_ROWS >= 16
    for (; r + 16 <= rows; r += 16)
        for (int c = 0; c < tiles; ++c) scores<ONE, 16, 1>(q + r * q_stride, q_stride, key + c, n, score + r * KEYS + 16 * c);
    for (; r + 8 <= rows; r += 8)
        for (int c = 0; c < tiles; c += 2) scores<ONE, 8, 2>(q + r * q_stride, q_stride, key + c, n, score + r * KEYS + 16 * c);
#endif
    for (; r + 4 <= rows; r += 4) scores<ONE, 4, 4>(q + r * q_stride, q_stride, key, n, score + r * KEYS);
    for (; r < rows; ++r) scores<ONE, 1, 4>(q + r * q_stride, q_stride, key, n, score + r * KEYS);
}

// out[r][16 c ..] += weights[r][i] * value[i], over `count` vectors i of keys (one key each, or a pair); value rows are
// `value_stride` bytes apart.
template <bool ONE, int R, int C>
VK_INLINE void mix(const char* weights, const char* value, int64_t value_stride, int count, float* out, int64_t stride) {
    VF acc[R * C];
VK_UNROLL(4)
    for (int r = 0; r < R; ++r)
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) acc[r * C + c] = vf_load(out + r * stride + 16 * c);
    for (int i = 0; i < count; ++i) {
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) {
            const VI v = vi_load(value + i * value_stride + 64 * c);
VK_UNROLL(4)
            for (int r = 0; r < R; ++r) {
                const char* w = weights + r * KEYS * 4;
                if constexpr (ONE) acc[r * C + c] = vf_fma(vf_bits(v), vf_set1(((const float*)w)[i]), acc[r * C + c]);
                else acc[r * C + c] = dot_pair(acc[r * C + c], v, (const Pair*)w + i);
            }
        }
    }
VK_UNROLL(4)
    for (int r = 0; r < R; ++r)
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) vf_store(out + r * stride + 16 * c, acc[r * C + c]);
}

template <bool ONE, int R>
VK_INLINE void mix_columns(const char* weights, const char* value, int64_t value_stride, int count, float* out, int64_t stride) {
    int64_t c = 0;
    for (; c + 64 <= stride; c += 64) mix<ONE, R, 4>(weights, value + 4 * c, value_stride, count, out + c, stride);
    for (; c < stride; c += 16) mix<ONE, R, 1>(weights, value + 4 * c, value_stride, count, out + c, stride);
}

struct StoreWeights {
    // Weights as the pairs that `mix` reads.
    VK_INLINE void put(float* s, const VF v[KEYS / 16]) {
#if VK_DOT
        for (int c = 0; c < KEYS / 16; c += 2)
            _mm512_storeu_si512((char*)s + 32 * c, (__m512i)_mm512_cvtne2ps_pbh(v[c + 1], v[c]));
#else
        StoreFloats::put(s, v);
#endif
    }
};

// The values of keys up to `keys`, zero from there on (unwritten slots may hold NaN, and 0 * NaN is NaN), rows padded to
// whole vectors.
template <bool ONE>
VK_INLINE void copy_values(const Attention& a, const char* const from[KEYS / 16], int keys, float* to) {
    const int64_t dv16 = padded(a.dv);
    constexpr int PER = ONE ? 1 : 2;  // keys per row of vectors
    for (int i = 0; i < KEYS / PER; ++i) {
        float* row = to + i * dv16;
        const float* source = (const float*)(from[i * PER / 16] + (i * PER % 16) / PER * a.dv * 4);
        const int left = keys - i * PER;
        for (int64_t j = 0; j < dv16; j += 16) {
            VF v = left > 0 ? load_upto(source, VK_F32, j, a.dv) : vf_zero();
            if (!ONE && left == 1) v = vf_bits(vi_and(vi_bits(v), vi_set1(0xffff)));
            vf_store(row + j, v);
        }
    }
}

template <bool ONE>
VK_INLINE void attend(const Attention& a, const TileMemory& m, int64_t b, int64_t head, int64_t base, int rows, int64_t begin,
                      int64_t end) {
    const Cut c = cut_of(a, b);
    const int64_t d16 = padded(a.d), dv16 = padded(a.dv), size = ONE ? 4 : 2;
    const int32_t* table = a.table + a.rows[b] * a.table_stride;
    const int64_t q_stride = d16 * 4, vectors = ONE ? a.d : a.d / 2;
    constexpr int PER = ONE ? 1 : 2;
    Sight sight;
    for (int r = 0; r < rows; ++r) {
        const void* q = begin_row(a, m, c, b, head, base, r, &sight);
        float* to = m.q + r * d16;
        for (int64_t i = 0; i < a.d; i += 16) {
            float scaled[16];
            const VF v = vf_mul(load_upto(q, a.dtype, i, a.d), vf_set1(a.scale));
            if (ONE) {
                vf_store(to + i, v);
                continue;
            }
            vf_store(scaled, v);
            for (int j = 0; j < 16; j += 2) ((Pair*)to)[(i + j) / 2] = pair_of(scaled + j);
        }
    }
    for (int64_t first = begin / 16 * 16; first < end; first += KEYS) {
        const int keys = (int)(end - first < KEYS ? end - first : KEYS), tiles = (keys + 15) / 16;
        const char *key[KEYS / 16], *value[KEYS / 16];
        for (int i = 0; i < KEYS / 16; ++i) {
            const int64_t at = first + 16 * (i < tiles ? i : tiles - 1), block = table[at / a.block_size], inside = at % a.block_size;
            key[i] = (const char*)a.k + (block * a.op->n[10] + head * a.op->n[12] + inside * a.d) * size;
            value[i] = (const char*)a.v + (block * a.op->n[13] + head * a.op->n[15] + inside * a.dv) * size;
        }
        // The next round's tiles lie in other blocks, where the processor does not look by itself.
        for (int64_t at = first + KEYS; at < end && at < first + 2 * KEYS; at += 16) {
            const int64_t block = table[at / a.block_size], inside = at % a.block_size;
            const char* k = (const char*)a.k + (block * a.op->n[10] + head * a.op->n[12] + inside * a.d) * size;
            const char* v = (const char*)a.v + (block * a.op->n[13] + head * a.op->n[15] + inside * a.dv) * size;
            for (int64_t i = 0; i < 16 * a.d * size; i += 64) vk_prefetch_far(k + i);
            for (int64_t i = 0; i < 16 * a.dv * size; i += 64) vk_prefetch_far(v + i);
        }
        all_scores<ONE>((const char*)m.q, q_stride, rows, key, tiles, vectors, m.score);
        for (int r = 0; r < rows; ++r)
            soften_row(a, m, r, first, sight.low[r] > begin ? sight.low[r] : begin,
                       sight.high[r] < first + keys ? sight.high[r] : first + keys, StoreWeights::put);
        const bool is_whole = keys == KEYS && dv16 == a.dv;
        if (!is_whole) copy_values<ONE>(a, value, keys, m.value);
        // Blocks lie apart, so each tile of values is a pass of its own, unless they were copied together.
        const int passes = is_whole ? KEYS / 16 : 1, count = (is_whole ? 16 : KEYS) / PER;
        for (int pass = 0; pass < passes; ++pass) {
            const char* from = is_whole ? value[pass] : (const char*)m.value;
            const char* weights = (const char*)m.score + pass * 16 / PER * (int64_t)(ONE ? 4 : sizeof(Pair));
            int r = 0;
            for (; r + 4 <= rows; r += 4)
                mix_columns<ONE, 4>(weights + r * KEYS * 4, from, dv16 * 4, count, m.out + r * dv16, dv16);
            for (; r < rows; ++r) mix_columns<ONE, 1>(weights + r * KEYS * 4, from, dv16 * 4, count, m.out + r * dv16, dv16);
        }
    }
}

void attend_pairs(const Attention& a, const TileMemory& m, int64_t b, int64_t head, int64_t base, int rows, int64_t begin, int64_t end) {
    attend<false>(a, m, b, head, base, rows, begin, end);
}
#if !VK_DOT
void attend_floats(const Attention& a, const TileMemory& m, int64_t b, int64_t head, int64_t base, int rows, int64_t begin, int64_t end) {
    attend<true>(a, m, b, head, base, rows, begin, end);
}
#endif

}  // namespace VK_TILED
}  // namespace
