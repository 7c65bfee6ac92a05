// The decoder of the Llama family: the packed tokens of a pass through all layers.
#pragma once
#include "attention.h"
#include "layers.h"

extern "C" {

struct Layer {  // float32 norms and biases: of queries' and keys' heads, of `qkv` and of `beside`, they may be null
    Matrix qkv[3], output, gate_up[2], down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm, *qkv_bias, *beside_norm;
    void *keys, *values;  // all blocks of this layer
};

struct Decoder {
    Shape shape;
    int32_t layers, hidden, inner, window;
    float scale, epsilon;
    const float* norm;  // null: there are more layers to come, so `x` is what counts
    const Layer* layer;
};
}

namespace {

// Queries, keys and values of all tokens, turned by their positions: [T][heads + 2 kv_heads][dim] to three of [T]. Where
// the layer has norms of heads, queries and keys are overwritten by what these make of them.
template <typename T>
void rotate(Team& team, const Decoder& decoder, const Layer& layer, int tokens, float* qkv, const float* cosine,
            const float* sine, T* query, T* key, T* value) {
    const Shape& shape = decoder.shape;
    const int dim = shape.dim, half = dim / 2, heads = shape.heads, kv = shape.kv_heads;
    team.share(tokens, [&](int t) {
        float* from = qkv + int64_t(t) * (heads + 2 * kv) * dim;
        const float *c = cosine + t * dim, *s = sine + t * dim;
        for (int h = 0; h < heads + kv; h++, from += dim) {
            T* to = h < heads ? query + (int64_t(t) * heads + h) * dim : key + (int64_t(t) * kv + h - heads) * dim;
            if (const float* norm = h < heads ? layer.query_norm : layer.key_norm)
                normalise(from, norm, from, dim, decoder.epsilon);
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
    });
}

// `beside` [tokens][hidden]: what the attention of layers with a norm for it reads before `x`. Others leave it alone.
template <typename T>
void decode(const Decoder& decoder, const QueryRange* ranges, int count, const int32_t* tables, int tokens,
            const float* cosine, const float* sine, float* x, T* hidden, const float* beside) {
    const Shape& shape = decoder.shape;
    const int q = shape.heads * shape.dim, kv = shape.kv_heads * shape.dim, width = decoder.hidden;
    static thread_local std::vector<float> floats;  // they grow to the longest pass, and stay
    static thread_local std::vector<T> narrow;
    const int wide = std::max(q + 2 * kv, 2 * decoder.inner);
    floats.resize(int64_t(tokens) * wide);
    narrow.resize(int64_t(tokens) * (2 * width + 2 * q + 2 * kv + decoder.inner));
    float* product = floats.data();
    T *normed = narrow.data(), *query = normed + int64_t(tokens) * 2 * width, *key = query + int64_t(tokens) * q,
      *value = key + int64_t(tokens) * kv, *attended = value + int64_t(tokens) * kv,
      *gated = attended + int64_t(tokens) * q;
    const Fixed fixed = fixed_memory(tokens, std::max({2 * width, q, decoder.inner}));
    const Pass pass(shape, ranges, count, tables, {decoder.scale, decoder.window});
    Team team;
#pragma omp parallel
    {
        for (int l = 0; l < decoder.layers; l++) {
            const Layer& layer = decoder.layer[l];
            const int own = layer.beside_norm ? width : 0, read = own + width;
            if (own) rms_norm(team, beside, layer.beside_norm, normed, tokens, width, decoder.epsilon, read);
            rms_norm(team, x, layer.attention_norm, normed + own, tokens, width, decoder.epsilon, read);
            linear(team, normed, layer.qkv, 3, layer.qkv_bias, product, tokens, read, fixed);
            rotate(team, decoder, layer, tokens, product, cosine, sine, query, key, value);
            attention(team, pass, query, key, value, (T*)layer.keys, (T*)layer.values, attended);
            linear(team, attended, &layer.output, 1, nullptr, x, tokens, q, fixed, true);
            rms_norm(team, x, layer.mlp_norm, normed, tokens, width, decoder.epsilon);
            linear(team, normed, layer.gate_up, 2, nullptr, product, tokens, width, fixed);
            gate(team, product, gated, tokens, decoder.inner);
            linear(team, gated, &layer.down, 1, nullptr, x, tokens, decoder.inner, fixed, true);
        }
        if (decoder.norm) rms_norm(team, x, decoder.norm, hidden, tokens, width, decoder.epsilon);
    }
}

}  // namespace
