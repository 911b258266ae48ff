// The part that is the same on every machine: thread pool, choice of level, replay of programs, the C ABI.
#include "levels.h"
#include "vk.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

// -------------------------------------------------------------------------------------------- packed formats

struct Size {
    int32_t format, super, row_bytes, group_bytes;
};
const Size SIZES[] = {
    {VK_Q4_0, 32, 18, 288},    {VK_Q4_1, 32, 20, 320},    {VK_Q5_0, 32, 22, 352},    {VK_Q5_1, 32, 24, 384},
    {VK_Q8_0, 32, 34, 544},    {VK_Q2_K, 256, 84, 1344},  {VK_Q3_K, 256, 110, 1760}, {VK_Q4_K, 256, 144, 2304},
    {VK_Q5_K, 256, 176, 2816}, {VK_Q6_K, 256, 210, 3360}, {VK_IQ4_NL, 32, 18, 288},  {VK_IQ4_XS, 256, 136, 2176},
    {VK_MXFP4, 32, 17, 272},   {VK_NVFP4, 64, 36, 576},   {VK_BF16, 2, 4, 64},
    {VK_W4_32, 32, 24, 384},   {VK_W4_128, 128, 72, 1152}, {VK_W8_32, 32, 36, 576}, {VK_W8_128, 128, 132, 2112},
    {VK_F8_32, 32, 36, 576},   {VK_F8_128, 128, 132, 2112}, {VK_NF4_64, 64, 36, 576}, {VK_FP4_64, 64, 36, 576},
};

const Size* size_of(int32_t format, int64_t cols) {
    for (const Size& s : SIZES)
        if (s.format == format && cols > 0 && cols % s.super == 0) return &s;
    return nullptr;
}

// -------------------------------------------------------------------------------------------- waiting
//
// Spin for about 40 microseconds, then sleep in the kernel: a spinning thread that shares its core with another program
// would keep the very thread it waits for from running.

constexpr int SPINS = 1500;
constexpr int MAX_THREADS = 256;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// What a waiting thread reads ahead into its own cache: the beginning of its share of the next weight.
struct Ahead {
    const uint8_t *next = nullptr, *end = nullptr;
    int op = -1;  // whose weight it is

    bool step() {
        if (next >= end) return false;
        for (int i = 0; i < 8; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
        next += 512;
        return true;
    }
};

struct Gate {
    alignas(64) std::atomic<uint32_t> phase{0};
    std::atomic<uint32_t> sleepers{0};

    void wait_past(uint32_t seen, Ahead* ahead = nullptr) {
        for (int i = 0; i < SPINS; ++i) {
            if (phase.load(std::memory_order_acquire) != seen) return;
            if (!ahead || !ahead->step()) relax();
        }
        sleepers.fetch_add(1);
        while (phase.load() == seen) syscall(SYS_futex, &phase, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers.fetch_sub(1);
    }
    void open() {
        phase.fetch_add(1);
        if (sleepers.load()) syscall(SYS_futex, &phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
};

// -------------------------------------------------------------------------------------------- the pool

struct Pool {
    int num_threads = 1;    // wanted
    int num_running = 1;    // workers that exist, plus the caller
    pthread_t threads[MAX_THREADS];
    Gate start, barrier, done;
    alignas(64) std::atomic<int> arrived{0};
    int resume = 0;  // the op at which threads go on after they met
    alignas(64) std::atomic<int> left{0};
    bool stopping = false;

    const VkLevel* level = nullptr;
    const VkOp* ops = nullptr;
    const VkStep* step = nullptr;
    int num_ops = 0;
    int32_t* counters = nullptr;
    size_t counters_size = 0;
    uint8_t* scratch[MAX_THREADS] = {};
    size_t scratch_size = 0;
    uint8_t* shared = nullptr;
    size_t shared_size = 0;
};

Pool* pool = new Pool;
pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;

// Points `ahead` at thread tid's share of the first product from op `from` on, if that is near and reads its weight once.
// Every thread reads as fast alone as all together (nearly: one reads 28 GB/s, two 31), so what is read while another
// thread norms a row is won.
constexpr int OPS_AHEAD = 8;
constexpr int64_t ROWS_AHEAD = 16, BYTES_AHEAD = 256 << 10;

void look_ahead(Pool* p, int from, int tid, Ahead* ahead) {
    const int stop = from + OPS_AHEAD < p->num_ops ? from + OPS_AHEAD : p->num_ops;
    for (int i = from; i < stop; ++i) {
        const VkOp* op = p->ops + i;
        if (op->opcode != VK_OP_GEMM && op->opcode != VK_OP_GEMM_PAIRS) continue;
        if (i == ahead->op) return;
        ahead->op = i;
        const Size* size = size_of((int32_t)op->n[0], op->n[2]);
        if (!size || vk_rows(op, p->step) > ROWS_AHEAD) {
            ahead->next = ahead->end;
            return;
        }
        const int64_t group = op->n[2] / size->super * size->group_bytes, groups = (op->n[1] + 15) / 16;
        const int64_t begin = groups * tid / p->num_running, end = groups * (tid + 1) / p->num_running;
        const int64_t bytes = (end - begin) * group;
        ahead->next = (const uint8_t*)op->p[1] + begin * group;
        ahead->end = ahead->next + (bytes < BYTES_AHEAD ? bytes : BYTES_AHEAD);
        return;
    }
}

bool is_shared_out(const Pool* p, int i) {
    return p->num_running > 1 && p->level->is_parallel(p->ops + i, vk_rows(p->ops + i, p->step));
}

void run_op(Pool* p, int i, int tid, int nth) {
    VkCtx ctx;
    ctx.tid = nth > 1 ? tid : 0;
    ctx.nth = nth;
    ctx.counters = p->counters + (size_t)i * p->num_running * VK_COUNTER_STRIDE;
    ctx.scratch = p->scratch[tid];
    ctx.shared = p->shared;
    p->level->kernel[p->ops[i].opcode](p->ops + i, p->step, &ctx);
}

// All threads meet before op i; the last to come does what is one thread's work from there on. Where they go on.
int meet(Pool* p, int i, int tid, Ahead* ahead) {
    const uint32_t seen = p->barrier.phase.load(std::memory_order_relaxed);
    if (p->arrived.fetch_add(1) + 1 < p->num_running) {
        look_ahead(p, i, tid, ahead);
        p->barrier.wait_past(seen, ahead);
        return p->resume;
    }
    while (i < p->num_ops && !is_shared_out(p, i)) run_op(p, i++, tid, 1);
    p->resume = i;
    p->arrived.store(0);
    p->barrier.open();
    return i;
}

// Every thread walks the whole list. They meet where something begins that needs what they did since they last met.
void walk(Pool* p, int tid) {
    Ahead ahead;
    bool is_open = false;  // whether an op that was shared out has begun since threads last met
    for (int i = 0; i < p->num_ops; ++i) {
        bool is_parallel = is_shared_out(p, i);
        if (i && (is_open || is_parallel) && !(p->ops[i].flags & VK_FLAG_INDEPENDENT)) {
            i = meet(p, i, tid, &ahead);
            if (i == p->num_ops) return;
            is_parallel = true;
        }
        is_open = is_open || is_parallel;
        if (is_parallel || !tid) run_op(p, i, tid, is_parallel ? p->num_running : 1);
    }
}

void finish(Pool* p) {
    if (p->left.fetch_sub(1) == 1) p->done.open();
}

struct WorkerArgument {
    Pool* pool;
    int tid;
    uint32_t seen;
};

void* worker(void* argument) {
    WorkerArgument a = *(WorkerArgument*)argument;
    free(argument);
    for (;;) {
        a.pool->start.wait_past(a.seen);
        ++a.seen;
        if (a.pool->stopping) return nullptr;
        walk(a.pool, a.tid);
        finish(a.pool);
    }
}

void stop_workers(Pool* p) {
    if (p->num_running == 1) return;
    p->stopping = true;
    p->start.open();
    for (int i = 1; i < p->num_running; ++i) pthread_join(p->threads[i], nullptr);
    p->stopping = false;
    p->num_running = 1;
}

void start_workers(Pool* p) {
    if (p->num_running == p->num_threads) return;
    stop_workers(p);
    for (int i = 1; i < p->num_threads; ++i) {
        WorkerArgument* a = (WorkerArgument*)malloc(sizeof(WorkerArgument));
        if (!a) break;
        *a = {p, i, p->start.phase.load()};
        if (pthread_create(&p->threads[i], nullptr, worker, a)) {
            free(a);
            break;
        }
        ++p->num_running;
    }
    p->num_threads = p->num_running;
}

// A forked child has no workers: it starts again with a new pool (the old one's memory is left, like every other lock's).
void after_fork() {
    Pool* fresh = new Pool;
    fresh->num_threads = pool->num_threads;
    fresh->level = pool->level;
    pool = fresh;
    pthread_mutex_init(&running, nullptr);
}

bool grow(uint8_t** p, size_t* size, size_t wanted) {
    if (wanted <= *size) return true;
    free(*p);
    *p = (uint8_t*)aligned_alloc(64, (wanted + 4095) / 4096 * 4096);
    *size = *p ? wanted : 0;
    return *p != nullptr;
}

bool prepare(Pool* p, const VkOp* ops, int num_ops, const VkStep* step) {
    size_t scratch = 64, shared = 0;
    for (int i = 0; i < num_ops; ++i) {
        const size_t mine = p->level->scratch(ops + i, step), ours = p->level->shared(ops + i, step);
        scratch = mine > scratch ? mine : scratch;
        shared = ours > shared ? ours : shared;
    }
    if (scratch > p->scratch_size) {
        for (int i = 0; i < p->num_running; ++i) {
            size_t none = 0;
            if (!grow(&p->scratch[i], &none, scratch)) return false;
        }
        p->scratch_size = scratch;
    }
    const size_t counters = (size_t)num_ops * p->num_running * VK_COUNTER_STRIDE * sizeof(int32_t);
    if (!grow((uint8_t**)&p->counters, &p->counters_size, counters)) return false;
    memset(p->counters, 0, counters);
    return grow(&p->shared, &p->shared_size, shared);
}

// -------------------------------------------------------------------------------------------- storage
//
// A step walks through all weights, and with pages of 4 KB it waits as long for the tables that name them as for the
// weights: small matrices then come at half the rate (measured: 15 instead of 28 GB/s). So all of them, small ones side
// by side, lie in chunks that ask for huge pages. Pages of a chunk that were never written cost nothing.

constexpr size_t HUGE_PAGE = 2u << 20, CHUNK = 64u << 20;

struct Chunk {
    uint8_t* base;
    size_t size, used;
    int64_t living;
    Chunk* next;
};
Chunk* chunks = nullptr;
pthread_mutex_t storing = PTHREAD_MUTEX_INITIALIZER;

Chunk* add_chunk(size_t size) {
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    Chunk* c = (Chunk*)malloc(sizeof(Chunk));
    uint8_t* raw = (uint8_t*)mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!c || raw == MAP_FAILED) {
        if (raw != MAP_FAILED) munmap(raw, size + HUGE_PAGE);
        free(c);
        return nullptr;
    }
    uint8_t* base = (uint8_t*)(((uintptr_t)raw + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (base > raw) munmap(raw, (size_t)(base - raw));
    if (raw + HUGE_PAGE > base) munmap(base + size, (size_t)(raw + HUGE_PAGE - base));
    madvise(base, size, MADV_HUGEPAGE);
    *c = {base, size, 0, 0, chunks};
    return chunks = c;
}

void* store(size_t bytes) {
    bytes = bytes ? (bytes + 63) / 64 * 64 : 64;
#if defined(__SANITIZE_ADDRESS__) || defined(VK_SEPARATE_WEIGHTS)
    return aligned_alloc(64, bytes);  // so that reading past one weight into the next is seen
#endif
    Chunk* c = chunks;
    while (c && c->size - c->used < bytes) c = c->next;
    if (!c) c = add_chunk(bytes > CHUNK ? bytes : CHUNK);
    if (!c) return nullptr;
    uint8_t* p = c->base + c->used;
    c->used += bytes;
    ++c->living;
    return p;
}

void unstore(uint8_t* p) {
#if defined(__SANITIZE_ADDRESS__) || defined(VK_SEPARATE_WEIGHTS)
    return free(p);
#endif
    for (Chunk** at = &chunks; *at; at = &(*at)->next) {
        Chunk* c = *at;
        if (p < c->base || p >= c->base + c->size) continue;
        if (--c->living) return;
        *at = c->next;
        munmap(c->base, c->size);
        free(c);
        return;
    }
}

// Whether a page is surely not anonymous memory, which MADV_DONTNEED would clear: the system takes MADV_WIPEONFORK for
// that alone. A system that does not know it (before Linux 4.14) takes it for nothing.
bool is_of_a_file(void* page) {
    static const bool can_tell = [] {
        void* own = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        const bool is_taken = own != MAP_FAILED && !madvise(own, 4096, MADV_WIPEONFORK);
        if (own != MAP_FAILED) munmap(own, 4096);
        return is_taken;
    }();
    if (!can_tell) return false;
    if (madvise(page, 4096, MADV_WIPEONFORK)) return errno == EINVAL;
    madvise(page, 4096, MADV_KEEPONFORK);
    return false;
}

}  // namespace

// -------------------------------------------------------------------------------------------- the C ABI

#define VK_EXPORT extern "C" __attribute__((visibility("default")))

VK_EXPORT int32_t vk_abi() { return VK_ABI; }
VK_EXPORT int32_t vk_op_size() { return (int32_t)sizeof(VkOp); }
VK_EXPORT int32_t vk_block_bytes() { return 44; }

// Whether this machine runs a level.
VK_EXPORT int32_t vk_can_run(const char* name) { return can_run(name); }

// Takes a level; 0 when there is none of that name or this machine cannot run it.
VK_EXPORT int32_t vk_use_level(const char* name) {
    const VkLevel* level = find_level(name);
    if (!level || !can_run(name)) return 0;
    pthread_mutex_lock(&running);
    static bool is_registered = false;
    if (!is_registered) pthread_atfork(nullptr, nullptr, after_fork);
    is_registered = true;
    pool->level = level;
    pthread_mutex_unlock(&running);
    return 1;
}

VK_EXPORT const char* vk_current_level() { return pool->level ? pool->level->name : ""; }

VK_EXPORT void vk_set_num_threads(int32_t num_threads) {
    pthread_mutex_lock(&running);
    stop_workers(pool);
    for (int i = 0; i < MAX_THREADS; ++i) {
        free(pool->scratch[i]);
        pool->scratch[i] = nullptr;
    }
    pool->scratch_size = 0;
    pool->num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    pthread_mutex_unlock(&running);
}

VK_EXPORT int32_t vk_num_threads() { return pool->num_threads; }

// Runs a program. 0, or the errno of what went wrong (ENOMEM, EINVAL for an unknown opcode).
VK_EXPORT int32_t vk_run(const VkOp* ops, int32_t num_ops, const VkStep* step) {
    for (int i = 0; i < num_ops; ++i)
        if (ops[i].opcode < 0 || ops[i].opcode >= VK_OP_COUNT) return EINVAL;
    pthread_mutex_lock(&running);
    Pool* p = pool;
    start_workers(p);
    if (!p->level || !prepare(p, ops, num_ops, step)) {
        pthread_mutex_unlock(&running);
        return p->level ? ENOMEM : EINVAL;
    }
    p->ops = ops;
    p->num_ops = num_ops;
    p->step = step;
    if (p->num_running > 1) {
        const uint32_t seen = p->done.phase.load();
        p->left.store(p->num_running - 1);
        p->start.open();
        walk(p, 0);
        p->done.wait_past(seen);
    } else {
        walk(p, 0);
    }
    pthread_mutex_unlock(&running);
    return 0;
}

// Bytes of 16 packed rows of `cols` values; 0 when the format or the width is not one we pack.
VK_EXPORT int64_t vk_group_bytes(int32_t format, int64_t cols) {
    const Size* s = size_of(format, cols);
    return s ? cols / s->super * s->group_bytes : 0;
}

// Bytes of one row as the file stores it; 0 as above.
VK_EXPORT int64_t vk_row_bytes(int32_t format, int64_t cols) {
    const Size* s = size_of(format, cols);
    return s ? cols / s->super * s->row_bytes : 0;
}

// Memory for packed weights; null if there is none.
VK_EXPORT void* vk_alloc(int64_t bytes) {
    pthread_mutex_lock(&storing);
    void* p = store((size_t)bytes);
    pthread_mutex_unlock(&storing);
    return p;
}
VK_EXPORT void vk_free(void* p) {
    pthread_mutex_lock(&storing);
    unstore((uint8_t*)p);
    pthread_mutex_unlock(&storing);
}

// Lets this process go of pages of a file that it has read; they stay in the system's cache, and come back when touched.
// Memory that is no file's is left alone. (Files are mapped for reading only, so no page here holds what the file does not.)
VK_EXPORT void vk_release_mapping(const void* p, int64_t bytes) {
    const uintptr_t page = 4096, begin = ((uintptr_t)p + page - 1) / page * page, end = ((uintptr_t)p + bytes) / page * page;
    if (end > begin && is_of_a_file((void*)begin)) madvise((void*)begin, end - begin, MADV_DONTNEED);
}
