// y = x Wᵀ + bias for a packed weight W of up to 8 rows of x. Bound by the bytes of W.
//
// Codes become bfloat16 integers, which is exact, and go through the tensor cores: 16 rows of W are a tile's rows, the
// rows of x its 8 columns, a group's sum is taken in float and multiplied by the group's scale. The work is the same
// for any number of columns. x that bfloat16 does not hold is the sum of two (float16) or three (float) numbers that
// it does, so that nothing is lost. Sums of x, which formats with a least value need, are products with a tile of ones.
//
// One block per 16 rows of W; its warps take blocks of the row by turns and their sums are added in order. The order of
// the sum over a row depends on nothing else, so that a result does not depend on the other rows of x.
#include "formats.cuh"

struct VkPacked {
    const void* x;  // rows at a multiple of 16 bytes
    const uint8_t* data;
    const void* bias;  // null: none
    void* out;
    int64_t rows, row_bytes, num_blocks;
    int64_t x_row, out_row;  // elements from one row of x and of out to the next
    int32_t tokens, type, bias_type, format, is_planes;
};

constexpr int ROWS = 16, TOKENS = 8, WARPS = 8;

// Four numbers of x as words of a tile, pairs (0, 2) and (1, 3) as codes_of gives them: in each of PARTS numbers.
template <typename T>
struct Run;

template <>
struct Run<bf16> {
    static constexpr int PARTS = 1;
    uint32_t words[1][2];
    VK_DEVICE void load(const bf16* from) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        words[0][0] = byte_perm(x.x, x.y, 0x5410), words[0][1] = byte_perm(x.x, x.y, 0x7632);
    }
};

template <int N>
VK_DEVICE void cut_into(uint32_t (&words)[N][2], float x0, float x1, float x2, float x3) {
    float x[4] = {x0, x2, x1, x3};
#pragma unroll
    for (int part = 0; part < N; part++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t word = pack_pair(bf16{}, x[2 * pair], x[2 * pair + 1]);
            words[part][pair] = word;
            x[2 * pair] -= float_of(word << 16), x[2 * pair + 1] -= float_of(word & 0xffff0000u);
        }
}

template <>
struct Run<f16> {
    static constexpr int PARTS = 2;
    uint32_t words[2][2];
    VK_DEVICE void load(const f16* from) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        cut_into(words, widen(f16{(uint16_t)x.x}), widen(f16{(uint16_t)(x.x >> 16)}), widen(f16{(uint16_t)x.y}),
                 widen(f16{(uint16_t)(x.y >> 16)}));
    }
};

template <>
struct Run<float> {
    static constexpr int PARTS = 3;
    uint32_t words[3][2];
    VK_DEVICE void load(const float* from) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        cut_into(words, float_of(x.x), float_of(x.y), float_of(x.z), float_of(x.w));
    }
};

// Four codes as pairs (0, 2) and (1, 3) of bfloat16 integers. A code below 128 in the mantissa of 128 makes 128 + code;
// the sign bit of a signed one makes that 128 a 256. What is too much is taken away, here or, IS_FOLDED, from the sum.
template <class F, bool IS_FOLDED>
VK_DEVICE void codes_of(uint32_t codes, uint32_t& even, uint32_t& odd) {
    constexpr uint32_t mask = F::MASK * 0x00010001u;
    const uint32_t shifted = codes >> 8;
    if (IS_FOLDED) {
        even = and_or(codes, mask, 0x43004300u), odd = and_or(shifted, mask, 0x43004300u);
    } else if (F::IS_SIGNED) {
        even = add_bf16x2(and_or(codes, 0x007f007fu, 0x43004300u), and_or(codes, 0x00800080u, 0xc300c300u));
        odd = add_bf16x2(and_or(shifted, 0x007f007fu, 0x43004300u), and_or(shifted, 0x00800080u, 0xc300c300u));
    } else {
        constexpr uint32_t minus = (0xc300u + F::ZERO) * 0x00010001u;
        even = add_bf16x2(and_or(codes, mask, 0x43004300u), minus);
        odd = add_bf16x2(and_or(shifted, mask, 0x43004300u), minus);
    }
}

// sum += the product of one block of two rows of W with x, which points at the block's first column of a lane's token.
template <class F, typename T>
VK_DEVICE void add_block(float (&sum)[4], const F (&held)[2], const T* x, bool is_token, int t) {
    // The sum of x is known for formats with a least value. 128 times it costs float a digit or two of its sums, which
    // results of 16 bits do not have.
    constexpr bool IS_FOLDED = F::HAS_LEAST && Run<T>::PARTS < 3;
    constexpr uint32_t ONES[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
    for (int group = 0; group < F::GROUPS; group++) {
        float products[4] = {}, ones[4] = {};
#pragma unroll
        for (int run = 0; run < 2; run++) {
            Run<T> columns = {};
            if (is_token) columns.load(x + 32 * group + (F::IS_WIDE ? 8 * t + 4 * run : 16 * run + 4 * t));
            uint32_t tile[4];
            codes_of<F, IS_FOLDED>(held[0].codes(group, run), tile[0], tile[2]);
            codes_of<F, IS_FOLDED>(held[1].codes(group, run), tile[1], tile[3]);
#pragma unroll
            for (int part = Run<T>::PARTS - 1; part >= 0; part--) {
                multiply_tile(bf16{}, products, tile, columns.words[part][0], columns.words[part][1]);
                if (F::HAS_LEAST) multiply_tile(bf16{}, ones, ONES, columns.words[part][0], columns.words[part][1]);
            }
            if (run == 0 && !F::HAS_SCALE_PER_RUN) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (IS_FOLDED) products[i] -= 128.0f * ones[i];
                if (F::HAS_LEAST) sum[i] -= held[i / 2].least(group) * ones[i];
                sum[i] += held[i / 2].scale(group, run) * products[i];
                products[i] = 0.0f;
            }
        }
    }
}

template <class F, bool IS_PLANES, typename T>
__global__ void __launch_bounds__(32 * WARPS, 2) packed_product(VkPacked a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int64_t first_row = (int64_t)blockIdx.x * ROWS, last_row = a.rows - 1;
    // A row that is not there is read as the last one; what comes of it is not stored.
    const int64_t top = first_row + g < last_row ? first_row + g : last_row;
    const int64_t bottom = first_row + g + 8 < last_row ? first_row + g + 8 : last_row;
    const Reader<F, IS_PLANES> rows[2] = {{a.data + top * a.row_bytes, a.num_blocks},
                                          {a.data + bottom * a.row_bytes, a.num_blocks}};
    const bool is_token = g < a.tokens;
    const T* const x = static_cast<const T*>(a.x) + (is_token ? g : 0) * a.x_row;
    float sum[4] = {};
    for (int64_t first = (int64_t)warp * F::UNIT; first < a.num_blocks; first += WARPS * F::UNIT) {
        F held[F::UNIT][2];
#pragma unroll
        for (int b = 0; b < F::UNIT; b++)
            if (first + b < a.num_blocks) {
                held[b][0].load(rows[0], first + b, t);
                held[b][1].load(rows[1], first + b, t);
            }
#pragma unroll
        for (int b = 0; b < F::UNIT; b++)
            if (first + b < a.num_blocks) add_block(sum, held[b], x + (first + b) * (32 * F::GROUPS), is_token, t);
    }
    VK_SHARED(float, parts, WARPS * ROWS * TOKENS);  // [warp][row][token]
#pragma unroll
    for (int i = 0; i < 4; i++) parts[(warp * ROWS + g + i / 2 * 8) * TOKENS + 2 * t + i % 2] = sum[i];
    sync_block();
    const int row = threadIdx.x % ROWS, token = threadIdx.x / ROWS;
    if (token >= a.tokens || first_row + row >= a.rows) return;
    float y = 0.0f;
    for (int w = 0; w < WARPS; w++) y += parts[(w * ROWS + row) * TOKENS + token];
    if (a.bias) y += load_as(a.bias, a.bias_type, first_row + row);
    static_cast<T*>(a.out)[token * a.out_row + first_row + row] = narrow<T>(y);
}

template <class F, bool IS_PLANES>
int launch_product(const VkPacked& a, void* stream) {
    const dim3 grid((unsigned)((a.rows + ROWS - 1) / ROWS));
    const int threads = 32 * WARPS;
    if (a.type == VK_BF16) return launch(packed_product<F, IS_PLANES, bf16>, grid, threads, stream, a);
    if (a.type == VK_F16) return launch(packed_product<F, IS_PLANES, f16>, grid, threads, stream, a);
    return launch(packed_product<F, IS_PLANES, float>, grid, threads, stream, a);
}

template <class F>
int launch_format(const VkPacked& a, void* stream) {
    return a.is_planes ? launch_product<F, true>(a, stream) : launch_product<F, false>(a, stream);
}

VK_EXPORT int vk_packed(const VkPacked* a, int32_t device, void* stream) {
    use_device(device);
    switch (a->format) {
        case VK_Q4_0: return launch_format<Q4_0>(*a, stream);
        case VK_Q4_1: return launch_format<Q4_1>(*a, stream);
        case VK_Q5_0: return launch_format<Q5_0>(*a, stream);
        case VK_Q5_1: return launch_format<Q5_1>(*a, stream);
        case VK_Q8_0: return launch_format<Q8_0>(*a, stream);
        case VK_Q4_K: return launch_format<Q4_K>(*a, stream);
        case VK_Q5_K: return launch_format<Q5_K>(*a, stream);
        case VK_Q6_K: return launch_format<Q6_K>(*a, stream);
        case VK_IQ4_NL: return launch_format<IQ4_NL>(*a, stream);
        case VK_IQ4_XS: return launch_format<IQ4_XS>(*a, stream);
        case VK_MXFP4: return launch_format<MXFP4>(*a, stream);
    }
    return 1;  // invalid value
}

// What Python compares with the size of its own structure.
VK_EXPORT int64_t vk_packed_bytes() { return sizeof(VkPacked); }
