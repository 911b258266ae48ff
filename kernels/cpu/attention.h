// Paged attention: any mix of prefill and decode, grouped heads, sliding window, soft cap, sinks.
//
// The query rows of one kv head (tokens x heads of its group) are cut into tiles of up to 32 rows. A tile walks its keys
// 64 at a time: keys are transposed into lanes, so scores need no sums across lanes, and the softmax is kept online.
// A sequence with a single tile and many keys is also cut along its keys, at fixed places, so that neither the number of
// threads nor the other sequences change how anything is summed. Source: Dao et al. 2022, algorithm 1.
#pragma once

#include "dense.h"
#include "narrow.h"
#include "rows.h"

namespace {

constexpr int TILE_ROWS = 32;
constexpr int KEYS = 64;            // keys per round
constexpr int64_t SPLIT_KEYS = 512;  // keys per part of a split sequence

#if defined(__AVX512BW__)
VK_INLINE void transpose16(VF v[16]) {
    VF t[16];
VK_UNROLL(8)
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    }
VK_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        v[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        v[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        v[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        v[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
VK_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
    }
VK_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#else
VK_INLINE void transpose16(VF v[16]) {
    float from[256], to[256];
    for (int i = 0; i < 16; ++i) vf_store(from + 16 * i, v[i]);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to[16 * j + i] = from[16 * i + j];
    for (int i = 0; i < 16; ++i) v[i] = vf_load(to + 16 * i);
}
#endif

struct Attention {
    const VkOp* op;
    const void *q, *k, *v;
    const int32_t *table, *rows, *lens, *cu;
    const float* sinks;
    void* out;
    int64_t num_seqs, heads, kv_heads, group, d, dv, block_size, table_stride, window;
    int32_t dtype, cache_dtype;
    float scale, cap;
};

// p: q, k cache, v cache, out, block table, rows, lengths, cu_seqlens, sinks float32 or null. n: H, K, D, Dv, dtype, q
// stride, q head stride, out stride, cache dtype, block size, then block, token and head stride of the k cache and of the
// v cache, table stride, window or 0, whether the cache is tiled, whether no sequence is split. f: scale, cap or 0. Rows
// are sequences.
Attention open_attention(const VkOp* op, const VkStep* step) {
    Attention a;
    a.op = op;
    a.q = op->p[0];
    a.k = op->p[1];
    a.v = op->p[2];
    a.out = op->p[3];
    a.table = (const int32_t*)op->p[4];
    a.rows = (const int32_t*)op->p[5];
    a.lens = (const int32_t*)op->p[6];
    a.cu = (const int32_t*)op->p[7];
    a.sinks = (const float*)op->p[8];
    a.num_seqs = vk_rows(op, step);
    a.heads = op->n[0];
    a.kv_heads = op->n[1];
    a.group = a.heads / a.kv_heads;
    a.d = op->n[2];
    a.dv = op->n[3];
    a.dtype = (int32_t)op->n[4];
    a.cache_dtype = (int32_t)op->n[8];
    a.block_size = op->n[9];
    a.table_stride = op->n[16];
    a.window = op->n[17];
    a.scale = op->f[0];
    a.cap = op->f[1];
    return a;
}

// How one sequence is cut.
struct Cut {
    int64_t queries, length, first_key, tiles, parts;
};
VK_INLINE Cut cut_of(const Attention& a, int64_t b) {
    Cut c;
    c.queries = a.cu[b + 1] - a.cu[b];
    c.length = a.lens[b];
    const int64_t first_position = c.length - c.queries;
    c.first_key = a.window && first_position - a.window + 1 > 0 ? first_position - a.window + 1 : 0;
    c.tiles = (c.queries * a.group + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t keys = c.length - c.first_key;
    const bool splits = c.tiles == 1 && c.queries < 8 && !a.op->n[19];
    c.parts = splits ? (keys + SPLIT_KEYS - 1) / SPLIT_KEYS : 1;
    return c;
}
VK_INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
// A part's result: per row the running maximum and sum (16 floats for alignment), then the unnormalised output.
VK_INLINE int64_t part_floats(const Attention& a) { return TILE_ROWS * (16 + padded(a.dv)); }

size_t attention_shared(const VkOp* op, const VkStep* step) {
    const Attention a = open_attention(op, step);
    int64_t parts = 0;
    for (int64_t b = 0; b < a.num_seqs; ++b) {
        const Cut c = cut_of(a, b);
        if (c.parts > 1) parts += c.parts;
    }
    return (size_t)(parts * a.kv_heads * part_floats(a)) * sizeof(float);
}
size_t attention_scratch(const VkOp* op, const VkStep* step) {
    const int64_t d = padded(op->n[2]), dv = padded(op->n[3]);
    const int64_t floats = TILE_ROWS * (d + dv + 2 * 16 + KEYS) + KEYS * (d + dv);
    return (size_t)(floats * 4 + (vk_rows(op, step) + 1) * 16 + 1024);
}

// A thread's working memory for one tile.
struct TileMemory {
    float *q, *out, *max, *sum, *score, *key, *value;
    VK_INLINE TileMemory at(uint8_t* p, int64_t d, int64_t dv) {
        TileMemory m;
        m.q = (float*)p;
        m.out = m.q + TILE_ROWS * d;
        m.max = m.out + TILE_ROWS * dv;
        m.sum = m.max + TILE_ROWS;
        m.score = m.sum + TILE_ROWS;
        m.key = m.score + TILE_ROWS * KEYS;
        m.value = m.key + KEYS * d;
        return m;
    }
};

// Where keys first .. first + 63 and their values lie; what is past `end` repeats the last.
VK_INLINE void find_keys(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t end,
                         const void* key[KEYS], const void* value[KEYS]) {
    const int64_t *ks = a.op->n + 10, *vs = a.op->n + 13;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    const void *k = nullptr, *v = nullptr;
    for (int i = 0; i < KEYS; ++i) {
        if (first + i >= end) {
            key[i] = key[i - 1];
            value[i] = value[i - 1];
            continue;
        }
        if (!i || offset == a.block_size) {
            if (i) ++block, offset = 0;
            k = cache_row(a.k, table[block] * ks[0] + head * ks[2], a.cache_dtype);
            v = cache_row(a.v, table[block] * vs[0] + head * vs[2], a.cache_dtype);
        }
        key[i] = cache_row(k, offset * ks[1], a.cache_dtype);
        value[i] = cache_row(v, offset * vs[1], a.cache_dtype);
        ++offset;
    }
}

// One head's rows lie apart, between those of the other heads, so the processor does not see them coming.
VK_INLINE void expect_keys(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t end) {
    if (first >= end) return;
    const void *key[KEYS], *value[KEYS];
    find_keys(a, table, head, first, end, key, value);
    const int64_t k_bytes = cache_row_bytes(a.cache_dtype, a.d), v_bytes = cache_row_bytes(a.cache_dtype, a.dv);
    for (int i = 0; i < KEYS; ++i) {
        for (int64_t at = 0; at < k_bytes; at += 64) vk_prefetch_far((const char*)key[i] + at);
        for (int64_t at = 0; at < v_bytes; at += 64) vk_prefetch_far((const char*)value[i] + at);
    }
}

// 64 keys from `first` on into lanes (key[chunk][d][16]) and 64 values into rows.
VK_INLINE void load_keys(const Attention& a, const TileMemory& m, const int32_t* table, int64_t head, int64_t first, int64_t end) {
    const int64_t d16 = padded(a.d), dv16 = padded(a.dv);
    const void *key[KEYS], *value[KEYS];
    find_keys(a, table, head, first, end, key, value);
    for (int chunk = 0; chunk < KEYS / 16; ++chunk) {
        if (first + 16 * chunk >= end) break;
        for (int64_t i = 0; i < a.d; i += 16) {
            VF t[16];
VK_UNROLL(16)
            for (int j = 0; j < 16; ++j) t[j] = load_cached(key[16 * chunk + j], a.cache_dtype, i, a.d);
            transpose16(t);
            float* to = m.key + (chunk * d16 + i) * 16;
VK_UNROLL(16)
            for (int j = 0; j < 16; ++j) vf_store(to + 16 * j, t[j]);
        }
    }
    for (int i = 0; i < KEYS && first + i < end; ++i)
        for (int64_t j = 0; j < a.dv; j += 16) vf_store(m.value + i * dv16 + j, load_cached(value[i], a.cache_dtype, j, a.dv));
}

template <int R>
VK_INLINE void score_rows(const float* q, int64_t d, int64_t q_stride, const float* key, float* score) {
    VF acc[R];
VK_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r] = vf_zero();
    for (int64_t i = 0; i < d; ++i) {
        const VF k = vf_load(key + 16 * i);
VK_UNROLL(16)
        for (int r = 0; r < R; ++r) acc[r] = vf_fma(vf_set1(q[r * q_stride + i]), k, acc[r]);
    }
VK_UNROLL(16)
    for (int r = 0; r < R; ++r) vf_store(score + r * KEYS, acc[r]);
}

// out[r] += sum over keys of p[r][key] * value[key], for R rows and 16 * C columns.
template <int R, int C>
VK_INLINE void mix_rows(const float* p, const float* value, int64_t stride, int keys, float* out) {
    VF acc[R * C];
VK_UNROLL(4)
    for (int r = 0; r < R; ++r)
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) acc[r * C + c] = vf_load(out + r * stride + 16 * c);
    for (int i = 0; i < keys; ++i) {
        VF v[C];
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) v[c] = vf_load(value + i * stride + 16 * c);
VK_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const VF weight = vf_set1(p[r * KEYS + i]);
VK_UNROLL(4)
            for (int c = 0; c < C; ++c) acc[r * C + c] = vf_fma(weight, v[c], acc[r * C + c]);
        }
    }
VK_UNROLL(4)
    for (int r = 0; r < R; ++r)
VK_UNROLL(4)
        for (int c = 0; c < C; ++c) vf_store(out + r * stride + 16 * c, acc[r * C + c]);
}

template <int R>
VK_INLINE void mix_columns(const float* p, const float* value, int64_t stride, int keys, float* out) {
    int64_t c = 0;
    for (; c + 64 <= stride; c += 64) mix_rows<R, 4>(p, value + c, stride, keys, out + c);
    for (; c < stride; c += 16) mix_rows<R, 1>(p, value + c, stride, keys, out + c);
}

VK_INLINE VF cap_scores(VF s, float cap) {
    // cap * tanh(s / cap), tanh(y) = 1 - 2 / (e^2y + 1)
    const VF e = vf_exp(vf_mul(s, vf_set1(2.0f / cap)));
    const VF t = vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f))));
    return vf_mul(t, vf_set1(cap));
}

static const float LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Turns a row's scores of keys first .. first + 63 into weights, given that it sees keys low .. high - 1.
template <class Store>
VK_INLINE void soften_row(const Attention& a, const TileMemory& m, int r, int64_t first, int64_t low, int64_t high, Store store) {
    float* s = m.score + r * KEYS;
    const int64_t dv16 = padded(a.dv);
    VF v[KEYS / 16];
    VF peak = vf_set1(-INFINITY);
    for (int c = 0; c < KEYS / 16; ++c) {
        v[c] = vf_load(s + 16 * c);
        if (a.cap > 0) v[c] = cap_scores(v[c], a.cap);
        const int64_t at = first + 16 * c;
        if (at < low || at + 16 > high) {
            float t[16];
            vf_store(t, v[c]);
            for (int i = 0; i < 16; ++i)
                if (at + i < low || at + i >= high) t[i] = -INFINITY;
            v[c] = vf_load(t);
        }
        peak = vf_max(v[c], peak);
    }
    const float top = vf_hmax(peak);
    if (top > m.max[r]) {
        const float shrink = m.max[r] == -INFINITY ? 0.0f : expf(m.max[r] - top);
        m.sum[r] *= shrink;
        for (int64_t j = 0; j < dv16; j += 16) {
            float* out = m.out + r * dv16 + j;
            vf_store(out, vf_mul(vf_load(out), vf_set1(shrink)));
        }
        m.max[r] = top;
    }
    if (m.max[r] == -INFINITY) {  // nothing seen yet
        for (int c = 0; c < KEYS / 16; ++c) v[c] = vf_zero();
        store(s, v);
        return;
    }
    VF total = vf_zero();
VK_UNROLL(4)
    for (int c = 0; c < KEYS / 16; ++c) {
        // vf_exp clamps at -87, which would give masked keys a weight of 1e-38: below half a unit of any sum that counts.
        v[c] = vf_exp(vf_sub(v[c], vf_set1(m.max[r])));
        total = vf_add(total, v[c]);
    }
    store(s, v);
    m.sum[r] += vf_sum(total);
}

struct StoreFloats {
    VK_INLINE void put(float* s, const VF v[KEYS / 16]) {
        for (int c = 0; c < KEYS / 16; ++c) vf_store(s + 16 * c, v[c]);
    }
};

// What each row of a tile sees, and the start of its softmax.
struct Sight {
    int64_t low[TILE_ROWS], high[TILE_ROWS];
};
VK_INLINE const void* begin_row(const Attention& a, const TileMemory& m, const Cut& c, int64_t b, int64_t head, int64_t base, int r,
                                Sight* sight) {
    const int64_t dv16 = padded(a.dv), token = (base + r) / a.group, h = head * a.group + (base + r) % a.group;
    const int64_t position = c.length - c.queries + token;
    sight->high[r] = position + 1;
    sight->low[r] = a.window && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    m.max[r] = -INFINITY;
    m.sum[r] = 0;
    for (int64_t i = 0; i < dv16; i += 16) vf_store(m.out + r * dv16 + i, vf_zero());
    return row_at(a.q, (a.cu[b] + token) * a.op->n[5] + h * a.op->n[6], a.dtype);
}

// One tile's keys begin .. end - 1 (only those some row sees). Row r is token (base + r) / group of the sequence.
void attend_tile(const Attention& a, const TileMemory& m, int64_t b, int64_t head, int64_t base, int rows, int64_t begin,
                 int64_t end) {
    const Cut c = cut_of(a, b);
    const int64_t d16 = padded(a.d), dv16 = padded(a.dv);
    const int32_t* table = a.table + a.rows[b] * a.table_stride;
    Sight sight;
    for (int r = 0; r < rows; ++r) {
        const void* q = begin_row(a, m, c, b, head, base, r, &sight);
        for (int64_t i = 0; i < a.d; i += 16)
            vf_store(m.q + r * d16 + i, vf_mul(load_upto(q, a.dtype, i, a.d), vf_set1(a.scale)));
    }
    for (int64_t first = begin; first < end; first += KEYS) {
        load_keys(a, m, table, head, first, end);
        expect_keys(a, table, head, first + KEYS, end);
        const int keys = (int)(end - first < KEYS ? end - first : KEYS);
        for (int chunk = 0; 16 * chunk < keys; ++chunk) {
            const float* key = m.key + chunk * d16 * 16;
            float* score = m.score + 16 * chunk;
            int r = 0;
#if VK_MAX_ROWS >= 16
            for (; r + 16 <= rows; r += 16) score_rows<16>(m.q + r * d16, a.d, d16, key, score + r * KEYS);
#endif
            for (; r + 4 <= rows; r += 4) score_rows<4>(m.q + r * d16, a.d, d16, key, score + r * KEYS);
            for (; r < rows; ++r) score_rows<1>(m.q + r * d16, a.d, d16, key, score + r * KEYS);
        }
        for (int r = 0; r < rows; ++r)
            soften_row(a, m, r, first, sight.low[r], sight.high[r] < first + keys ? sight.high[r] : first + keys, StoreFloats::put);
        int r = 0;
        for (; r + 4 <= rows; r += 4) mix_columns<4>(m.score + r * KEYS, m.value, dv16, keys, m.out + r * dv16);
        for (; r < rows; ++r) mix_columns<1>(m.score + r * KEYS, m.value, dv16, keys, m.out + r * dv16);
    }
}

}  // namespace

// The tiled cache, with and without the bfloat16 dot product.
#define VK_TILED tiled
#define VK_DOT 0
#include "attention_tiled.h"
#undef VK_TILED
#undef VK_DOT
#if defined(__AVX512BW__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#define VK_TILED tiled_dot
#define VK_DOT 1
#include "attention_tiled.h"
#undef VK_TILED
#undef VK_DOT
#pragma GCC pop_options
#endif

namespace {

VK_INLINE void attend(const Attention& a, const TileMemory& m, int64_t b, int64_t head, int64_t base, int rows, int64_t begin,
                      int64_t end) {
    if (!a.op->n[18]) return attend_tile(a, m, b, head, base, rows, begin, end);
    if (a.cache_dtype == VK_F32) return tiled::attend_floats(a, m, b, head, base, rows, begin, end);
#if defined(__AVX512BW__)
    if (HAS_BF16) return tiled_dot::attend_pairs(a, m, b, head, base, rows, begin, end);
#endif
    tiled::attend_pairs(a, m, b, head, base, rows, begin, end);
}

// Divides by the softmax's sum, a sink included, and writes the row.
VK_INLINE void finish_row(const Attention& a, const float* out, float max, float sum, int64_t token, int64_t h) {
    if (a.sinks) sum += expf(a.sinks[h] - max);
    const VF inverse = vf_set1(sum > 0 ? 1.0f / sum : 0.0f);
    void* to = row_at(a.out, token * a.op->n[7] + h * a.dv, a.dtype);
    for (int64_t j = 0; j < a.dv; j += 16) store_upto(to, a.dtype, j, a.dv, vf_mul(vf_load(out + j), inverse));
}

void op_attention(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const Attention a = open_attention(op, step);
    const int64_t d16 = padded(a.d), dv16 = padded(a.dv), part_size = part_floats(a);
    // Items before each sequence, and parts stored before it.
    int64_t* starts = (int64_t*)ctx->scratch;
    int64_t* stored = starts + a.num_seqs + 1;
    starts[0] = 0;
    int64_t parts = 0;
    for (int64_t b = 0; b < a.num_seqs; ++b) {
        const Cut c = cut_of(a, b);
        starts[b + 1] = starts[b] + c.tiles * c.parts * a.kv_heads;
        stored[b] = parts;
        if (c.parts > 1) parts += c.parts;
    }
    const size_t used = ((size_t)(2 * a.num_seqs + 1) * 8 + 63) / 64 * 64;
    const TileMemory m = TileMemory::at(ctx->scratch + used, d16, dv16);
    vk_for_each(ctx, starts[a.num_seqs], [&](int64_t item) {
        int64_t low = 0, high = a.num_seqs;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (starts[middle] <= item) low = middle;
            else high = middle;
        }
        const int64_t b = low;
        const Cut c = cut_of(a, b);
        const int64_t within = item - starts[b], per_head = c.tiles * c.parts;
        const int64_t head = within / per_head, tile = within % per_head / c.parts, part = within % c.parts;
        const int64_t base = tile * TILE_ROWS, all = c.queries * a.group;
        const int rows = (int)(all - base < TILE_ROWS ? all - base : TILE_ROWS);
        const int64_t first_position = c.length - c.queries + base / a.group;
        const int64_t last_position = c.length - c.queries + (base + rows - 1) / a.group;
        int64_t begin = a.window && first_position - a.window + 1 > 0 ? first_position - a.window + 1 : 0;
        int64_t end = last_position + 1;
        if (c.parts > 1) {
            begin = c.first_key + part * SPLIT_KEYS;
            end = begin + SPLIT_KEYS < end ? begin + SPLIT_KEYS : end;
        }
        attend(a, m, b, head, base, rows, begin, end);
        if (c.parts > 1) {
            float* to = (float*)ctx->shared + ((stored[b] * a.kv_heads) + head * c.parts + part) * part_size;
            for (int r = 0; r < rows; ++r) {
                float* row = to + r * (16 + dv16);
                row[0] = m.max[r];
                row[1] = m.sum[r];
                memcpy(row + 16, m.out + r * dv16, (size_t)dv16 * 4);
            }
            return;
        }
        for (int r = 0; r < rows; ++r)
            finish_row(a, m.out + r * dv16, m.max[r], m.sum[r], a.cu[b] + (base + r) / a.group,
                       head * a.group + (base + r) % a.group);
    });
}

// Fields as op_attention, which has left its parts in the shared memory.
void op_attention_join(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const Attention a = open_attention(op, step);
    const int64_t dv16 = padded(a.dv), part_size = part_floats(a);
    if (!ctx->shared) return;
    vk_for_each(ctx, a.num_seqs, [&](int64_t b) {
        const Cut c = cut_of(a, b);
        if (c.parts <= 1) return;
        int64_t stored = 0;
        for (int64_t i = 0; i < b; ++i) {
            const Cut before = cut_of(a, i);
            if (before.parts > 1) stored += before.parts;
        }
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            float* parts = (float*)ctx->shared + (stored * a.kv_heads + head * c.parts) * part_size;
            for (int64_t r = 0; r < c.queries * a.group; ++r) {
                const float* first = parts + r * (16 + dv16);
                float max = -INFINITY, sum = 0;
                for (int64_t p = 0; p < c.parts; ++p) max = fmaxf(max, first[p * part_size]);
                float* out = parts + r * (16 + dv16) + 16;
                for (int64_t p = 0; p < c.parts; ++p) {
                    const float* part = first + p * part_size;
                    const float share = part[0] == -INFINITY ? 0.0f : expf(part[0] - max);
                    sum += part[1] * share;
                    for (int64_t j = 0; j < dv16; j += 16) {
                        const VF scaled = vf_mul(vf_load(part + 16 + j), vf_set1(share));
                        vf_store(out + j, p ? vf_add(vf_load(out + j), scaled) : scaled);
                    }
                }
                finish_row(a, out, max, sum, a.cu[b] + r / a.group, head * a.group + r % a.group);
            }
        }
    });
}

}  // namespace
