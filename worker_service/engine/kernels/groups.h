// Matrices of weights, and the groups of few bits that one may consist of, as they lie in memory. How they came to be so, and
// what they are multiplied with, is not known here.
#pragma once
#include "products.h"

extern "C" {

// Weights [n][k], packed in panels of 32 outputs. Those of 32 bits are float32, those of 16 bfloat16, as products.h has
// them. Of fewer bits they are numbers from 0 on, and `group` of them along k share a scale, and a minimum if there are any:
//   weight = scale * (number - 2^(bits - 1)), or scale * number + minimum.
// All that belongs to a group of a panel lies together: [n / 32][k / group] of numbers [group / (32 / bits)][32] of 32 bits,
// whose bytes hold four consecutive k, and where they have 4 bits the next four in their upper halves; then scales [32],
// then minima [32] if there are any.
struct Matrix {
    const void* weights;
    int32_t n, bits, group;
    int32_t wide, minima;  // whether scales and minima have 32 bits, not 16; whether there are minima
};
}

namespace {

constexpr int GRAIN = 16;  // each group is some grains

// What lies AHEAD of `from` will be wanted soon.
void prefetch(const char* from) { __builtin_prefetch(from + AHEAD, 0, 2); }

Ints load_words(const char* from) {
    Ints words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

Floats load_scales(const char* from, bool wide) {
    prefetch(from);
    if (wide) return load((const float*)from);
    Shorts halves;  // none is infinite
    std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
    const Ints bits = __builtin_convertvector(halves, Ints);
    const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Ints)size | (bits & 0x8000) << 16);
#endif
}

// The groups of one panel.
template <int BITS>
class Groups {
   public:
    Groups(const Matrix& weight, int p, int k)
        : size(weight.group),
          minima(weight.minima),
          wide(weight.wide),
          words(int64_t(PANEL) * size * BITS / 8),
          each(words + PANEL * scale_bytes() * (minima ? 2 : 1)),
          at((const char*)weight.weights + int64_t(p) * (k / size) * each) {}

    const int size;  // numbers of k that share a scale
    const bool minima;

    // The words that begin with number `i` of k, from column `c` on.
    const char* numbers(int i, int c) const { return at + i / size * each + (i % size * BITS / 8 * PANEL + c * 4); }
    // Of group `g`, from column `c` on. What it does not have it must not be asked for.
    Floats scales(int g, int c) const { return load_scales(at + g * each + words + c * scale_bytes(), wide); }
    Floats minimum(int g, int c) const { return load_scales(at + g * each + words + (PANEL + c) * scale_bytes(), wide); }

   private:
    const bool wide;
    const int64_t words, each;  // bytes: of a group's numbers, and of all of a group
    const char* const at;

    int scale_bytes() const { return wide ? 4 : 2; }
};

}  // namespace
