// How keys and values lie in blocks, and how those of a pass come there.
//
// Within a block the keys of a head lie transposed, [dim][token], and its values as they come, [token][dim], so that
// scores and outputs are products of the same kind; both in steps, as products.h has them.
#pragma once
#include "pass.h"
#include "tiles.h"

namespace {

// Of how many tokens values are multiplied at a time.
template <typename T>
int value_step(const Shape& shape) {
    return tiled<T>(shape.block_tokens, shape.dim) ? TILE_STEP : STEP<T>;
}

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

}  // namespace
