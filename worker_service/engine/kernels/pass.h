// What a pass's attention has to compute, and how threads share it out. No computation but the merging of what they sum up.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vectors.h"

extern "C" {

struct Shape {  // of the model and its blocks
    int32_t heads, kv_heads, dim, block_tokens;
};

// The packed tokens begin..begin+n: they are those of one text from position `start` on. table: where the text's block
// ids begin. source: -1, or a block of another text: the text's block of `start` begins as that one does.
struct QueryRange {
    int32_t begin, n, start, table, source;
};
}

namespace {

// How a layer attends. `window`: how far back a token sees, itself included, 0: everything. `softcap`: 0: none. `sinks`:
// of each head, or null.
struct Options {
    float scale;
    int window;
    float softcap = 0;
    const float* sinks = nullptr;
};

constexpr int PIECE = 16;  // tokens of a query range that are computed together

// A text is attended to in spans of so many tokens, or a little less: whole blocks, from its begin on. Each is summed up
// apart, and the sums are merged in order: so threads can share a long text out, as in Flash-Decoding, and give what one
// of them would.
constexpr int SPAN = 512;

// What attention sums up, for rows of `dim` values.
struct Sums {
    float *values, *tops, *masses;  // [rows][dim] values by their weights, relative to e^top; [rows] tops and weights

    Sums(float* memory, int rows, int dim) : values(memory), tops(values + rows * dim), masses(tops + rows) {}

    static int64_t size(int rows, int dim) { return int64_t(rows) * (dim + 2); }

    // Adds what was summed up of the next span. Of a span in which a row sees nothing it has a top below every score, and
    // mass and values of 0: merged with others they leave those as they are.
    void merge(const Sums& next, int rows, int dim) const {
        for (int r = 0; r < rows; r++) {
            const float top = std::max(tops[r], next.tops[r]);
            const float here = std::exp(tops[r] - top), there = std::exp(next.tops[r] - top);
            tops[r] = top, masses[r] = masses[r] * here + next.masses[r] * there;
            for (float *to = values + r * dim, *end = to + dim, *from = next.values + r * dim; to < end;
                 to += LANES, from += LANES)
                store(to, load(to) * here + load(from) * there);
        }
    }
};

struct Piece {
    int range, first, rows;  // of which query range, from which of its tokens on; rows: query heads of a key-value head
    int low, high;           // together its tokens see the positions low..high (without high),
    int begin, end;          // which lie in the spans begin..end (without end)
    int64_t at;              // where its sums begin, if they are shared
};

// A pass's query ranges as pieces, and what one thread computes at a time: a piece, or a span of one where pieces are few.
struct Pass {
    struct Task {
        int piece, span;
    };

    const Shape& shape;
    const QueryRange* ranges;
    int count;
    const int32_t* tables;
    Options options;
    int group = shape.heads / shape.kv_heads, span_tokens = std::max(1, SPAN / shape.block_tokens) * shape.block_tokens;
    std::vector<Piece> pieces;
    std::vector<Task> tasks;
    bool forks = false, shared;  // whether a range has a source; whether threads share pieces

    Pass(const Shape& shape, const QueryRange* ranges, int count, const int32_t* tables, const Options& options)
        : shape(shape), ranges(ranges), count(count), tables(tables), options(options) {
        int64_t floats = 0;
        int spans = 0, most = 0;  // of all pieces, and of the longest
        for (int s = 0; s < count; s++) {
            forks |= ranges[s].source >= 0;
            for (int first = 0; first < ranges[s].n; first += PIECE) {
                const int tokens = std::min(PIECE, ranges[s].n - first), start = ranges[s].start + first;
                const int low = options.window ? std::max(0, start - options.window + 1) : 0, high = start + tokens;
                const int begin = low / span_tokens, end = (high - 1) / span_tokens + 1, rows = tokens * group;
                pieces.push_back({s, first, rows, low, high, begin, end, floats});
                floats += (end - begin) * shape.kv_heads * Sums::size(rows, shape.dim);
                spans += end - begin, most = std::max(most, end - begin);
            }
        }
        const int number = int(pieces.size()), heads = shape.kv_heads, threads = omp_get_max_threads();
        const bool even = int64_t(spans) * heads >= int64_t(most) * EVEN * threads;
        shared = threads > 1 && most > 1 && !even && floats < LARGEST;
        for (int p = 0; p < number; p++)
            for (int span = pieces[p].begin; span < pieces[p].end; span = shared ? span + 1 : pieces[p].end)
                tasks.push_back({p, span});
        if (!shared) return;
        static thread_local std::vector<float> memory;  // grows to the longest pass, and stays
        if (int64_t(memory.size()) < floats) memory.resize(floats);
        sums = memory.data(), computed = std::vector<std::atomic<int>>(number * heads);
    }

    Sums shared_sums(const Piece& piece, int kv_head, int span) const {
        const int64_t before = int64_t(kv_head) * (piece.end - piece.begin) + span - piece.begin;
        return {sums + piece.at + before * Sums::size(piece.rows, shape.dim), piece.rows, shape.dim};
    }

    // Says that one more span was computed, in this layer. Returns whether it was the last one of its piece.
    bool complete(int piece, int kv_head) const {
        return ++computed[piece * shape.kv_heads + kv_head] % (pieces[piece].end - pieces[piece].begin) == 0;
    }

   private:
    float* sums = nullptr;
    mutable std::vector<std::atomic<int>> computed;  // spans, of each piece and key-value head, in all layers

    // Whole pieces are even enough if each thread has so many times the longest; sums of so many floats are not shared.
    static constexpr int EVEN = 8, LARGEST = 1 << 24;
};

}  // namespace
