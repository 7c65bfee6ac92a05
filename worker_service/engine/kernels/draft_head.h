// The draft head's recurrence: chains of drafts for a batch, each as long as the head is sure of it.
#pragma once
#include "layers.h"

extern "C" {

struct DraftHead {  // weights in bfloat16 or of few bits, float32 norms, the target's embeddings and ids
    int32_t hidden, inner, outputs;
    float epsilon;
    Matrix join, gate_up, down, output;
    const void* embeddings;
    const float *state_norm, *token_norm, *mlp_norm, *output_norm;
    const int32_t* ids;
};
}

namespace {

constexpr int WIDEST = 8;  // chains of a row
constexpr float TAKEN = -1e30f;

// The `count` largest of the logits, in order: which they are, and the share of each in the softmax, which is not a number
// if a logit is none. Overwrites the logits that it finds.
void choose(float* logits, int n, int count, int* found, float* share) {
    const auto most = [&] {
        Floats most = load(logits);
        for (int i = LANES; i < n; i += LANES) {
            const Floats here = load(logits + i);
            most = here > most ? here : most;
        }
        return largest(most);
    };
    const float top = most();
    Floats mass = {};
    for (int i = 0; i < n; i += LANES) mass += exp(load(logits + i) - top);
    for (int i = 0; i < count; i++) {
        const float here = i ? most() : top;
        found[i] = std::find(logits, logits + n - 1, here) - logits;  // not a number: the last, for none equals it
        share[i] = std::exp(here - top) / total(mass);
        logits[found[i]] = TAKEN;
    }
}

// `least` and `position` are those of Price, and so is when a chain ends (drafting/drafter.py). Of each of `rows` there
// are `width` chains, which begin with the likeliest tokens. `state` [rows * width][hidden] holds one state a row at first,
// and is overwritten; `token` [rows] are the newest. Chain c gets `length`[c] drafts, `draft`[c][longest], and their
// `chances`; `length`[rows * width] is for how many positions drafts were computed.
template <typename Embedding>
void draft(const DraftHead& head, float* state, const int32_t* token, int rows, int width, int longest, float least,
           float position, int32_t* draft, float* chances, int32_t* length) {
    using T = BFloat16;  // of what is multiplied, whatever the target's: drafts need not be exact
    const int hidden = head.hidden, most = rows * width, wide = std::max(2 * head.inner, head.outputs);
    static thread_local std::vector<float> floats;
    static thread_local std::vector<T> narrow;
    floats.resize(int64_t(most) * (wide + hidden));
    narrow.resize(int64_t(most) * (2 * hidden + head.inner));
    float *product = floats.data(), *embedding = product + int64_t(most) * wide;
    T *normed = narrow.data(), *gated = normed + int64_t(most) * 2 * hidden;
    const Fixed fixed = fixed_memory(most, std::max(2 * hidden, head.inner));
    std::fill_n(length, most + 1, 0);
    struct Chain {  // that goes on
        int number, row;  // `row`: of `state`
        int32_t token;
        float chance;
    };
    std::vector<Chain> chains, next(most);
    for (int r = 0; r < rows; r++) chains.push_back({r * width, r, token[r], 1});
    Team team;
#pragma omp parallel
    for (int j = 0, n = rows; j < longest && n; j++, n = chains.size()) {
        const int kept = j ? 1 : width;  // of the tokens that may follow each chain
        team.share(n, [&](int r) {
            const Embedding* from = (const Embedding*)head.embeddings + int64_t(chains[r].token) * hidden;
            for (int i = 0; i < hidden; i += LANES) store(embedding + int64_t(r) * hidden + i, load(from + i));
        });
        rms_norm(team, state, head.state_norm, normed, n, hidden, head.epsilon, 2 * hidden);
        rms_norm(team, embedding, head.token_norm, normed + hidden, n, hidden, head.epsilon, 2 * hidden);
        linear(team, normed, &head.join, 1, nullptr, state, n, 2 * hidden, fixed);
        rms_norm(team, state, head.mlp_norm, normed, n, hidden, head.epsilon);
        linear(team, normed, &head.gate_up, 1, nullptr, product, n, hidden, fixed);
        gate(team, product, gated, n, head.inner);
        linear(team, gated, &head.down, 1, nullptr, state, n, head.inner, fixed, true);
        rms_norm(team, state, head.output_norm, normed, n, hidden, head.epsilon);
        linear(team, normed, &head.output, 1, nullptr, product, n, hidden, fixed);
        team.share(n, [&](int r) {
            int found[WIDEST];
            float share[WIDEST];
            choose(product + int64_t(r) * head.outputs, head.outputs, kept, found, share);
            for (int i = 0; i < kept; i++)
                next[r * kept + i] = {chains[r].number + i, r, head.ids[found[i]], chains[r].chance * share[i]};
        });
#pragma omp master
        {
            length[most] = j + 1;
            chains.clear();
            float worth = 0;
            for (int c = 0; c < n * kept; c++) {
                const Chain& chain = next[c];
                if (!(chain.chance >= least)) continue;  // nor does what follows; not a number counts as 0
                const int64_t place = int64_t(chain.number) * longest + length[chain.number]++;
                draft[place] = chain.token, chances[place] = chain.chance;
                worth += std::max(0.0f, std::max(0.6f * chain.chance, 2 * chain.chance - 1) - least);
                chains.push_back(chain);
            }
            if (!(worth > position)) chains.clear();
            // The states of the chains that go on, each in the row of its own. There may be more than before.
            if (!chains.empty() && j + 1 < longest) {
                std::copy_n(state, int64_t(n) * hidden, embedding);
                for (size_t c = 0; c < chains.size(); c++) {
                    std::copy_n(embedding + int64_t(chains[c].row) * hidden, hidden, state + c * hidden);
                    chains[c].row = c;
                }
            }
        }
        team.wait();
    }
}

}  // namespace
