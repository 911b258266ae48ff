// Runs CUDA kernels on the processor, for tests: every thread of a block is a fiber, blocks run one after another.
//
// Fibers change only at barriers and warp operations, in an order that VK_HOST_ORDER chooses (0: as numbered, 1:
// backwards, n: shuffled with that seed): where a result depends on it, a barrier is missing. Shared memory is a heap
// block of exactly its size, filled with NaN. A barrier that not all threads reach, or lanes of a warp in
// different operations, end the launch with an error.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace shim {

constexpr int MISUSE = 719;  // "unspecified launch failure"
constexpr size_t STACK_BYTES = 256 << 10;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    void* fake_stack = nullptr;
    bool is_done = false;
    const char* waits_for = nullptr;  // the name of a barrier; null: may run
    bool waits_for_block = false;
    uint64_t operations = 0;
};

struct Warp {
    uint32_t slots[2][32][6];
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::unique_ptr<char[]> shared;
    size_t shared_bytes = 0;
    std::function<void()> body;
    ucontext_t scheduler;
    void* scheduler_fake_stack = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;
    int current = 0;
};

inline Block* block = nullptr;
inline dim3 thread_index, block_index, block_size, grid_size;

// Between fibers the address sanitizer wants to be told which stack comes next.
inline void announce(void** fake_stack, const void* stack, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#else
    (void)fake_stack, (void)stack, (void)bytes;
#endif
}
inline void arrived(void* fake_stack, const void** stack, size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
#else
    (void)fake_stack, (void)stack, (void)bytes;
#endif
}

inline void to_scheduler(bool is_last) {
    Fiber& own = block->fibers[block->current];
    announce(is_last ? nullptr : &own.fake_stack, block->scheduler_stack, block->scheduler_stack_bytes);
    swapcontext(&own.context, &block->scheduler);
    arrived(own.fake_stack, nullptr, nullptr);
}

inline void wait(const char* what, bool for_block) {
    Fiber& own = block->fibers[block->current];
    own.waits_for = what;
    own.waits_for_block = for_block;
    own.operations++;
    to_scheduler(false);
}

inline void enter() {
    arrived(nullptr, &block->scheduler_stack, &block->scheduler_stack_bytes);
    block->body();
    block->fibers[block->current].is_done = true;
    to_scheduler(true);
}

inline void run_until_it_waits(int index) {
    block->current = index;
    thread_index = dim3(index, 0, 0);
    Fiber& fiber = block->fibers[index];
    announce(&block->scheduler_fake_stack, fiber.stack.get(), STACK_BYTES);
    swapcontext(&block->scheduler, &fiber.context);
    arrived(block->scheduler_fake_stack, nullptr, nullptr);
}

// Lets the fibers first .. last - 1 go on if all of them wait for the same; false if they never will.
inline bool release(int first, int last, bool for_block, bool* released) {
    const char* what = nullptr;
    uint64_t operations = 0;
    bool has_left = false;
    for (int i = first; i < last; i++) {
        const Fiber& fiber = block->fibers[i];
        if (fiber.is_done) {
            has_left = true;
            continue;
        }
        if (!fiber.waits_for || fiber.waits_for_block != for_block) return true;
        if (what && (strcmp(what, fiber.waits_for) || (!for_block && operations != fiber.operations))) {
            fprintf(stderr, "host shim: one lane in %s, another in %s\n", what, fiber.waits_for);
            return false;
        }
        what = fiber.waits_for, operations = fiber.operations;
    }
    if (!what) return true;
    if (has_left) {
        fprintf(stderr, "host shim: %s after a thread has ended\n", what);
        return false;
    }
    for (int i = first; i < last; i++) block->fibers[i].waits_for = nullptr;
    *released = true;
    return true;
}

// The block's shared memory; the first thread to ask has it made.
inline void* shared(size_t bytes) {
    if (!block->shared) {
        block->shared.reset(new char[bytes]);
        memset(block->shared.get(), 0xff, bytes);
        block->shared_bytes = bytes;
    }
    if (bytes != block->shared_bytes || bytes > 48 << 10) {
        fprintf(stderr, "host shim: %zu bytes shared\n", bytes);
        abort();
    }
    return block->shared.get();
}

inline bool run_block(const std::vector<int>& order, int threads) {
    for (int left = threads; left;) {
        bool progressed = false;
        for (int index : order) {
            Fiber& fiber = block->fibers[index];
            if (fiber.is_done || fiber.waits_for) continue;
            run_until_it_waits(index);
            progressed = true;
            left -= fiber.is_done;
        }
        for (int warp = 0; warp * 32 < threads; warp++)
            if (!release(warp * 32, std::min(threads, warp * 32 + 32), false, &progressed)) return false;
        if (!release(0, threads, true, &progressed)) return false;
        if (!progressed && left) {
            fprintf(stderr, "host shim: a barrier that not all threads reach\n");
            return false;
        }
    }
    return true;
}

inline std::vector<int> ordered(int count, unsigned order) {
    std::vector<int> indices(count);
    std::iota(indices.begin(), indices.end(), 0);
    if (order == 1) std::reverse(indices.begin(), indices.end());
    if (order > 1) std::shuffle(indices.begin(), indices.end(), std::mt19937(order));
    return indices;
}

inline int run(dim3 grid, int threads, const std::function<void()>& body) {
    if (!threads || threads > 1024 || threads % 32 || !grid.x || grid.x > 0x7fffffffu || !grid.y || grid.y > 65535 ||
        !grid.z || grid.z > 65535)
        return 9;  // invalid configuration
    const char* text = getenv("VK_HOST_ORDER");
    const unsigned order = text ? (unsigned)atoi(text) : 0;
    Block current;
    current.fibers = std::vector<Fiber>(threads);
    current.warps = std::vector<Warp>(threads / 32);
    current.body = body;
    block = &current;
    grid_size = grid, block_size = dim3(threads);
    const std::vector<int> lanes = ordered(threads, order);
    for (int number : ordered((int)(grid.x * grid.y * grid.z), order)) {
        block_index = dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y);
        current.shared.reset();
        for (Fiber& fiber : current.fibers) {
            fiber.is_done = false, fiber.waits_for = nullptr, fiber.operations = 0;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK_BYTES;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
        }
        if (!run_block(lanes, threads)) return MISUSE;
    }
    return 0;
}

// Every lane gives words and sees those of all lanes of its warp. Two sets of slots by turns: a lane that is ahead
// writes to the set that no other can still be reading.
inline const uint32_t (*exchange(const char* what, std::initializer_list<uint32_t> words))[6] {
    const int lane = block->current % 32;
    Warp& warp = block->warps[block->current / 32];
    const uint64_t turn = block->fibers[block->current].operations % 2;
    std::copy(words.begin(), words.end(), warp.slots[turn][lane]);
    wait(what, false);
    return warp.slots[turn];
}

template <typename To, typename From>
inline To cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &x, sizeof to);
    return to;
}

}  // namespace shim

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size

#define VK_SHARED(type, name, count) type* const name = static_cast<type*>(shim::shared(sizeof(type) * (count)))
inline void sync_block() { shim::wait("a barrier of the block", true); }
inline void fence() {}
inline float load_fresh(const float* from) { return *from; }
inline int atomic_add(int* to, int value) {
    const int before = *to;
    *to += value;
    return before;
}

inline float vk_half_to_float(uint16_t bits) { return (float)shim::cast<_Float16>(bits); }
inline uint16_t vk_float_to_half(float x) { return shim::cast<uint16_t>((_Float16)x); }
inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t digit = selector >> (4 * i) & 15;
        uint32_t byte = (uint32_t)(both >> (8 * (digit & 7))) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;  // the instruction spreads the sign
        out |= byte << (8 * i);
    }
    return out;
}

inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t other) { return (x & mask) | other; }

inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    const float low = shim::cast<float>(a << 16) + shim::cast<float>(b << 16);
    const float high = shim::cast<float>(a & 0xffff0000u) + shim::cast<float>(b & 0xffff0000u);
    const uint32_t low_bits = shim::cast<uint32_t>(low), high_bits = shim::cast<uint32_t>(high);
    if ((low_bits | high_bits) & 0xffffu) fprintf(stderr, "host shim: a sum of bfloat16 that is not exact\n"), abort();
    return low_bits >> 16 | high_bits;
}

inline float shuffle_xor(float x, int mask) {
    const int lane = shim::block->current % 32;
    return shim::cast<float>(shim::exchange("shuffle_xor", {shim::cast<uint32_t>(x)})[lane ^ mask][0]);
}

namespace shim {

inline float half_of(uint32_t word, int index, bool is_bf16) {
    const uint16_t bits = (uint16_t)(word >> (16 * index));
    return is_bf16 ? cast<float>((uint32_t)bits << 16) : vk_half_to_float(bits);
}

inline void multiply_tile(bool is_bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int g = block->current % 32 / 4, t = block->current % 4;
    const char* what = is_bf16 ? "multiply_tile of bf16" : "multiply_tile of f16";
    const auto* all = exchange(what, {a[0], a[1], a[2], a[3], b0, b1});
    for (int i = 0; i < 4; i++) {
        const int is_lower = i / 2, column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            const int lane = k % 8 / 2, word = k / 8;
            sum += half_of(all[4 * g + lane][2 * word + is_lower], k % 2, is_bf16) *
                   half_of(all[4 * column + lane][4 + word], k % 2, is_bf16);
        }
        c[i] += sum;
    }
}

}  // namespace shim

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
inline void multiply_tile(bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    shim::multiply_tile(true, c, a, b0, b1);
}
inline void multiply_tile(f16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    shim::multiply_tile(false, c, a, b0, b1);
}

inline uint32_t transpose_tile(uint32_t x) {
    const int g = shim::block->current % 32 / 4, t = shim::block->current % 4;
    const auto* all = shim::exchange("transpose_tile", {x});
    const auto entry = [&](int row, int column) {
        return all[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffffu;
    };
    return entry(2 * t, g) | entry(2 * t + 1, g) << 16;
}

inline void use_device(int) {}

template <typename A>
inline int launch(void (*kernel)(A), dim3 grid, int threads, void*, const A& arguments) {
    return shim::run(grid, threads, [&] { kernel(arguments); });
}
