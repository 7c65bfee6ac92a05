// Attention of a round's packed tokens over KV in blocks.
//
// Within a block the keys of a head lie transposed, [dim][token], and its values as they come, [token][dim], so that
// scores and outputs are the same kind of product (products.h); both in steps, as it wants them.
#pragma once
#include <cmath>
#include <utility>
#include <vector>

#include "products.h"

extern "C" {

struct Shape {  // of the model and its blocks
    int32_t heads, kv_heads, dim, block_tokens;
};

struct Segment {  // tokens begin..begin+n of the packed round: its request's from position `start` on
    int32_t begin, n, start, table;  // table: where its block ids begin
};
}

namespace {

// out[rows][width] += a[rows][k] * b[k][width]; width is a multiple of LANES, `a_stride` what lies between rows of a.
template <typename T>
void multiply(const T* a, int a_stride, const T* b, float* out, int rows, int k, int width, int64_t ahead) {
    in_groups<5>(rows, [&](int first, auto n) {
        const auto columns = [&](auto& sum, int c) {
            float* to = out + first * width + c;
            for (int r = 0; r < n; r++) std::memcpy(sum[r], to + r * width, sizeof sum[r]);
            multiply_add(a + first * a_stride, a_stride, b + c * STEP<T>, width * STEP<T>, k, sum, ahead);
            for (int r = 0; r < n; r++) std::memcpy(to + r * width, sum[r], sizeof sum[r]);
        };
        int c = 0;
        for (Floats sum[n][4]; c + 4 * LANES <= width; c += 4 * LANES) columns(sum, c);
        for (Floats sum[n][1]; c < width; c += LANES) columns(sum, c);
    });
}

// Softmax over blocks, online as in FlashAttention: what a row has seen so far. Weights are relative to e^top.
struct Seen {
    float top = NEVER;
    Floats mass = {};

    // Turns the scores [begin, end) of the next `span` tokens into weights, all others into 0; returns by how much
    // what was summed up before has to shrink.
    template <typename T>
    float next(float* score, T* weight, int begin, int end, int span, float scale) {
        begin = std::clamp(begin, 0, span), end = std::clamp(end, begin, span);
        std::fill(score, score + begin, NEVER);
        std::fill(score + end, score + span, NEVER);
        Floats most = load(score);
        for (int t = LANES; t < span; t += LANES) {
            const Floats here = load(score + t);
            most = here > most ? here : most;
        }
        const float before = top;
        top = std::max(top, largest(most) * scale);
        const float shrink = top == before ? 1 : std::exp(before - top);
        mass *= shrink;
        for (int t = 0; t < span; t += LANES) {
            const Floats here = load(score + t), p = here == NEVER ? Floats{} : exp(here * scale - top);
            mass += p;
            store(weight + t, p);
        }
        return shrink;
    }

    static constexpr float NEVER = -1e30f;
};

constexpr int TILE = 16;  // tokens of a segment that share one pass over its blocks

template <typename T>
struct Scratch {  // of one thread; grows to the largest tile
    std::vector<T> query, weight;
    std::vector<float> sum, score;
    std::vector<Seen> seen;
};

// One tile of queries of one key-value head over all blocks that it sees.
template <typename T>
void attend(const Shape& shape, const Segment& segment, const int32_t* table, int kv_head, int first, const T* query,
            const T* keys, const T* values, T* out, float scale, int window, Scratch<T>& scratch) {
    const int group = shape.heads / shape.kv_heads, dim = shape.dim, span = shape.block_tokens;
    const int tokens = std::min(TILE, segment.n - first), rows = tokens * group;
    const auto place = [&](int r) {  // of the row's head, in query and out
        return (int64_t(segment.begin + first + r / group) * shape.heads + kv_head * group + r % group) * dim;
    };
    scratch.query.resize(rows * dim), scratch.weight.resize(rows * span), scratch.score.resize(rows * span);
    scratch.sum.assign(rows * dim, 0.0f), scratch.seen.assign(rows, {});
    T *q = scratch.query.data(), *weight = scratch.weight.data();
    float *sum = scratch.sum.data(), *score = scratch.score.data();
    for (int r = 0; r < rows; r++) std::copy_n(query + place(r), dim, q + r * dim);
    const int low = window ? std::max(0, segment.start + first - window + 1) : 0;
    const int high = segment.start + first + tokens;
    const auto start = [&](int block) { return (int64_t(table[block]) * shape.kv_heads + kv_head) * span * dim; };
    for (int block = low / span; block * span < high; block++) {
        const int64_t at = start(block), ahead = (block + 1) * span < high ? start(block + 1) - at : 0;
        std::fill_n(score, rows * span, 0.0f);
        multiply(q, dim, keys + at, score, rows, dim, span, ahead);
        for (int r = 0; r < rows; r++) {
            const int own = segment.start + first + r / group - block * span;  // of the row's token, from here
            const float shrink = scratch.seen[r].next(score + r * span, weight + r * span,
                                                      window ? own - window + 1 : 0, own + 1, span, scale);
            if (shrink != 1)
                for (int d = 0; d < dim; d += LANES) store(sum + r * dim + d, load(sum + r * dim + d) * shrink);
        }
        // Beyond `high` there may be anything, but for the other half of a step.
        const int filled = std::min(span, high - block * span);
        multiply(weight, span, values + at, sum, rows, filled + filled % STEP<T>, dim, ahead);
    }
    for (int r = 0; r < rows; r++) {
        const float mass = total(scratch.seen[r].mass);
        for (int d = 0; d < dim; d += LANES) store(out + place(r) + d, load(sum + r * dim + d) / mass);
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

// Key and value of one head of the token that is `inside`-th in its block.
template <typename T>
void write(const T* key, const T* value, T* keys, T* values, int inside, int dim, int span) {
    constexpr int S = STEP<T>;
    for (int d = 0; d < dim; d++) keys[(d / S * span + inside) * S + d % S] = key[d];
    T* row = values + inside / S * dim * S;
    for (int d = 0; d < dim; d++) row[d * S + inside % S] = value[d];
    // The other half of the step will be multiplied by a weight of 0, so it must be finite.
    if (inside % S == 0)
        for (int d = 0; d < dim; d++)
            for (int other = 1; other < S; other++) row[d * S + other] = T{};
}

// Within a parallel region, as all that follows; it ends with a barrier.
template <typename T>
void attention(Barrier& barrier, const Round& round, const T* query, const T* key, const T* value, T* keys, T* values,
               T* out) {
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
            write(key + from, value + from, keys + at, values + at, inside, dim, span);
        }
    }
    barrier.wait();
    static thread_local Scratch<T> scratch;
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
