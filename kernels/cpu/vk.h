// The C ABI of the native CPU backend: an op list, and the few values that change from step to step.
//
// A program is an array of VkOp over fixed buffers. Python records it once per model and replays it with one vk_run()
// per step (the CPU twin of a CUDA graph); an eager call is a program of one op. No torch header is included: pointers
// and strides are all a kernel sees.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define VK_ABI 2

// Formats carry their GGUF numbers; activations use the first three.
enum VkFormat {
    VK_F32 = 0, VK_F16 = 1, VK_BF16 = 30,
    VK_Q4_0 = 2, VK_Q4_1 = 3, VK_Q5_0 = 6, VK_Q5_1 = 7, VK_Q8_0 = 8,
    VK_Q2_K = 10, VK_Q3_K = 11, VK_Q4_K = 12, VK_Q5_K = 13, VK_Q6_K = 14,
    VK_IQ4_NL = 20, VK_IQ4_XS = 23, VK_MXFP4 = 39, VK_NVFP4 = 40,
    // Ours: codes with a float32 scale per 32 or 128 inputs, as quantised safetensors checkpoints hold them.
    VK_W4_32 = 200, VK_W4_128 = 201, VK_W8_32 = 202, VK_W8_128 = 203, VK_F8_32 = 204, VK_F8_128 = 205,
    VK_NF4_64 = 206, VK_FP4_64 = 207,  // codes into a table of floats, a float32 scale per 64 inputs
};

// A row count in an op is a literal (>= 0) or one of these, read from the step and multiplied by `row_factor`.
enum VkRows { VK_ROWS_TOKENS = -1, VK_ROWS_LOGITS = -2, VK_ROWS_SEQS = -3 };

enum VkOpcode {
    VK_OP_PACK = 0,        // weight rows as stored in the file -> packed groups of 16 rows
    VK_OP_QUANTIZE,        // float rows -> what a product reads: int8 blocks with scale and sums, or pairs
    VK_OP_GEMM,            // int8 blocks x packed weight -> float rows
    VK_OP_GEMM_PAIRS,      // bfloat16 pairs x packed bfloat16 weight -> float rows
    VK_OP_GEMM_EXACT,      // float rows x packed weight, dequantised in registers
    VK_OP_DENSE,           // float rows x plain rows of F32, F16 or BF16
    VK_OP_EMBED,           // rows of a plain or quantised table, read where the file has them
    VK_OP_RMS_NORM,        // optionally adds to the residual first, optionally quantises
    VK_OP_GLU,             // act(gate) * up, optionally quantises
    VK_OP_ROPE,            // rotates heads in place
    VK_OP_WRITE_KV,        // rows of k and v into their cache slots
    VK_OP_ATTENTION,       // paged attention of any mix of prefill and decode
    VK_OP_ATTENTION_JOIN,  // joins the parts of sequences whose keys were split
    VK_OP_COMBINE,         // (x + y) * factor or x * y, element by element
    VK_OP_UNARY,           // a named function of every element
    VK_OP_LAYER_NORM,
    VK_OP_ARGMAX,          // index of each row's largest value, ties to the lowest
    VK_OP_READ,            // sums a buffer: the memory read probe
    VK_OP_DRAW,            // one token per row, at random
    VK_OP_SCALE_ROWS,      // each row times a number of its own
    VK_OP_REPLACE_IDS,
    VK_OP_HEAD_DENSE,      // each head's row times a matrix of its own
    VK_OP_CONV,            // causal convolution over a sequence's last inputs, and its state
    VK_OP_LOG_DECAY,
    VK_OP_DELTA,           // gated delta rule
    VK_OP_SCAN,            // Mamba-2
    VK_OP_ROUTE,           // each token's experts and their weights
    VK_OP_EXPERT_SORT,     // rows of the experts' products: by expert
    VK_OP_EXPERT_ROWS,     // as QUANTIZE, into the pieces of each expert
    VK_OP_EXPERT_GEMM,     // each expert's rows x its weight
    VK_OP_EXPERT_JOIN,     // weighted sum of a token's experts
    VK_OP_COUNT
};

// Set in `flags`: the op needs nothing of the one before it, so threads go on to it without meeting.
#define VK_FLAG_INDEPENDENT 1

typedef struct VkOp {
    int32_t opcode;
    int32_t flags;
    int64_t rows;
    int64_t row_factor;
    void* p[10];
    int64_t n[20];
    float f[4];
} VkOp;

typedef struct VkStep {
    int64_t num_tokens;
    int64_t num_logits;
    int64_t num_seqs;
} VkStep;

static inline int64_t vk_rows(const VkOp* op, const VkStep* step) {
    if (op->rows >= 0) return op->rows;
    const int64_t rows = op->rows == VK_ROWS_TOKENS   ? step->num_tokens
                         : op->rows == VK_ROWS_LOGITS ? step->num_logits
                                                      : step->num_seqs;
    return rows * op->row_factor;
}

// How one thread sees its share of an op. Work is cut into numbered items; every thread owns a contiguous range, so that
// it reads weights in one stream, and takes from the others' ranges when its own is done.
typedef struct VkCtx {
    int32_t tid;
    int32_t nth;
    int32_t* counters;  // one per thread, 64 bytes apart; zero when the op starts
    uint8_t* scratch;   // this thread's own
    uint8_t* shared;    // one for all threads, kept from an op to the next
} VkCtx;

#define VK_COUNTER_STRIDE 16

template <class Body>
static inline void vk_for_each(VkCtx* ctx, int64_t total, Body body) {
    for (int v = 0; v < ctx->nth; ++v) {
        const int t = (ctx->tid + v) % ctx->nth;
        const int64_t begin = total * t / ctx->nth, end = total * (t + 1) / ctx->nth;
        if (begin == end) continue;
        for (;;) {
            const int64_t i = begin + __atomic_fetch_add(&ctx->counters[t * VK_COUNTER_STRIDE], 1, __ATOMIC_RELAXED);
            if (i >= end) break;
            body(i);
        }
    }
}

typedef void (*VkKernel)(const VkOp*, const VkStep*, VkCtx*);

typedef struct VkLevel {
    const char* name;
    VkKernel kernel[VK_OP_COUNT];
    // Whether an op of this many rows is worth more than one thread.
    int32_t (*is_parallel)(const VkOp*, int64_t rows);
    // Bytes of scratch that each thread, and that all threads together, need for this op.
    size_t (*scratch)(const VkOp*, const VkStep*);
    size_t (*shared)(const VkOp*, const VkStep*);
    // Whether what the level adds computes what it should here; null where that is sure.
    int32_t (*works)();
} VkLevel;
