// Attention of the packed tokens of a pass over KV in blocks.
//
// Within a block the keys of a head lie transposed, [dim][token], and its values as they come, [token][dim], so that
// scores and outputs are the same kind of product (products.h); both in steps, as it wants them.
#pragma once
#include "pass.h"
#include "tiles.h"

namespace {

// out[rows][width] += a[rows][k] * b[k][width]; width is a multiple of LANES, `a_stride` what lies between rows of a.
template <typename T>
void multiply(TileRegisters& registers, const T* a, int a_stride, const T* b, float* out, int rows, int k, int width,
              int64_t ahead) {
    if (tiled<T>(a_stride, width))
        return registers.multiply(a, a_stride, b, width * STEP<T>, out, width, out, width, rows, k, width, ahead);
    in_groups<5>(rows, [&](int first, auto n) {
        const auto columns = [&](auto& sum, int c) {
            float* to = out + first * width + c;
            for (int r = 0; r < n; r++) std::memcpy(sum[r], to + r * width, sizeof sum[r]);
            multiply_add(a + first * a_stride, a_stride, b + c * STEP<T>, width * STEP<T>, k, sum, ahead);
            for (int r = 0; r < n; r++) std::memcpy(to + r * width, sum[r], sizeof sum[r]);
        };
        int c = 0;
        constexpr int V = at_once(n, 4);
        for (Floats sum[n][V]; c + V * LANES <= width; c += V * LANES) columns(sum, c);
        for (Floats sum[n][1]; c < width; c += LANES) columns(sum, c);
    });
}

// Softmax over blocks, online as in FlashAttention: what a row has seen of a span so far. Weights are relative to e^top.
struct Seen {
    float top = NEVER;
    Floats mass = {};

    // Turns the scores [begin, end) of the next block into weights, and its other scores into 0. Returns the factor by
    // which what was summed up before has to shrink.
    template <typename T>
    float next(float* score, T* weight, int begin, int end, int block_tokens, float scale) {
        begin = std::clamp(begin, 0, block_tokens), end = std::clamp(end, begin, block_tokens);
        std::fill(score, score + begin, NEVER);
        std::fill(score + end, score + block_tokens, NEVER);
        Floats most = load(score);
        for (int t = LANES; t < block_tokens; t += LANES) {
            const Floats here = load(score + t);
            most = here > most ? here : most;
        }
        const float before = top;
        top = std::max(top, largest(most) * scale);
        const float shrink = top == before ? 1 : std::exp(before - top);
        mass *= shrink;
        for (int t = 0; t < block_tokens; t += LANES) {
            const Floats here = load(score + t), p = here == NEVER ? Floats{} : exp(here * scale - top);
            mass += p;
            store(weight + t, p);
        }
        return shrink;
    }

    static constexpr float NEVER = -1e30f;
};

// Scores of products: cap * tanh(scale * product / cap).
void cap(float* score, int count, const Options& options) {
    const float narrow = options.scale / options.softcap;
    for (int i = 0; i < count; i += LANES) {
        const Floats x = load(score + i) * narrow, e = exp((x < 0 ? x : -x) * 2);
        const Floats size = (1 - e) / (1 + e) * options.softcap;
        store(score + i, x < 0 ? -size : size);
    }
}

// Of how many tokens values are multiplied at a time.
template <typename T>
int value_step(const Shape& shape) {
    return tiled<T>(shape.block_tokens, shape.dim) ? TILE_STEP : STEP<T>;
}

template <typename T>
struct Scratch {  // of one thread; grows to the largest piece
    std::vector<T> query, weight;
    std::vector<float> score, sums;
    std::vector<Seen> seen;
};

// One layer's attention in a pass, as one thread computes it.
template <typename T>
class Attention {
   public:
    Attention(const Pass& pass, const T* query, const T* keys, const T* values, T* out, Scratch<T>& scratch)
        : pass(pass), query(query), keys(keys), values(values), out(out), scratch(scratch) {}

    // One task of one key-value head.
    void operator()(const Pass::Task& task, int kv_head) {
        const Piece& piece = pass.pieces[task.piece];
        const int dim = pass.shape.dim, rows = piece.rows;
        if (pass.shared) {
            sum(piece, kv_head, task.span, pass.shared_sums(piece, kv_head, task.span));
            if (!pass.complete(task.piece, kv_head)) return;
        }
        const int64_t size = Sums::size(rows, dim);
        if (!pass.shared) scratch.sums.resize(2 * size);
        const auto summed = [&](int span) {
            if (pass.shared) return pass.shared_sums(piece, kv_head, span);
            const Sums own(scratch.sums.data() + (span > piece.begin) * size, rows, dim);
            sum(piece, kv_head, span, own);
            return own;
        };
        const Sums all = summed(piece.begin);
        for (int span = piece.begin + 1; span < piece.end; span++) all.merge(summed(span), rows, dim);
        const float* sinks = pass.options.sinks;
        for (int r = 0; r < rows; r++) {  // a sink takes a part of the weight and brings no value
            const float sink = sinks ? std::exp(sinks[kv_head * pass.group + r % pass.group] - all.tops[r]) : 0;
            for (int d = 0; d < dim; d += LANES)
                store(out + place(piece, kv_head, r) + d, load(all.values + r * dim + d) / (all.masses[r] + sink));
        }
    }

   private:
    const Pass& pass;
    const T *query, *keys, *values;
    T* out;
    Scratch<T>& scratch;
    TileRegisters registers;

    // In `query` and `out`, of a row's head.
    int64_t place(const Piece& piece, int kv_head, int r) const {
        const int token = pass.ranges[piece.range].begin + piece.first + r / pass.group;
        return (int64_t(token) * pass.shape.heads + kv_head * pass.group + r % pass.group) * pass.shape.dim;
    }

    // Sums up what a piece sees of one span. Compiled once, so that its sums are the same to the bit wherever it is called.
    [[gnu::noinline]] void sum(const Piece& piece, int kv_head, int span, const Sums& sums) {
        const Shape& shape = pass.shape;
        const Options& options = pass.options;
        const int dim = shape.dim, block_tokens = shape.block_tokens, rows = piece.rows, window = options.window;
        const float scale = options.softcap ? 1 : options.scale;  // a cap has scaled them
        const int32_t* table = pass.tables + pass.ranges[piece.range].table;
        const int scores = rows * block_tokens;
        scratch.query.resize(rows * dim), scratch.weight.resize(scores), scratch.score.resize(scores);
        scratch.seen.assign(rows, {});
        T *q = scratch.query.data(), *weight = scratch.weight.data();
        float* score = scratch.score.data();
        for (int r = 0; r < rows; r++) std::copy_n(query + place(piece, kv_head, r), dim, q + r * dim);
        std::fill_n(sums.values, rows * dim, 0.0f);
        const int low = std::max(piece.low, span * pass.span_tokens);
        const int high = std::min(piece.high, (span + 1) * pass.span_tokens);
        const auto start = [&](int block) {
            return (int64_t(table[block]) * shape.kv_heads + kv_head) * block_tokens * dim;
        };
        for (int block = low / block_tokens; block * block_tokens < high; block++) {
            const int64_t at = start(block), ahead = (block + 1) * block_tokens < piece.high ? start(block + 1) - at : 0;
            std::fill_n(score, scores, 0.0f);
            multiply(registers, q, dim, keys + at, score, rows, dim, block_tokens, ahead);
            if (options.softcap) cap(score, scores, options);
            for (int r = 0; r < rows; r++) {
                // The row's token, counted from this block's first one.
                const int own = pass.ranges[piece.range].start + piece.first + r / pass.group - block * block_tokens;
                const float shrink =
                    scratch.seen[r].next(score + r * block_tokens, weight + r * block_tokens,
                                         window ? own - window + 1 : 0, own + 1, block_tokens, scale);
                if (shrink != 1)
                    for (float *to = sums.values + r * dim, *end = to + dim; to < end; to += LANES)
                        store(to, load(to) * shrink);
            }
            // Beyond `high` there may be anything, but for the other tokens of a step.
            const int filled = std::min(block_tokens, high - block * block_tokens), step = value_step<T>(shape);
            multiply(registers, weight, block_tokens, values + at, sums.values, rows, (filled + step - 1) / step * step, dim,
                     ahead);
        }
        for (int r = 0; r < rows; r++)
            sums.tops[r] = scratch.seen[r].top, sums.masses[r] = total(scratch.seen[r].mass);
    }
};

// Writes key and value of one head, for the token at place `inside` of its block.
template <typename T>
void write(const T* key, const T* value, T* keys, T* values, int inside, const Shape& shape) {
    constexpr int S = STEP<T>;
    const int dim = shape.dim, step = value_step<T>(shape);
    for (int d = 0; d < dim; d++) keys[(d / S * shape.block_tokens + inside) * S + d % S] = key[d];
    // The other tokens of the step will be multiplied by weights of 0, so they must be finite.
    if (step > 1 && inside % step == 0) std::fill_n(values + inside * dim, step * dim, T{});
    T* row = values + inside / S * dim * S;
    for (int d = 0; d < dim; d++) row[d * S + inside % S] = value[d];
}

// Copies keys and values of one head: those of the first `tokens` of a block, and of as many more as are multiplied with
// them. `keys` and `values`: of block 0.
template <typename T>
void copy(T* keys, T* values, int64_t from, int64_t to, int tokens, const Shape& shape) {
    constexpr int S = STEP<T>;
    const int dim = shape.dim, step = value_step<T>(shape);
    for (int d = 0; d < dim; d += S) {
        const int64_t row = int64_t(d) * shape.block_tokens;
        std::copy_n(keys + from + row, tokens * S, keys + to + row);
    }
    std::copy_n(values + from, (tokens + step - 1) / step * step * dim, values + to);
}

// Writes all new keys and values of the ranges that have a source, or of those that have none. Threads share the work.
template <typename T>
void write(Team& team, const Pass& pass, bool forks, const T* key, const T* value, T* keys, T* values) {
    const Shape& shape = pass.shape;
    const int block_tokens = shape.block_tokens, size = block_tokens * shape.dim;
    team.share(pass.count * shape.kv_heads, [&](int task) {
        const QueryRange& range = pass.ranges[task / shape.kv_heads];
        const int head = task % shape.kv_heads;
        const auto start = [&](int64_t block) { return (block * shape.kv_heads + head) * size; };
        if ((range.source >= 0) != forks) return;
        const int32_t* table = pass.tables + range.table;
        if (forks) {
            const int inside = range.start % block_tokens;
            copy(keys, values, start(range.source), start(table[range.start / block_tokens]), inside, shape);
        }
        for (int i = 0; i < range.n; i++) {
            const int position = range.start + i;
            const int64_t from = (int64_t(range.begin + i) * shape.kv_heads + head) * shape.dim;
            const int64_t at = start(table[position / block_tokens]);
            write(key + from, value + from, keys + at, values + at, position % block_tokens, shape);
        }
    });
}

// To be called within a parallel region; it ends with a barrier.
template <typename T>
void attention(Team& team, const Pass& pass, const T* query, const T* key, const T* value, T* keys, T* values,
               T* out) {
    const Shape& shape = pass.shape;
    // First all new keys and values, for ranges see each other's.
    write(team, pass, false, key, value, keys, values);
    if (pass.forks) write(team, pass, true, key, value, keys, values);
    static thread_local Scratch<T> scratch;
    Attention<T> attend(pass, query, keys, values, out, scratch);
    team.share(int(pass.tasks.size()) * shape.kv_heads, [&](int task) {
        attend(pass.tasks[task / shape.kv_heads], task % shape.kv_heads);
    });
}

}  // namespace
