// Kernels with mistakes that the shim must see.
#include "device.cuh"

struct Given {
    float* out;
    int mistake;
};

__global__ void mistaken(Given a) {
    VK_SHARED(float, shared, 64);
    const int thread = threadIdx.x;
    if (a.mistake == 1 && thread < 32) sync_block();  // only half of the block comes
    if (a.mistake == 2 && thread % 32 < 16) shuffle_xor(1.0f, 1);  // half a warp
    if (a.mistake == 3 && thread % 32 == 5) return;  // before the others' shuffle
    if (a.mistake == 3) shuffle_xor(1.0f, 1);
    if (a.mistake == 4) {
        if (thread % 2) {
            shuffle_xor(1.0f, 1);
        } else {
            transpose_tile(1);
        }
    }
    shared[thread] = (float)thread;
    if (a.mistake != 5) sync_block();
    a.out[thread] = shared[(thread + 33) % 64];  // without the barrier: what is there by then

}

VK_EXPORT int run_mistaken(float* out, int mistake) { return launch(mistaken, dim3(1), 64, nullptr, Given{out, mistake}); }

__global__ void tiles(Given a) {
    const int lane = threadIdx.x;
    const float* const in = a.out;  // a (16, 16), b (16, 8), then c (16, 8) and the transpose (8, 8) of b's first half
    const int g = lane / 4, t = lane % 4;
    const auto pair = [&](const float* from, int step) { return pack_pair(bf16{}, from[0], from[step]); };
    const uint32_t left[4] = {pair(in + 16 * g + 2 * t, 1), pair(in + 16 * (g + 8) + 2 * t, 1),
                              pair(in + 16 * g + 2 * t + 8, 1), pair(in + 16 * (g + 8) + 2 * t + 8, 1)};
    const float* const right = in + 256;
    float c[4] = {};
    multiply_tile(bf16{}, c, left, pair(right + 8 * 2 * t + g, 8), pair(right + 8 * (2 * t + 8) + g, 8));
    for (int i = 0; i < 4; i++) a.out[384 + 8 * (g + i / 2 * 8) + 2 * t + i % 2] = c[i];
    const uint32_t turned = transpose_tile(pair(right + 8 * g + 2 * t, 1));
    a.out[512 + 8 * g + 2 * t] = float_of(turned << 16), a.out[512 + 8 * g + 2 * t + 1] = float_of(turned & 0xffff0000u);
}

VK_EXPORT int run_tiles(float* out) { return launch(tiles, dim3(1), 32, nullptr, Given{out, 0}); }
