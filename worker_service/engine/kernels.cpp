// What the CPU computes natively: attention over KV in blocks, products with packed weights, and with both the decoder
// of the Llama family. Plain pointers: no torch, no Python; whose memory it is and who runs is not known here.
//
// Within a block the keys of a head lie transposed, [dim][token], and its values as they come, [token][dim]. So scores
// and outputs are both sums of broadcast numbers times rows of a block: one inner loop, without sums across a vector.
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// Where the threads of a parallel region wait for each other. OpenMP's own barriers spin for long: on a busy machine one
// thread then spins on the very core that another one needs, for a whole time slice at each of hundreds of barriers.
class Barrier {
   public:
    void wait() {
        const int now = generation.load();
        if (arrived.fetch_add(1) + 1 == omp_get_num_threads()) {
            arrived.store(0);
            generation.store(now + 1);
            return;
        }
        for (int spins = 0; generation.load(std::memory_order_acquire) == now; spins++)
            if (spins > SPINS) sched_yield();
    }

   private:
    static constexpr int SPINS = 2000;  // some microseconds
    std::atomic<int> arrived{0}, generation{0};
};

constexpr int LANES = 16;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Shorts = uint16_t __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

float to_float(float x) { return x; }
float to_float(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

void store(float* to, float x) { *to = x; }
void store(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}
Floats load(const BFloat16* from) {
    Shorts bits;
    std::memcpy(&bits, from, sizeof bits);
    Ints wide = __builtin_convertvector(bits, Ints) << 16;
    return (Floats)wide;
}

// e^x for x <= 0, to 2e-7 relative: 2^n times a polynomial in what is left (Cephes' coefficients).
Floats exp(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    Floats whole = __builtin_convertvector(n, Floats);
    Floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return (Floats)((Ints)p + (n << 23));
}

// out[ROWS][VECTORS * LANES] += a[ROWS][k] * b[k][...], all sums in registers.
template <int ROWS, int VECTORS, typename T>
void multiply_add(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int k) {
    Floats sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(out + r * out_stride + v * LANES);
    for (int i = 0; i < k; i++) {
        Floats row[VECTORS];
        for (int v = 0; v < VECTORS; v++) row[v] = load(b + i * b_stride + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] += a[r * a_stride + i] * row[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(out + r * out_stride + v * LANES, &sum[r][v], sizeof(Floats));
}

template <int ROWS, typename T>
void columns(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int k, int width) {
    int c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        multiply_add<ROWS, 4>(a, a_stride, b + c, b_stride, out + c, out_stride, k);
    for (; c < width; c += LANES) multiply_add<ROWS, 1>(a, a_stride, b + c, b_stride, out + c, out_stride, k);
}

// out[rows][width] += a[rows][k] * b[k][width]; width is a multiple of LANES.
template <typename T>
void multiply(const float* a, int a_stride, const T* b, int b_stride, float* out, int out_stride, int rows, int k,
              int width) {
    int r = 0;
    for (; r + 5 <= rows; r += 5)
        columns<5>(a + r * a_stride, a_stride, b, b_stride, out + r * out_stride, out_stride, k, width);
    a += r * a_stride, out += r * out_stride;
    switch (rows - r) {
        case 4: return columns<4>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 3: return columns<3>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 2: return columns<2>(a, a_stride, b, b_stride, out, out_stride, k, width);
        case 1: return columns<1>(a, a_stride, b, b_stride, out, out_stride, k, width);
    }
}

}  // namespace

extern "C" {

struct Shape {  // of the model and its blocks
    int32_t heads, kv_heads, dim, block_tokens;
};

struct Segment {  // tokens begin..begin+n of the packed round: its request's from position `start` on
    int32_t begin, n, start, table;  // table: where its block ids begin
};
}

namespace {

constexpr int TILE = 16;  // tokens of a segment that share one pass over its blocks

// One tile of queries of one key-value head over all blocks that it sees: softmax online, as in FlashAttention.
template <typename T>
void attend(const Shape& shape, const Segment& segment, const int32_t* table, int kv_head, int first, const T* query,
            const T* keys, const T* values, T* out, float scale, int window, std::vector<float>& scratch) {
    const int group = shape.heads / shape.kv_heads, dim = shape.dim, span = shape.block_tokens;
    const int tokens = std::min(TILE, segment.n - first), rows = tokens * group;
    scratch.resize(rows * (2 * dim + span + 2));
    float *q = scratch.data(), *sum = q + rows * dim, *score = sum + rows * dim, *top = score + rows * span,
          *mass = top + rows;
    for (int r = 0; r < rows; r++) {
        const T* from = query + ((segment.begin + first + r / group) * shape.heads + kv_head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) q[r * dim + d] = to_float(from[d]) * scale;
        top[r] = -1e30f, mass[r] = 0;
    }
    std::fill(sum, sum + rows * dim, 0.0f);
    const int low = window ? std::max(0, segment.start + first - window + 1) : 0;
    const int high = segment.start + first + tokens;
    for (int block = low / span; block * span < high; block++) {
        const int64_t at = (int64_t(table[block]) * shape.kv_heads + kv_head) * span * dim;
        std::fill(score, score + rows * span, 0.0f);
        multiply(q, dim, keys + at, span, score, span, rows, dim, span);
        for (int r = 0; r < rows; r++) {
            const int own = segment.start + first + r / group;  // the position of the row's token
            const int begin = window ? std::max(0, own - window + 1 - block * span) : 0;
            const int end = std::min(span, own + 1 - block * span);
            float* s = score + r * span;
            std::fill(s, s + std::clamp(begin, 0, span), -1e30f);
            std::fill(s + std::clamp(end, 0, span), s + span, -1e30f);
            if (begin >= end) {
                std::fill(s, s + span, 0.0f);
                continue;
            }
            float best = top[r];
            for (int t = begin; t < end; t++) best = std::max(best, s[t]);
            Floats shrink = exp(Floats{} + (top[r] - best)), total = {};
            top[r] = best;
            for (int t = 0; t < span; t += LANES) {
                Floats p = exp(load(s + t) - best);
                p = load(s + t) < -1e29f ? Floats{} : p;
                total += p;
                std::memcpy(s + t, &p, sizeof p);
            }
            mass[r] *= shrink[0];
            for (int v = 0; v < LANES; v++) mass[r] += total[v];
            for (int d = 0; d < dim; d += LANES) {
                Floats scaled = load(sum + r * dim + d) * shrink;
                std::memcpy(sum + r * dim + d, &scaled, sizeof scaled);
            }
        }
        multiply(score, span, values + at, dim, sum, dim, rows, std::min(span, high - block * span), dim);
    }
    for (int r = 0; r < rows; r++) {
        T* to = out + ((segment.begin + first + r / group) * shape.heads + kv_head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) store(to + d, sum[r * dim + d] / mass[r]);
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

// Within a parallel region, as all that follows; it ends with a barrier.
template <typename T>
void attention(Barrier& barrier, const Round& round, const T* query, const T* key, const T* value, T* keys, T* values, T* out) {
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
            for (int d = 0; d < dim; d++) keys[at + d * span + inside] = key[from + d];
            std::copy(value + from, value + from + dim, values + at + inside * dim);
        }
    }
    barrier.wait();
    static thread_local std::vector<float> scratch;
#pragma omp for schedule(dynamic) nowait
    for (int task = 0; task < int(round.tiles.size()) * shape.kv_heads; task++) {
        const auto [s, first] = round.tiles[task / shape.kv_heads];
        const Segment& segment = round.segments[s];
        attend(shape, segment, round.tables + segment.table, task % shape.kv_heads, first, query, keys, values, out,
               round.scale, round.window, scratch);
    }
    barrier.wait();
}

// Weights [n][k] are packed in panels of 32 outputs: [n / 32][k][32], and in bfloat16 [n / 32][k / 2][32][2], for there
// is an instruction that multiplies pairs.
constexpr int PANEL = 2 * LANES;

template <int ROWS>
void panel(const float* a, const float* weight, int k, Floats (&sum)[ROWS][2]) {
    constexpr int CHUNK = 64;  // sums of sums: one long sum would lose digits that the exact mode needs
    for (int begin = 0; begin < k; begin += CHUNK) {
        Floats part[ROWS][2] = {};
        for (int i = begin; i < std::min(k, begin + CHUNK); i++, weight += PANEL) {
            const Floats w0 = load(weight), w1 = load(weight + LANES);
            for (int r = 0; r < ROWS; r++) {
                part[r][0] += a[int64_t(r) * k + i] * w0;
                part[r][1] += a[int64_t(r) * k + i] * w1;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < 2; v++) sum[r][v] += part[r][v];
    }
}

template <int ROWS>
void panel(const BFloat16* a, const BFloat16* weight, int k, Floats (&sum)[ROWS][2]) {
    for (int i = 0; i < k; i += 2, weight += 2 * PANEL) {
#ifdef __AVX512BF16__
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(weight), w1 = (__m512bh)_mm512_loadu_si512(weight + PANEL);
        for (int r = 0; r < ROWS; r++) {
            int both;
            std::memcpy(&both, a + r * k + i, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
            sum[r][0] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][0], x, w0);
            sum[r][1] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][1], x, w1);
        }
#else
        for (int v = 0; v < 2; v++) {
            Ints both;
            std::memcpy(&both, weight + v * PANEL, sizeof both);
            const Floats even = (Floats)(both << 16), odd = (Floats)(both & ~0xffff);
            for (int r = 0; r < ROWS; r++) sum[r][v] += to_float(a[r * k + i]) * even + to_float(a[r * k + i + 1]) * odd;
        }
#endif
    }
}

template <int ROWS, typename T>
void rows_times_panel(const T* a, const T* weight, const float* bias, float* out, int n, int k, bool add) {
    Floats sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) {
            sum[r][v] = add ? load(out + int64_t(r) * n + v * LANES) : Floats{};
            if (bias) sum[r][v] += load(bias + v * LANES);
        }
    panel<ROWS>(a, weight, k, sum);
    for (int r = 0; r < ROWS; r++) std::memcpy(out + int64_t(r) * n, sum[r], sizeof sum[r]);
}

// out[rows][n] = a[rows][k] * weight^T + bias, or that added to `out`; n is a multiple of PANEL, k of 2.
template <typename T>
void linear(Barrier& barrier, const T* a, const T* weight, const float* bias, float* out, int rows, int n, int k, bool add = false) {
#pragma omp for schedule(dynamic) nowait
    for (int p = 0; p < n / PANEL; p++) {
        const T* w = weight + int64_t(p) * PANEL * k;
        const float* b = bias ? bias + p * PANEL : nullptr;
        float* o = out + p * PANEL;
        int r = 0;
        for (; r + 8 <= rows; r += 8) rows_times_panel<8>(a + int64_t(r) * k, w, b, o + int64_t(r) * n, n, k, add);
        const T* rest = a + int64_t(r) * k;
        o += int64_t(r) * n;
        switch (rows - r) {
            case 7: rows_times_panel<7>(rest, w, b, o, n, k, add); break;
            case 6: rows_times_panel<6>(rest, w, b, o, n, k, add); break;
            case 5: rows_times_panel<5>(rest, w, b, o, n, k, add); break;
            case 4: rows_times_panel<4>(rest, w, b, o, n, k, add); break;
            case 3: rows_times_panel<3>(rest, w, b, o, n, k, add); break;
            case 2: rows_times_panel<2>(rest, w, b, o, n, k, add); break;
            case 1: rows_times_panel<1>(rest, w, b, o, n, k, add); break;
        }
    }
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
        for (int i = 0; i < width; i++) store(out + int64_t(r) * width + i, from[i] * inverse * weight[i]);
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
void rotate(Barrier& barrier, const Shape& shape, int tokens, const float* qkv, const float* cosine, const float* sine, T* query, T* key,
            T* value) {
    const int dim = shape.dim, half = dim / 2, heads = shape.heads, kv = shape.kv_heads;
#pragma omp for nowait
    for (int t = 0; t < tokens; t++) {
        const float *from = qkv + int64_t(t) * (heads + 2 * kv) * dim, *c = cosine + t * dim, *s = sine + t * dim;
        for (int h = 0; h < heads + kv; h++, from += dim) {
            T* to = h < heads ? query + (int64_t(t) * heads + h) * dim : key + (int64_t(t) * kv + h - heads) * dim;
            for (int d = 0; d < half; d++) {
                store(to + d, from[d] * c[d] - from[d + half] * s[d]);
                store(to + d + half, from[d + half] * c[d + half] + from[d] * s[d + half]);
            }
        }
        for (int d = 0; d < kv * dim; d++) store(value + int64_t(t) * kv * dim + d, from[d]);
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
            for (int v = 0; v < LANES; v++) store(out + int64_t(t) * inner + i + v, y[v]);
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
