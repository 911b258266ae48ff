// Products with bfloat16 weights, packed 16 rows x 2 inputs to a vector. Included with VK_DOT 0 and, where there is a
// bfloat16 dot product, once more with VK_DOT 1; VK_PAIRS is the namespace.
//
// A piece of R activation rows (see rows.h) is R pairs per two inputs: bfloat16 with VK_DOT, float32 without. Groups are
// taken two at a time below 16 rows, so that enough sums are under way to hide the latency of the dot product.

namespace {
namespace VK_PAIRS {

#if VK_DOT
constexpr int64_t PAIR_BYTES = 4;
VK_INLINE VF dot_pair(VF acc, VI weight, const uint8_t* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)weight, (__m512bh)_mm512_set1_epi32(pair));
}
#else
constexpr int64_t PAIR_BYTES = 8;
VK_INLINE VF dot_pair(VF acc, VI weight, const uint8_t* x) {
    const float* pair = (const float*)x;
    acc = vf_fma(vf_bits(vi_shl(weight, 16)), vf_set1(pair[0]), acc);
    return vf_fma(vf_bits(vi_and(weight, vi_set1((int32_t)0xffff0000u))), vf_set1(pair[1]), acc);
}
#endif

// out[g][r]: 16 outputs of row r and group g, for G neighbouring groups.
template <int R, int G>
__attribute__((noinline)) void tile(const uint8_t* weight, int64_t group_bytes, const uint8_t* x, int64_t pairs, VF* out) {
    VF acc[G * R];
VK_UNROLL(16)
    for (int i = 0; i < G * R; ++i) acc[i] = vf_zero();
    for (int64_t j = 0; j < pairs; ++j) {
VK_UNROLL(2)
        for (int g = 0; g < G; ++g) {
            const uint8_t* p = weight + g * group_bytes + 64 * j;
            prefetch_weight<R>(p + PREFETCH_BYTES);
            const VI w = vi_load(p);
VK_UNROLL(16)
            for (int r = 0; r < R; ++r) acc[g * R + r] = dot_pair(acc[g * R + r], w, x + r * PAIR_BYTES);
        }
        x += R * PAIR_BYTES;
    }
VK_UNROLL(16)
    for (int i = 0; i < G * R; ++i) out[i] = acc[i];
}

template <int R, int G>
VK_INLINE void piece(const Gemm& g, int64_t group, int64_t first) {
    const uint8_t* x = g.x + first * (g.k / 2) * PAIR_BYTES;
    VF acc[G * R], up[G * R];
    tile<R, G>(g.weight + group * g.group_bytes, g.group_bytes, x, g.k / 2, acc);
    if (g.epilogue) tile<R, G>(g.up_weight + group * g.group_bytes, g.group_bytes, x, g.k / 2, up);
    for (int i = 0; i < G; ++i) finish_piece(g, group + i, first, R, acc + i * R, g.epilogue ? up + i * R : nullptr);
}

template <int G>
void rows(const Gemm& g, int64_t group, int64_t first, int64_t end) {
    while (first < end) {
        const int height = piece_rows(end - first);
        switch (height) {
#if VK_MAX_ROWS >= 16
            case 16:
                for (int i = 0; i < G; ++i) piece<16, 1>(g, group + i, first);
                break;
            case 8: piece<8, G>(g, group, first); break;
#endif
#if VK_MAX_ROWS >= 4
            case 4: piece<4, G>(g, group, first); break;
            case 2: piece<2, G>(g, group, first); break;
#endif
            default: piece<1, G>(g, group, first); break;
        }
        first += height;
    }
}

// Two inputs a and b of row `index` of a piece `height` rows high, pair j of the row.
void pack_row(const void* x, int32_t dtype, int64_t k, uint8_t* piece, int height, int index) {
    for (int64_t i = 0; i < k; i += 16) {
        float v[16];
        vf_store(v, load_upto(x, dtype, i, k));
#if VK_DOT
        const __m256bh h = _mm512_cvtneps_pbh(_mm512_loadu_ps(v));
        uint32_t pairs[8];
        memcpy(pairs, &h, 32);
#else
        struct { float a, b; } pairs[8];
        memcpy(pairs, v, 64);
#endif
        for (int64_t j = 0; j < 8 && i + 2 * j < k; ++j)
            memcpy(piece + ((i / 2 + j) * height + index) * PAIR_BYTES, &pairs[j], PAIR_BYTES);
    }
}

}  // namespace VK_PAIRS
}  // namespace
