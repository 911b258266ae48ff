// Products of activation rows with plain rows of float32, float16 or bfloat16, read where they lie.
//
// A tile is four weight rows by four activation rows: 16 accumulators that run along K, summed across lanes once at the
// end. Everything is widened to float32. (bfloat16 weights have a faster product, gemm_pairs.h, that rounds activations.)
#pragma once

#include "rows.h"

namespace {

constexpr int TILE = 4;
constexpr int64_t DENSE_ROWS = 16;    // weight rows per work item
constexpr int64_t DENSE_TOKENS = 64;  // activation rows per work item

struct Dense {
    const char *x, *weight;
    const float* bias;
    void* out;
    int64_t m, rows, k, x_stride, weight_stride, stride;
    int32_t x_dtype, weight_dtype, dtype;
    float scale;  // of the product
};

#if defined(__AVX512BW__)
// Lane sums of 16 vectors, as the lanes of one.
VK_INLINE VF sum16(const VF a[16]) {
    VF b[8], c[4], d[2];
    for (int i = 0; i < 8; ++i)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 8]), _mm512_unpackhi_ps(a[i], a[i + 8]));
    for (int i = 0; i < 4; ++i)
        c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[i], b[i + 4]), _mm512_unpackhi_ps(b[i], b[i + 4]));
    // c[i] holds, per 128-bit lane, partial sums of a[i], a[i + 4], a[i + 8], a[i + 12] in the order i, i + 4, i + 8, i + 12.
    for (int i = 0; i < 2; ++i)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[i], c[i + 2], 0x88), _mm512_shuffle_f32x4(c[i], c[i + 2], 0xdd));
    const VF e = _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
    // 128-bit lanes of e: c[0], c[2], c[1], c[3].
    const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return _mm512_permutexvar_ps(order, e);
}
#else
VK_INLINE VF sum16(const VF a[16]) {
    float sums[16];
    for (int i = 0; i < 16; ++i) sums[i] = vf_sum(a[i]);
    return vf_load(sums);
}
#endif

template <int R>
__attribute__((noinline)) void dense_tile(const Dense& g, int64_t row, int64_t token, float* sums) {
    const void* w[TILE];
    const void* x[R];
    for (int i = 0; i < TILE; ++i) w[i] = row_at(g.weight, (row + i) * g.weight_stride, g.weight_dtype);
    for (int t = 0; t < R; ++t) x[t] = row_at(g.x, (token + t) * g.x_stride, g.x_dtype);
    VF acc[16];
    for (int i = 0; i < 16; ++i) acc[i] = vf_zero();
    for (int64_t k = 0; k < g.k; k += 16) {
        VF wv[TILE];
VK_UNROLL(4)
        for (int i = 0; i < TILE; ++i) {
            wv[i] = load_upto(w[i], g.weight_dtype, k, g.k);
            vk_prefetch_far(row_at(w[i], TILE * g.weight_stride + k, g.weight_dtype));  // the next four rows
        }
VK_UNROLL(4)
        for (int t = 0; t < R; ++t) {
            const VF xv = load_upto(x[t], g.x_dtype, k, g.k);
VK_UNROLL(4)
            for (int i = 0; i < TILE; ++i) acc[TILE * t + i] = vf_fma(wv[i], xv, acc[TILE * t + i]);
        }
    }
    vf_store(sums, sum16(acc));
}

// The last weight rows, when they do not fill a tile: one row by one activation.
float dense_one(const Dense& g, int64_t row, int64_t token) {
    float sums[16];
    Dense one = g;
    one.weight_stride = 0;  // four times the same row
    one.weight = (const char*)row_at(g.weight, row * g.weight_stride, g.weight_dtype);
    dense_tile<1>(one, 0, token, sums);
    return sums[0];
}

VK_INLINE void store_one(void* p, int32_t dtype, int64_t i, float value) { store_part(p, dtype, i, vf_set1(value), 1); }

void dense_block(const Dense& g, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end;) {
        const int height = end - token >= TILE ? TILE : 1;
        for (int64_t row = row_begin; row < row_end; row += TILE) {
            const int width = row_end - row >= TILE ? TILE : (int)(row_end - row);
            float sums[16];
            if (width < TILE) {
                for (int t = 0; t < height; ++t)
                    for (int i = 0; i < width; ++i) sums[TILE * t + i] = dense_one(g, row + i, token + t);
            } else if (height == TILE) {
                dense_tile<TILE>(g, row, token, sums);
            } else {
                dense_tile<1>(g, row, token, sums);
            }
            for (int t = 0; t < height; ++t) {
                void* out = row_at(g.out, (token + t) * g.stride, g.dtype);
                for (int i = 0; i < width; ++i)
                    store_one(out, g.dtype, row + i, sums[TILE * t + i] * g.scale + (g.bias ? g.bias[row + i] : 0.0f));
            }
        }
        token += height;
    }
}

// p: x, weight, bias float32 or null, out. n: weight dtype, output rows, K, x dtype, x stride, weight stride, out dtype,
// out stride.
void op_dense(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    Dense g;
    g.x = (const char*)op->p[0];
    g.weight = (const char*)op->p[1];
    g.bias = (const float*)op->p[2];
    g.out = op->p[3];
    g.m = vk_rows(op, step);
    g.weight_dtype = (int32_t)op->n[0];
    g.rows = op->n[1];
    g.k = op->n[2];
    g.x_dtype = (int32_t)op->n[3];
    g.x_stride = op->n[4];
    g.weight_stride = op->n[5];
    g.dtype = (int32_t)op->n[6];
    g.stride = op->n[7];
    g.scale = 1.0f;
    const int64_t chunks = (g.m + DENSE_TOKENS - 1) / DENSE_TOKENS, blocks = (g.rows + DENSE_ROWS - 1) / DENSE_ROWS;
    vk_for_each(ctx, chunks * blocks, [&](int64_t item) {
        const int64_t row = item % blocks * DENSE_ROWS, token = item / blocks * DENSE_TOKENS;
        const int64_t row_end = row + DENSE_ROWS < g.rows ? row + DENSE_ROWS : g.rows;
        dense_block(g, row, row_end, token, token + DENSE_TOKENS < g.m ? token + DENSE_TOKENS : g.m);
    });
}

// p: x (T, H, I), weight (H, O, I), out (T, H, O). n: weight dtype, O, I, x dtype, x stride, H, out dtype, stride of x
// heads, strides of the weight's heads and rows.
void op_head_dense(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t heads = op->n[5], rows = op->n[1], k = op->n[2];
    Dense all = {};
    all.m = vk_rows(op, step), all.rows = rows, all.k = k;
    all.x_stride = op->n[4], all.weight_stride = op->n[9], all.stride = heads * rows;
    all.weight_dtype = (int32_t)op->n[0], all.x_dtype = (int32_t)op->n[3], all.dtype = (int32_t)op->n[6];
    all.scale = 1.0f;
    const int64_t blocks = (rows + DENSE_ROWS - 1) / DENSE_ROWS;
    vk_for_each(ctx, heads * blocks, [&](int64_t item) {
        const int64_t h = item / blocks, row = item % blocks * DENSE_ROWS;
        Dense g = all;
        g.x = (const char*)row_at(op->p[0], h * op->n[7], g.x_dtype);
        g.weight = (const char*)row_at(op->p[1], h * op->n[8], g.weight_dtype);
        g.out = row_at(op->p[2], h * rows, g.dtype);
        dense_block(g, row, row + DENSE_ROWS < rows ? row + DENSE_ROWS : rows, 0, g.m);
    });
}

}  // namespace
