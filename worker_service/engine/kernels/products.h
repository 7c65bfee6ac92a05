// Products in float32 sums: of linear layers with whole weights, and of attention with values.
#pragma once
#include <type_traits>

#include "vectors.h"

namespace {

// How many numbers of a sum are multiplied at a time: of bfloat16 pairs, for there is an instruction for them.
template <typename T>
constexpr int STEP = sizeof(float) / sizeof(T);

// How many vectors of outputs are summed at a time for so many rows: at most `most`, and only as many as stay in registers.
// Registers hold the sums, a vector of b for each vector of outputs, and two more for what is multiplied.
constexpr int at_once(int rows, int most) {
    while (most > 1 && (rows + 1) * most + 2 > REGISTERS) most /= 2;
    return most;
}

constexpr int CACHE_LINE = 64;  // bytes
constexpr int PANEL = 32;       // outputs whose weights lie together: [k / STEP][PANEL][STEP]
constexpr int MOST_ROWS = REGISTERS == 16 ? 6 : 8;  // at a time: each weight is read once for all of them
constexpr int AHEAD = 16 << 10;  // bytes: so long before a thread reads weights, it asks for them
constexpr int CHUNK = 64;  // sums of sums: one long sum would lose digits that the exact mode needs

// Whether `fused` rounds once.
#if defined(__FMA__) || !defined(__x86_64__)
constexpr bool FUSES = true;
#else
constexpr bool FUSES = false;
#endif

// sum + a * b. A compiler that is free to fuse them may do so for some numbers of rows and not for others.
Floats fused(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

Floats multiply_add(Floats sum, const float* a, Floats b) { return fused(sum, broadcast(*a), b); }
Floats multiply_add(Floats sum, const BFloat16* a, Floats b) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
#else
    const Ints pairs = Ints{} + pair;
    sum = fused(sum, (Floats)(pairs << 16), (Floats)((Ints)b << 16));
    return fused(sum, (Floats)(pairs & ~0xffff), (Floats)((Ints)b & ~0xffff));
#endif
}

// A vector of b, to be multiplied with numbers of type T. Of the same type: as it lies in memory. bfloat16 beside float32: a
// vector has two numbers for each output, and `part` says which of them become float32.
template <typename T, typename B>
Floats load_step(const B* b, int part) {
    Ints bits;
    std::memcpy(&bits, b, sizeof bits);
    if constexpr (std::is_same_v<T, B>) return (Floats)bits;
    return (Floats)(part ? bits & ~0xffff : bits << 16);
}

// x, in a register. GCC 12 gives each use of what it has loaded a load of its own wherever that saves an instruction, and
// for two to four rows those loads are what takes the time.
Floats kept(Floats x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// sum[ROWS][VECTORS * LANES] += a[ROWS][k] * b[k][...], all sums in registers. b lies in steps: [k / STEP][width][STEP],
// with `b_stride` numbers from one step to the next. What lies `ahead` numbers further will be wanted soon.
template <int ROWS, int VECTORS, typename T, typename B>
void multiply_add(const T* a, int64_t a_stride, const B* b, int b_stride, int k, Floats (&sum)[ROWS][VECTORS],
                  int64_t ahead = 0) {
    constexpr int WIDTH = LANES * STEP<B>, PARTS = STEP<B> / STEP<T>;
    for (int i = 0; i < k; i += STEP<B>, b += b_stride)
        for (int part = 0; part < PARTS; part++) {
            Floats row[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                row[v] = load_step<T>(b + v * WIDTH, part);
                if (ROWS > 1) row[v] = kept(row[v]);
                if (ahead && !part && v * sizeof(Floats) % CACHE_LINE == 0) __builtin_prefetch(b + v * WIDTH + ahead, 0, 2);
            }
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    sum[r][v] = multiply_add(sum[r][v], a + r * a_stride + i + part * STEP<T>, row[v]);
        }
}

// What a product is added to: `stride` floats from one row to the next. Nothing: zeros.
struct Start {
    const float* at;
    int stride;

    Floats operator()(int row, int column) const { return at ? load(at + int64_t(row) * stride + column) : Floats{}; }
};

// Calls work(n) with a number that the compiler knows; `n` is in 1..MOST.
template <int MOST, typename Work>
void as_constant(int n, const Work& work) {
    if (n == MOST)
        work(std::integral_constant<int, MOST>());
    else if constexpr (MOST > 1)
        as_constant<MOST - 1>(n, work);
}

// Calls work(first row, how many) until all rows are done, in groups of equal size, at most MOST.
template <int MOST, typename Work>
void in_groups(int rows, const Work& work) {
    for (int first = 0, groups = (rows + MOST - 1) / MOST; groups > 0; groups--) {
        const int n = (rows - first + groups - 1) / groups;
        as_constant<MOST>(n, [&](auto constant) { work(first, constant); });
        first += n;
    }
}

}  // namespace
