// What the CPU computes natively: attention over KV in blocks, products with packed weights, and with both the decoder
// of the Llama family. Plain pointers: no torch, no Python; whose memory it is and who runs is not known here.
#include <cmath>

#include "attention.h"

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
void rms_norm(Barrier& barrier, const float* x, const float* weight, T* out, int rows, int width, float epsilon) {
#pragma omp for nowait
    for (int r = 0; r < rows; r++) {
        const float* from = x + int64_t(r) * width;
        Floats squares = {};
        for (int i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
        float mean = 0;
        for (int v = 0; v < LANES; v++) mean += squares[v] / width;
        const float inverse = 1 / std::sqrt(mean + epsilon);
        for (int i = 0; i < width; i += LANES)
            store(out + int64_t(r) * width + i, load(from + i) * inverse * load(weight + i));
    }
    barrier.wait();
}

}  // namespace

extern "C" {

struct Layer {  // pointers to packed weights, and to float32 ones of norms and biases; `qkv_bias` may be null
    const void *qkv, *output, *gate_up, *down;
    const float *attention_norm, *mlp_norm, *qkv_bias;
    void *keys, *values;  // all blocks of this layer
};

struct Decoder {
    Shape shape;
    int32_t layers, hidden, inner, window;
    float scale, epsilon;
    const float* norm;
    const Layer* layer;
};
}

namespace {

// Queries, keys and values of all tokens, turned by their positions: [T][heads + 2 kv_heads][dim] to three of [T].
template <typename T>
void rotate(Barrier& barrier, const Shape& shape, int tokens, const float* qkv, const float* cosine, const float* sine,
            T* query, T* key, T* value) {
    const int dim = shape.dim, half = dim / 2, heads = shape.heads, kv = shape.kv_heads;
#pragma omp for nowait
    for (int t = 0; t < tokens; t++) {
        const float *from = qkv + int64_t(t) * (heads + 2 * kv) * dim, *c = cosine + t * dim, *s = sine + t * dim;
        for (int h = 0; h < heads + kv; h++, from += dim) {
            T* to = h < heads ? query + (int64_t(t) * heads + h) * dim : key + (int64_t(t) * kv + h - heads) * dim;
            int d = 0;
            for (; d + LANES <= half; d += LANES) {
                const Floats low = load(from + d), high = load(from + d + half);
                store(to + d, low * load(c + d) - high * load(s + d));
                store(to + d + half, high * load(c + d + half) + low * load(s + d + half));
            }
            for (; d < half; d++) {
                store(to + d, from[d] * c[d] - from[d + half] * s[d]);
                store(to + d + half, from[d + half] * c[d + half] + from[d] * s[d + half]);
            }
        }
        for (int d = 0; d < kv * dim; d += LANES) store(value + int64_t(t) * kv * dim + d, load(from + d));
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

template <typename T>
void decode(const Decoder& decoder, const Segment* segments, int count, const int32_t* tables, int tokens,
            const float* cosine, const float* sine, float* x, T* hidden) {
    const Shape& shape = decoder.shape;
    const int q = shape.heads * shape.dim, kv = shape.kv_heads * shape.dim, width = decoder.hidden;
    static thread_local std::vector<float> floats;  // they grow to the longest round, and stay
    static thread_local std::vector<T> narrow;
    const int wide = std::max(q + 2 * kv, 2 * decoder.inner);
    floats.resize(int64_t(tokens) * wide);
    narrow.resize(int64_t(tokens) * (width + 2 * q + 2 * kv + decoder.inner));
    float* product = floats.data();
    T *normed = narrow.data(), *query = normed + int64_t(tokens) * width, *key = query + int64_t(tokens) * q,
      *value = key + int64_t(tokens) * kv, *attended = value + int64_t(tokens) * kv,
      *gated = attended + int64_t(tokens) * q;
    const Round round(shape, segments, count, tables, decoder.scale, decoder.window);
    Barrier barrier;
#pragma omp parallel
    {
        for (int l = 0; l < decoder.layers; l++) {
            const Layer& layer = decoder.layer[l];
            rms_norm(barrier, x, layer.attention_norm, normed, tokens, width, decoder.epsilon);
            linear(barrier, normed, (const T*)layer.qkv, layer.qkv_bias, product, tokens, q + 2 * kv, width);
            rotate(barrier, shape, tokens, product, cosine, sine, query, key, value);
            attention(barrier, round, query, key, value, (T*)layer.keys, (T*)layer.values, attended);
            linear(barrier, attended, (const T*)layer.output, nullptr, x, tokens, width, q, true);
            rms_norm(barrier, x, layer.mlp_norm, normed, tokens, width, decoder.epsilon);
            linear(barrier, normed, (const T*)layer.gate_up, nullptr, product, tokens, 2 * decoder.inner, width);
            gate(barrier, product, gated, tokens, decoder.inner);
            linear(barrier, gated, (const T*)layer.down, nullptr, x, tokens, width, decoder.inner, true);
        }
        rms_norm(barrier, x, decoder.norm, hidden, tokens, width, decoder.epsilon);
    }
}

template <typename T>
void attention_alone(const Shape& shape, const Segment* segments, int count, const int32_t* tables, const T* query,
                     const T* key, const T* value, T* keys, T* values, T* out, float scale, int window) {
    const Round round(shape, segments, count, tables, scale, window);
    Barrier barrier;
#pragma omp parallel
    attention(barrier, round, query, key, value, keys, values, out);
}

}  // namespace

// For each type of weights T: one layer's attention of a round (`query`, `key`, `value`, `out` are [T][heads][dim];
// `keys` and `values` the layer's blocks; `window`: how far back a token sees, itself included, 0: everything); a round
// through all layers (`x`: embeddings [T][hidden], overwritten; `cosine`, `sine`: [T][dim]; `hidden`: the result, after
// the last norm); and a product with packed weights, summed in float32.
#define FOR_TYPE(NAME, T)                                                                                              \
    void attention_##NAME(const Shape* shape, const Segment* segments, int count, const int32_t* tables,               \
                          const T* query, const T* key, const T* value, T* keys, T* values, T* out, float scale,       \
                          int window) {                                                                                \
        attention_alone(*shape, segments, count, tables, query, key, value, keys, values, out, scale, window);         \
    }                                                                                                                  \
    void decode_##NAME(const Decoder* decoder, const Segment* segments, int count, const int32_t* tables, int tokens,  \
                       const float* cosine, const float* sine, float* x, T* hidden) {                                  \
        decode(*decoder, segments, count, tables, tokens, cosine, sine, x, hidden);                                    \
    }                                                                                                                  \
    void linear_##NAME(const T* a, const T* weight, const float* bias, float* out, int rows, int n, int k) {           \
        Barrier barrier;                                                                                               \
        _Pragma("omp parallel") linear(barrier, a, weight, bias, out, rows, n, k);                                     \
    }

extern "C" {
FOR_TYPE(float, float)
FOR_TYPE(bfloat16, BFloat16)
}
