// The gated delta rule (gated delta nets, and with one decay per channel Kimi delta attention).
//
// A sequence's tokens are taken 16 at a time while there are so many, the rest one after the other (decoding is all rest).
// With S the state before a chunk, F_t the product of the decays up to t, and k_s faded from s to t written k_s|t:
//
//     u_t = beta_t (v_t - (F_t k_t) S - sum over s < t of (k_t . k_s|t) u_s)        a triangular system: the WY form
//     out_t = (F_t q_t) S + sum over s <= t of (q_t . k_s|t) u_s
//     S <- F_C S + sum over s of k_s|C outer u_s
//
// Keys fade in place from token to token, so no exponential of a sum is ever taken, and nothing can overflow. Tokens one by
// one load and store the state twice and once per token; a chunk does so twice and once per 16, and what is left are
// three multiply-adds per token and value. A chunk's scores serve all columns of a head.
//
// A decoded token has the same bits in any batch; so has a prompt wherever it is cut at a multiple of 16 tokens (and the
// state is float32). Cut elsewhere, other tokens are summed together, and last bits differ.
// Source: Yang et al. 2024, Gated Delta Networks, section 3.3; Kimi Team 2025, Kimi Linear, section 3.
#pragma once

#include "dense.h"
#include "recurrent.h"

namespace {

struct Delta {
    const VkOp* op;
    int64_t d, width, key_head, head;
    int32_t dtype;
};

VK_INLINE float write_strength(const VkOp* op, int64_t t, int64_t head) {
    return 1.0f / (1.0f + expf(-load_one(op->p[4], (int32_t)op->n[15], t * op->n[9] + head)));
}

// Token t's keys, its fading, and the keys faded: what reads the state before it fades.
VK_INLINE void delta_keys(const Delta& x, const Strip& s, int64_t t) {
    unit(s.k, row_at(x.op->p[1], t * x.op->n[6] + x.key_head * x.d, x.dtype), x.dtype, x.d, 1.0f);
    const float* decay = (const float*)x.op->p[3] + t * x.op->n[8];
    const VF one = vf_exp(vf_set1(decay[x.op->n[13] ? 0 : x.head]));
    for (int64_t i = 0; i < x.d; i += 16) {
        const VF fade = x.op->n[13] ? vf_exp(load_upto(decay + x.head * x.d, VK_F32, i, x.d)) : one;
        store_upto(s.fade, VK_F32, i, x.d, fade);
        store_upto(s.next, VK_F32, i, x.d, vf_mul(fade, load_upto(s.k, VK_F32, i, x.d)));
    }
}

// Tokens begin .. end - 1, one after the other.
void delta_strip(const Delta& x, const Strip& s, int64_t begin, int64_t end, int64_t column) {
    const VkOp* op = x.op;
    const int32_t dtype = x.dtype;
    for (int64_t t = begin; t < end; ++t) {
        delta_keys(x, s, t);
        unit(s.q, row_at(op->p[0], t * op->n[5] + x.key_head * x.d, dtype), dtype, x.d, 1.0f / sqrtf((float)x.d));
        const Columns known = read_state(s, s.next);
        const VF beta = vf_set1(write_strength(op, t, x.head));
        const Columns v = load_columns(row_at(op->p[2], t * op->n[7] + x.head * x.width, dtype), dtype, column, x.width);
        const Columns u = {vf_mul(beta, vf_sub(v.a, known.a)), vf_mul(beta, vf_sub(v.b, known.b))};
        void* out = row_at(op->p[6], t * op->n[10] + x.head * x.width, dtype);
        store_columns(out, dtype, column, x.width, advance(s, u));
    }
}

// -------------------------------------------------------------------------------------------- by chunks

constexpr int CHUNK_TOKENS = 16;
// Sums stay in registers only where every loop over them is unrolled, their beginning and end included.
#define VK_UNROLL_SUMS _Pragma("GCC unroll 8")
#if defined(__AVX512BW__)
constexpr int READ_TOKENS = 4, UPDATE_ROWS = 8;  // what the registers hold the sums of
#else
constexpr int READ_TOKENS = 1, UPDATE_ROWS = 2;
#endif

VK_INLINE int64_t whole_vectors(int64_t d) { return (d + 15) / 16 * 16; }

// Of a thread, rows of `pad` values (zero from d on): keys as they fade, keys and queries faded from the chunk's beginning,
// and one token's key, query and decays. Then the scores of pairs of tokens, and two strips of CHUNK_TOKENS rows.
struct Chunk {
    float *faded, *keys, *queries, *key, *query, *fade, *total;
    float *key_scores, *query_scores, *beta;
    float *known, *seen, *update;
    int64_t pad;
    VK_INLINE Chunk at(float* base, int64_t d) {
        const int64_t pad = whole_vectors(d), rows = CHUNK_TOKENS * pad;
        Chunk c;
        c.pad = pad;
        c.faded = base, c.keys = base + rows, c.queries = base + 2 * rows;
        c.key = base + 3 * rows, c.query = c.key + pad, c.fade = c.query + pad, c.total = c.fade + pad;
        c.key_scores = c.total + pad, c.query_scores = c.key_scores + CHUNK_TOKENS * 16;
        c.beta = c.query_scores + CHUNK_TOKENS * 16;
        c.known = c.beta + 16, c.seen = c.known + CHUNK_TOKENS * STRIP, c.update = c.seen + CHUNK_TOKENS * STRIP;
        return c;
    }
    VK_INLINE int64_t size(int64_t d) {
        return (3 * CHUNK_TOKENS + 4) * whole_vectors(d) + 2 * CHUNK_TOKENS * 16 + 16 + 3 * CHUNK_TOKENS * STRIP;
    }
};

// Token t's unit key and query, and its decays.
VK_INLINE void chunk_token(const Delta& x, const Chunk& c, int64_t t) {
    const VkOp* op = x.op;
    unit(c.key, row_at(op->p[1], t * op->n[6] + x.key_head * x.d, x.dtype), x.dtype, x.d, 1.0f);
    unit(c.query, row_at(op->p[0], t * op->n[5] + x.key_head * x.d, x.dtype), x.dtype, x.d, 1.0f / sqrtf((float)x.d));
    const float* decay = (const float*)op->p[3] + t * op->n[8];
    if (op->n[13]) {
        for (int64_t i = 0; i < x.d; i += 16)
            vf_store(c.fade + i, vf_exp(load_upto(decay + x.head * x.d, VK_F32, i, x.d)));
        return;
    }
    const VF one = vf_exp(vf_set1(decay[x.head]));
    for (int64_t i = 0; i < x.d; i += 16) vf_store(c.fade + i, one);
}

// What all columns of a head share of CHUNK_TOKENS tokens from `begin` on.
void prepare_chunk(const Delta& x, const Chunk& c, int64_t begin) {
    const int64_t pad = c.pad;
    memset(c.key, 0, (size_t)(2 * pad) * 4);
    for (int64_t i = 0; i < pad; i += 16) vf_store(c.total + i, vf_set1(1.0f));
    for (int t = 0; t < CHUNK_TOKENS; ++t) {
        chunk_token(x, c, begin + t);
        c.beta[t] = write_strength(x.op, begin + t, x.head);
        for (int64_t i = 0; i < pad; i += 16) {
            const VF key = vf_load(c.key + i), total = vf_mul(vf_load(c.total + i), vf_load(c.fade + i));
            vf_store(c.total + i, total);
            vf_store(c.faded + t * pad + i, key);
            vf_store(c.keys + t * pad + i, vf_mul(total, key));
            vf_store(c.queries + t * pad + i, vf_mul(total, vf_load(c.query + i)));
        }
        VF keys[16], queries[16];
        for (int s = 0; s < 16; ++s) keys[s] = queries[s] = vf_zero();
        for (int s = 0; s <= t; ++s) {
            float* row = c.faded + s * pad;
            VF by_key = vf_zero(), by_query = vf_zero();
            for (int64_t i = 0; i < pad; i += 16) {
                VF faded = vf_load(row + i);
                if (s < t) {
                    faded = vf_mul(faded, vf_load(c.fade + i));
                    vf_store(row + i, faded);
                    by_key = vf_fma(faded, vf_load(c.key + i), by_key);
                }
                by_query = vf_fma(faded, vf_load(c.query + i), by_query);
            }
            keys[s] = by_key, queries[s] = by_query;
        }
        vf_store(c.key_scores + 16 * t, sum16(keys));
        vf_store(c.query_scores + 16 * t, sum16(queries));
    }
}

// What T tokens' keys and queries read of a strip.
template <int T>
VK_INLINE void read_strip(const Chunk& c, const float* state, int64_t d, int first) {
    VF known[T][2], seen[T][2];
    VK_UNROLL_SUMS
    for (int t = 0; t < T; ++t) known[t][0] = known[t][1] = seen[t][0] = seen[t][1] = vf_zero();
    const float *keys = c.keys + first * c.pad, *queries = c.queries + first * c.pad;
    for (int64_t i = 0; i < d; ++i) {
        const VF a = vf_load(state + i * STRIP), b = vf_load(state + i * STRIP + 16);
        VK_UNROLL_SUMS
        for (int t = 0; t < T; ++t) {
            const VF key = vf_set1(keys[t * c.pad + i]), query = vf_set1(queries[t * c.pad + i]);
            known[t][0] = vf_fma(key, a, known[t][0]);
            known[t][1] = vf_fma(key, b, known[t][1]);
            seen[t][0] = vf_fma(query, a, seen[t][0]);
            seen[t][1] = vf_fma(query, b, seen[t][1]);
        }
    }
    VK_UNROLL_SUMS
    for (int t = 0; t < T; ++t) {
        float *to_known = c.known + (first + t) * STRIP, *to_seen = c.seen + (first + t) * STRIP;
        vf_store(to_known, known[t][0]);
        vf_store(to_known + 16, known[t][1]);
        vf_store(to_seen, seen[t][0]);
        vf_store(to_seen + 16, seen[t][1]);
    }
}

// Solves for the updates, token by token, and writes the outputs.
VK_INLINE void solve_strip(const Delta& x, const Chunk& c, int64_t begin, int64_t column) {
    const VkOp* op = x.op;
    for (int t = 0; t < CHUNK_TOKENS; ++t) {
        const int64_t token = begin + t;
        const float *keys = c.key_scores + 16 * t, *queries = c.query_scores + 16 * t;
        const Columns v = load_columns(row_at(op->p[2], token * op->n[7] + x.head * x.width, x.dtype), x.dtype, column, x.width);
        float* own = c.update + t * STRIP;
        Columns u = {vf_sub(v.a, vf_load(c.known + t * STRIP)), vf_sub(v.b, vf_load(c.known + t * STRIP + 16))};
        Columns out = {vf_load(c.seen + t * STRIP), vf_load(c.seen + t * STRIP + 16)};
        for (int s = 0; s < t; ++s) {
            const VF a = vf_load(c.update + s * STRIP), b = vf_load(c.update + s * STRIP + 16);
            const VF key = vf_set1(keys[s]), query = vf_set1(queries[s]);
            u = {vf_fnma(key, a, u.a), vf_fnma(key, b, u.b)};
            out = {vf_fma(query, a, out.a), vf_fma(query, b, out.b)};
        }
        const VF beta = vf_set1(c.beta[t]), query = vf_set1(queries[t]);
        u = {vf_mul(beta, u.a), vf_mul(beta, u.b)};
        vf_store(own, u.a);
        vf_store(own + 16, u.b);
        out = {vf_fma(query, u.a, out.a), vf_fma(query, u.b, out.b)};
        store_columns(row_at(op->p[6], token * op->n[10] + x.head * x.width, x.dtype), x.dtype, column, x.width, out);
    }
}

// Rows i .. i + R - 1 of a strip after the chunk.
template <int R>
VK_INLINE void update_strip(const Chunk& c, float* state, int64_t i) {
    VF sum[R][2];
    VK_UNROLL_SUMS
    for (int r = 0; r < R; ++r) {
        const VF total = vf_set1(c.total[i + r]);
        sum[r][0] = vf_mul(total, vf_load(state + (i + r) * STRIP));
        sum[r][1] = vf_mul(total, vf_load(state + (i + r) * STRIP + 16));
    }
    for (int t = 0; t < CHUNK_TOKENS; ++t) {
        const VF a = vf_load(c.update + t * STRIP), b = vf_load(c.update + t * STRIP + 16);
        const float* key = c.faded + t * c.pad + i;
        VK_UNROLL_SUMS
        for (int r = 0; r < R; ++r) {
            const VF k = vf_set1(key[r]);
            sum[r][0] = vf_fma(k, a, sum[r][0]);
            sum[r][1] = vf_fma(k, b, sum[r][1]);
        }
    }
    VK_UNROLL_SUMS
    for (int r = 0; r < R; ++r) {
        vf_store(state + (i + r) * STRIP, sum[r][0]);
        vf_store(state + (i + r) * STRIP + 16, sum[r][1]);
    }
}

__attribute__((noinline)) void chunk_strip(const Delta& x, const Chunk& c, float* state, int64_t begin, int64_t column) {
    for (int t = 0; t < CHUNK_TOKENS; t += READ_TOKENS) read_strip<READ_TOKENS>(c, state, x.d, t);
    solve_strip(x, c, begin, column);
    int64_t i = 0;
    for (; i + UPDATE_ROWS <= x.d; i += UPDATE_ROWS) update_strip<UPDATE_ROWS>(c, state, i);
    for (; i < x.d; ++i) update_strip<1>(c, state, i);
}

// -------------------------------------------------------------------------------------------- both

// Heads' strips go together, so that a chunk's scores are made once, unless that leaves too little for every thread.
constexpr int64_t ITEMS_PER_THREAD = 4;

size_t delta_scratch(const VkOp* op) {
    const int64_t d = op->n[1], strips = (op->n[3] + STRIP - 1) / STRIP;
    return (size_t)(d * STRIP * strips + whole_vectors(4 * d) + Chunk::size(d)) * 4;
}

// Strips first .. first + count - 1 of a head.
void delta_head(const Delta& x, uint8_t* scratch, const SequenceRun& run, int64_t first, int64_t count) {
    const VkOp* op = x.op;
    const int32_t state_dtype = (int32_t)op->n[11];
    void* state = row_at(op->p[5], run.block * op->n[12] + x.head * x.d * x.width, state_dtype);
    float* vectors = (float*)scratch + x.d * STRIP * count;
    Strip s = {nullptr, vectors, vectors + x.d, vectors + 2 * x.d, vectors + 3 * x.d, x.d};
    const Chunk chunk = Chunk::at(vectors + whole_vectors(4 * x.d), x.d);
    const auto each = [&](auto body) {
        for (int64_t i = 0; i < count; ++i) {
            s.state = (float*)scratch + i * x.d * STRIP;
            body((first + i) * STRIP);
        }
    };
    each([&](int64_t column) { load_strip(s, state, state_dtype, x.width, column, run.is_fresh); });
    int64_t t = run.begin;
    for (; !op->n[16] && t + CHUNK_TOKENS <= run.end; t += CHUNK_TOKENS) {
        prepare_chunk(x, chunk, t);
        each([&](int64_t column) { chunk_strip(x, chunk, s.state, t, column); });
    }
    each([&](int64_t column) {
        delta_strip(x, s, t, run.end, column);
        store_strip(s, state, state_dtype, x.width, column);
    });
}

// p: q, k, v, decay float32, write, state, out, cu_seqlens, blocks, is_fresh. n: Hk, D, H, Dv, dtype, strides of q, k, v,
// decay, write and out, state dtype, values from one state to the next, one decay per channel, tiled heads, write dtype,
// whether tokens are never taken by chunks.
// Source: Yang et al. 2024, Gated Delta Networks, eq. 10.
void op_delta(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t heads = op->n[2], width = op->n[3], strips = (width + STRIP - 1) / STRIP, all = vk_rows(op, step) * heads;
    const int64_t count = all >= ITEMS_PER_THREAD * ctx->nth ? strips : 1, parts = strips / count;
    vk_for_each(ctx, all * parts, [&](int64_t item) {
        const int64_t head = item / parts % heads;
        const int64_t key_head = op->n[14] ? head % op->n[0] : head / (heads / op->n[0]);
        const Delta x = {op, op->n[1], width, key_head, head, (int32_t)op->n[4]};
        delta_head(x, ctx->scratch, run_of(op->p + 7, item / parts / heads), item % parts * count, count);
    });
}

}  // namespace
