// Layers that keep one state per sequence: causal convolution, Mamba-2, and what the gated delta rule (delta.h) shares.
//
// A sequence's tokens are taken one after the other, its heads and columns of its state side by side: a strip of the state
// stays in the first-level cache while all tokens of the step pass. Results do not depend on how a prompt is cut into
// steps, nor on the other sequences.
#pragma once

#include "rows.h"

namespace {

struct SequenceRun {
    int64_t begin, end, block;
    bool is_fresh;
};
// p[i..]: cu_seqlens int32, blocks int64, is_fresh bool.
VK_INLINE SequenceRun run_of(void* const* p, int64_t sequence) {
    const int32_t* cu = (const int32_t*)p[0];
    return {cu[sequence], cu[sequence + 1], ((const int64_t*)p[1])[sequence], ((const uint8_t*)p[2])[sequence] != 0};
}

constexpr int64_t MAX_TAPS = 8;
constexpr int64_t CHANNELS_AT_A_TIME = 64;

// p: x, weight (C, K), bias or null, state, out, -, -, cu_seqlens, blocks, is_fresh. n: C, K, x dtype, x stride, state dtype,
// values from one state to the next, weight dtype, bias dtype. The state is (C, K - 1), oldest first.
VK_INLINE void conv_channels(const VkOp* op, const SequenceRun& run, int64_t channel, int lanes) {
    const int64_t c = op->n[0], taps = op->n[1], past = taps - 1;
    const int32_t dtype = (int32_t)op->n[2], state_dtype = (int32_t)op->n[4];
    void* state = row_at(op->p[3], run.block * op->n[5] + channel * past, state_dtype);
    float spread[MAX_TAPS][16] = {}, kernel[MAX_TAPS][16] = {};
    for (int r = 0; r < lanes; ++r) {
        for (int64_t j = 0; j < taps; ++j) kernel[j][r] = load_one(op->p[1], (int32_t)op->n[6], (channel + r) * taps + j);
        for (int64_t j = 0; j < past && !run.is_fresh; ++j) spread[j][r] = load_one(state, state_dtype, r * past + j);
    }
    VF weight[MAX_TAPS], window[MAX_TAPS];
    for (int64_t j = 0; j < taps; ++j) weight[j] = vf_load(kernel[j]), window[j] = vf_load(spread[j]);
    const VF bias = op->p[2] ? load_part(op->p[2], (int32_t)op->n[7], channel, lanes) : vf_zero();
    for (int64_t t = run.begin; t < run.end; ++t) {
        window[past] = load_upto(row_at(op->p[0], t * op->n[3], dtype), dtype, channel, c);
        VF sum = bias;
        for (int64_t j = 0; j < taps; ++j) sum = vf_fma(window[j], weight[j], sum);
        store_upto(row_at(op->p[4], t * c, dtype), dtype, channel, c, act_silu(sum));
        for (int64_t j = 0; j < past; ++j) window[j] = window[j + 1];
    }
    for (int64_t j = 0; j < past; ++j) vf_store(spread[j], window[j]);
    for (int r = 0; r < lanes; ++r)
        for (int64_t j = 0; j < past; ++j) store_part(state, state_dtype, r * past + j, vf_set1(spread[j][r]), 1);
}

void op_conv(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t c = op->n[0], parts = (c + CHANNELS_AT_A_TIME - 1) / CHANNELS_AT_A_TIME;
    vk_for_each(ctx, vk_rows(op, step) * parts, [&](int64_t item) {
        const SequenceRun run = run_of(op->p + 7, item / parts);
        const int64_t first = item % parts * CHANNELS_AT_A_TIME;
        const int64_t end = first + CHANNELS_AT_A_TIME < c ? first + CHANNELS_AT_A_TIME : c;
        for (int64_t i = first; i < end; i += 16) conv_channels(op, run, i, (int)(end - i < 16 ? end - i : 16));
    });
}

// p: x, rate float32, bias float32, out float32. n: H, D, dtype, stride.
void op_log_decay(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t heads = op->n[0], d = op->n[1];
    const float *rate = (const float*)op->p[1], *bias = (const float*)op->p[2];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* x = row_at(op->p[0], row * op->n[3], (int32_t)op->n[2]);
        float* out = (float*)op->p[3] + row * heads * d;
        for (int64_t h = 0; h < heads; ++h) {
            const float speed = expf(rate[h]);
            for (int64_t i = h * d; i < (h + 1) * d; ++i)
                out[i] = -speed * softplus(load_one(x, (int32_t)op->n[2], i) + bias[i]);
        }
    });
}

// -------------------------------------------------------------------------------------------- matrices

constexpr int64_t STRIP = 32;  // columns of a state that are worked on together

// Of a thread: the strip (D, STRIP), then four vectors of D.
struct Strip {
    float *state, *q, *k, *fade, *next;
    int64_t d;
    VK_INLINE Strip at(uint8_t* scratch, int64_t d) {
        float* base = (float*)scratch;
        return {base, base + d * STRIP, base + d * (STRIP + 1), base + d * (STRIP + 2), base + d * (STRIP + 3), d};
    }
};

size_t state_scratch(const VkOp* op) { return (size_t)op->n[1] * (STRIP + 4) * 4; }

VK_INLINE void load_strip(const Strip& s, const void* state, int32_t dtype, int64_t width, int64_t column, bool is_fresh) {
    for (int64_t i = 0; i < s.d; ++i)
        for (int64_t c = 0; c < STRIP; c += 16) {
            const bool is_there = !is_fresh && column + c < width;
            vf_store(s.state + i * STRIP + c,
                     is_there ? load_upto(row_at(state, i * width, dtype), dtype, column + c, width) : vf_zero());
        }
}
VK_INLINE void store_strip(const Strip& s, void* state, int32_t dtype, int64_t width, int64_t column) {
    for (int64_t i = 0; i < s.d; ++i)
        for (int64_t c = 0; c < STRIP && column + c < width; c += 16)
            store_upto(row_at(state, i * width, dtype), dtype, column + c, width, vf_load(s.state + i * STRIP + c));
}

struct Columns {
    VF a, b;
};
VK_INLINE Columns load_columns(const void* p, int32_t dtype, int64_t column, int64_t width) {
    return {load_upto(p, dtype, column, width),
            column + 16 < width ? load_upto(p, dtype, column + 16, width) : vf_zero()};
}
VK_INLINE void store_columns(void* p, int32_t dtype, int64_t column, int64_t width, Columns v) {
    store_upto(p, dtype, column, width, v.a);
    if (column + 16 < width) store_upto(p, dtype, column + 16, width, v.b);
}

// State <- fade * state + k u'; what q reads of it.
VK_INLINE Columns advance(const Strip& s, Columns u) {
    Columns out = {vf_zero(), vf_zero()};
    for (int64_t i = 0; i < s.d; ++i) {
        float* row = s.state + i * STRIP;
        const VF fade = vf_set1(s.fade[i]), k = vf_set1(s.k[i]), q = vf_set1(s.q[i]);
        const VF a = vf_fma(k, u.a, vf_mul(fade, vf_load(row))), b = vf_fma(k, u.b, vf_mul(fade, vf_load(row + 16)));
        vf_store(row, a);
        vf_store(row + 16, b);
        out = {vf_fma(q, a, out.a), vf_fma(q, b, out.b)};
    }
    return out;
}

// What keys read of the state; in two sums, since each waits for the last multiply-add.
VK_INLINE Columns read_state(const Strip& s, const float* keys) {
    Columns sum[2] = {{vf_zero(), vf_zero()}, {vf_zero(), vf_zero()}};
    for (int64_t i = 0; i < s.d; ++i) {
        const VF k = vf_set1(keys[i]);
        const float* row = s.state + i * STRIP;
        Columns* to = sum + i % 2;
        *to = {vf_fma(k, vf_load(row), to->a), vf_fma(k, vf_load(row + 16), to->b)};
    }
    return {vf_add(sum[0].a, sum[1].a), vf_add(sum[0].b, sum[1].b)};
}

// x of d values divided by its length and multiplied by `factor`.
VK_INLINE void unit(float* out, const void* x, int32_t dtype, int64_t d, float factor) {
    VF squares = vf_zero();
    for (int64_t i = 0; i < d; i += 16) {
        const VF v = load_upto(x, dtype, i, d);
        squares = vf_fma(v, v, squares);
    }
    const VF scale = vf_set1(factor / sqrtf(vf_sum(squares) + 1e-6f));
    for (int64_t i = 0; i < d; i += 16) store_upto(out, VK_F32, i, d, vf_mul(load_upto(x, dtype, i, d), scale));
}

// p: x, step, b, c, constants float32 (3, H: rate, skip, step bias), state, out, cu_seqlens, blocks, is_fresh. n: G, N, H, P,
// dtype, strides of x, step, b, c and out, step dtype, state dtype, values from one state to the next. f: least step.
// Source: Dao and Gu 2024, section 2.
void op_scan(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t d = op->n[1], heads = op->n[2], width = op->n[3], parts = (width + STRIP - 1) / STRIP;
    const int32_t dtype = (int32_t)op->n[4], state_dtype = (int32_t)op->n[11];
    const float* constants = (const float*)op->p[4];
    const Strip s = Strip::at(ctx->scratch, d);
    vk_for_each(ctx, vk_rows(op, step) * heads * parts, [&](int64_t item) {
        const SequenceRun run = run_of(op->p + 7, item / parts / heads);
        const int64_t head = item / parts % heads, column = item % parts * STRIP, group = head / (heads / op->n[0]);
        const float rate = expf(constants[head]), bias = constants[2 * heads + head];
        const VF skip = vf_set1(constants[heads + head]);
        void* state = row_at(op->p[5], run.block * op->n[12] + head * d * width, state_dtype);
        load_strip(s, state, state_dtype, width, column, run.is_fresh);
        for (int64_t t = run.begin; t < run.end; ++t) {
            float size = softplus(load_one(op->p[1], (int32_t)op->n[10], t * op->n[6] + head) + bias);
            size = size > op->f[0] ? size : op->f[0];
            const float fade = expf(-rate * size);
            convert_row(s.k, VK_F32, row_at(op->p[2], t * op->n[7] + group * d, dtype), dtype, d);
            convert_row(s.q, VK_F32, row_at(op->p[3], t * op->n[8] + group * d, dtype), dtype, d);
            for (int64_t i = 0; i < d; ++i) s.fade[i] = fade;
            const Columns x = load_columns(row_at(op->p[0], t * op->n[5] + head * width, dtype), dtype, column, width);
            const Columns u = {vf_mul(x.a, vf_set1(size)), vf_mul(x.b, vf_set1(size))};
            const Columns y = advance(s, u);
            store_columns(row_at(op->p[6], t * op->n[9] + head * width, dtype), dtype, column, width,
                          {vf_fma(skip, x.a, y.a), vf_fma(skip, x.b, y.b)});
        }
        store_strip(s, state, state_dtype, width, column);
    });
}

}  // namespace
