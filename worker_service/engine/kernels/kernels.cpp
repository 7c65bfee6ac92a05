// What the CPU computes natively, as C functions for each type of weights. Plain pointers: no torch, no Python; whose
// memory it is and who runs is not known here.
#include "attention.h"
#include "decoder.h"
#include "draft_head.h"
#include "layers.h"

namespace {

template <typename T>
void attention_alone(const Shape& shape, const QueryRange* ranges, int count, const int32_t* tables, const T* query,
                     const T* key, const T* value, T* keys, T* values, T* out, const Options& options) {
    const Pass pass(shape, ranges, count, tables, options);
    Team team;
#pragma omp parallel
    attention(team, pass, query, key, value, keys, values, out);
}

}  // namespace

// For each type of weights T: one layer's attention in a pass (`query`, `key`, `value`, `out` are [T][heads][dim];
// `keys` and `values` the layer's blocks; the last four are Options); a pass through all layers (`x`: embeddings
// [T][hidden], overwritten; `cosine`, `sine`: [T][dim]; `hidden`: the result, after the last norm; `beside`: null, or
// what some layers read, too); chains of drafts; a product with packed weights, summed in float32; and some outputs' weights
// as T [count][k], or false where one is not among the first n.
#define FOR_TYPE(NAME, T)                                                                                              \
    void attention_##NAME(const Shape* shape, const QueryRange* ranges, int count, const int32_t* tables,              \
                          const T* query, const T* key, const T* value, T* keys, T* values, T* out, float scale,       \
                          int window, float softcap, const float* sinks) {                                             \
        attention_alone(*shape, ranges, count, tables, query, key, value, keys, values, out,                           \
                        Options{scale, window, softcap, sinks});                                                       \
    }                                                                                                                  \
    void decode_##NAME(const Decoder* decoder, const QueryRange* ranges, int count, const int32_t* tables, int tokens, \
                       const float* cosine, const float* sine, float* x, T* hidden, const float* beside) {             \
        decode(*decoder, ranges, count, tables, tokens, cosine, sine, x, hidden, beside);                              \
    }                                                                                                                  \
    void draft_##NAME(const DraftHead* head, float* state, const int32_t* token, int rows, int width, int longest,     \
                      float least, float position, int32_t* drafts, float* chances, int32_t* length) {                 \
        draft<T>(*head, state, token, rows, width, longest, least, position, drafts, chances, length);                 \
    }                                                                                                                  \
    void linear_##NAME(const T* a, const Matrix* weight, const float* bias, float* out, int rows, int k) {             \
        const Fixed fixed = fixed_memory(rows, k);                                                                     \
        Team team;                                                                                                     \
        _Pragma("omp parallel") linear(team, a, weight, 1, bias, out, rows, k, fixed);                                 \
    }                                                                                                                  \
    bool widen_##NAME(const Matrix* weight, const int64_t* outputs, int n, int count, int k, T* out) {                 \
        for (int i = 0; i < count; i++) {                                                                              \
            if (outputs[i] < 0 || outputs[i] >= n) return false;                                                       \
            widen(*weight, outputs[i], k, out + int64_t(i) * k);                                                       \
        }                                                                                                              \
        return true;                                                                                                   \
    }

extern "C" {
int tiles() { return has_tiles; }
FOR_TYPE(float, float)
FOR_TYPE(bfloat16, BFloat16)
}
