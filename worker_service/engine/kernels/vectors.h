// Vectors of floats, and bfloat16: what all kernels are written in.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// As wide as the processor's own vectors: a compiler keeps wider ones in memory, which takes ten times as long.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__x86_64__)
constexpr int LANES = 4, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 32;
#endif
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Unsigned = uint32_t __attribute__((vector_size(4 * LANES)));
using Shorts = uint16_t __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

float as_float(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

void store(float* to, float x) { *to = x; }
void store(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
void store(BFloat16* to, Floats x) {
#ifdef __AVX512BF16__
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
    const Ints bits = (Ints)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Shorts narrow = __builtin_convertvector(nearest, Shorts);
#endif
    std::memcpy(to, &narrow, sizeof narrow);
}

Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

Floats load(const BFloat16* from) {
    Shorts bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

// The same number in all lanes. The compiler drops `x - 0`, which is x; `0 + x` it has to add, for -0 becomes 0.
Floats broadcast(float x) { return x - Floats{}; }

// Lane i of the result is lane i ^ HALF of x.
template <int HALF, int... I>
Floats swapped(Floats x, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, x, (I ^ HALF)...);
#else
    return __builtin_shuffle(x, Ints{(I ^ HALF)...});
#endif
}

// Of all lanes, by halves: one lane after the other would wait for each.
template <int HALF = LANES / 2, typename Better>
Floats reduce(Floats x, Better better) {
    x = better(x, swapped<HALF>(x, std::make_integer_sequence<int, LANES>()));
    if constexpr (HALF > 1) return reduce<HALF / 2>(x, better);
    return x;
}
float largest(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return a > b ? a : b; })[0];
}
float total(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return a + b; })[0];
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

}  // namespace
