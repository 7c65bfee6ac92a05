// Attention of a round's packed tokens over KV in blocks.
//
// Within a block the keys of a head lie transposed, [dim][token], and its values as they come, [token][dim]. So scores
// and outputs are both sums of broadcast numbers times rows of a block: one inner loop, without sums across a vector.
#pragma once
#include <utility>
#include <vector>

#include "vectors.h"

extern "C" {

struct Shape {  // of the model and its blocks
    int32_t heads, kv_heads, dim, block_tokens;
};

struct Segment {  // tokens begin..begin+n of the packed round: its request's from position `start` on
    int32_t begin, n, start, table;  // table: where its block ids begin
};
}

namespace {

// out[ROWS][VECTORS * LANES] += a[ROWS][k] * b[k][...], all sums in registers.
template <int ROWS, int VECTORS, typename T>
void multiply_add(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int k) {
    Floats sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(out + r * out_stride + v * LANES);
    for (int i = 0; i < k; i++) {
        Floats row[VECTORS];
        for (int v = 0; v < VECTORS; v++) row[v] = load(b + i * b_stride + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] += a[r * a_stride + i] * row[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(out + r * out_stride + v * LANES, &sum[r][v], sizeof(Floats));
}

template <int ROWS, typename T>
void columns(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int k, int width) {
    int c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        multiply_add<ROWS, 4>(a, a_stride, b + c, b_stride, out + c, out_stride, k);
    for (; c < width; c += LANES) multiply_add<ROWS, 1>(a, a_stride, b + c, b_stride, out + c, out_stride, k);
}

// out[rows][width] += a[rows][k] * b[k][width]; width is a multiple of LANES.
template <typename T>
void multiply(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int rows, int k,
              int width) {
    int r = 0;
    for (; r + 5 <= rows; r += 5)
        columns<5>(a + r * a_stride, a_stride, b, b_stride, out + r * out_stride, out_stride, k, width);
    a += r * a_stride, out += r * out_stride;
    switch (rows - r) {
        case 4: return columns<4>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 3: return columns<3>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 2: return columns<2>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 1: return columns<1>(a, a_stride, b, b_stride, out, out_stride, k, width);
    }
}

constexpr int TILE = 16;  // tokens of a segment that share one pass over its blocks

// One tile of queries of one key-value head over all blocks that it sees: softmax online, as in FlashAttention.
template <typename T>
void attend(const Shape& shape, const Segment& segment, const int32_t* table, int kv_head, int first, const T* query,
            const T* keys, const T* values, T* out, float scale, int window, std::vector<float>& scratch) {
    const int group = shape.heads / shape.kv_heads, dim = shape.dim, span = shape.block_tokens;
    const int tokens = std::min(TILE, segment.n - first), rows = tokens * group;
    scratch.resize(rows * (2 * dim + span + 2));
    float *q = scratch.data(), *sum = q + rows * dim, *score = sum + rows * dim, *top = score + rows * span,
          *mass = top + rows;
    for (int r = 0; r < rows; r++) {
        const T* from = query + ((segment.begin + first + r / group) * shape.heads + kv_head * group + r % group) * dim;
        for (int d = 0; d < dim; d += LANES) store(q + r * dim + d, load(from + d) * scale);
        top[r] = -1e30f, mass[r] = 0;
    }
    std::fill(sum, sum + rows * dim, 0.0f);
    const int low = window ? std::max(0, segment.start + first - window + 1) : 0;
    const int high = segment.start + first + tokens;
    for (int block = low / span; block * span < high; block++) {
        const int64_t at = (int64_t(table[block]) * shape.kv_heads + kv_head) * span * dim;
        std::fill(score, score + rows * span, 0.0f);
        multiply(q, dim, keys + at, span, score, span, rows, dim, span);
        for (int r = 0; r < rows; r++) {
            const int own = segment.start + first + r / group;  // the position of the row's token
            const int begin = window ? std::max(0, own - window + 1 - block * span) : 0;
            const int end = std::min(span, own + 1 - block * span);
            float* s = score + r * span;
            std::fill(s, s + std::clamp(begin, 0, span), -1e30f);
            std::fill(s + std::clamp(end, 0, span), s + span, -1e30f);
            if (begin >= end) {
                std::fill(s, s + span, 0.0f);
                continue;
            }
            Floats most = load(s);
            for (int t = LANES; t < span; t += LANES) {
                const Floats other = load(s + t);
                most = other > most ? other : most;
            }
            float best = top[r];
            for (int v = 0; v < LANES; v++) best = std::max(best, most[v]);
            Floats shrink = exp(Floats{} + (top[r] - best)), total = {};
            top[r] = best;
            for (int t = 0; t < span; t += LANES) {
                Floats p = exp(load(s + t) - best);
                p = load(s + t) < -1e29f ? Floats{} : p;
                total += p;
                std::memcpy(s + t, &p, sizeof p);
            }
            mass[r] *= shrink[0];
            for (int v = 0; v < LANES; v++) mass[r] += total[v];
            for (int d = 0; d < dim; d += LANES) {
                Floats scaled = load(sum + r * dim + d) * shrink;
                std::memcpy(sum + r * dim + d, &scaled, sizeof scaled);
            }
        }
        multiply(score, span, values + at, dim, sum, dim, rows, std::min(span, high - block * span), dim);
    }
    for (int r = 0; r < rows; r++) {
        T* to = out + ((segment.begin + first + r / group) * shape.heads + kv_head * group + r % group) * dim;
        for (int d = 0; d < dim; d += LANES) store(to + d, load(sum + r * dim + d) / mass[r]);
    }
}

using Tiles = std::vector<std::pair<int, int>>;  // segment, first token

struct Round {
    const Shape& shape;
    const Segment* segments;
    int count;
    const int32_t* tables;
    Tiles tiles;
    float scale;
    int window;

    Round(const Shape& shape, const Segment* segments, int count, const int32_t* tables, float scale, int window)
        : shape(shape), segments(segments), count(count), tables(tables), scale(scale), window(window) {
        for (int s = 0; s < count; s++)
            for (int first = 0; first < segments[s].n; first += TILE) tiles.emplace_back(s, first);
    }
};

// Within a parallel region, as all that follows; it ends with a barrier.
template <typename T>
void attention(Barrier& barrier, const Round& round, const T* query, const T* key, const T* value, T* keys, T* values, T* out) {
    const Shape& shape = round.shape;
    const int dim = shape.dim, span = shape.block_tokens;
    // First all new keys and values, for the tiles of a segment see each other's.
#pragma omp for nowait
    for (int task = 0; task < round.count * shape.kv_heads; task++) {
        const Segment& segment = round.segments[task / shape.kv_heads];
        const int head = task % shape.kv_heads;
        for (int i = 0; i < segment.n; i++) {
            const int position = segment.start + i, inside = position % span;
            const int64_t block = round.tables[segment.table + position / span];
            const int64_t from = (int64_t(segment.begin + i) * shape.kv_heads + head) * dim;
            const int64_t at = (block * shape.kv_heads + head) * span * dim;
            for (int d = 0; d < dim; d++) keys[at + d * span + inside] = key[from + d];
            std::copy(value + from, value + from + dim, values + at + inside * dim);
        }
    }
    barrier.wait();
    static thread_local std::vector<float> scratch;
#pragma omp for schedule(dynamic) nowait
    for (int task = 0; task < int(round.tiles.size()) * shape.kv_heads; task++) {
        const auto [s, first] = round.tiles[task / shape.kv_heads];
        const Segment& segment = round.segments[s];
        attend(shape, segment, round.tables + segment.table, task % shape.kv_heads, first, query, keys, values, out,
               round.scale, round.window, scratch);
    }
    barrier.wait();
}

}  // namespace
