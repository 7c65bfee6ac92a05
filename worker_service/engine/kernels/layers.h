// What layers are made of: products with packed weights, norms, gates. All run within a parallel region and end with a
// barrier; activations are float32 between them, and rounded to the weights' type where they are multiplied.
#pragma once
#include <cmath>
#include <vector>

#include "few_bits.h"
#include "threads.h"
#include "tiles.h"

namespace {

// sum[GROUPS][ROWS][VECTORS] += a * a panel of whole weights, whose columns are in so many groups. All groups are summed
// over a part of k before the next part is read: so weights come from memory in the order in which they lie there.
template <int GROUPS, int ROWS, int VECTORS, typename W>
void whole(const float* a, const W* weight, int k, Floats (&sum)[GROUPS][ROWS][VECTORS]) {
    for (int begin = 0; begin < k; begin += CHUNK)
        for (int g = 0; g < GROUPS; g++) {
            Floats part[ROWS][VECTORS] = {};
            multiply_add(a + begin, k, weight + int64_t(begin) * PANEL + STEP<W> * g * VECTORS * LANES, STEP<W> * PANEL,
                         std::min(CHUNK, k - begin), part, AHEAD / sizeof(W));
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) sum[g][r][v] += part[r][v];
        }
}

template <int GROUPS, int ROWS, int VECTORS>
void whole(const BFloat16* a, const BFloat16* weight, int k, Floats (&sum)[GROUPS][ROWS][VECTORS]) {
    for (int begin = 0, part = GROUPS > 1 ? CHUNK : k; begin < k; begin += part)
        for (int g = 0; g < GROUPS; g++)
            multiply_add(a + begin, k, weight + int64_t(begin) * PANEL + 2 * g * VECTORS * LANES, 2 * PANEL,
                         std::min(part, k - begin), sum[g], AHEAD / sizeof(BFloat16));
}

// Rows first..first + ROWS times panel `p` of whole weights, as many of its columns at a time as registers hold.
template <int ROWS, typename T>
void rows_times_panel(const T* a, int first, const Matrix& weight, int p, const Start& start, float* out, int n, int k) {
    constexpr int VECTORS = at_once(ROWS, PANEL / LANES), COLUMNS = VECTORS * LANES, GROUPS = PANEL / COLUMNS;
    a += int64_t(first) * k;
    out += int64_t(first) * n;
    Floats sum[GROUPS][ROWS][VECTORS];
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sum[g][r][v] = start(first + r, g * COLUMNS + v * LANES);
    const int64_t at = int64_t(p) * PANEL * k;
    if (weight.bits == 32)
        if constexpr (std::is_same_v<T, float>) whole(a, (const float*)weight.weights + at, k, sum);
    if (weight.bits == 16) whole(a, (const BFloat16*)weight.weights + at, k, sum);
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < ROWS; r++) std::memcpy(out + int64_t(r) * n + g * COLUMNS, sum[g][r], sizeof sum[g][r]);
}

// out[rows][n] = a[rows][k] * weights^T + bias, or the product added to `out`. The weights' rows are those of all `parts`
// together: n of each is a multiple of PANEL, k of 2; if they are of few bits, k of their group.
template <typename T>
void linear(Team& team, const T* a, const Matrix* parts, int count, const float* bias, float* out, int rows, int k,
            const Fixed& fixed, bool add = false) {
    int n = 0;
    bool few = false;
    for (int i = 0; i < count; i++) n += parts[i].n, few |= parts[i].bits < 16;
    if (few && std::is_same_v<T, BFloat16>) {
        team.share(rows, [&](int r) {
            fix(a + int64_t(r) * k, k, fixed.row(r, k));
        });
    }
    TileRegisters registers;
    team.share(n / PANEL, [&](int p) {
        const Matrix* part = parts;
        int own = p;
        for (; own >= part->n / PANEL; part++) own -= part->n / PANEL;
        float* to = out + p * PANEL;
        const Start start = add ? Start{to, n} : Start{bias ? bias + p * PANEL : nullptr, 0};
        if (part->bits == 16 && tiled<T>(k, PANEL)) {
            constexpr int LINE = PANEL * STEP<T>;
            registers.multiply(a, k, (const T*)part->weights + int64_t(own) * PANEL * k, LINE, start.at, start.stride, to, n,
                               rows, k, PANEL, int64_t(TILE_ROWS) * LINE);
            return;
        }
        if (part->bits < 16)
            rows_times_few_bits(a, fixed, *part, own, start, to, rows, n, k);
        else
            in_groups<MOST_ROWS>(rows, [&](int first, auto number) {
                rows_times_panel<number>(a, first, *part, own, start, to, n, k);
            });
    });
}

// Memory for the activations of a product. It grows to the largest, and stays.
inline Fixed fixed_memory(int64_t rows, int k) {
    static thread_local std::vector<int32_t> memory;
    const int64_t numbers = rows * k / 2, sums = rows * k / GRAIN;
    memory.resize(std::max(int64_t(memory.size()), numbers + sums + rows + 2));
    int32_t* at = memory.data();
    return {(char*)at, (float*)(at + numbers + 1), (float*)(at + numbers + 1 + rows)};
}

// One row; `out` may be `from`.
template <typename T>
void normalise(const float* from, const float* weight, T* out, int width, float epsilon) {
    Floats squares = {};
    for (int i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
    float mean = 0;
    for (int v = 0; v < LANES; v++) mean += squares[v] / width;
    const float inverse = 1 / std::sqrt(mean + epsilon);
    for (int i = 0; i < width; i += LANES) store(out + i, load(from + i) * inverse * load(weight + i));
}

template <typename T>
void rms_norm(Team& team, const float* x, const float* weight, T* out, int rows, int width, float epsilon,
              int out_stride = 0) {
    team.share(rows, [&](int r) {
        normalise(x + int64_t(r) * width, weight, out + int64_t(r) * (out_stride ? out_stride : width), width, epsilon);
    });
}

template <typename T>
void gate(Team& team, const float* gate_up, T* out, int tokens, int inner) {
    team.share(tokens, [&](int t) {
        const float *g = gate_up + int64_t(t) * 2 * inner, *u = g + inner;
        for (int i = 0; i < inner; i += LANES) {
            const Floats x = load(g + i), size = x < 0 ? x : -x, small = exp(size);
            const Floats sigmoid = (x < 0 ? small : Floats{} + 1.0f) / (small + 1.0f), y = x * sigmoid * load(u + i);
            store(out + int64_t(t) * inner + i, y);
        }
    });
}

}  // namespace
