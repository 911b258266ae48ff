// The levels that are linked in, and which of them this machine runs. Included by core.cpp alone.
#pragma once

#include "vk.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if !defined(VK_TILE_EMULATION)
extern "C" const VkLevel* vk_level_scalar();
#endif
#if defined(__x86_64__)
#if !defined(VK_TILE_EMULATION)
extern "C" const VkLevel* vk_level_avx2();
extern "C" const VkLevel* vk_level_avx512vnni();
#endif
extern "C" const VkLevel* vk_level_amx();
#endif

namespace {

const VkLevel* find_level(const char* name) {
#if !defined(VK_TILE_EMULATION)
    if (!strcmp(name, "scalar")) return vk_level_scalar();
#if defined(__x86_64__)
    if (!strcmp(name, "avx2")) return vk_level_avx2();
    if (!strcmp(name, "avx512vnni")) return vk_level_avx512vnni();
#endif
#endif
#if defined(__x86_64__)
    if (!strcmp(name, "amx")) return vk_level_amx();
#endif
    return nullptr;
}

#if defined(__x86_64__)

#if defined(VK_TILE_EMULATION)
bool may_use_tiles() { return true; }
#else
// Whether the processor has tiles of the size we use and both products, the system saves them (two bits of XCR0), and it
// lets this process have them: it must be asked once, before the first instruction.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux, x86/xstate.rst.
bool may_use_tiles() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, NEEDED = BF16 | TILE | INT8;
    constexpr unsigned OSXSAVE = 1u << 27, TILE_STATE = 3u << 17;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILE_STATE) != TILE_STATE) return false;
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || (b & 0xffff) < 64 || b >> 16 < 8 || (c & 0xffff) < 16) return false;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif

// Tiles are tried once, on two small products: a machine whose tiles compute something else goes without.
bool can_use_tiles() {
    static const bool can = may_use_tiles() && vk_level_amx()->works();
    return can;
}

#endif

bool can_run(const char* name) {
    if (!find_level(name)) return false;
    if (!strcmp(name, "scalar")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!strcmp(name, "avx2")) return avx2;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx512vnni")) return avx512;
    if (!strcmp(name, "amx")) return avx512 && __builtin_cpu_supports("avx512bf16") && can_use_tiles();
#endif
    return false;
}

}  // namespace
