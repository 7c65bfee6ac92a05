// The draft head's recurrence: chains of drafts for a batch, each as long as the head is sure of it.
#pragma once
#include "layers.h"

extern "C" {

struct DraftHead {  // pointers to packed weights, float32 norms, the target's embeddings, and its ids of the draft tokens
    int32_t hidden, inner, outputs;
    float epsilon;
    const void *join, *gate_up, *down, *output, *embeddings;
    const float *state_norm, *token_norm, *mlp_norm, *output_norm;
    const int32_t* ids;
};
}

namespace {

// Which of the logits is the largest, and its share in their softmax: not a number if one of them is none.
std::pair<int, float> choose(const float* logits, int n) {
    Floats most = load(logits), mass = {};
    for (int i = LANES; i < n; i += LANES) {
        const Floats here = load(logits + i);
        most = here > most ? here : most;
    }
    const float top = largest(most);
    for (int i = 0; i < n; i += LANES) mass += exp(load(logits + i) - top);
    const auto best = std::find(logits, logits + n - 1, top) - logits;  // not a number: the last, for none equals it
    return {int(best), 1 / total(mass)};
}

// `least` and `position` are those of Price, and so is when a chain ends (drafting/drafter.py). `state` [rows][hidden]
// and `token` [rows] are overwritten. Row r gets `length`[r] drafts, `draft`[r][longest], and their `chances`; `length`[rows]
// is for how many positions drafts were computed.
template <typename T>
void draft(const DraftHead& head, float* state, int32_t* token, int rows, int longest, float least, float position,
           int32_t* draft, float* chances, int32_t* length) {
    const int width = head.hidden, wide = std::max(2 * head.inner, head.outputs);
    static thread_local std::vector<float> floats;
    static thread_local std::vector<T> narrow;
    floats.resize(int64_t(rows) * (wide + width + 1));
    narrow.resize(int64_t(rows) * (2 * width + head.inner));
    float *product = floats.data(), *embedding = product + int64_t(rows) * wide, *chance = embedding + int64_t(rows) * width;
    T *normed = narrow.data(), *gated = normed + int64_t(rows) * 2 * width;
    std::fill_n(chance, rows, 1.0f);
    std::fill_n(length, rows + 1, 0);
    Barrier barrier;
#pragma omp parallel
    for (int j = 0; j < longest; j++) {
#pragma omp for nowait
        for (int r = 0; r < rows; r++) {
            const T* from = (const T*)head.embeddings + int64_t(token[r]) * width;
            for (int i = 0; i < width; i += LANES) store(embedding + int64_t(r) * width + i, load(from + i));
        }
        rms_norm(barrier, state, head.state_norm, normed, rows, width, head.epsilon, 2 * width);
        rms_norm(barrier, embedding, head.token_norm, normed + width, rows, width, head.epsilon, 2 * width);
        linear(barrier, normed, (const T*)head.join, nullptr, state, rows, width, 2 * width);
        rms_norm(barrier, state, head.mlp_norm, normed, rows, width, head.epsilon);
        linear(barrier, normed, (const T*)head.gate_up, nullptr, product, rows, 2 * head.inner, width);
        gate(barrier, product, gated, rows, head.inner);
        linear(barrier, gated, (const T*)head.down, nullptr, state, rows, width, head.inner, true);
        rms_norm(barrier, state, head.output_norm, normed, rows, width, head.epsilon);
        linear(barrier, normed, (const T*)head.output, nullptr, product, rows, head.outputs, width);
#pragma omp for nowait
        for (int r = 0; r < rows; r++) {
            const auto [best, share] = choose(product + int64_t(r) * head.outputs, head.outputs);
            token[r] = head.ids[best];
            chance[r] *= share;
            if (chance[r] >= least) {
                const int64_t place = int64_t(r) * longest + length[r]++;
                draft[place] = token[r], chances[place] = chance[r];
            }
        }
        barrier.wait();
#pragma omp master
        length[rows] = j + 1;
        float worth = 0;  // all threads see the same; what is no number counts as 0
        for (int r = 0; r < rows; r++)
            worth += std::max(0.0f, std::max(0.6f * chance[r], 2 * chance[r] - 1) - least);
        if (!(worth > position)) break;
    }
}

}  // namespace
