// RMS norm of rows, with and without the addition before it. Bound by memory.
//
// One block per row. A row whose start and width allow loads of 16 bytes is read once and stays in registers, up to
// 2 x 8 values a thread and 1024 threads; any other row is read twice, one value at a time.
#include "device.cuh"

struct VkNorm {
    const void* x;
    const void* residual;  // null: nothing is added
    const void* weight;    // null: none
    void* out;             // rows follow each other in out and total
    void* total;           // x + residual, rounded; it is the rounded sum that is normed
    int64_t rows, width;
    int64_t inner;  // row r is x[r / inner][r % inner], by these strides
    int64_t x_outer, x_inner, residual_outer, residual_inner;
    float eps, offset;
    int32_t type, weight_type, has_wide_loads;
};

constexpr int LARGEST_BLOCK = 1024;

template <typename T>
struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight {
    T at[8];
};

// Sum over the block, in the same order whatever runs beside it.
VK_DEVICE float sum_of_block(float x) {
    VK_SHARED(float, parts, LARGEST_BLOCK / 32);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = sum_of_warp(x);
    if (lane == 0) parts[warp] = x;
    sync_block();
    return sum_of_warp(lane < warps ? parts[lane] : 0.0f);
}

// x / rms · weight: rounded before the weight as well, unless the weight has an offset.
template <typename T>
VK_DEVICE T scaled(float x, float inverse, const VkNorm& a, int64_t column) {
    const float normed = x * inverse;
    if (!a.weight) return narrow<T>(normed);
    const float weight = load_as(a.weight, a.weight_type, column);
    if (a.offset != 0.0f) return narrow<T>(normed * (weight + a.offset));
    return narrow<T>(widen(narrow<T>(normed)) * widen(narrow<T>(weight)));
}

template <typename T>
VK_DEVICE int64_t start_of(int64_t row, int64_t inner, int64_t outer_stride, int64_t inner_stride) {
    return row / inner * outer_stride + row % inner * inner_stride;
}

// VECTORS: runs of eight values that a thread holds.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(LARGEST_BLOCK) rms_norm_held(VkNorm a) {
    const int64_t row = blockIdx.x;
    const auto* x = reinterpret_cast<const Eight<T>*>(
        static_cast<const T*>(a.x) + start_of<T>(row, a.inner, a.x_outer, a.x_inner));
    const auto* residual = reinterpret_cast<const Eight<T>*>(
        static_cast<const T*>(a.residual) + start_of<T>(row, a.inner, a.residual_outer, a.residual_inner));
    auto* const out = reinterpret_cast<Eight<T>*>(static_cast<T*>(a.out) + row * a.width);
    auto* const total = reinterpret_cast<Eight<T>*>(static_cast<T*>(a.total) + row * a.width);
    const int count = (int)(a.width / 8);
    Eight<T> held[VECTORS];
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = threadIdx.x + v * blockDim.x;
        if (at < count) held[v] = x[at];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = threadIdx.x + v * blockDim.x;
        if (at >= count) continue;
        if (a.residual) {
            const Eight<T> addend = residual[at];
#pragma unroll
            for (int i = 0; i < 8; i++) held[v].at[i] = narrow<T>(widen(held[v].at[i]) + widen(addend.at[i]));
            total[at] = held[v];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) squares += widen(held[v].at[i]) * widen(held[v].at[i]);
    }
    const float inverse = 1.0f / sqrtf(sum_of_block(squares) / (float)a.width + a.eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = threadIdx.x + v * blockDim.x;
        if (at >= count) continue;
        if (a.weight && a.weight_type == a.type) {
            const Eight<T> weight = static_cast<const Eight<T>*>(a.weight)[at];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float normed = widen(held[v].at[i]) * inverse, factor = widen(weight.at[i]);
                held[v].at[i] = a.offset != 0.0f ? narrow<T>(normed * (factor + a.offset))
                                                 : narrow<T>(widen(narrow<T>(normed)) * factor);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) held[v].at[i] = scaled<T>(widen(held[v].at[i]), inverse, a, at * 8 + i);
        }
        out[at] = held[v];
    }
}

template <typename T>
__global__ void __launch_bounds__(LARGEST_BLOCK) rms_norm_twice(VkNorm a) {
    const int64_t row = blockIdx.x;
    const T* const x = static_cast<const T*>(a.x) + start_of<T>(row, a.inner, a.x_outer, a.x_inner);
    const T* const residual =
        static_cast<const T*>(a.residual) + start_of<T>(row, a.inner, a.residual_outer, a.residual_inner);
    T* const out = static_cast<T*>(a.out) + row * a.width;
    T* const total = static_cast<T*>(a.total) + row * a.width;
    float squares = 0.0f;
    for (int64_t at = threadIdx.x; at < a.width; at += blockDim.x) {
        T value = x[at];
        if (a.residual) total[at] = value = narrow<T>(widen(value) + widen(residual[at]));
        squares += widen(value) * widen(value);
    }
    const float inverse = 1.0f / sqrtf(sum_of_block(squares) / (float)a.width + a.eps);
    // A thread reads back from total what it has itself written.
    const T* const normed = a.residual ? total : x;
    for (int64_t at = threadIdx.x; at < a.width; at += blockDim.x)
        out[at] = scaled<T>(widen(normed[at]), inverse, a, at);
}

template <typename T>
int launch_norm(const VkNorm& a, void* stream) {
    const dim3 grid((unsigned)a.rows);
    const auto threads_for = [](int64_t work) {
        return (int)(work > LARGEST_BLOCK ? LARGEST_BLOCK : (work + 31) / 32 * 32);
    };
    const int64_t vectors = a.width / 8;
    if (a.has_wide_loads && vectors <= LARGEST_BLOCK / 2)
        return launch(rms_norm_held<T, 1>, grid, threads_for(vectors), stream, a);
    if (a.has_wide_loads && vectors <= 2 * LARGEST_BLOCK)
        return launch(rms_norm_held<T, 2>, grid, threads_for((vectors + 1) / 2), stream, a);
    return launch(rms_norm_twice<T>, grid, threads_for(a.width), stream, a);
}

VK_EXPORT int vk_rms_norm(const VkNorm* a, int32_t device, void* stream) {
    use_device(device);
    if (a->type == VK_BF16) return launch_norm<bf16>(*a, stream);
    if (a->type == VK_F16) return launch_norm<f16>(*a, stream);
    return launch_norm<float>(*a, stream);
}

// What Python compares with the size of its own structure.
VK_EXPORT int64_t vk_rms_norm_bytes() { return sizeof(VkNorm); }
