// Attention of the packed tokens of a pass over KV in blocks. How KV comes there is not known here.
#pragma once
#include "kv_blocks.h"

namespace {

// Scores of at most so many tokens become weights together: of whole blocks, but of one at least.
constexpr int STRIP = 64;

// Softmax over strips, online as in FlashAttention: what a row has seen of a span so far. Weights are relative to e^top.
struct Seen {
    float top = NEVER;
    Floats mass = {};

    // Turns the scores [begin, end) of the next `tokens` into weights, and the others into 0. Returns the factor by which
    // what was summed up before has to shrink.
    template <typename T>
    float next(float* score, T* weight, int begin, int end, int tokens, float scale) {
        begin = std::clamp(begin, 0, tokens), end = std::clamp(end, begin, tokens);
        std::fill(score, score + begin, NEVER);
        std::fill(score + end, score + tokens, NEVER);
        Floats most = load(score);
        for (int t = LANES; t < tokens; t += LANES) {
            const Floats here = load(score + t);
            most = here > most ? here : most;
        }
        const float before = top;
        top = std::max(top, largest(most) * scale);
        const float shrink = top == before ? 1 : std::exp(before - top);
        mass *= shrink;
        for (int t = 0; t < tokens; t += LANES) {
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
    const int strip = std::max(1, STRIP / pass.shape.block_tokens), width = strip * pass.shape.block_tokens;  // blocks; tokens
    static constexpr int ROWS = 6;  // at a time

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
        scratch.query.resize(rows * dim), scratch.weight.resize(rows * width), scratch.score.resize(rows * width);
        scratch.seen.assign(rows, {});
        for (int r = 0; r < rows; r++)
            std::copy_n(query + place(piece, kv_head, r), dim, scratch.query.data() + r * dim);
        std::fill_n(sums.values, rows * dim, 0.0f);
        const int low = std::max(piece.low, span * pass.span_tokens);
        const int high = std::min(piece.high, (span + 1) * pass.span_tokens);
        const Text text{pass.tables + pass.ranges[piece.range].table, shape, kv_head, high};
        for (int first = low / block_tokens, end; first * block_tokens < high; first = end) {
            const int begin = first - (first - span * pass.span_tokens / block_tokens) % strip;  // of the strip
            end = std::min((high - 1) / block_tokens + 1, begin + strip);
            float* score = scratch.score.data();
            scores(text, first, end, rows, score + (first - begin) * block_tokens);
            const int tokens = (end - begin) * block_tokens;
            for (int r = 0; r < rows; r++, score += width) {
                // The row's token, counted from this strip's first one.
                const int own = pass.ranges[piece.range].start + piece.first + r / pass.group - begin * block_tokens;
                if (options.softcap) cap(score, tokens, options);
                const float shrink = scratch.seen[r].next(score, scratch.weight.data() + r * width,
                                                          window ? own - window + 1 : 0, own + 1, tokens, scale);
                if (shrink != 1)
                    for (float *to = sums.values + r * dim, *last = to + dim; to < last; to += LANES)
                        store(to, load(to) * shrink);
            }
            add_values(text, first, end, rows, scratch.weight.data() + (first - begin) * block_tokens, sums.values);
        }
        for (int r = 0; r < rows; r++)
            sums.tops[r] = scratch.seen[r].top, sums.masses[r] = total(scratch.seen[r].mass);
    }

    // Of a text that ends before `high`, where a head's keys or values of a block begin.
    struct Text {
        const int32_t* table;
        const Shape& shape;
        int head, high;

        int64_t operator[](int block) const {
            return (int64_t(table[block]) * shape.kv_heads + head) * shape.block_tokens * shape.dim;
        }
        int tokens(int block) const { return std::min(shape.block_tokens, high - block * shape.block_tokens); }
    };

    // Scores of all rows and the tokens of these blocks: `out` [rows][width]. Their values are wanted soon.
    void scores(const Text& text, int first, int end, int rows, float* out) {
        const int dim = pass.shape.dim, block_tokens = pass.shape.block_tokens, each = block_tokens / LANES;
        const T* q = scratch.query.data();
        const int64_t ahead = values - keys;
        if (tiled<T>(dim, block_tokens)) {
            for (int block = first; block < end; block++, out += block_tokens)
                registers.multiply(q, dim, keys + text[block], block_tokens * STEP<T>, nullptr, 0, out, width, rows, dim,
                                   block_tokens, ahead);
            return;
        }
        in_groups<ROWS>(rows, [&](int row, auto count) {
            constexpr int n = count, MOST = at_once(n, 4);
            for (int u = 0, number; u < (end - first) * each; u += number) {  // vectors of tokens
                number = std::min(MOST, (end - first) * each - u);
                as_constant<MOST>(number, [&](auto vectors) {
                    constexpr int V = vectors;
                    const T* from[V];
                    for (int v = 0; v < V; v++)
                        from[v] = keys + text[first + (u + v) / each] + (u + v) % each * LANES * STEP<T>;
                    Floats sum[n][V] = {};
                    for (int i = 0; i < dim; i += STEP<T>) {
                        Floats key[V];
                        for (int v = 0; v < V; v++) {
                            key[v] = kept(load_step<T>(from[v], 0));
                            __builtin_prefetch(from[v] + ahead, 0, 2);
                            from[v] += block_tokens * STEP<T>;
                        }
                        for (int r = 0; r < n; r++)
                            for (int v = 0; v < V; v++) sum[r][v] = multiply_add(sum[r][v], q + (row + r) * dim + i, key[v]);
                    }
                    for (int r = 0; r < n; r++) std::memcpy(out + (row + r) * width + u * LANES, sum[r], sizeof sum[r]);
                });
            }
        });
    }

    // Adds the values of these blocks by the `weight` [rows][width] of their tokens: to `out` [rows][dim]. The keys of the
    // next strip are wanted soon. Beyond the text's end there may be anything, but for the other tokens of a step.
    void add_values(const Text& text, int first, int end, int rows, const T* weight, float* out) {
        const int dim = pass.shape.dim, block_tokens = pass.shape.block_tokens, step = value_step<T>(pass.shape);
        const auto each_block = [&](auto work) {
            for (int block = first; block < end; block++) {
                const int tokens = (text.tokens(block) + step - 1) / step * step;
                const bool last = (block + strip) * block_tokens >= text.high;
                work(weight + (block - first) * block_tokens, values + text[block], tokens,
                     last ? 0 : keys + text[block + strip] - values - text[block]);
            }
        };
        if (tiled<T>(block_tokens, dim)) {
            each_block([&](const T* own, const T* from, int tokens, int64_t ahead) {
                registers.multiply(own, width, from, dim * STEP<T>, out, dim, out, dim, rows, tokens, dim, ahead);
            });
            return;
        }
        in_groups<ROWS>(rows, [&](int row, auto count) {
            constexpr int n = count, MOST = at_once(n, 4);
            for (int c = 0, number; c < dim; c += number * LANES) {
                number = std::min(MOST, (dim - c) / LANES);
                as_constant<MOST>(number, [&](auto vectors) {
                    constexpr int V = vectors;
                    Floats sum[n][V];
                    for (int r = 0; r < n; r++) std::memcpy(sum[r], out + (row + r) * dim + c, sizeof sum[r]);
                    each_block([&](const T* own, const T* from, int tokens, int64_t ahead) {
                        multiply_add(own + row * width, width, from + c * STEP<T>, dim * STEP<T>, tokens, sum, ahead);
                    });
                    for (int r = 0; r < n; r++) std::memcpy(out + (row + r) * dim + c, sum[r], sizeof sum[r]);
                });
            }
        });
    }
};

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
