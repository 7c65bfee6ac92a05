// Products of weights of few bits and activations in bfloat16, by integers. Those in float32 are in few_bits.h.
#pragma once
#include "groups.h"

namespace {

// Activations as 16-bit numbers: finer than bfloat16, multiplied by integers without rounding, and summed likewise.
struct Fixed {
    char* numbers;  // [rows][2 * k], as FixedProducts has them
    float* scales;  // [rows]
    float* sums;    // [rows][k / GRAIN]: of the numbers, which are whole numbers too

    // The rows from this one on.
    Fixed row(int64_t r, int k) const { return {numbers + r * 2 * k, scales + r, sums + r * k / GRAIN}; }
};

constexpr int LARGEST_FIXED = 127 << 8 | 127;  // of these numbers; the smallest is as far from 0

// Four bytes, the same in all lanes.
Ints broadcast_word(const char* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return Ints{} + word;
}

// What is summed up of a row's numbers times LANES outputs' weights. A lane has the weights of four consecutive k in its bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) && !defined(__AVX512F__)
// A number is 256 times an upper byte plus a lower one, both signed. Of a row's k numbers all upper bytes lie first.
class FixedProducts {
   public:
    static constexpr int WORDS = 1;  // of a lane, for its four weights
    static void split(Ints four, Ints* words) { words[0] = four; }

    static void store(Ints numbers, char* a, int k, int i) {
        const Ints upper = (numbers + 128) >> 8;
        store_bytes(upper, a + i);
        store_bytes(numbers - (upper << 8), a + k + i);
    }

    // Those of the four numbers from `i` on.
    void add(const char* a, int k, int i, const Ints* words) {
        upper = dot(upper, words[0], broadcast_word(a + i));
        lower = dot(lower, words[0], broadcast_word(a + k + i));
    }

    Ints sum() const { return (upper << 8) + lower; }

   private:
    Ints upper = {}, lower = {};

    static void store_bytes(Ints numbers, char* to) {
        const auto bytes = __builtin_convertvector(numbers, int8_t __attribute__((vector_size(LANES))));
        std::memcpy(to, &bytes, sizeof bytes);
    }

    static Ints dot(Ints sum, Ints weights, Ints numbers) {
#ifdef __AVX512F__
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)numbers);
#else
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)numbers);
#endif
    }
};
#else
// Two weights are multiplied at once, as pairs of 16 bits. Of four numbers of a row the even ones lie before the odd ones.
class FixedProducts {
   public:
    static constexpr int WORDS = 2;
    static void split(Ints four, Ints* words) {
        using Pairs = uint16_t __attribute__((vector_size(4 * LANES)));
        words[0] = four & 0x00ff00ff;
        words[1] = (Ints)((Pairs)four >> 8);
    }

    static void store(Ints numbers, char* a, int, int i) {
        int16_t sorted[LANES];
        for (int j = 0; j < LANES; j++) sorted[j / 4 * 4 + j % 4 / 2 + j % 2 * 2] = numbers[j];
        std::memcpy(a + 2 * i, sorted, sizeof sorted);
    }

    void add(const char* a, int, int i, const Ints* words) {
        for (int w = 0; w < WORDS; w++) all = dot(all, words[w], broadcast_word(a + 2 * i + 4 * w));
    }

    Ints sum() const { return all; }

   private:
    Ints all = {};

    static Ints dot(Ints sum, Ints a, Ints b) {
#if defined(__AVX512BW__)
        return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
        return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
    }
};
#endif

// One row.
template <typename T>
void fix(const T* a, int k, const Fixed& to) {
    const auto larger = [](Floats x, Floats y) { return (Ints)x > (Ints)y ? x : y; };  // of sizes, and a NaN is larger
    Floats most = {};
    for (int i = 0; i < k; i += LANES) most = larger(most, (Floats)((Ints)load(a + i) & 0x7fffffff));
    const float top = reduce(most, larger)[0], inverse = top > 0 ? LARGEST_FIXED / top : 0;
    *to.scales = top / LARGEST_FIXED;
    for (int i = 0; i < k; i += GRAIN) {
        constexpr float MAGIC = 12582912;  // 1.5 * 2^23: adding it rounds
        Floats sum = {};
        for (int j = i; j < i + GRAIN; j += LANES) {
            const Ints whole = (Ints)(load(a + j) * inverse + MAGIC) - 0x4b400000;
            FixedProducts::store(whole, to.numbers, k, j);
            sum += __builtin_convertvector(whole, Floats);
        }
        to.sums[i / GRAIN] = total(sum);
    }
}

// So many rows are multiplied with weights that were taken apart into registers, of so many vectors of outputs at a time.
constexpr int FIXED_ROWS = 32, VECTORS = REGISTERS == 32 ? 2 : 1;

// sum[rows][PANEL] += a * the weights of 4 * FOURS numbers of k, from number `i` on, which are of one group. In units of
// each row's scale.
template <int FOURS, int BITS>
void add_products(const Fixed& a, int rows, const Groups<BITS>& groups, int k, int i, float* sum) {
    const int g = i / groups.size;
    for (int c = 0; c < PANEL; c += VECTORS * LANES) {
        Ints weights[FOURS][VECTORS][FixedProducts::WORDS];
        Floats scale[VECTORS], minimum[VECTORS];
        const char* from = groups.numbers(i, c);
#pragma GCC unroll 8
        for (int f = 0; f < FOURS; f += 8 / BITS, from += PANEL * 4)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const Ints packed = load_words(from + v * sizeof(Ints));
                if ((c * 4 + v * sizeof(Ints)) % CACHE_LINE == 0) prefetch(from + v * sizeof(Ints));
#pragma GCC unroll 2
                for (int part = 0; part < 8 / BITS; part++)
                    FixedProducts::split(BITS == 8 ? packed : packed >> (BITS * part) & 0x0f0f0f0f, weights[f + part][v]);
            }
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            scale[v] = groups.scales(g, c + v * LANES);
            minimum[v] = groups.minima ? groups.minimum(g, c + v * LANES) : scale[v] * -float(1 << (BITS - 1));
        }
        const char* numbers = a.numbers;
        const float* sums = a.sums + i / GRAIN;
        float* to = sum + c;
        for (int r = 0; r < rows; r++, numbers += 2 * int64_t(k), sums += k / GRAIN, to += PANEL) {
            FixedProducts products[VECTORS];
#pragma GCC unroll 8
            for (int f = 0; f < FOURS; f++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) products[v].add(numbers, k, i + 4 * f, weights[f][v]);
            const Floats all = broadcast(4 * FOURS > GRAIN ? sums[0] + sums[1] : sums[0]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const Floats product = __builtin_convertvector(products[v].sum(), Floats);
                store(to + v * LANES, fused(fused(load(to + v * LANES), product, scale[v]), minimum[v], all));
            }
        }
    }
}

// All rows times panel `p` of a `weight` of few bits, by integers.
template <int BITS>
void rows_times_few_bits(const Fixed& a, const Matrix& weight, int p, const Start& start, float* out, int rows, int n, int k) {
    constexpr int FEW = GRAIN / 4, MOST = 8 / FixedProducts::WORDS;
    const Groups<BITS> groups(weight, p, k);
    for (int first = 0, count; first < rows; first += count) {
        count = std::min(FIXED_ROWS, rows - first);
        const Fixed own = a.row(first, k);
        alignas(CACHE_LINE) float sum[FIXED_ROWS * PANEL];
        std::fill_n(sum, count * PANEL, 0.0f);
        for (int i = 0, end = groups.size; i < k; end += groups.size) {
            for (; i + 4 * MOST <= end; i += 4 * MOST) add_products<MOST>(own, count, groups, k, i, sum);
            for (; i < end; i += 4 * FEW) add_products<FEW>(own, count, groups, k, i, sum);
        }
        for (int r = 0; r < count; r++)
            for (int c = 0; c < PANEL; c += LANES)
                store(out + int64_t(first + r) * n + c,
                      fused(start(first + r, c), load(sum + r * PANEL + c), broadcast(own.scales[r])));
    }
}

}  // namespace
