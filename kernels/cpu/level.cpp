// All kernels of one level. Compiled once per level (-DVK_LEVEL_NAME=...) with that level's instruction flags; only
// C headers are included, so that no library code compiled for a newer machine can be linked into an older level.
//
// Arithmetic of a row never depends on the other rows of the step nor on the number of threads: tiles of different
// heights run the same operations in the same order for each of their rows.
#include <float.h>

#include "formats.h"
#include "simd.h"
#include "vk.h"

#define VK_JOIN2(a, b) a##b
#define VK_JOIN(a, b) VK_JOIN2(a, b)
#define VK_STR2(a) #a
#define VK_STR(a) VK_STR2(a)

#include "rows.h"
#include "gemm.h"
#include "dense.h"
#include "narrow.h"
#include "elementwise.h"
#include "attention.h"
#include "sampling.h"
#include "experts.h"
#include "delta.h"
#include "recurrent.h"

namespace {

// Below this many values a second thread costs more than it saves (a barrier is about a third of a microsecond).
constexpr int64_t SERIAL_VALUES = 16384;

int32_t is_parallel(const VkOp* op, int64_t rows) {
    switch (op->opcode) {
        case VK_OP_PACK: case VK_OP_GEMM: case VK_OP_GEMM_PAIRS: case VK_OP_GEMM_EXACT: case VK_OP_DENSE: case VK_OP_READ: case VK_OP_ATTENTION:
        case VK_OP_EXPERT_GEMM: case VK_OP_HEAD_DENSE: case VK_OP_CONV: case VK_OP_DELTA: case VK_OP_SCAN:
            return 1;
        case VK_OP_EXPERT_SORT: return 0;
        case VK_OP_ROPE: return rows * (op->n[0] + op->n[1]) * op->n[2] > SERIAL_VALUES;
        case VK_OP_WRITE_KV: case VK_OP_ATTENTION_JOIN: return rows * op->n[0] * op->n[2] > SERIAL_VALUES;
        default: return rows > 1 && rows * op->n[0] > SERIAL_VALUES;
    }
}

size_t scratch(const VkOp* op, const VkStep* step) {
    switch (op->opcode) {
        case VK_OP_DRAW: return draw_scratch(op);
        case VK_OP_DELTA: return delta_scratch(op);
        case VK_OP_SCAN: return state_scratch(op);
        case VK_OP_ROUTE: return (size_t)op->n[0] * 8;
        default: break;
    }
    return op->opcode == VK_OP_ATTENTION ? attention_scratch(op, step) : 0;
}

size_t shared(const VkOp* op, const VkStep* step) {
    return op->opcode == VK_OP_ATTENTION ? attention_shared(op, step) : 0;
}

const VkLevel LEVEL = {
    VK_STR(VK_LEVEL_NAME),
    {
        op_pack, op_quantize, op_gemm, op_gemm_pairs, op_gemm_exact, op_dense, op_embed, op_rms_norm, op_glu, op_rope, op_write_kv,
        op_attention, op_attention_join, op_combine, op_unary, op_layer_norm, op_argmax, op_read,
        op_draw,
        op_scale_rows, op_replace_ids, op_head_dense, op_conv, op_log_decay, op_delta, op_scan, op_route, op_expert_sort,
        op_expert_rows, op_expert_gemm, op_expert_join,
    },
    is_parallel,
    scratch,
    shared,
#if defined(VK_TILES)
    tiles_work,
#else
    nullptr,
#endif
};

}  // namespace

extern "C" const VkLevel* VK_JOIN(vk_level_, VK_LEVEL_NAME)() { return &LEVEL; }
