// Drawing a token per row: temperature, min_p, top_k, top_p, then a race of exponential noise, without sorting a row.
//
// The same rules and the same noise as kernels/reference/draw.py, to float rounding. A row is read once for the maxima of
// its chunks; what follows finds it in the second-level cache. Weights are exp((x - largest) / temperature); one below
// 1e-35 never wins. Dropped weights are zero or below a floor, so that no later stage needs to know why.
#pragma once

namespace {

constexpr int64_t DRAW_CHUNK = 64;  // tokens per chunk; CHUNK of the reference
constexpr int64_t DRAW_FEW = 64;    // so many are sorted one by one
constexpr float DRAW_LEAST = 1e-35f;
constexpr int DRAW_CUTS = 3;  // thresholds looked at together: seven cost more than they narrow
constexpr int DRAW_LOOKS = 2;  // thresholds of the first look at a row
const float DRAW_FIRST[DRAW_LOOKS] = {0x1p-7f, 0x1p-13f};
const int32_t DRAW_LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct DrawRow {
    const float* x;
    int64_t width, chunks;
    float largest, scale;    // of the logits; log2(e) / temperature
    VI low, high;            // halves of the key
    float* maxima;           // per chunk
    float* weights;          // the row, or its candidates; room for whole chunks
    int32_t* ids;
    float* part;             // candidates of a stage, and their places
    int32_t* places;
};

VK_INLINE int64_t draw_chunks(int64_t width) { return (width + DRAW_CHUNK - 1) / DRAW_CHUNK; }

// Four arrays of a padded row, and one of a value per chunk.
size_t draw_scratch(const VkOp* op) {
    const size_t chunks = (size_t)draw_chunks(op->n[0]);
    return (4 * (chunks + 1) * DRAW_CHUNK + chunks + 16) * 4;
}

// Chunk c of a row; the last one is completed with -inf in `spare`.
VK_INLINE const float* draw_chunk(const DrawRow* row, int64_t c, float* spare) {
    const float* p = row->x + c * DRAW_CHUNK;
    const int64_t left = row->width - c * DRAW_CHUNK;
    if (left >= DRAW_CHUNK) return p;
    for (int64_t i = 0; i < DRAW_CHUNK; ++i) spare[i] = i < left ? p[i] : -INFINITY;
    return spare;
}

// Maxima of the chunks; the row's largest value, or NaN where a value is NaN or +inf.
VK_INLINE float draw_maxima(const DrawRow* row) {
    const VF lowest = vf_set1(-FLT_MAX);
    VF odd[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()}, best = lowest;  // four, so that none waits for itself
    float spare[DRAW_CHUNK];
    for (int64_t c = 0; c < row->chunks; ++c) {
        const float* p = draw_chunk(row, c, spare);
        VF v[4];
        VK_UNROLL(4)
        for (int i = 0; i < 4; ++i) {
            v[i] = vf_max(lowest, vf_load(p + 16 * i));  // a NaN as second operand stays
            odd[i] = vf_fma(v[i], vf_zero(), odd[i]);
        }
        const VF own = vf_max(vf_max(v[0], v[1]), vf_max(v[2], v[3]));
        row->maxima[c] = vf_hmax(own);
        best = vf_max(own, best);
    }
    if (vf_sum(vf_add(vf_add(odd[0], odd[1]), vf_add(odd[2], odd[3]))) != 0.0f) return NAN;
    const float top = vf_hmax(best);
    if (top > -FLT_MAX) return top;
    for (int64_t i = 0; i < row->width; ++i)
        if (row->x[i] > -INFINITY) return top;
    return -INFINITY;
}

// 2^t for t = (x - largest) / temperature * log2(e), never below 2^-126; to 2e-7 of itself beside the rounding of t.
#if defined(__AVX512BW__)
// 2^floor(t) is one instruction, t - floor(t) another. Source of the numbers: the polynomial of the fifth degree that is
// 1 at 0 and nearest to 2^r on [0, 1] in relative error (8e-8).
VK_INLINE VF draw_weight(const DrawRow* row, VF x) {
    const VF t = vf_max(vf_mul(vf_sub(x, vf_set1(row->largest)), vf_set1(row->scale)), vf_set1(-126.0f));
    const VF r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    VF y = vf_fma(vf_set1(1.86713057e-3f), r, vf_set1(9.01702925e-3f));
    y = vf_fma(y, r, vf_set1(5.57999139e-2f));
    y = vf_fma(y, r, vf_set1(2.4016445e-1f));
    y = vf_fma(y, r, vf_set1(6.93151312e-1f));
    y = vf_fma(y, r, vf_set1(1.0f));
    return _mm512_scalef_ps(y, t);
}
#else
// Adding 1.5 * 2^23 rounds t to an integer, and leaves it in the low bits, where the exponent is taken from. Half as many
// instructions as vf_exp, which has no sign to rely on. Source: the Taylor series of 2^r to r^6 on [-1/2, 1/2].
VK_INLINE VF draw_weight(const DrawRow* row, VF x) {
    const VF round = vf_set1(12582912.0f + 127.0f);
    const VF t = vf_max(vf_mul(vf_sub(x, vf_set1(row->largest)), vf_set1(row->scale)), vf_set1(-126.0f));
    const VF n = vf_add(t, round), r = vf_sub(t, vf_sub(n, round));
    VF y = vf_fma(vf_set1(1.5403530e-4f), r, vf_set1(1.3333558e-3f));
    y = vf_fma(y, r, vf_set1(9.6181291e-3f));
    y = vf_fma(y, r, vf_set1(5.5504109e-2f));
    y = vf_fma(y, r, vf_set1(2.4022651e-1f));
    y = vf_fma(y, r, vf_set1(6.9314718e-1f));
    y = vf_fma(y, r, vf_set1(1.0f));
    return vf_mul(y, vf_bits(vi_shl(vi_bits(n), 23)));
}
#endif

// -------------------------------------------------------------------------------------------- noise

VK_INLINE VI draw_mixed(VI bits) {
    bits = vi_mul(vi_xor(bits, vi_shr(bits, 16)), vi_set1((int32_t)0x85EBCA6Bu));
    bits = vi_mul(vi_xor(bits, vi_shr(bits, 13)), vi_set1((int32_t)0xC2B2AE35u));
    return vi_xor(bits, vi_shr(bits, 16));
}

// (n + 1/2) / 2^32 for unsigned n, rounded once.
VK_INLINE VF draw_unit(VI n) {
    const VF low = vf_add(vf_from_vi(vi_and(n, vi_set1(0xffff))), vf_set1(0.5f));
    return vf_fma(vf_from_vi(vi_shr(n, 16)), vf_set1(1.0f / 65536), vf_mul(low, vf_set1(1.0f / 4294967296.0f)));
}

VK_INLINE VI draw_bits(const DrawRow* row, VI ids) {
    const VI first = draw_mixed(vi_xor(vi_mul(ids, vi_set1((int32_t)0x9E3779B1u)), row->low));
    return draw_mixed(vi_add(first, row->high));
}

// Exp(1) noise of an id's bits: -log u, where u has 32 bits and 1 - u is as exact as u, since the small values are what
// wins. Source: log(1 + f) = 2 artanh(f / (2 + f)), its series to the ninth power on [sqrt(1/2), sqrt(2)].
VK_INLINE VF draw_noise(VI bits) {
    const VF u = draw_unit(vi_xor(bits, vi_set1(INT32_MIN))), rest = draw_unit(vi_xor(bits, vi_set1(INT32_MAX)));
    const VI root = vi_set1(0x3f3504f3);  // sqrt(1/2)
    const VI shifted = vi_shr(vi_add(vi_bits(u), vi_sub(vi_set1(64 << 23), root)), 23);
    const VI exponent = vi_sub(shifted, vi_set1(64));
    const VF mantissa = vf_bits(vi_sub(vi_bits(u), vi_shl(exponent, 23)));
    const VF f = vf_select_lt(u, vf_bits(root), vf_sub(mantissa, vf_set1(1.0f)), vf_sub(vf_zero(), rest));
    const VF s = vf_div(f, vf_add(vf_set1(2.0f), f)), z = vf_mul(s, s);
    VF y = vf_fma(z, vf_set1(1.0f / 9), vf_set1(1.0f / 7));
    y = vf_fma(y, z, vf_set1(1.0f / 5));
    y = vf_fma(y, z, vf_set1(1.0f / 3));
    y = vf_fma(vf_mul(y, z), s, s);
    return vf_sub(vf_mul(vf_from_vi(exponent), vf_set1(-0.693147180559945f)), vf_add(y, y));
}

// No more than the noise: -log u >= 1 - u, without the lowest eight bits.
VK_INLINE VF draw_least_noise(VI bits) {
    return vf_mul(vf_from_vi(vi_shr(vi_xor(bits, vi_set1(INT32_MAX)), 8)), vf_set1(0x1p-24f));
}

// Place of the largest weight / noise among n (a multiple of 16) weights of at least `floor`; -1 if there is none. The
// noise is that of ids, or of the places where there are no ids, xored with `flip`.
//
// Few beat the best so far, and who cannot is known without a logarithm or a division.
VK_INLINE int64_t draw_race(
    const DrawRow* row, const float* weights, const int32_t* ids, int64_t n, float floor, int32_t flip) {
    VF best = vf_zero(), where = vf_bits(vi_set1(-1)), bar = vf_zero();
    const VI lanes = vi_load(DRAW_LANES);
    for (int64_t i = 0; i < n; i += 16) {
        VF w = vf_load(weights + i);
        if (!vf_any_ge(w, vf_set1(floor))) continue;
        w = vf_select_lt(w, vf_set1(floor), vf_zero(), w);
        const VI place = vi_add(lanes, vi_set1((int32_t)i));
        const VI bits = draw_bits(row, vi_xor(ids ? vi_load(ids + i) : place, vi_set1(flip)));
        if (!vf_any_ge(w, vf_mul(bar, draw_least_noise(bits)))) continue;
        const VF score = vf_div(w, draw_noise(bits));
        where = vf_select_lt(best, score, vf_bits(place), where);
        best = vf_max(best, score);
        bar = vf_set1(0.9999f * vf_hmax(best));  // further below the best than noise is rounded
    }
    float scores[16];
    int32_t places[16];
    vf_store(scores, best);
    memcpy(places, &where, 64);
    int64_t found = -1;
    float top = 0;
    for (int i = 0; i < 16; ++i) {
        if (places[i] < 0 || scores[i] < top || (scores[i] == top && found >= 0 && found < places[i])) continue;
        top = scores[i];
        found = places[i];
    }
    return found;
}

// -------------------------------------------------------------------------------------------- truncation

// The k-th largest of n values, which it reorders. Source: Hoare 1961, "Algorithm 65: find".
float draw_kth(float* a, int64_t n, int64_t k) {
    int64_t first = 0, last = n - 1;
    const int64_t at = k - 1;
    while (first < last) {
        const float x = a[first], y = a[(first + last) / 2], z = a[last];
        const float pivot = x > y ? (y > z ? y : x > z ? z : x) : (x > z ? x : y > z ? z : y);
        int64_t i = first, j = last;
        while (i <= j) {
            while (a[i] > pivot) ++i;
            while (a[j] < pivot) --j;
            if (i > j) break;
            const float t = a[i];
            a[i++] = a[j];
            a[j--] = t;
        }
        if (at <= j) last = j;
        else if (at >= i) first = i;
        else break;
    }
    return a[at];
}

// Values of at least `low` and below `high` of n (a multiple of 16) with their ids (their places, where there are none),
// in the same order; padded with zeros to a multiple of 16. In place if `to` is `values`. How many.
VK_INLINE int64_t draw_pick(
    float* to, int32_t* to_ids, const float* values, const int32_t* ids, int64_t n, float low, float high) {
    const VI lanes = vi_load(DRAW_LANES);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const VI names = ids ? vi_load(ids + i) : vi_add(lanes, vi_set1((int32_t)i));
        count += vf_pick(to + count, to_ids + count, vf_load(values + i), names, vf_set1(low), vf_set1(high));
    }
    vf_store(to + count, vf_zero());
    return count;
}

VK_INLINE int64_t draw_padded(int64_t n) { return (n + 15) / 16 * 16; }

VK_INLINE float draw_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
VK_INLINE uint32_t draw_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Sums of the values (n, a multiple of 16) that reach each of the thresholds.
VK_INLINE void draw_sums(const float* values, int64_t n, const float* thresholds, double* sums) {
    for (int j = 0; j < DRAW_CUTS; ++j) sums[j] = 0;
    for (int64_t begin = 0; begin < n; begin += 1024) {  // short float sums, so that the double one is exact enough
        const int64_t end = begin + 1024 < n ? begin + 1024 : n;
        VF part[DRAW_CUTS], cuts[DRAW_CUTS];
        VK_UNROLL(3)
        for (int j = 0; j < DRAW_CUTS; ++j) part[j] = vf_zero(), cuts[j] = vf_set1(thresholds[j]);
        for (int64_t i = begin; i < end; i += 16) {
            const VF v = vf_load(values + i);
            VK_UNROLL(3)
            for (int j = 0; j < DRAW_CUTS; ++j) part[j] = vf_add_ge(part[j], v, cuts[j]);
        }
        for (int j = 0; j < DRAW_CUTS; ++j) sums[j] += vf_sum(part[j]);
    }
}

// Sorts a stage's candidates, largest first; equal ones keep their order.
VK_INLINE void draw_sort(const DrawRow* row, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const float value = row->part[i];
        const int32_t place = row->places[i];
        int64_t j = i;
        for (; j && row->part[j - 1] < value; --j) {
            row->part[j] = row->part[j - 1];
            row->places[j] = row->places[j - 1];
        }
        row->part[j] = value;
        row->places[j] = place;
    }
}

// Where the border of top_p lies: below `low` all weights go, of at least `high` all stay; `above` is the sum of those.
struct DrawBorder {
    uint32_t low, high;
    double above;
};

// Before the first look at n weights: all below a mean of what is dropped sum to less than that.
VK_INLINE DrawBorder draw_border(int64_t n, double mass, double top_p) {
    const float bound = (float)((mass - top_p * mass) / (double)n * 0.999);
    return {draw_to_bits(bound > DRAW_LEAST ? bound : DRAW_LEAST), draw_to_bits(1.0f) + 1, 0};
}

// The border after the first look: the sums of the weights that reach each of its thresholds.
VK_INLINE void draw_narrow(DrawBorder* border, const double* sums, double limit) {
    int j = 0;
    while (j < DRAW_LOOKS && sums[j] < limit) ++j;
    if (j) border->high = draw_to_bits(DRAW_FIRST[j - 1]), border->above = sums[j - 1];
    if (j < DRAW_LOOKS && draw_to_bits(DRAW_FIRST[j]) > border->low) border->low = draw_to_bits(DRAW_FIRST[j]);
}

// Drops what top_p drops of n weights (n a multiple of 16) with sum `mass`: in descending order, ties in order of place,
// a weight stays while those before it sum to less than top_p * mass; the first stays. Returns a floor: weights below it
// are dropped, and dropped ones above it were set to zero.
//
// The border is looked for between two floats, four times closer with every look at what still lies between them.
VK_INLINE float draw_top_p(
    const DrawRow* row, float* weights, int64_t n, double mass, double top_p, DrawBorder border) {
    const double limit = top_p * mass;
    uint32_t low = border.low, high = border.high;
    double above = border.above;
    int64_t count = draw_pick(
        row->part, row->places, weights, nullptr, n, draw_from_bits(low), draw_from_bits(high));
    while (count > DRAW_FEW && high - low > 1) {
        float thresholds[DRAW_CUTS];
        double sums[DRAW_CUTS];
        for (uint32_t j = 0; j < DRAW_CUTS; ++j) {
            const uint64_t step = (uint64_t)(high - low) * (DRAW_CUTS - j) / (DRAW_CUTS + 1);
            thresholds[j] = draw_from_bits(low + (uint32_t)step);
        }
        draw_sums(row->part, draw_padded(count), thresholds, sums);
        int j = 0;
        while (j < DRAW_CUTS && above + sums[j] < limit) ++j;
        if (j) high = draw_to_bits(thresholds[j - 1]);
        if (j < DRAW_CUTS) low = draw_to_bits(thresholds[j]);
        if (j) above += sums[j - 1];
        count = draw_pick(row->part, row->places, row->part, row->places, draw_padded(count), draw_from_bits(low),
            draw_from_bits(high));
    }
    if (count <= DRAW_FEW) draw_sort(row, count);  // else all are equal
    for (int64_t i = 0; i < count; ++i) {
        if (above >= limit && above > 0) weights[row->places[i]] = 0;
        above += row->part[i];
    }
    return draw_from_bits(low);
}

// -------------------------------------------------------------------------------------------- rows

// No truncation: a race between the chunks by their sums, then one inside the chunk that won.
VK_INLINE int64_t draw_plain(const DrawRow* row) {
    float spare[DRAW_CHUNK];
    for (int64_t c = 0; c < row->chunks; ++c) {
        const float* p = draw_chunk(row, c, spare);
        const VF a = vf_add(draw_weight(row, vf_load(p)), draw_weight(row, vf_load(p + 16)));
        const VF b = vf_add(draw_weight(row, vf_load(p + 32)), draw_weight(row, vf_load(p + 48)));
        row->weights[c] = vf_sum(vf_add(a, b));
    }
    vf_store(row->weights + row->chunks, vf_zero());
    const int64_t chunk = draw_race(row, row->weights, nullptr, draw_padded(row->chunks), DRAW_LEAST, -1);
    if (chunk < 0) return -1;
    const float* p = draw_chunk(row, chunk, spare);
    const VI first = vi_add(vi_load(DRAW_LANES), vi_set1((int32_t)(chunk * DRAW_CHUNK)));
    for (int i = 0; i < DRAW_CHUNK; i += 16) {
        vf_store(row->weights + i, draw_weight(row, vf_load(p + i)));
        const VI names = vi_add(first, vi_set1(i));
        memcpy(row->ids + i, &names, 64);
    }
    const int64_t place = draw_race(row, row->weights, row->ids, DRAW_CHUNK, DRAW_LEAST, 0);
    return place < 0 ? -1 : row->ids[place];
}

// The sum of the row's weights from `floor` (a logit) on, and of those that reach each of the first thresholds.
template <bool HAS_FLOOR>
VK_INLINE double draw_mass(const DrawRow* row, float floor, double* sums) {
    float spare[DRAW_CHUNK];
    double mass = 0;
    for (int j = 0; j < DRAW_LOOKS; ++j) sums[j] = 0;
    const VF first = vf_set1(DRAW_FIRST[0]), second = vf_set1(DRAW_FIRST[1]);
    for (int64_t begin = 0; begin < row->chunks; begin += 16) {  // short sums, as in draw_sums
        const int64_t end = begin + 16 < row->chunks ? begin + 16 : row->chunks;
        VF all[2] = {vf_zero(), vf_zero()}, part[DRAW_LOOKS] = {vf_zero(), vf_zero()};
        for (int64_t c = begin; c < end; ++c) {
            if (HAS_FLOOR && row->maxima[c] < floor) continue;
            const float* p = draw_chunk(row, c, spare);
            VK_UNROLL(4)
            for (int i = 0; i < 4; ++i) {
                const VF x = vf_load(p + 16 * i), w = draw_weight(row, x);
                const VF kept = HAS_FLOOR ? vf_select_lt(x, vf_set1(floor), vf_zero(), w) : w;
                all[i % 2] = vf_add(all[i % 2], kept);
                part[0] = vf_add_ge(part[0], kept, first);
                part[1] = vf_add_ge(part[1], kept, second);
            }
        }
        mass += vf_sum(vf_add(all[0], all[1]));
        for (int j = 0; j < DRAW_LOOKS; ++j) sums[j] += vf_sum(part[j]);
    }
    return mass;
}

// Logits of at least `floor` with their ids, in `part` and `ids`, padded with -inf to a multiple of 16. How many.
VK_INLINE int64_t draw_candidates(const DrawRow* row, float floor) {
    float spare[DRAW_CHUNK];
    int64_t count = 0;
    const VI lanes = vi_load(DRAW_LANES);
    for (int64_t c = 0; c < row->chunks; ++c) {
        if (row->maxima[c] < floor) continue;
        const float* p = draw_chunk(row, c, spare);
        for (int64_t i = 0; i < DRAW_CHUNK; i += 16) {
            const VI names = vi_add(lanes, vi_set1((int32_t)(c * DRAW_CHUNK + i)));
            count += vf_pick(
                row->part + count, row->ids + count, vf_load(p + i), names, vf_set1(floor), vf_set1(INFINITY));
        }
    }
    vf_store(row->part + count, vf_set1(-INFINITY));
    return count;
}

// min_p and top_p without top_k. The whole row counts, but what one look at it drops is never written down.
VK_INLINE int64_t draw_from_row(const DrawRow* row, float floor, double top_p) {
    double mass = 0, sums[DRAW_LOOKS];
    DrawBorder border = {draw_to_bits(DRAW_LEAST), 0, 0};
    if (top_p < 1) {
        mass = floor > -INFINITY ? draw_mass<true>(row, floor, sums) : draw_mass<false>(row, floor, sums);
        border = draw_border(row->chunks * DRAW_CHUNK, mass, top_p);
        draw_narrow(&border, sums, top_p * mass);
        // A logit a little below the border's weight: rounding may not lose one that stays.
        const float lowest = row->largest + (log2f(draw_from_bits(border.low)) - 0.01f) / row->scale;
        floor = lowest > floor ? lowest : floor;
    }
    const int64_t n = draw_padded(draw_candidates(row, floor));
    for (int64_t i = 0; i < n; i += 16) vf_store(row->weights + i, draw_weight(row, vf_load(row->part + i)));
    const float least = top_p < 1 ? draw_top_p(row, row->weights, n, mass, top_p, border) : DRAW_LEAST;
    const int64_t place = draw_race(row, row->weights, row->ids, n, least, 0);
    return place < 0 ? -1 : row->ids[place];
}

// top_k, with min_p as `floor`: what reaches the k-th largest of the chunks' maxima holds the k largest.
VK_INLINE int64_t draw_from_candidates(const DrawRow* row, float floor, int64_t top_k, double top_p) {
    if (top_k <= row->chunks) {
        memcpy(row->weights, row->maxima, (size_t)row->chunks * 4);
        const float kth = draw_kth(row->weights, row->chunks, top_k);
        floor = kth > floor ? kth : floor;
    }
    int64_t count = draw_candidates(row, floor);
    if (count > top_k) {
        memcpy(row->weights, row->part, (size_t)count * 4);
        const float kth = draw_kth(row->weights, count, top_k);
        vf_store(row->part + count, vf_set1(-INFINITY));
        count = draw_pick(row->part, row->ids, row->part, row->ids, draw_padded(count), kth, INFINITY);
    }
    vf_store(row->part + count, vf_set1(-INFINITY));
    const int64_t n = draw_padded(count);
    double mass = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const VF w = draw_weight(row, vf_load(row->part + i));
        vf_store(row->weights + i, w);
        mass += vf_sum(w);
    }
    const DrawBorder border = draw_border(n, mass, top_p);
    const float least = top_p < 1 ? draw_top_p(row, row->weights, n, mass, top_p, border) : DRAW_LEAST;
    const int64_t place = draw_race(row, row->weights, row->ids, n, least, 0);
    return place < 0 ? -1 : row->ids[place];
}

// p: logits float32, rows int64, temperatures float32, min_p float32, top_k int64 (0: off), top_p double, keys int64, out
// ids int64, out largest logits float32 (NaN: the row holds a NaN or +inf). n: V, logits stride. A row whose largest is no
// number gives 0.
void op_draw(const VkOp* op, const VkStep* step, VkCtx* ctx) {
    DrawRow row;
    row.width = op->n[0];
    row.chunks = draw_chunks(row.width);
    const int64_t room = (row.chunks + 1) * DRAW_CHUNK;
    row.weights = (float*)ctx->scratch;
    row.part = row.weights + room;
    row.ids = (int32_t*)(row.part + room);
    row.places = row.ids + room;
    row.maxima = (float*)(row.places + room);
    vk_for_each(ctx, vk_rows(op, step), [&](int64_t r) {
        const float temperature = ((const float*)op->p[2])[r], min_p = ((const float*)op->p[3])[r];
        const int64_t top_k = ((const int64_t*)op->p[4])[r];
        const double top_p = ((const double*)op->p[5])[r];
        const uint64_t key = ((const uint64_t*)op->p[6])[r];
        row.x = (const float*)op->p[0] + ((const int64_t*)op->p[1])[r] * op->n[1];
        row.scale = 1.44269504088896341f / temperature;
        row.low = vi_set1((int32_t)(uint32_t)key);
        row.high = vi_set1((int32_t)(uint32_t)(key >> 32));
        row.largest = draw_maxima(&row);
        ((float*)op->p[8])[r] = row.largest;
        int64_t id = -1;
        if (row.largest >= -FLT_MAX) {
            const float floor = min_p > 0 ? row.largest + temperature * logf(min_p) : -INFINITY;
            if (top_k) id = draw_from_candidates(&row, floor, top_k, top_p);
            else if (min_p > 0 || top_p < 1) id = draw_from_row(&row, floor, top_p);
            else id = draw_plain(&row);
        }
        ((int64_t*)op->p[7])[r] = id < 0 ? 0 : id;
    });
}

}  // namespace
