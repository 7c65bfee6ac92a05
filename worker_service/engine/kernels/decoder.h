// The decoder of the Llama family: the packed tokens of a pass through all layers.
#pragma once
#include "attention.h"
#include "layers.h"

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
void decode(const Decoder& decoder, const QueryRange* ranges, int count, const int32_t* tables, int tokens,
            const float* cosine, const float* sine, float* x, T* hidden) {
    const Shape& shape = decoder.shape;
    const int q = shape.heads * shape.dim, kv = shape.kv_heads * shape.dim, width = decoder.hidden;
    static thread_local std::vector<float> floats;  // they grow to the longest pass, and stay
    static thread_local std::vector<T> narrow;
    const int wide = std::max(q + 2 * kv, 2 * decoder.inner);
    floats.resize(int64_t(tokens) * wide);
    narrow.resize(int64_t(tokens) * (width + 2 * q + 2 * kv + decoder.inner));
    float* product = floats.data();
    T *normed = narrow.data(), *query = normed + int64_t(tokens) * width, *key = query + int64_t(tokens) * q,
      *value = key + int64_t(tokens) * kv, *attended = value + int64_t(tokens) * kv,
      *gated = attended + int64_t(tokens) * q;
    const Pass pass(shape, ranges, count, tables, {decoder.scale, decoder.window});
    Barrier barrier;
#pragma omp parallel
    {
        for (int l = 0; l < decoder.layers; l++) {
            const Layer& layer = decoder.layer[l];
            rms_norm(barrier, x, layer.attention_norm, normed, tokens, width, decoder.epsilon);
            linear(barrier, normed, (const T*)layer.qkv, layer.qkv_bias, product, tokens, q + 2 * kv, width);
            rotate(barrier, shape, tokens, product, cosine, sine, query, key, value);
            attention(barrier, pass, query, key, value, (T*)layer.keys, (T*)layer.values, attended);
            linear(barrier, attended, (const T*)layer.output, nullptr, x, tokens, width, q, true);
            rms_norm(barrier, x, layer.mlp_norm, normed, tokens, width, decoder.epsilon);
            linear(barrier, normed, (const T*)layer.gate_up, nullptr, product, tokens, 2 * decoder.inner, width);
            gate(barrier, product, gated, tokens, decoder.inner);
            linear(barrier, gated, (const T*)layer.down, nullptr, x, tokens, width, decoder.inner, true);
        }
        rms_norm(barrier, x, decoder.norm, hidden, tokens, width, decoder.epsilon);
    }
}

}  // namespace
