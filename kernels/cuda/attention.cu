// Attention of few queries over a paged cache: softmax(mask(cap(scale · q kᵀ))) v. Bound by keys and values.
//
// A sequence's keys are cut into chunks of a fixed number, one block each, so that a result depends on the sequence
// alone; the last block of a sequence to finish merges its parts in order. The query heads that share a kv head, times
// the queries, are the rows of one block: keys and values are read once for all of them.
//
// Both products go through the tensor cores with keys and values as the 16-row operand, straight from the cache by
// loads of 16 bytes, with no shared memory between. Scores: a tile's rows are 16 keys, its columns 8 query rows; lane t
// of four holds elements 8 t .. 8 t + 7 of each 32, for keys and queries alike, which only permutes a sum. Output: a
// tile's rows are 16 value columns, its inner dimension the 16 keys; lane 4 g + t loads columns 8 g .. 8 g + 7 of four
// keys and pairs them up, so that a tile's rows are every other column. The weights go from the first product's result
// to the second's operand by the transpose of an 8 x 8 tile. A warp takes every WARPS-th run of 16 keys of the chunk.
//
// Softmax in base 2, the running maximum clamped where nothing is visible yet; a sink is added once, at the very end.
// Source: Dao et al. 2022, algorithm 1; Dao 2023, flash-decoding.
#include "device.cuh"

struct VkDecode {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    void* out;             // (T, H, value_width)
    float* part;           // (sequences, splits, max_queries, H, value_width)
    float* part_lse;       // (sequences, splits, max_queries, H)
    const float* sinks;    // (H); null: none
    int32_t* finished;     // (sequences, kv heads, tiles): zero before and after
    const int32_t* table;
    const int32_t* rows;
    const int32_t* seq_lens;
    const int32_t* cu_seqlens;
    int64_t table_row, q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head;
    int32_t num_sequences, num_kv_heads, group, block_size, width, value_width;
    int32_t max_queries, num_splits, chunk, window;  // window 0: none
    int32_t type, num_tiles, columns;                // num_tiles of columns times 8 query rows: a sequence, a kv head
    float scale, soft_cap;                           // soft_cap 0: none
};

constexpr int WARPS = 4, KEYS = 16, COLUMNS = 8;
constexpr float NOTHING = -INFINITY;

VK_DEVICE uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// One sequence's keys as a block sees them.
struct Chunk {
    int first, last, lowest;  // keys first .. last - 1; those below lowest must not be read
    int length, num_queries, num_chunks, query_start;
    const int32_t* blocks;
};

VK_DEVICE bool find_chunk(const VkDecode& a, int sequence, int split, Chunk& c) {
    c.query_start = a.cu_seqlens[sequence];
    c.num_queries = a.cu_seqlens[sequence + 1] - c.query_start;
    c.length = a.seq_lens[sequence];
    if (c.num_queries > a.max_queries) return false;
    const int seen_from = c.length - c.num_queries - a.window + 1;
    c.lowest = a.window && seen_from > 0 ? seen_from : 0;
    const int first_chunk = c.lowest / a.chunk;
    const int chunks = (c.length + a.chunk - 1) / a.chunk - first_chunk;
    c.num_chunks = chunks > 1 ? chunks : 1;
    if (split >= c.num_chunks) return false;
    const int start = (first_chunk + split) * a.chunk, whole = c.lowest / KEYS * KEYS;
    c.first = start > whole ? start : whole;
    c.last = start + a.chunk < c.length ? start + a.chunk : c.length;
    c.blocks = a.table + a.rows[sequence] * a.table_row;
    return true;
}

// Where keys lie: a run of 16 is in one block of the cache if blocks hold a multiple of 16.
struct Places {
    const VkDecode& a;
    const Chunk& c;
    bool is_regular;
    int block, slot;  // of the run, if regular
    int next_block;   // of the run after it: asked for early, since loads of keys wait for it

    VK_DEVICE void look_ahead(int start) {
        if (is_regular && start < c.last) next_block = c.blocks[start / a.block_size];
    }
    VK_DEVICE void at_run(int start) {
        if (is_regular) block = next_block, slot = start % a.block_size;
    }
    // The offset of key `start` + i in a cache of these strides; false if it must not be read.
    VK_DEVICE bool find(int start, int i, int64_t block_step, int64_t slot_step, int64_t& offset) const {
        const int key = start + i;
        if (key < c.lowest || key >= c.last) return false;
        const int64_t own_block = is_regular ? block : c.blocks[key / a.block_size];
        const int own_slot = is_regular ? slot + i : key % a.block_size;
        offset = own_block * block_step + own_slot * slot_step;
        return true;
    }
};

// The share of the keys in a softmax whose denominator has a sink too.
VK_DEVICE float share_beside(float lse, float sink) {
    const float larger = max_of(lse, sink);
    const float own = exp2_fast((lse - larger) * LOG2E);
    return own / (own + exp2_fast((sink - larger) * LOG2E));
}

// W: the largest width of keys and values this is compiled for; N: columns of query rows, eight each.
template <typename T, int W, int N>
__global__ void __launch_bounds__(32 * WARPS, N == 1 && W <= 128 ? 3 : 2) decode(VkDecode a) {
    constexpr int PIECES = W / 32, RUNS = W / 64, LINES = N * COLUMNS;
    // Values are asked for before the scores, and the next keys after them, where registers can hold both.
    constexpr bool IS_EARLY = W <= 128;
    const int sequence = blockIdx.x, kv_head = blockIdx.y / a.num_tiles, row_tile = blockIdx.y % a.num_tiles;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    Chunk c;
    if (!find_chunk(a, sequence, blockIdx.z, c)) return;
    const int first_line = row_tile * LINES, num_lines = c.num_queries * a.group;
    if (first_line >= num_lines) return;
    const int num_heads = a.num_kv_heads * a.group;

    uint4 q[N][PIECES] = {};
    int position[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int line = first_line + n * COLUMNS + g;
        if (line < num_lines) {
            const T* from = static_cast<const T*>(a.q) + (c.query_start + line / a.group) * a.q_token +
                            (kv_head * a.group + line % a.group) * a.q_head;
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                if (32 * p + 8 * t < a.width) q[n][p] = *reinterpret_cast<const uint4*>(from + 32 * p + 8 * t);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            position[n][i] = c.length - c.num_queries + (first_line + n * COLUMNS + 2 * t + i) / a.group;
    }

    const T* const k_cache = static_cast<const T*>(a.k_cache) + kv_head * a.k_head;
    const T* const v_cache = static_cast<const T*>(a.v_cache) + kv_head * a.v_head;
    Places places{a, c, a.block_size % KEYS == 0, 0, 0, 0};
    uint4 k[2][PIECES];
    const auto load_keys = [&](int start) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int64_t offset;
            const bool is_there = places.find(start, g + 8 * i, a.k_block, a.k_slot, offset);
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                k[i][p] = uint4{0, 0, 0, 0};
                if (is_there && 32 * p + 8 * t < a.width)
                    k[i][p] = *reinterpret_cast<const uint4*>(k_cache + offset + 32 * p + 8 * t);
            }
        }
    };

    uint4 v[4][RUNS];
    // Zeros where a value must not be read: a weight of zero times NaN would be NaN.
    const auto load_values = [&](int start) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int64_t offset;
            const bool is_there = places.find(start, 2 * t + i % 2 + i / 2 * 8, a.v_block, a.v_slot, offset);
#pragma unroll
            for (int r = 0; r < RUNS; r++) {
                v[i][r] = uint4{0, 0, 0, 0};
                if (is_there && 64 * r + 8 * g < a.value_width)
                    v[i][r] = *reinterpret_cast<const uint4*>(v_cache + offset + 64 * r + 8 * g);
            }
        }
    };

    float peak[N][2], total[N][2] = {}, o[N][RUNS][4][4] = {};
#pragma unroll
    for (int n = 0; n < N; n++) peak[n][0] = peak[n][1] = NOTHING;
    const float factor = a.soft_cap != 0.0f ? a.scale / a.soft_cap * 2.0f * LOG2E : a.scale * LOG2E;

    int start = c.first + warp * KEYS;
    places.look_ahead(start);
    places.at_run(start);
    places.look_ahead(start + WARPS * KEYS);
    if (IS_EARLY && start < c.last) load_keys(start);
    for (; start < c.last; start += WARPS * KEYS) {
        if (IS_EARLY) {
            load_values(start);
        } else {
            load_keys(start);
        }
        float scores[N][4] = {};
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t tile[4] = {word_of(k[0][p], 2 * half), word_of(k[1][p], 2 * half),
                                          word_of(k[0][p], 2 * half + 1), word_of(k[1][p], 2 * half + 1)};
#pragma unroll
                for (int n = 0; n < N; n++)
                    multiply_tile(T{}, scores[n], tile, word_of(q[n][p], 2 * half), word_of(q[n][p], 2 * half + 1));
            }
        const int next = start + WARPS * KEYS;
        if (!IS_EARLY) load_values(start);
        places.at_run(next);
        places.look_ahead(next + WARPS * KEYS);
        if (IS_EARLY && next < c.last) load_keys(next);

        uint32_t weights[N][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            float highest[2] = {NOTHING, NOTHING};
#pragma unroll
            for (int i = 0; i < 4; i++) {  // key g + 8 (i / 2), query row 2 t + i % 2
                const int key = start + g + i / 2 * 8;
                float s = scores[n][i] * factor;
                if (a.soft_cap != 0.0f) s = (1.0f - 2.0f / (exp2_fast(s) + 1.0f)) * (a.soft_cap * LOG2E);
                const bool is_seen = key >= c.lowest && key < c.last && key <= position[n][i % 2] &&
                                     (a.window == 0 || key > position[n][i % 2] - a.window);
                scores[n][i] = is_seen ? s : NOTHING;
                highest[i % 2] = max_of(highest[i % 2], scores[n][i]);
            }
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) highest[i] = max_of(highest[i], shuffle_xor(highest[i], mask));
                const float new_peak = max_of(peak[n][i], highest[i]);
                const float base = new_peak == NOTHING ? 0.0f : new_peak;
                shrink[i] = exp2_fast(peak[n][i] - base);
                scores[n][i] = exp2_fast(scores[n][i] - base);
                scores[n][i + 2] = exp2_fast(scores[n][i + 2] - base);
                total[n][i] = total[n][i] * shrink[i] + scores[n][i] + scores[n][i + 2];
                peak[n][i] = new_peak;
            }
            weights[n][0] = transpose_tile(pack_pair(T{}, scores[n][0], scores[n][1]));
            weights[n][1] = transpose_tile(pack_pair(T{}, scores[n][2], scores[n][3]));
#pragma unroll
            for (int r = 0; r < RUNS; r++)
#pragma unroll
                for (int i = 0; i < 16; i++) o[n][r][i / 4][i % 4] *= shrink[i % 2];
        }
#pragma unroll
        for (int r = 0; r < RUNS; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) {  // rows are columns 8 g + 2 i (first eight) and 8 g + 2 i + 1 (last eight)
                const uint32_t tile[4] = {byte_perm(word_of(v[0][r], i), word_of(v[1][r], i), 0x5410),
                                          byte_perm(word_of(v[0][r], i), word_of(v[1][r], i), 0x7632),
                                          byte_perm(word_of(v[2][r], i), word_of(v[3][r], i), 0x5410),
                                          byte_perm(word_of(v[2][r], i), word_of(v[3][r], i), 0x7632)};
#pragma unroll
                for (int n = 0; n < N; n++) multiply_tile(T{}, o[n][r][i], tile, weights[n][0], weights[n][1]);
            }
    }

    // The warps' results meet in shared memory: peaks, totals, then sums by [warp][line][column].
    constexpr int PITCH = W + 4;  // so that the four lines of neighbouring lanes begin in different banks
    VK_SHARED(float, peaks, WARPS * LINES * (2 + PITCH));
    float* const totals = peaks + WARPS * LINES;
    float* const sums = totals + WARPS * LINES;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = total[n][i];
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            const int line = n * COLUMNS + 2 * t + i;
            if (g == 0) peaks[warp * LINES + line] = peak[n][i], totals[warp * LINES + line] = sum;
#pragma unroll
            for (int r = 0; r < RUNS; r++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float* const to = sums + (warp * LINES + line) * PITCH + 64 * r + 8 * g + 2 * j;
                    to[0] = o[n][r][j][i], to[1] = o[n][r][j][i + 2];
                }
        }
    sync_block();
    const int lines = num_lines - first_line < LINES ? num_lines - first_line : LINES;
    for (int item = threadIdx.x; item < lines * a.value_width; item += 32 * WARPS) {
        const int line = item / a.value_width, column = item % a.value_width;
        float highest = NOTHING;
        for (int w = 0; w < WARPS; w++) highest = max_of(highest, peaks[w * LINES + line]);
        const float base = highest == NOTHING ? 0.0f : highest;
        float value = 0.0f, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2_fast(peaks[w * LINES + line] - base);
            value += weight * sums[(w * LINES + line) * PITCH + column], sum += weight * totals[w * LINES + line];
        }
        const bool is_empty = sum == 0.0f;
        value /= is_empty ? 1.0f : sum;
        const float lse = is_empty ? NOTHING : (highest + log2f(sum)) * LN2;
        const int query = (first_line + line) / a.group, head = kv_head * a.group + (first_line + line) % a.group;
        if (c.num_chunks == 1) {
            if (a.sinks) value *= share_beside(lse, a.sinks[head]);
            static_cast<T*>(a.out)[((int64_t)(c.query_start + query) * num_heads + head) * a.value_width + column] =
                narrow<T>(value);
        } else {
            const int64_t part = (int64_t)sequence * a.num_splits + blockIdx.z;
            const int64_t at = (part * a.max_queries + query) * num_heads + head;
            a.part[at * a.value_width + column] = value;
            if (column == 0) a.part_lse[at] = lse;
        }
    }
    if (c.num_chunks == 1) return;

    // Whoever finds that all other parts are written merges them, and leaves the counter as it was.
    fence();
    sync_block();
    int* const is_last = reinterpret_cast<int*>(peaks);
    if (threadIdx.x == 0) {
        int* const counter = a.finished + blockIdx.x * gridDim.y + blockIdx.y;
        *is_last = atomic_add(counter, 1) == c.num_chunks - 1;
        if (*is_last) *counter = 0;
    }
    sync_block();
    if (!*is_last) return;
    fence();
    for (int item = threadIdx.x; item < lines * a.value_width; item += 32 * WARPS) {
        const int line = item / a.value_width, column = item % a.value_width;
        const int query = (first_line + line) / a.group, head = kv_head * a.group + (first_line + line) % a.group;
        float highest = NOTHING, value = 0.0f, sum = 0.0f;
        for (int split = 0; split < c.num_chunks; split++) {
            const int64_t at = (((int64_t)sequence * a.num_splits + split) * a.max_queries + query) * num_heads + head;
            const float lse = load_fresh(a.part_lse + at), new_highest = max_of(highest, lse);
            const float base = new_highest == NOTHING ? 0.0f : new_highest;
            const float shrink = exp2_fast((highest - base) * LOG2E), weight = exp2_fast((lse - base) * LOG2E);
            value = value * shrink + weight * load_fresh(a.part + at * a.value_width + column);
            sum = sum * shrink + weight, highest = new_highest;
        }
        const bool is_empty = sum == 0.0f;
        value /= is_empty ? 1.0f : sum;
        if (a.sinks) value *= share_beside(is_empty ? NOTHING : highest + log2f(sum) * LN2, a.sinks[head]);
        static_cast<T*>(a.out)[((int64_t)(c.query_start + query) * num_heads + head) * a.value_width + column] =
            narrow<T>(value);
    }
}

template <typename T, int W, int N>
int launch_decode(const VkDecode& a, void* stream) {
    const dim3 grid((unsigned)a.num_sequences, (unsigned)(a.num_kv_heads * a.num_tiles), (unsigned)a.num_splits);
    return launch(decode<T, W, N>, grid, 32 * WARPS, stream, a);
}

template <typename T>
int launch_for(const VkDecode& a, void* stream) {
    const int columns = a.columns, width = a.width > a.value_width ? a.width : a.value_width;
    if (width <= 64) return columns == 1 ? launch_decode<T, 64, 1>(a, stream) : launch_decode<T, 64, 2>(a, stream);
    if (width <= 128) return columns == 1 ? launch_decode<T, 128, 1>(a, stream) : launch_decode<T, 128, 2>(a, stream);
    return columns == 1 ? launch_decode<T, 256, 1>(a, stream) : 1;
}

VK_EXPORT int vk_decode(const VkDecode* a, int32_t device, void* stream) {
    use_device(device);
    return a->type == VK_BF16 ? launch_for<bf16>(*a, stream) : launch_for<f16>(*a, stream);
}

// What Python compares with the size of its own structure.
VK_EXPORT int64_t vk_decode_bytes() { return sizeof(VkDecode); }
