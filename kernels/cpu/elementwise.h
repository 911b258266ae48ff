// Row-wise operations: norms, gated activations, rotary embedding, cache writes, sums, look-ups.
#pragma once

#include "gemm.h"
#include "narrow.h"
#include "rows.h"

namespace {

// x rounded to `dtype` and widened again: what a reader of a stored value would see.
VK_INLINE VF rounded(VF x, int32_t dtype) {
    if (dtype == VK_F32) return x;
    uint16_t half[16];
    store16(half, dtype, 0, x);
    return load16(half, dtype, 0);
}

VK_INLINE VF norm_value(VF x, VF inverse, const VkOp* op, int32_t dtype, int64_t i, int64_t c) {
    VF y = vf_mul(x, inverse);
    if (!op->p[1]) return y;
    const VF weight = load_upto(op->p[1], (int32_t)op->n[5], i, c);
    const float offset = op->f[1];
    if (offset != 0.0f) return vf_mul(y, vf_add(weight, vf_set1(offset)));
    return vf_mul(rounded(y, dtype), weight);
}

// p: x, weight or null, residual or null, out or null, sum out (with a residual), blocks out or null.
// n: C, dtype, x stride, residual stride, out stride, weight dtype, block kind, sum stride, inner rows of x and their
// stride. f: eps, offset.
// The sum is rounded to the dtype before it is normed. Source: Zhang and Sennrich 2019, eq. 4.
void op_rms_norm(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t m = vk_rows(op, step), c = op->n[0];
    const int32_t dtype = (int32_t)op->n[1];
    vk_for_each(ctx, m, [&](int64_t row) {
        const void* x = row_at(op->p[0], row_offset(row, op->n[2], op->n[8], op->n[9]), dtype);
        if (op->p[2]) {
            const void* residual = row_at(op->p[2], row * op->n[3], dtype);
            void* sum = row_at(op->p[4], row * op->n[7], dtype);
            for (int64_t i = 0; i < c; i += 16)
                store_upto(sum, dtype, i, c, vf_add(load_upto(x, dtype, i, c), load_upto(residual, dtype, i, c)));
            x = sum;
        }
        VF squares[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
        for (int64_t i = 0; i < c; i += 16) {
            const VF v = load_upto(x, dtype, i, c);
            squares[i / 16 % 4] = vf_fma(v, v, squares[i / 16 % 4]);
        }
        const float sum = vf_sum(vf_add(vf_add(squares[0], squares[1]), vf_add(squares[2], squares[3])));
        const VF inverse = vf_set1(1.0f / sqrtf(sum / (float)c + op->f[0]));
        if (op->p[3]) {
            void* out = row_at(op->p[3], row * op->n[4], dtype);
            for (int64_t i = 0; i < c; i += 16)
                store_upto(out, dtype, i, c, norm_value(load_upto(x, dtype, i, c), inverse, op, dtype, i, c));
        }
        if (op->p[5]) {
            QuantRow q = QuantRow::at(op->p[5], m, row, c, op->n[6]);
            for (int64_t i = 0; i < c; i += 32) {
                const VF a = norm_value(load16(x, dtype, i), inverse, op, dtype, i, c);
                const VF b = norm_value(load16(x, dtype, i + 16), inverse, op, dtype, i + 16, c);
                QuantRow::put(&q, rounded(a, dtype), rounded(b, dtype));
            }
        }
    });
}

// p: x (gates, then ups), out or null, blocks out or null. n: I, dtype, x stride, out stride, activation, block kind.
void op_glu(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t m = vk_rows(op, step), width = op->n[0];
    const int32_t dtype = (int32_t)op->n[1];
    vk_for_each(ctx, m, [&](int64_t row) {
        const void* gate = row_at(op->p[0], row * op->n[2], dtype);
        const void* up = row_at(gate, width, dtype);
        if (op->p[1]) {
            void* out = row_at(op->p[1], row * op->n[3], dtype);
            for (int64_t i = 0; i < width; i += 16)
                store_upto(out, dtype, i, width,
                           vf_mul(act(op->n[4], load_upto(gate, dtype, i, width)), load_upto(up, dtype, i, width)));
        }
        if (op->p[2]) {
            QuantRow q = QuantRow::at(op->p[2], m, row, width, op->n[5]);
            for (int64_t i = 0; i < width; i += 32) {
                const VF a = vf_mul(act(op->n[4], load16(gate, dtype, i)), load16(up, dtype, i));
                const VF b = vf_mul(act(op->n[4], load16(gate, dtype, i + 16)), load16(up, dtype, i + 16));
                QuantRow::put(&q, rounded(a, dtype), rounded(b, dtype));
            }
        }
    });
}

VK_INLINE void norm_head(void* x, int32_t dtype, int64_t d, const void* weight, int32_t weight_dtype, float eps, float offset) {
    VF squares = vf_zero();
    for (int64_t i = 0; i < d; i += 16) {
        const VF v = load_upto(x, dtype, i, d);
        squares = vf_fma(v, v, squares);
    }
    const VF inverse = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)d + eps));
    for (int64_t i = 0; i < d; i += 16) {
        const VF y = vf_mul(load_upto(x, dtype, i, d), inverse), w = load_upto(weight, weight_dtype, i, d);
        store_upto(x, dtype, i, d,
                   offset != 0.0f ? vf_mul(y, vf_add(w, vf_set1(offset))) : vf_mul(rounded(y, dtype), w));
    }
}

VK_INLINE void rotate_head(void* x, int32_t dtype, const float* cos, const float* sin, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = load_one(x, dtype, 2 * i), b = load_one(x, dtype, 2 * i + 1);
            store_part(x, dtype, 2 * i, vf_set1(a * cos[i] - b * sin[i]), 1);
            store_part(x, dtype, 2 * i + 1, vf_set1(b * cos[i] + a * sin[i]), 1);
        }
        return;
    }
    void* upper = row_at(x, half, dtype);
    for (int64_t i = 0; i < half; i += 16) {
        const VF a = load_upto(x, dtype, i, half), b = load_upto(upper, dtype, i, half);
        const VF c = load_upto(cos, VK_F32, i, half), s = load_upto(sin, VK_F32, i, half);
        store_upto(x, dtype, i, half, vf_fnma(b, s, vf_mul(a, c)));
        store_upto(upper, dtype, i, half, vf_fma(a, s, vf_mul(b, c)));
    }
}

// Rotates q and k in place, after a norm of each head where weights are given.
// p: q, k or null, positions, cos_sin, q weight or null, k weight. n: H, K, D, R, dtype, q stride, k stride, q head stride,
// k head stride, interleaved, position bytes, weight dtype. f: eps, offset. Source: Su et al. 2021, eq. 34.
void op_rope(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t d = op->n[2], half = op->n[3] / 2;
    const int32_t dtype = (int32_t)op->n[4];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const int64_t position = op->n[10] == 8 ? ((const int64_t*)op->p[2])[row] : ((const int32_t*)op->p[2])[row];
        const float* cos = (const float*)op->p[3] + position * op->n[3];
        for (int part = 0; part < 2; ++part) {
            if (!op->p[part]) continue;
            for (int64_t h = 0; h < op->n[part]; ++h) {
                void* x = row_at(op->p[part], row * op->n[5 + part] + h * op->n[7 + part], dtype);
                if (op->p[4]) norm_head(x, dtype, d, op->p[4 + part], (int32_t)op->n[11], op->f[0], op->f[1]);
                rotate_head(x, dtype, cos, cos + half, half, op->n[9] != 0);
            }
        }
    });
}

VK_INLINE void convert_row(void* to, int32_t to_dtype, const void* from, int32_t from_dtype, int64_t n) {
    if (to_dtype == from_dtype) {
        memcpy(to, from, (size_t)(n * dtype_size(to_dtype)));
        return;
    }
    for (int64_t i = 0; i < n; i += 16) store_upto(to, to_dtype, i, n, load_upto(from, from_dtype, i, n));
}

// One head's key and value into a tiled cache (see attention_tiled.h): `at` is the token's place in its block.
VK_INLINE void write_tiled(const VkOp* op, int part, const void* from, int32_t dtype, void* block, int64_t at) {
    const int64_t width = op->n[2 + part];
    const bool is_float = op->n[9] == VK_F32;
    for (int64_t i = 0; i < width; i += 16) {
        const int n = (int)(width - i < 16 ? width - i : 16);
        const VF v = load_upto(from, dtype, i, width);
        if (is_float && part) {
            store_upto((float*)block + at * width, VK_F32, i, width, v);
        } else if (is_float) {
            float lanes[16];
            vf_store(lanes, v);
            float* to = (float*)block + (at / 16 * width + i) * 16 + at % 16;
            for (int j = 0; j < n; ++j) to[16 * j] = lanes[j];
        } else {
            uint16_t lanes[16];
            vf_store_bf16(lanes, v);
            uint16_t* to = (uint16_t*)block;
            if (part) {
                to += (at / 2 * width + i) * 2 + at % 2;
                for (int j = 0; j < n; ++j) to[2 * j] = lanes[j];
            } else {
                to += (at / 16 * width + i) * 16 + at % 16 * 2;
                for (int j = 0; j < n; ++j) to[j / 2 * 32 + j % 2] = lanes[j];
            }
        }
    }
}

// p: k, v, k cache, v cache, slots int64. n: K, whether the cache is tiled, D, Dv, dtype, k stride, v stride, k head stride,
// v head stride, cache dtype, block size, then block, token and head stride of the k cache, and of the v cache.
void op_write_kv(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int32_t dtype = (int32_t)op->n[4], cache_dtype = (int32_t)op->n[9];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const int64_t slot = ((const int64_t*)op->p[4])[row];
        if (slot < 0) return;
        const int64_t block = slot / op->n[10], offset = slot % op->n[10];
        for (int part = 0; part < 2; ++part) {
            const int64_t* strides = op->n + 11 + 3 * part;
            for (int64_t h = 0; h < op->n[0]; ++h) {
                const void* from = row_at(op->p[part], row * op->n[5 + part] + h * op->n[7 + part], dtype);
                void* to = (void*)cache_row(op->p[2 + part], block * strides[0] + h * strides[2], cache_dtype);
                if (is_narrow(cache_dtype)) store_cached((char*)to + offset * strides[1], cache_dtype, from, dtype, op->n[2 + part]);
                else if (op->n[1]) write_tiled(op, part, from, dtype, to, offset);
                else convert_row(row_at(to, offset * strides[1], cache_dtype), cache_dtype, from, dtype, op->n[2 + part]);
            }
        }
    });
}

// p: x, y or null, out. n: C, dtype, x stride, y stride (0: one row for all), out stride, out dtype, whether to multiply
// instead of adding, y dtype. f: factor of the result.
void op_combine(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t c = op->n[0];
    const int32_t dtype = (int32_t)op->n[1], y_dtype = (int32_t)op->n[7], out_dtype = (int32_t)op->n[5];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* x = row_at(op->p[0], row * op->n[2], dtype);
        const void* y = op->p[1] ? row_at(op->p[1], row * op->n[3], y_dtype) : nullptr;
        void* out = row_at(op->p[2], row * op->n[4], out_dtype);
        for (int64_t i = 0; i < c; i += 16) {
            VF v = load_upto(x, dtype, i, c);
            if (y && op->n[6]) v = vf_mul(v, load_upto(y, y_dtype, i, c));
            else if (y) v = vf_add(v, load_upto(y, y_dtype, i, c));
            store_upto(out, out_dtype, i, c, op->f[0] == 1.0f ? v : vf_mul(v, vf_set1(op->f[0])));
        }
    });
}

// p: x, factors, out. n: C, dtype, x stride, factors' dtype, distance of factors.
void op_scale_rows(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t c = op->n[0];
    const int32_t dtype = (int32_t)op->n[1];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* x = row_at(op->p[0], row * op->n[2], dtype);
        const VF factor = vf_set1(load_one(op->p[1], (int32_t)op->n[3], row * op->n[4]));
        for (int64_t i = 0; i < c; i += 16)
            store_upto(row_at(op->p[2], row * c, dtype), dtype, i, c, vf_mul(load_upto(x, dtype, i, c), factor));
    });
}

// p: ids int64, out, old ids. n: how many old ids, the new one.
void op_replace_ids(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t* old = (const int64_t*)op->p[2];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        int64_t id = ((const int64_t*)op->p[0])[row];
        for (int64_t i = 0; i < op->n[0]; ++i)
            if (id == old[i]) {
                id = op->n[1];
                break;
            }
        ((int64_t*)op->p[1])[row] = id;
    });
}

enum Unary { UNARY_SILU = 1, UNARY_GELU_TANH, UNARY_GELU, UNARY_RELU, UNARY_RELU2, UNARY_SIGMOID, UNARY_TANH, UNARY_CAP, UNARY_SOFTPLUS };

VK_INLINE VF act_sigmoid(VF x) { return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), x)))); }
// 2 sigmoid(2x) - 1 loses digits near zero, where the series takes over: its next term is below 1e-8 for |x| < 1/8.
VK_INLINE VF act_tanh(VF x) {
    const VF wide = vf_sub(vf_mul(vf_set1(2.0f), act_sigmoid(vf_mul(vf_set1(2.0f), x))), vf_set1(1.0f));
    const VF square = vf_mul(x, x);
    VF narrow = vf_fma(square, vf_set1(-17.0f / 315), vf_set1(2.0f / 15));
    narrow = vf_fma(narrow, square, vf_set1(-1.0f / 3));
    narrow = vf_fma(vf_mul(narrow, square), x, x);
    float a[16], b[16], c[16];
    vf_store(a, wide);
    vf_store(b, narrow);
    vf_store(c, x);
    for (int i = 0; i < 16; ++i) a[i] = fabsf(c[i]) < 0.125f ? b[i] : a[i];
    return vf_load(a);
}
VK_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
VK_INLINE VF act_softplus(VF x) {
    float v[16];
    vf_store(v, x);
    for (int i = 0; i < 16; ++i) v[i] = softplus(v[i]);
    return vf_load(v);
}
__attribute__((noinline)) VF unary_value(int64_t kind, float cap, VF x) {
    switch (kind) {
        case UNARY_SILU: return act_silu(x);
        case UNARY_GELU_TANH: return act_gelu_tanh(x);
        case UNARY_GELU: return act_gelu(x);
        case UNARY_RELU: return vf_max(x, vf_zero());
        case UNARY_RELU2: x = vf_max(x, vf_zero()); return vf_mul(x, x);
        case UNARY_SIGMOID: return act_sigmoid(x);
        case UNARY_TANH: return act_tanh(x);
        case UNARY_SOFTPLUS: return act_softplus(x);
        default: return vf_mul(act_tanh(vf_div(x, vf_set1(cap))), vf_set1(cap));
    }
}

// p: x, out. n: C, dtype, x stride, out stride, function, inner rows of x and their stride. f: cap.
void op_unary(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t c = op->n[0];
    const int32_t dtype = (int32_t)op->n[1];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* x = row_at(op->p[0], row_offset(row, op->n[2], op->n[5], op->n[6]), dtype);
        void* out = row_at(op->p[1], row * op->n[3], dtype);
        for (int64_t i = 0; i < c; i += 16)
            store_upto(out, dtype, i, c, unary_value(op->n[4], op->f[0], load_upto(x, dtype, i, c)));
    });
}

// p: x, weight or null, bias or null, out. n: C, dtype, x stride, out stride, weight dtype, bias dtype, rows of the
// weight (row t takes row t % rows of it), inner rows of x and their stride. f: eps. Source: Ba, Kiros and Hinton 2016, eq. 3.
void op_layer_norm(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t c = op->n[0];
    const int32_t dtype = (int32_t)op->n[1], weight_dtype = (int32_t)op->n[4], bias_dtype = (int32_t)op->n[5];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* x = row_at(op->p[0], row_offset(row, op->n[2], op->n[7], op->n[8]), dtype);
        void* out = row_at(op->p[3], row * op->n[3], dtype);
        const int64_t table = row % op->n[6] * c;
        VF sum = vf_zero();
        for (int64_t i = 0; i < c; i += 16) sum = vf_add(sum, load_upto(x, dtype, i, c));
        const VF mean = vf_set1(vf_sum(sum) / (float)c);
        float squares = 0;
        VF square_sum = vf_zero();
        for (int64_t i = 0; i < c; i += 16) {
            const VF v = vf_sub(load_upto(x, dtype, i, c), mean);
            if (i + 16 <= c) {
                square_sum = vf_fma(v, v, square_sum);
            } else {
                float part[16];
                vf_store(part, vf_mul(v, v));
                for (int64_t j = i; j < c; ++j) squares += part[j - i];
            }
        }
        squares += vf_sum(square_sum);
        const VF inverse = vf_set1(1.0f / sqrtf(squares / (float)c + op->f[0]));
        for (int64_t i = 0; i < c; i += 16) {
            VF v = vf_mul(vf_sub(load_upto(x, dtype, i, c), mean), inverse);
            if (op->p[1]) v = vf_mul(v, load_upto(row_at(op->p[1], table, weight_dtype), weight_dtype, i, c));
            if (op->p[2]) v = vf_add(v, load_upto(row_at(op->p[2], table, bias_dtype), bias_dtype, i, c));
            store_upto(out, dtype, i, c, v);
        }
    });
}

// The largest of a row and where it first occurs; a NaN counts as largest.
VK_INLINE float largest_of(const float* x, int64_t c, int64_t* where) {
    constexpr int64_t PART = 512;
    float top = -INFINITY;
    int64_t part = 0;
    for (int64_t begin = 0; begin < c; begin += PART) {
        const int64_t end = begin + PART < c ? begin + PART : c;
        VF best = vf_set1(-INFINITY), spoilt = vf_zero();
        for (int64_t i = begin; i < end; i += 16) {
            const VF v = i + 16 <= end ? vf_load(x + i) : load_upto(x, VK_F32, i, end);
            spoilt = vf_max(spoilt, vf_select_lt(v, vf_set1(INFINITY), vf_zero(), vf_set1(1)));  // NaN or +inf
            best = i + 16 <= end ? vf_max(v, best) : best;
        }
        float peak = vf_hmax(best);
        for (int64_t i = end - (end - begin) % 16; i < end; ++i) peak = x[i] > peak ? x[i] : peak;
        for (int64_t i = begin; vf_hmax(spoilt) > 0 && i < end; ++i)
            if (x[i] != x[i]) {
                *where = i;
                return x[i];
            }
        if (peak > top) top = peak, part = begin;
    }
    const int64_t last = c - 1;
    while (part < last && x[part] != top) ++part;
    *where = part;
    return top;
}

// p: x float32, out int64, out float32. n: C, x stride. Ties go to the lowest index.
void op_argmax(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const float* x = (const float*)op->p[0] + row * op->n[1];
        ((float*)op->p[2])[row] = largest_of(x, op->n[0], (int64_t*)op->p[1] + row);
    });
}

// p: buffer, out float. n: -, -, bytes. Reads every byte once: what a product that only waits for memory would take.
void op_read(const VkOp* op, const VkStep*, VkCtx* ctx) {
    constexpr int64_t CHUNK = 1 << 16;
    VI sum = vi_set1(0);
    vk_for_each(ctx, op->n[2] / CHUNK, [&](int64_t chunk) {
        const uint8_t* p = (const uint8_t*)op->p[0] + chunk * CHUNK;
        for (int64_t i = 0; i < CHUNK; i += 64) {
            vk_prefetch(p + i + 2048);
            sum = vi_xor(sum, vi_load(p + i));
        }
    });
    ((int32_t*)op->p[1])[ctx->tid * 16] = vi_sum(sum);
}

}  // namespace
