// Products of activation rows with packed quantised weights.
//
// Work is cut by groups of 16 output rows (and by 64 activation rows when there are many). For each group and 32 inputs
// the weights are opened into eight vectors and used by up to 16 activation rows before the next block: at one row the
// memory bus bounds it, from about 16 rows the dot-product units do.
#pragma once

#include "rows.h"

namespace {

constexpr int64_t ROWS_AT_A_TIME = 64;   // activation rows whose blocks stay in L2 while groups pass by
constexpr int64_t GROUPS_AT_A_TIME = 4;  // groups per work item when there are several such chunks
constexpr int PREFETCH_BYTES = 1536;

template <class F> constexpr int NUM_SCALES = F::SUPER / (F::HALVES ? 16 : 32);

// Weights that serve a full piece are likely to serve another one; those of fewer rows pass by once. (Decoding a 0.5B Q4_0
// model, one thread of an EPYC with 1 MB of L2: 5 % less time per step, and the host's code stays in the cache.)
template <int R>
VK_INLINE void prefetch_weight(const uint8_t* p) {
    if (R == VK_MAX_ROWS) vk_prefetch(p);
    else vk_prefetch_once(p);
}

// What a piece of rows holds of 32 inputs (see rows.h). `bias` and `sum` are two names of one place.
struct BlockRows {
    const int8_t* codes;
    const float *scales, *sum;
    const int32_t* bias;
    int height;
    VK_INLINE BlockRows at(const uint8_t* block, int height) {
        const float* scales = (const float*)(block + 32 * height);
        return {(const int8_t*)block, scales, scales + height, (const int32_t*)scales + height, height};
    }
};

// Adds the integer sums of 32 inputs (of 16 and 16, where scales cover so many) to row r's 16 outputs.
template <class F>
VK_INLINE VF add_block(VF acc, VI first, VI second, const VF* scale, const VF* min, const BlockRows& rows, int r) {
    const VF d = vf_set1(rows.scales[r]);
    if constexpr (F::HALVES)
        acc = vf_fma(vf_fma(vf_from_vi(second), scale[1], vf_mul(vf_from_vi(first), scale[0])), d, acc);
    else
        acc = vf_fma(vf_from_vi(first), vf_mul(scale[0], d), acc);
    if constexpr (F::MIN) {
        acc = vf_fnma(min[0], vf_set1(rows.sum[r]), acc);
        if constexpr (F::HALVES) acc = vf_fnma(min[1], vf_set1(rows.sum[rows.height + r]), acc);
    }
    return acc;
}

// acc[r] (16 outputs of row r) of one piece of R rows.
template <class F, int R>
__attribute__((noinline)) void tile(const uint8_t* weight, const uint8_t* block, int64_t num_supers, VF out[R]) {
    VF acc[R];
VK_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r] = vf_zero();
    for (int64_t s = 0; s < num_supers; ++s) {
        VF scale[NUM_SCALES<F>], min[F::MIN ? NUM_SCALES<F> : 1];
        F::scales(weight, scale, min);
        for (int b = 0; b < F::SUPER / 32; ++b) {
            constexpr int LINES = (F::BYTES / (F::SUPER / 32) + 63) / 64;
VK_UNROLL(9)
            for (int i = 0; i < LINES; ++i)
                prefetch_weight<R>(weight + PREFETCH_BYTES + b * (F::BYTES / (F::SUPER / 32)) + 64 * i);
            VB w[8];
            F::codes(weight, b, w);
            const BlockRows rows = BlockRows::at(block, R);
VK_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                const int8_t* x = rows.codes + 32 * r;
                VI first = F::BIAS ? vi_dot_start<F::WIDE>(rows.bias + r) : vi_set1(0), second = first;
                if constexpr (F::HALVES) {
                    second = F::BIAS ? vi_dot_start<F::WIDE>(rows.bias + R + r) : vi_set1(0);
VK_UNROLL(4)
                    for (int j = 0; j < 4; ++j) {
                        first = vi_dot<F::WIDE>(first, w[j], x + 4 * j);
                        second = vi_dot<F::WIDE>(second, w[j + 4], x + 16 + 4 * j);
                    }
                } else {
VK_UNROLL(8)
                    for (int j = 0; j < 8; ++j) first = vi_dot<F::WIDE>(first, w[j], x + 4 * j);
                }
                constexpr int PARTS = F::HALVES ? 2 : 1;
                acc[r] = add_block<F>(acc[r], first, second, scale + PARTS * b, min + (F::MIN ? PARTS * b : 0), rows, r);
            }
            block += R * BLOCK_BYTES;
        }
        weight += F::BYTES;
    }
VK_UNROLL(16)
    for (int r = 0; r < R; ++r) out[r] = acc[r];
}

enum Epilogue { EPILOGUE_NONE = 0, EPILOGUE_SILU = 1, EPILOGUE_GELU_TANH = 2, EPILOGUE_GELU = 3 };

VK_INLINE VF act_silu(VF x) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), x)))); }
VK_INLINE VF act_gelu_tanh(VF x) {
    // x * sigmoid(2u) is 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
    const VF cube = vf_mul(vf_mul(x, x), x);
    const VF u = vf_mul(vf_set1(-1.5957691216057308f), vf_fma(vf_set1(0.044715f), cube, x));
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(u)));
}
__attribute__((noinline)) VF act_gelu(VF x) {
    float v[16];
    vf_store(v, x);
    for (int i = 0; i < 16; ++i) v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678118654752f));
    return vf_load(v);
}
VK_INLINE VF act(int64_t kind, VF x) {
    if (kind == EPILOGUE_SILU) return act_silu(x);
    return kind == EPILOGUE_GELU_TANH ? act_gelu_tanh(x) : act_gelu(x);
}

// One op's constants, opened once per thread.
struct Gemm {
    const uint8_t *x, *weight, *up_weight;
    const float *bias, *up_bias;
    void* out;
    int64_t m, rows, k, stride, epilogue, group_bytes, num_supers, x_stride;
    int32_t dtype;
    float scale;
};

// Bias, activation and the write of one piece's 16 columns; `up` is null without an epilogue.
__attribute__((noinline)) void finish_piece(const Gemm& g, int64_t group, int64_t first, int rows, VF* acc, VF* up) {
    const int64_t column = 16 * group;
    const VF scale = vf_set1(g.scale);  // of 1 for all but few: the sum's bits then stay what they are
    const VF bias = g.bias ? load_upto(g.bias, VK_F32, column, g.rows) : vf_zero();
    const VF up_bias = up && g.up_bias ? load_upto(g.up_bias, VK_F32, column, g.rows) : vf_zero();
    for (int r = 0; r < rows; ++r) {
        VF value = vf_fma(acc[r], scale, bias);
        if (up) value = vf_mul(act(g.epilogue, value), vf_fma(up[r], scale, up_bias));
        store_upto(row_at(g.out, (first + r) * g.stride, g.dtype), g.dtype, column, g.rows, value);
    }
}

template <class F, int R>
VK_INLINE void gemm_piece(const Gemm& g, int64_t group, int64_t first) {
    const uint8_t* block = g.x + first * (g.k / 32) * BLOCK_BYTES;
    VF acc[R], up[R];
    tile<F, R>(g.weight + group * g.group_bytes, block, g.num_supers, acc);
    if (g.epilogue) tile<F, R>(g.up_weight + group * g.group_bytes, block, g.num_supers, up);
    finish_piece(g, group, first, R, acc, g.epilogue ? up : nullptr);
}

}  // namespace

#if defined(VK_TILES)
#include "gemm_tiles.h"
#endif

namespace {

template <class F>
void gemm_rows(const Gemm& g, int64_t group, int64_t first, int64_t end) {
    while (first < end) {
#if defined(VK_TILES)
        const int64_t done = tiled_rows<F>(g, group, first, end);
        if (done) {
            first += done;
            continue;
        }
#endif
        const int rows = piece_rows(end - first);
        switch (rows) {
#if VK_MAX_ROWS >= 16
            case 16: gemm_piece<F, 16>(g, group, first); break;
            case 8: gemm_piece<F, 8>(g, group, first); break;
#endif
#if VK_MAX_ROWS >= 4
            case 4: gemm_piece<F, 4>(g, group, first); break;
            case 2: gemm_piece<F, 2>(g, group, first); break;
#endif
            default: gemm_piece<F, 1>(g, group, first); break;
        }
        first += rows;
    }
}

// What every product ends with on every thread.
VK_INLINE void end_of_product() {
#if defined(VK_TILES)
    tile_done();
#endif
}

Gemm open_gemm(const VkOp* op, const VkStep* step) {
    Gemm g;
    g.x = (const uint8_t*)op->p[0];
    g.weight = (const uint8_t*)op->p[1];
    g.bias = (const float*)op->p[2];
    g.out = op->p[3];
    g.up_weight = (const uint8_t*)op->p[4];
    g.up_bias = (const float*)op->p[5];
    g.m = vk_rows(op, step);
    g.rows = op->n[1];
    g.k = op->n[2];
    g.dtype = (int32_t)op->n[3];
    g.stride = op->n[4];
    g.epilogue = op->n[5];
    g.x_stride = op->n[6];
    g.scale = op->f[0] != 0.0f ? op->f[0] : 1.0f;
    g.num_supers = 0;
    g.group_bytes = 0;
    return g;
}

template <class F>
void gemm(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    Gemm g = open_gemm(op, step);
    g.num_supers = g.k / F::SUPER;
    g.group_bytes = g.num_supers * F::BYTES;
    const int64_t groups = (g.rows + 15) / 16;
    const int64_t chunks = (g.m + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
    const int64_t together = chunks > 1 ? GROUPS_AT_A_TIME : 1, per_chunk = (groups + together - 1) / together;
    vk_for_each(ctx, per_chunk * chunks, [&](int64_t item) {
        const int64_t first = item / per_chunk * ROWS_AT_A_TIME, group = item % per_chunk * together;
        const int64_t end = first + ROWS_AT_A_TIME < g.m ? first + ROWS_AT_A_TIME : g.m;
        for (int64_t i = group; i < group + together && i < groups; ++i) gemm_rows<F>(g, i, first, end);
    });
    end_of_product();
}

// p: blocks, weight, bias or null, out, then with an epilogue the weight and bias of the second factor.
// n: format, output columns, K, out dtype, out stride, epilogue (act(x W) * x V). f: factor of the product (0: none).
void op_gemm(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    switch (op->n[0]) {
#define VK_CASE(F) \
    case F::FORMAT: return gemm<F>(op, step, ctx);
        VK_FOR_EACH_FORMAT(VK_CASE)
        VK_FOR_EACH_CODED(VK_CASE)
#undef VK_CASE
    }
}

// -------------------------------------------------------------------------------------------- floating point

// The 16 rows' values at input 4j + byte of an opened block.
template <class F>
VK_INLINE VF open_value(const VB w[8], int j, int byte, VF scale, VF min) {
    if constexpr (F::IS_FP8) {
        // Sign, four exponent and three mantissa bits where a float32 has them, which makes the value 2^-120 too small:
        // the factor puts that right, subnormals included.
        const VI high = vi_shl(w[j], 24 - 8 * byte);
        const VI bits = vi_or(vi_and(high, vi_set1(INT32_MIN)), vi_shr(vi_and(high, vi_set1(0x7f000000)), 4));
        return vf_mul(vf_mul(vf_bits(bits), vf_set1(0x1p120f)), scale);
    } else if constexpr (F::IS_TABLE) {
        return vf_mul(vf_lookup(F::table(), vi_and(vi_shr(w[j], 8 * byte), vi_set1(15))), scale);
    } else {
        const VI code = vi_add(vi_and(vi_shr(w[j], 8 * byte), vi_set1(255)), vi_set1(-F::BIAS));
        const VF value = vf_mul(vf_from_vi(code), scale);
        return F::MIN ? vf_sub(value, min) : value;
    }
}

template <class F, int R>
__attribute__((noinline)) void exact_piece(const Gemm& g, int64_t group, int64_t first) {
    const uint8_t* weight = g.weight + group * g.group_bytes;
    const float* x = (const float*)g.x + first * g.x_stride;
    VF acc[R];
    for (int r = 0; r < R; ++r) acc[r] = vf_zero();
    for (int64_t i = 0; i < g.k; i += F::SUPER, weight += F::BYTES) {
        VF scale[NUM_SCALES<F>], min[F::MIN ? NUM_SCALES<F> : 1];
        F::scales(weight, scale, min);
        for (int b = 0; b < F::SUPER / 32; ++b) {
            VB w[8];
            F::codes(weight, b, w);
            for (int j = 0; j < 8; ++j) {
                const int s = F::HALVES ? 2 * b + j / 4 : b;
VK_UNROLL(4)
                for (int byte = 0; byte < 4; ++byte) {
                    const VF value = open_value<F>(w, j, byte, scale[s], min[F::MIN ? s : 0]);
VK_UNROLL(8)
                    for (int r = 0; r < R; ++r)
                        acc[r] = vf_fma(value, vf_set1(x[r * g.x_stride + i + 32 * b + 4 * j + byte]), acc[r]);
                }
            }
        }
    }
    finish_piece(g, group, first, R, acc, nullptr);
}

template <class F>
void exact_rows(const Gemm& g, int64_t group) {
    int64_t first = 0;
#if VK_MAX_ROWS >= 4
    for (; first + 8 <= g.m; first += 8) exact_piece<F, 8>(g, group, first);
#endif
    for (; first < g.m; ++first) exact_piece<F, 1>(g, group, first);
}

template <class F>
void gemm_exact(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    Gemm g = open_gemm(op, step);
    g.group_bytes = g.k / F::SUPER * F::BYTES;
    vk_for_each(ctx, (g.rows + 15) / 16, [&](int64_t group) { exact_rows<F>(g, group); });
}

// p: x float32, weight, bias or null, out. n: format, output rows, K, out dtype, out stride, -, x stride.
void op_gemm_exact(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    switch (op->n[0]) {
#define VK_CASE(F) \
    case F::FORMAT: return gemm_exact<F>(op, step, ctx);
        VK_FOR_EACH_FORMAT(VK_CASE)
        VK_FOR_EACH_CODED(VK_CASE)
        VK_FOR_EACH_FLOAT(VK_CASE)
#undef VK_CASE
    }
}

// -------------------------------------------------------------------------------------------- packing and look-up

template <class F>
void pack(const VkOp* op, VkCtx* ctx) {
    const int64_t rows = op->n[1], supers = op->n[2] / F::SUPER, src_stride = op->n[3];
    vk_for_each(ctx, (rows + 15) / 16, [&](int64_t group) {
        uint8_t* dst = (uint8_t*)op->p[1] + group * supers * F::BYTES;
        const uint8_t* src[16];
        for (int r = 0; r < 16; ++r) {
            const int64_t row = 16 * group + r < rows ? 16 * group + r : rows - 1;  // padding repeats the last row
            src[r] = (const uint8_t*)op->p[0] + row * src_stride;
        }
        for (int64_t s = 0; s < supers; ++s, dst += F::BYTES)
            for (int r = 0; r < 16; ++r) F::pack(dst, r, src[r] + s * F::ROW);
    });
}

void pack_pairs(const VkOp* op, VkCtx* ctx) {
    const int64_t rows = op->n[1], pairs = op->n[2] / 2;
    vk_for_each(ctx, (rows + 15) / 16, [&](int64_t group) {
        uint8_t* dst = (uint8_t*)op->p[1] + group * pairs * 64;
        for (int r = 0; r < 16; ++r) {
            const int64_t row = 16 * group + r < rows ? 16 * group + r : rows - 1;
            const uint8_t* src = (const uint8_t*)op->p[0] + row * op->n[3];
            for (int64_t j = 0; j < pairs; ++j) vk_put32(dst, 16 * j + r, vk_u32(src + 4 * j));
        }
    });
}

// p: rows as in the file, packed. n: format, rows, K, bytes from one row to the next.
void op_pack(const VkOp* op, const VkStep*, VkCtx* ctx) {
    switch (op->n[0]) {
        case VK_BF16: return pack_pairs(op, ctx);
#define VK_CASE(F) \
    case F::FORMAT: return pack<F>(op, ctx);
        VK_FOR_EACH_FORMAT(VK_CASE)
        VK_FOR_EACH_CODED(VK_CASE)
        VK_FOR_EACH_FLOAT(VK_CASE)
#undef VK_CASE
    }
}

// One row of a table in file format: each super-block is packed alone, then opened like any other.
template <class F>
void embed_row(const uint8_t* row, int64_t k, void* out, int32_t dtype) {
    uint8_t packed[F::BYTES];
    memset(packed, 0, sizeof packed);
    for (int64_t i = 0; i < k; i += F::SUPER, row += F::ROW) {
        F::pack(packed, 0, row);
        VF scale[NUM_SCALES<F>], min[F::MIN ? NUM_SCALES<F> : 1];
        F::scales(packed, scale, min);
        for (int b = 0; b < F::SUPER / 32; ++b) {
            VB w[8];
            F::codes(packed, b, w);
            float values[32];
            for (int j = 0; j < 8; ++j) {
                const int s = F::HALVES ? 2 * b + j / 4 : b;
                for (int byte = 0; byte < 4; ++byte) {
                    float lanes[16];
                    vf_store(lanes, open_value<F>(w, j, byte, scale[s], min[F::MIN ? s : 0]));
                    values[4 * j + byte] = lanes[0];
                }
            }
            store16(out, dtype, i + 32 * b, vf_load(values));
            store16(out, dtype, i + 32 * b + 16, vf_load(values + 16));
        }
    }
}

// p: ids, table, out. n: format, bytes of an id, K, out dtype, out stride, bytes from one table row to the next, rows of
// the table. A row that does not exist is NaN.
void op_embed(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t k = op->n[2];
    const int32_t format = (int32_t)op->n[0], dtype = (int32_t)op->n[3];
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t row) {
        const int64_t id = op->n[1] == 8 ? ((const int64_t*)op->p[0])[row] : ((const int32_t*)op->p[0])[row];
        const uint8_t* table = (const uint8_t*)op->p[1] + id * op->n[5];
        void* out = row_at(op->p[2], row * op->n[4], dtype);
        if (id < 0 || id >= op->n[6]) {
            for (int64_t i = 0; i < k; i += 16) store_upto(out, dtype, i, k, vf_set1(NAN));
            return;
        }
        switch (format) {
#define VK_CASE(F) \
    case F::FORMAT: return embed_row<F>(table, k, out, dtype);
            VK_FOR_EACH_FORMAT(VK_CASE)
#undef VK_CASE
            default:
                for (int64_t i = 0; i < k; i += 16) store_upto(out, dtype, i, k, load_upto(table, format, i, k));
        }
    });
}

}  // namespace

namespace {

// Calls body(group, groups, first, end) for parts of a product: neighbouring groups, and rows first .. end - 1.
template <class Body>
VK_INLINE void for_each_part(const Gemm& g, VkCtx* ctx, Body body) {
    const int64_t groups = (g.rows + 15) / 16, chunks = (g.m + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
    const int64_t together = chunks > 1 ? GROUPS_AT_A_TIME : 2, per_chunk = (groups + together - 1) / together;
    vk_for_each(ctx, per_chunk * chunks, [&](int64_t item) {
        const int64_t first = item / per_chunk * ROWS_AT_A_TIME, begin = item % per_chunk * together;
        const int64_t end = first + ROWS_AT_A_TIME < g.m ? first + ROWS_AT_A_TIME : g.m;
        body(begin, begin + together < groups ? begin + together : groups, first, end);
    });
    end_of_product();
}

}  // namespace

// VK_PAIRS_CALL(f(...)): the product with bfloat16 weights that this processor has.
#if defined(VK_TILES)
#define VK_PAIRS_CALL(call) pairs_tiled::call
#else
#define VK_PAIRS pairs
#define VK_DOT 0
#include "gemm_pairs.h"
#undef VK_PAIRS
#undef VK_DOT
#define VK_PAIRS_CALL(call) pairs::call
#if defined(__AVX512BW__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#define VK_PAIRS pairs_dot
#define VK_DOT 1
#include "gemm_pairs.h"
#undef VK_PAIRS
#undef VK_DOT
#pragma GCC pop_options
#undef VK_PAIRS_CALL
#define VK_PAIRS_CALL(call) (HAS_BF16 ? pairs_dot::call : pairs::call)
#endif
#endif

namespace {

// As op_gemm, for bfloat16 weights.
void op_gemm_pairs(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    Gemm g = open_gemm(op, step);
    g.group_bytes = g.k / 2 * 64;
    for_each_part(g, ctx, [&](int64_t group, int64_t stop, int64_t first, int64_t end) {
        for (; group + 2 <= stop; group += 2) VK_PAIRS_CALL(rows<2>(g, group, first, end));
        if (group < stop) VK_PAIRS_CALL(rows<1>(g, group, first, end));
    });
}

// Row `row` of the M whose converted form begins at `out`, as products of this kind read it.
void convert_activations(const void* x, int32_t dtype, int64_t k, int64_t kind, void* out, int64_t m, int64_t row) {
    if (kind == KIND_FLOATS) {
        for (int64_t i = 0; i < k; i += 16) store_upto((float*)out + row * k, VK_F32, i, k, load_upto(x, dtype, i, k));
        return;
    }
    if (kind == KIND_PAIRS) {
        int height;
        const int64_t first = piece_of(m, row, &height);
        uint8_t* piece = (uint8_t*)out + first * (k / 2) * VK_PAIRS_CALL(PAIR_BYTES);
        return VK_PAIRS_CALL(pack_row(x, dtype, k, piece, height, (int)(row - first)));
    }
    QuantRow q = QuantRow::at(out, m, row, k, kind);
    for (int64_t i = 0; i < k; i += 32) QuantRow::put(&q, load16(x, dtype, i), load16(x, dtype, i + 16));
}

// Bytes of one converted row.
VK_INLINE int64_t converted_bytes(int64_t k, int64_t kind) {
    if (kind == KIND_FLOATS) return 4 * k;
    return kind == KIND_PAIRS ? k / 2 * VK_PAIRS_CALL(PAIR_BYTES) : k / 32 * BLOCK_BYTES;
}

// p: x, out. n: K, x dtype, x stride, kind (see block_kind).
void op_quantize(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    const int64_t m = vk_rows(op, step);
    const int32_t dtype = (int32_t)op->n[1];
    vk_for_each(ctx, m, [&](int64_t row) {
        convert_activations(row_at(op->p[0], row * op->n[2], dtype), dtype, op->n[0], op->n[3], op->p[1], m, row);
    });
}

}  // namespace
