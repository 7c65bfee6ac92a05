// What layers are made of: products with packed weights, norms, gates. All run within a parallel region and end with a
// barrier; activations are float32 between them, and rounded to the weights' type where they are multiplied.
#pragma once
#include <cmath>

#include "products.h"

namespace {

// Weights [n][k] are packed in panels of 32 outputs: [n / 32][k / STEP][32][STEP].
constexpr int PANEL = 2 * LANES;

template <int ROWS>
void panel(const float* a, const float* weight, int k, Floats (&sum)[ROWS][2], int64_t ahead) {
    constexpr int CHUNK = 64;  // sums of sums: one long sum would lose digits that the exact mode needs
    for (int begin = 0; begin < k; begin += CHUNK) {
        Floats part[ROWS][2] = {};
        multiply_add(a + begin, k, weight + int64_t(begin) * PANEL, PANEL, std::min(CHUNK, k - begin), part, ahead);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < 2; v++) sum[r][v] += part[r][v];
    }
}

template <int ROWS>
void panel(const BFloat16* a, const BFloat16* weight, int k, Floats (&sum)[ROWS][2], int64_t ahead) {
    multiply_add(a, k, weight, 2 * PANEL, k, sum, ahead);
}

template <int ROWS, typename T>
void rows_times_panel(const T* a, const T* weight, const float* bias, float* out, int n, int k, bool add) {
    Floats sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) {
            sum[r][v] = add ? load(out + int64_t(r) * n + v * LANES) : Floats{};
            if (bias) sum[r][v] += load(bias + v * LANES);
        }
    // The next panel of this thread, as far as one can tell.
    panel<ROWS>(a, weight, k, sum, int64_t(omp_get_num_threads()) * PANEL * k);
    for (int r = 0; r < ROWS; r++) std::memcpy(out + int64_t(r) * n, sum[r], sizeof sum[r]);
}

// out[rows][n] = a[rows][k] * weight^T + bias, or that added to `out`; n is a multiple of PANEL, k of 2.
template <typename T>
void linear(Barrier& barrier, const T* a, const T* weight, const float* bias, float* out, int rows, int n, int k,
            bool add = false) {
#pragma omp for schedule(dynamic) nowait
    for (int p = 0; p < n / PANEL; p++)
        in_groups<8>(rows, [&](int first, auto count) {
            rows_times_panel<count>(a + int64_t(first) * k, weight + int64_t(p) * PANEL * k,
                                    bias ? bias + p * PANEL : nullptr, out + int64_t(first) * n + p * PANEL, n, k, add);
        });
    barrier.wait();
}

template <typename T>
void rms_norm(Barrier& barrier, const float* x, const float* weight, T* out, int rows, int width, float epsilon,
              int out_stride = 0) {
#pragma omp for nowait
    for (int r = 0; r < rows; r++) {
        const float* from = x + int64_t(r) * width;
        Floats squares = {};
        for (int i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
        float mean = 0;
        for (int v = 0; v < LANES; v++) mean += squares[v] / width;
        const float inverse = 1 / std::sqrt(mean + epsilon);
        for (int i = 0; i < width; i += LANES)
            store(out + int64_t(r) * (out_stride ? out_stride : width) + i, load(from + i) * inverse * load(weight + i));
    }
    barrier.wait();
}

template <typename T>
void gate(Barrier& barrier, const float* gate_up, T* out, int tokens, int inner) {
#pragma omp for nowait
    for (int t = 0; t < tokens; t++) {
        const float *g = gate_up + int64_t(t) * 2 * inner, *u = g + inner;
        for (int i = 0; i < inner; i += LANES) {
            const Floats x = load(g + i), size = x < 0 ? x : -x, small = exp(size);
            const Floats sigmoid = (x < 0 ? small : Floats{} + 1.0f) / (small + 1.0f), y = x * sigmoid * load(u + i);
            store(out + int64_t(t) * inner + i, y);
        }
    }
    barrier.wait();
}

}  // namespace
