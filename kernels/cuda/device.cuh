// What all kernels here share: number formats, loads, operations of a warp, products of 16-bit tiles, the launch.
//
// Whatever is not plain C++ is behind a name of this file. A host build (VK_HOST, tests only) finds the same names in
// host_shim.h and runs the kernels' own source on the processor. A kernel has one array of shared memory, VK_SHARED;
// barriers and warp operations need all threads.
#pragma once

#include <cstdint>

#ifdef VK_HOST
#include "host_shim.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#define VK_DEVICE __device__ __forceinline__
#define VK_EXPORT extern "C" __attribute__((visibility("default")))

// ---- number formats ------------------------------------------------------------------------------------------------

#ifndef VK_HOST
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
#endif

// Numbers that Python sends for a type.
enum VkType : int32_t { VK_F32 = 0, VK_BF16 = 1, VK_F16 = 2 };

VK_DEVICE uint32_t bits_of(float x) {
    union {
        float f;
        uint32_t u;
    } both;
    both.f = x;
    return both.u;
}

VK_DEVICE float float_of(uint32_t bits) {
    union {
        uint32_t u;
        float f;
    } both;
    both.u = bits;
    return both.f;
}

VK_DEVICE float widen(float x) { return x; }
VK_DEVICE float widen(bf16 x) { return float_of((uint32_t)x.bits << 16); }

// float in bfloat16, ties to even; a NaN stays one.
VK_DEVICE uint16_t bf16_bits(float x) {
#ifdef __CUDA_ARCH__
    uint16_t out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
#else
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
}

#ifdef VK_HOST
VK_DEVICE float widen(f16 x) { return vk_half_to_float(x.bits); }
VK_DEVICE uint16_t f16_bits(float x) { return vk_float_to_half(x); }
#else
VK_DEVICE float widen(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
VK_DEVICE uint16_t f16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
#endif

template <typename T>
VK_DEVICE T narrow(float x);
template <>
VK_DEVICE float narrow<float>(float x) {
    return x;
}
template <>
VK_DEVICE bf16 narrow<bf16>(float x) {
    return bf16{bf16_bits(x)};
}
template <>
VK_DEVICE f16 narrow<f16>(float x) {
    return f16{f16_bits(x)};
}

// Two floats as one word of two bfloat16 (or float16), the first in the low half.
VK_DEVICE uint32_t pack_pair(bf16, float low, float high) {
    return (uint32_t)bf16_bits(low) | (uint32_t)bf16_bits(high) << 16;
}
VK_DEVICE uint32_t pack_pair(f16, float low, float high) {
    return (uint32_t)f16_bits(low) | (uint32_t)f16_bits(high) << 16;
}

// Element i of an array whose type is known at run time: weights and biases may be wider than the activations.
VK_DEVICE float load_as(const void* from, int32_t type, int64_t i) {
    if (type == VK_BF16) return widen(static_cast<const bf16*>(from)[i]);
    if (type == VK_F16) return widen(static_cast<const f16*>(from)[i]);
    return static_cast<const float*>(from)[i];
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

#ifndef VK_HOST
// 2^x; a result below the normal numbers is zero.
VK_DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte i of the result is byte (selector's hexadecimal digit i, 0..7) of b:a.
VK_DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// (x & mask) | other in one instruction: of two constants the compiler makes two.
VK_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t other) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(other));
    return out;
}

// Pairs of bfloat16, added.
VK_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return sum;
}

// ---- memory --------------------------------------------------------------------------------------------------------

// What another block has written during this launch.
VK_DEVICE float load_fresh(const float* from) { return __ldcg(from); }
VK_DEVICE int atomic_add(int* to, int value) { return atomicAdd(to, value); }
VK_DEVICE void fence() { __threadfence(); }
VK_DEVICE void sync_block() { __syncthreads(); }

#define VK_SHARED(type, name, count) __shared__ __align__(16) type name[count]

// ---- warps ---------------------------------------------------------------------------------------------------------

VK_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// c += a b, for a tile a of 16 x 16, b of 16 x 8, c of 16 x 8 in float. Lane 4 g + t holds of a the words (row g,
// columns 2 t and 2 t + 1), (row g + 8, the same), (row g, columns 2 t + 8 and 9), (row g + 8, the same); of b (rows
// 2 t and 2 t + 1, column g), (rows 2 t + 8 and 9, column g); of c (row g, columns 2 t and 2 t + 1), (row g + 8, the
// same).
VK_DEVICE void multiply_tile(bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
VK_DEVICE void multiply_tile(f16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The transpose of an 8 x 8 tile of 16-bit numbers: lane 4 g + t holds row g, columns 2 t and 2 t + 1.
VK_DEVICE uint32_t transpose_tile(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// ---- launch --------------------------------------------------------------------------------------------------------

// The library has a runtime of its own, which must be told the device that torch has chosen.
inline void use_device(int device) { cudaSetDevice(device); }

// Starts `kernel` and returns CUDA's error code.
template <typename A>
inline int launch(void (*kernel)(A), dim3 grid, int threads, void* stream, const A& arguments) {
    kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
    return cudaGetLastError();
}
#endif

VK_DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
    return x;
}

VK_DEVICE float max_of(float a, float b) { return a > b ? a : b; }
