// Mixtures of experts: the choice, and products of each expert with the rows that chose it.
//
// T tokens of k experts each make T * k rows. They are sorted by expert (EXPERT_SORT), brought into the form that products
// read with each expert's rows as pieces of their own (EXPERT_ROWS), multiplied expert by expert (EXPERT_GEMM), and summed
// per token in slot order (EXPERT_JOIN). A row's arithmetic is that of the plain products: it does not see the others.
#pragma once

#include "dense.h"
#include "gemm.h"

namespace {

// The k best of n, best first, ties to the lowest index; those at or below -INFINITY never. `value` is overwritten.
VK_INLINE void best_of(float* value, int64_t n, int64_t k, int64_t* best) {
    for (int64_t j = 0; j < k; ++j) {
        int64_t at = 0;
        for (int64_t e = 1; e < n; ++e)
            if (value[e] > value[at]) at = e;
        best[j] = at;
        value[at] = -INFINITY;
    }
}

// Leaves the choice's values of the best `wanted` of `groups` groups, -INFINITY elsewhere.
VK_INLINE void keep_groups(float* choice, int64_t n, int64_t groups, int64_t wanted, bool by_two) {
    const int64_t size = n / groups;
    uint8_t* is_kept = (uint8_t*)(choice + n);  // the scratch after the values
    memset(is_kept, 0, (size_t)groups);
    for (int64_t round = 0; round < wanted; ++round) {
        int64_t best = -1;
        float top = 0;
        for (int64_t g = 0; g < groups; ++g) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                if (choice[e] > first) second = first, first = choice[e];
                else if (choice[e] > second) second = choice[e];
            }
            const float strength = by_two && size > 1 ? first + second : first;
            if (!is_kept[g] && (best < 0 || strength > top)) best = g, top = strength;
        }
        is_kept[best] = 1;
    }
    for (int64_t e = 0; e < n; ++e)
        if (!is_kept[e / size]) choice[e] = -INFINITY;
}

// p: logits, bias float32 or null, weights float32 out, ids int64 out. n: E, dtype, stride, k, sigmoid instead of softmax,
// groups, groups kept, whether weights are divided by their sum. f: factor, what is added to that sum, its least value.
void op_route(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t n = op->n[0], k = op->n[3];
    const int32_t dtype = (int32_t)op->n[1];
    const float* bias = (const float*)op->p[1];
    float* choice = (float*)ctx->scratch;
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const void* logits = row_at(op->p[0], row * op->n[2], dtype);
        float peak = -INFINITY, total = 0;
        for (int64_t e = 0; e < n; ++e) {
            choice[e] = load_one(logits, dtype, e);
            peak = choice[e] > peak ? choice[e] : peak;
        }
        for (int64_t e = 0; e < n && !op->n[4]; ++e) total += expf(choice[e] - peak);
        const auto score = [&](int64_t e) {
            const float x = load_one(logits, dtype, e);
            const float value = op->n[4] ? 1.0f / (1.0f + expf(-x)) : expf(x - peak) / total;
            return isfinite(value) ? value : 0.0f;
        };
        for (int64_t e = 0; e < n; ++e) choice[e] = score(e) + (bias ? bias[e] : 0.0f);
        if (op->n[6] < op->n[5]) keep_groups(choice, n, op->n[5], op->n[6], bias != nullptr);
        int64_t* ids = (int64_t*)op->p[3] + row * k;
        float* weights = (float*)op->p[2] + row * k;
        best_of(choice, n, k, ids);
        float sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += weights[j] = score(ids[j]);
        sum = op->n[7] ? sum + op->f[1] : 1.0f;
        sum = sum > op->f[2] ? sum : op->f[2];
        for (int64_t j = 0; j < k; ++j) weights[j] = weights[j] / sum * op->f[0];
    });
}

// Where EXPERT_SORT leaves what the other ops need, in int32: E + 1 first rows of the experts, how many have rows, which
// (E), then of each sorted row its slot (token * k + j) and its expert, and of each slot its sorted row.
struct Sorted {
    int32_t *first, *count, *active, *slot, *expert, *place;
    VK_INLINE Sorted at(void* base, int64_t experts, int64_t slots) {
        Sorted s;
        s.first = (int32_t*)base;
        s.count = s.first + experts + 1;
        s.active = s.count + 1;
        s.slot = s.active + experts;
        s.expert = s.slot + slots;
        s.place = s.expert + slots;
        return s;
    }
};

// p: ids int64, sorted. n: E. Rows are slots. An id outside 0..E-1 has no row: its token's sum is NaN.
void op_expert_sort(const VkOp* op, const VkStep* step, VkCtx*) {
    const int64_t slots = vk_rows(op, step), n = op->n[0];
    const int64_t* ids = (const int64_t*)op->p[0];
    const Sorted s = Sorted::at(op->p[1], n, slots);
    memset(s.first, 0, (size_t)(n + 1) * 4);
    for (int64_t i = 0; i < slots; ++i)
        if (ids[i] >= 0 && ids[i] < n) ++s.first[ids[i] + 1];
    *s.count = 0;
    for (int64_t e = 0; e < n; ++e) {
        if (s.first[e + 1]) s.active[(*s.count)++] = (int32_t)e;
        s.first[e + 1] += s.first[e];
    }
    for (int64_t i = 0; i < slots; ++i) {
        s.place[i] = -1;
        if (ids[i] < 0 || ids[i] >= n) continue;
        const int32_t row = s.first[ids[i]]++;
        s.slot[row] = (int32_t)i;
        s.expert[row] = (int32_t)ids[i];
        s.place[i] = row;
    }
    for (int64_t e = n; e > 0; --e) s.first[e] = s.first[e - 1];
    s.first[0] = 0;
}

// p: x, out, sorted. n: K, x dtype, x stride, kind, E, slots per row of x (0: x is sorted already).
void op_expert_rows(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t slots = vk_rows(op, step), k = op->n[0], kind = op->n[3];
    const int32_t dtype = (int32_t)op->n[1];
    const Sorted s = Sorted::at(op->p[2], op->n[4], slots);
    vk_for_each(ctx, s.first[op->n[4]], [&](int64_t row) {
        const int64_t e = s.expert[row], first = s.first[e], from = op->n[5] ? s.slot[row] / op->n[5] : row;
        const void* x = row_at(op->p[0], from * op->n[2], dtype);
        void* out = (uint8_t*)op->p[1] + first * converted_bytes(k, kind);
        convert_activations(x, dtype, k, kind, out, s.first[e + 1] - first, row - first);
    });
}

enum ExpertMode { EXPERT_BLOCKS = 0, EXPERT_PAIRS, EXPERT_FLOATS, EXPERT_DENSE };

// One expert's product over its rows, cut by groups of 16 outputs.
template <class Body>
VK_INLINE void for_each_expert(const VkOp* op, VkCtx* ctx, const Sorted& s, int64_t bytes_per_row, Body body) {
    const int64_t groups = (op->n[1] + 15) / 16;
    const int32_t dtype = (int32_t)op->n[3];
    vk_for_each(ctx, *s.count * groups, [&](int64_t item) {
        const int64_t e = s.active[item / groups], first = s.first[e];
        Gemm g = {};
        g.x = (const uint8_t*)op->p[0] + first * bytes_per_row;
        memcpy(&g.weight, (const uint8_t*)op->p[1] + e * sizeof(void*), sizeof(void*));
        g.out = row_at(op->p[2], first * op->n[4], dtype);
        g.m = s.first[e + 1] - first;
        g.rows = op->n[1];
        g.k = op->n[2];
        g.stride = op->n[4];
        g.x_stride = g.k;
        g.dtype = dtype;
        g.scale = op->p[4] ? ((const float*)op->p[4])[e] : 1.0f;
        body(g, item % groups);
    });
    end_of_product();
}

template <class F>
void expert_blocks(const VkOp* op, VkCtx* ctx, const Sorted& s) {
    for_each_expert(op, ctx, s, converted_bytes(op->n[2], 0), [](Gemm& g, int64_t group) {
        g.num_supers = g.k / F::SUPER;
        g.group_bytes = g.num_supers * F::BYTES;
        gemm_rows<F>(g, group, 0, g.m);
    });
}

template <class F>
void expert_floats(const VkOp* op, VkCtx* ctx, const Sorted& s) {
    for_each_expert(op, ctx, s, 4 * op->n[2], [](Gemm& g, int64_t group) {
        g.group_bytes = g.k / F::SUPER * F::BYTES;
        exact_rows<F>(g, group);
    });
}

void expert_pairs(const VkOp* op, VkCtx* ctx, const Sorted& s) {
    for_each_expert(op, ctx, s, converted_bytes(op->n[2], KIND_PAIRS), [](Gemm& g, int64_t group) {
        g.group_bytes = g.k / 2 * 64;
        VK_PAIRS_CALL(rows<1>(g, group, 0, g.m));
    });
}

void expert_dense(const VkOp* op, VkCtx* ctx, const Sorted& s) {
    for_each_expert(op, ctx, s, 4 * op->n[2], [&](Gemm& g, int64_t group) {
        Dense d = {};
        d.x = (const char*)g.x;
        d.weight = (const char*)g.weight;
        d.out = g.out;
        d.m = g.m, d.rows = g.rows, d.k = g.k, d.x_stride = g.k, d.weight_stride = op->n[7], d.stride = g.stride;
        d.x_dtype = VK_F32, d.weight_dtype = (int32_t)op->n[0], d.dtype = g.dtype;
        d.scale = g.scale;
        dense_block(d, 16 * group, 16 * group + 16 < g.rows ? 16 * group + 16 : g.rows, 0, g.m);
    });
}

// p: converted rows, weights' addresses (E), out, sorted, scales float32 (E) or null. n: format, output columns, K, out
// dtype, out stride, mode, E, distance of weight rows (plain weights). Rows are slots.
void op_expert_gemm(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const Sorted s = Sorted::at(op->p[3], op->n[6], vk_rows(op, step));
    if (op->n[5] == EXPERT_DENSE) return expert_dense(op, ctx, s);
    if (op->n[5] == EXPERT_PAIRS) return expert_pairs(op, ctx, s);
    const bool is_exact = op->n[5] == EXPERT_FLOATS;
    switch (op->n[0]) {
#define VK_CASE(F) \
    case F::FORMAT: return is_exact ? expert_floats<F>(op, ctx, s) : expert_blocks<F>(op, ctx, s);
        VK_FOR_EACH_FORMAT(VK_CASE)
        VK_FOR_EACH_CODED(VK_CASE)
#undef VK_CASE
#define VK_CASE(F) \
    case F::FORMAT: return expert_floats<F>(op, ctx, s);
        VK_FOR_EACH_FLOAT(VK_CASE)
#undef VK_CASE
    }
}

// p: sorted rows, weights float32 (T, k), sorted, out. n: C, rows' dtype, k, E, out dtype. Rows are tokens.
void op_expert_join(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t tokens = vk_rows(op, step), c = op->n[0], k = op->n[2];
    const int32_t dtype = (int32_t)op->n[1], out_dtype = (int32_t)op->n[4];
    const Sorted s = Sorted::at(op->p[2], op->n[3], tokens * k);
    vk_for_each(ctx, tokens, [&](int64_t token) {
        void* out = row_at(op->p[3], token * c, out_dtype);
        const float* weights = (const float*)op->p[1] + token * k;
        for (int64_t i = 0; i < c; i += 16) {
            VF sum = vf_zero();
            for (int64_t j = 0; j < k; ++j) {
                const int64_t row = s.place[token * k + j];
                const VF value = row < 0 ? vf_set1(NAN) : load_upto(row_at(op->p[0], row * c, dtype), dtype, i, c);
                sum = vf_add(sum, vf_mul(value, vf_set1(weights[j])));
            }
            store_upto(out, out_dtype, i, c, sum);
        }
    });
}

}  // namespace
