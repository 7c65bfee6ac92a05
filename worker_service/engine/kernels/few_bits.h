// Matrices of weights, and products with those of few bits, taken as they lie in memory. How they came to be so is not
// known here.
#pragma once
#include <numeric>

#include "products.h"

extern "C" {

// Weights [n][k], packed in panels of 32 outputs. Those of 32 bits are float32, those of 16 bfloat16, as layers.h has
// them. Of fewer bits they are signed, and `group` of them along k share a scale, and a minimum if there are any:
//   weight = scale * number, or scale * (number + 2^(bits - 1)) + minimum.
// All that belongs to a group of a panel lies together: [n / 32][k / group] of numbers [group / (32 / bits)][32] of 32 bits,
// in each of which the halves hold k = 0, 2, 4... and 1, 3, 5..., then scales [32], then minima [32] if there are any.
struct Matrix {
    const void* weights;
    int32_t n, bits, group;
    int32_t wide, minima;  // whether scales and minima have 32 bits, not 16; whether there are minima
};
}

namespace {

constexpr int GRAIN = 16;  // each group is some grains
// Weights are asked for so many bytes before they are read: with 4 KiB they came too late.
constexpr int64_t AHEAD = 96 << 10;
// So many rows are multiplied at a time where words of weights need registers, too. More rows than that share weights that
// were widened into memory.
constexpr int PACKED_ROWS = REGISTERS == 16 ? 5 : 8;

// Activations as 16-bit numbers: finer than bfloat16, multiplied by integers without rounding, and summed likewise.
struct Fixed {
    int16_t* numbers;  // [rows][k]
    float* scales;     // [rows]
    float* sums;       // [rows][k / GRAIN]: of the numbers, which are whole numbers too
};

using Words = int16_t __attribute__((vector_size(4 * LANES)));

// sum + a * b, pair by pair.
Ints dot(Ints sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Number i of each half.
template <int BITS>
Words field(Words packed, int i) {
    return packed << (16 - BITS - BITS * i) >> (16 - BITS);
}

// What lies AHEAD of `from` will be wanted soon.
void prefetch(const char* from) { __builtin_prefetch(from + AHEAD, 0, 2); }

Floats load_scales(const char* from, bool wide) {
    prefetch(from);
    if (wide) return load((const float*)from);
    Shorts halves;  // none is infinite
    std::memcpy(&halves, from, sizeof halves);
    const Ints bits = __builtin_convertvector(halves, Ints);
    const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Ints)size | (bits & 0x8000) << 16);
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

template <typename T>
void fix(const T* a, int k, int16_t* numbers, float* scale, float* sums) {
    const auto larger = [](Floats x, Floats y) { return (Ints)x > (Ints)y ? x : y; };  // of sizes, and a NaN is larger
    Floats most = {};
    for (int i = 0; i < k; i += LANES) most = larger(most, (Floats)((Ints)load(a + i) & 0x7fffffff));
    const float top = reduce(most, larger)[0], inverse = top > 0 ? 32767 / top : 0;
    *scale = top / 32767;
    for (int i = 0; i < k; i += GRAIN) {
        constexpr float MAGIC = 12582912;  // 1.5 * 2^23: adding it rounds
        Floats sum = {};
        for (int j = i; j < i + GRAIN; j += LANES) {
            const Ints whole = (Ints)(load(a + j) * inverse + MAGIC) - 0x4b400000;
            const auto narrow = __builtin_convertvector(whole, int16_t __attribute__((vector_size(2 * LANES))));
            std::memcpy(numbers + j, &narrow, sizeof narrow);
            sum += __builtin_convertvector(whole, Floats);
        }
        sums[i / GRAIN] = total(sum);
    }
}

// sum[ROWS][VECTORS] = a * the columns of a panel from `c` on, in units of each row's scale. Where it
// is not told to unroll the inner loops, GCC 12 keeps the sums in memory, which takes up to four times as long.
template <int BITS, int ROWS, int VECTORS>
void panel(const Fixed& a, const Groups<BITS>& groups, int c, int k, Floats (&sum)[ROWS][VECTORS]) {
    const int group = groups.size;
    for (int g = 0; g < k / group; g++) {
        Ints part[ROWS][VECTORS] = {};
        const char* from = groups.numbers(g * group, c);
        for (int i = g * group; i < (g + 1) * group; from += PANEL * 4) {
            Words packed[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                std::memcpy(&packed[v], from + v * sizeof(Words), sizeof(Words));
                if (v * sizeof(Words) % CACHE_LINE == 0) prefetch(from + v * sizeof(Words));
            }
#pragma GCC unroll 4
            for (int each = 0; each < 16 / BITS; each++, i += 2) {
                Words row[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) row[v] = field<BITS>(packed[v], each);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    int32_t pair;
                    std::memcpy(&pair, a.numbers + int64_t(r) * k + i, sizeof pair);
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) part[r][v] = dot(part[r][v], (Words)(Ints{} + pair), row[v]);
                }
            }
        }
        Floats scale[VECTORS], zero[VECTORS] = {};
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            scale[v] = groups.scales(g, c + v * LANES);
            if (groups.minima) zero[v] = groups.minimum(g, c + v * LANES) + scale[v] * float(1 << (BITS - 1));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const float* sums = a.sums + (int64_t(r) * k + g * group) / GRAIN;
            const Floats all = broadcast(std::accumulate(sums, sums + group / GRAIN, 0.0f));
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                sum[r][v] = fused(sum[r][v], __builtin_convertvector(part[r][v], Floats), scale[v]);
                if (groups.minima) sum[r][v] = fused(sum[r][v], zero[v], all);
            }
        }
    }
}

// All rows times panel `p` of a `weight` of few bits, by integers.
template <int BITS>
void rows_times_few_bits(const Fixed& a, const Matrix& weight, int p, const Start& start, float* out, int rows, int n, int k) {
    const Groups<BITS> groups(weight, p, k);
    in_groups<PACKED_ROWS>(rows, [&](int first, auto number) {
        constexpr int ROWS = number, VECTORS = at_once(ROWS, PANEL / LANES);
        const Fixed own = {a.numbers + int64_t(first) * k, a.scales + first, a.sums + int64_t(first) * k / GRAIN};
        for (int c = 0; c < PANEL; c += VECTORS * LANES) {
            Floats sum[ROWS][VECTORS] = {};
            panel(own, groups, c, k, sum);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0, at = c; v < VECTORS; v++, at += LANES)
                    store(out + int64_t(first + r) * n + at, fused(start(first + r, at), sum[r][v], broadcast(own.scales[r])));
        }
    });
}

// What LANES outputs' numbers that share a scale stand for, in float32. It is exact where the product of scale and number is
// a float32 number. Numbers stay at their places of a word, but for the last one: each place has a scale of its own, smaller
// by a power of two.
template <int BITS>
struct Widened {
    static constexpr int EACH = 32 / BITS;  // numbers of a word
    static constexpr uint32_t LIFT = 1 << (BITS - 1);

    Floats zero, scales[EACH];

    Widened() = default;
    Widened(const Groups<BITS>& groups, int g, int c) {
        const Floats scale = groups.scales(g, c);
        lift = groups.minima ? 0 : LIFT;
        zero = groups.minima ? groups.minimum(g, c) : FUSES ? scale * -lift : Floats{};
#pragma GCC unroll 8
        for (int i = 0; i < EACH; i++) scales[i] = scale / one(i);
    }

    // Words from memory, with LIFT added to each of their signed numbers: so they begin with 0.
    static Ints load(const char* from) {
        Ints words;
        std::memcpy(&words, from, sizeof words);
        return words ^ int32_t(0xffffffff / ((1u << BITS) - 1) * LIFT);
    }

    // Of each word the number for k = `place` of those that it has.
    Floats operator()(Ints words, int place) const {
        const int i = place / 2 + place % 2 * (EACH / 2);
        const Ints number = i < EACH - 1 ? words & ((1 << BITS) - 1) << (BITS * i) : (Ints)((Unsigned)words >> (32 - BITS));
        const Floats x = __builtin_convertvector(number, Floats);
        return FUSES ? fused(zero, x, scales[i]) : (x - lift * one(i)) * scales[i] + zero;
    }

   private:
    float lift;  // of numbers where a product is rounded before it is added: there `zero` cannot have it

    static float one(int i) { return i < EACH - 1 ? 1u << (BITS * i) : 1; }  // in the place i
};

// Adds to ROWS rows of `out`, from row `row` and column `c` on, what a part of k gives; the first part is added to `start`.
template <int ROWS, int VECTORS>
void add_part(const Floats (&part)[ROWS][VECTORS], const Start& start, bool first, int row, int c, float* out, int n) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0, at = c; v < VECTORS; v++, at += LANES) {
            float* to = out + int64_t(row + r) * n + at;
            store(to, (first ? start(row + r, at) : load(to)) + part[r][v]);
        }
}

// ROWS rows times the weights begin..begin + count of a panel, which are widened in registers.
template <int BITS, int ROWS>
void few_rows_part(const float* a, const Groups<BITS>& groups, const Start& start, float* out, int n, int k, int begin,
                   int count) {
    constexpr int EACH = 32 / BITS, VECTORS = at_once(ROWS + 1, PANEL / LANES);
    for (int c = 0; c < PANEL; c += VECTORS * LANES) {
        Floats part[ROWS][VECTORS] = {};
        for (int i = begin; i < begin + count;) {
            const int g = i / groups.size, end = std::min(begin + count, (g + 1) * groups.size);
            Widened<BITS> widened[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) widened[v] = Widened<BITS>(groups, g, c + v * LANES);
            for (const char* from = groups.numbers(i, c); i < end; i += EACH, from += PANEL * 4) {
                Ints packed[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    packed[v] = Widened<BITS>::load(from + v * sizeof(Ints));
                    if (v * sizeof(Ints) % CACHE_LINE == 0) prefetch(from + v * sizeof(Ints));
                }
#pragma GCC unroll 8
                for (int place = 0; place < EACH; place++) {
                    Floats row[VECTORS];
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) row[v] = widened[v](packed[v], place);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                        for (int v = 0; v < VECTORS; v++)
                            part[r][v] = multiply_add(part[r][v], a + int64_t(r) * k + i + place, row[v]);
                }
            }
        }
        add_part(part, start, begin == 0, 0, c, out, n);
    }
}

// The same of any number of rows, for all of which the weights are widened once, into memory.
template <int BITS>
void many_rows_part(const float* a, const Groups<BITS>& groups, const Start& start, float* out, int rows, int n, int k,
                    int begin, int count) {
    constexpr int EACH = 32 / BITS;
    alignas(CACHE_LINE) float wide[CHUNK * PANEL];
    float* to = wide;
    for (int i = begin, end; i < begin + count; to += (end - i) * PANEL, i = end) {
        const int g = i / groups.size;
        end = std::min(begin + count, (g + 1) * groups.size);
        for (int c = 0; c < PANEL; c += LANES) {
            const Widened<BITS> widened(groups, g, c);
            const char* from = groups.numbers(i, c);
            for (float* own = to + c; own < to + (end - i) * PANEL; own += EACH * PANEL, from += PANEL * 4) {
                if (c * 4 % CACHE_LINE == 0) prefetch(from);
                const Ints packed = Widened<BITS>::load(from);
#pragma GCC unroll 8
                for (int place = 0; place < EACH; place++) store(own + place * PANEL, widened(packed, place));
            }
        }
    }
    in_groups<MOST_ROWS>(rows, [&](int first, auto number) {
        constexpr int ROWS = number, VECTORS = at_once(ROWS, PANEL / LANES);
        for (int c = 0; c < PANEL; c += VECTORS * LANES) {
            Floats part[ROWS][VECTORS] = {};
            multiply_add(a + int64_t(first) * k + begin, k, wide + c, PANEL, count, part);
            add_part(part, start, begin == 0, first, c, out, n);
        }
    });
}

// All rows of float32 times panel `p`: each weight becomes the float32 number that it stands for, and products are summed as
// those of whole weights are.
template <int BITS>
void rows_times_few_bits(const float* a, const Matrix& weight, int p, const Start& start, float* out, int rows, int n, int k) {
    const Groups<BITS> groups(weight, p, k);
    for (int begin = 0, count; begin < k; begin += count) {
        count = std::min(CHUNK, k - begin);
        if (rows > PACKED_ROWS)
            many_rows_part(a, groups, start, out, rows, n, k, begin, count);
        else
            as_constant<PACKED_ROWS>(rows, [&](auto number) {
                few_rows_part<BITS, number>(a, groups, start, out, n, k, begin, count);
            });
    }
}

// As these say: float32 rows, or those of bfloat16, which are `fixed` then.
template <typename T>
void rows_times_few_bits(const T* a, const Fixed& fixed, const Matrix& weight, int p, const Start& start, float* out, int rows,
                         int n, int k) {
    const auto times = [&](auto own) {
        if (weight.bits == 8)
            rows_times_few_bits<8>(own, weight, p, start, out, rows, n, k);
        else
            rows_times_few_bits<4>(own, weight, p, start, out, rows, n, k);
    };
    if constexpr (std::is_same_v<T, float>)
        times(a);
    else
        times(fixed);
}

// The k weights of one output.
template <int BITS, typename T>
void widen(const Matrix& weight, int64_t output, int k, T* out) {
    const Groups<BITS> groups(weight, output / PANEL, k);
    const int lane = output % LANES, c = output % PANEL - lane;
    for (int i = 0; i < k;) {
        const Widened<BITS> widened(groups, i / groups.size, c);
        for (const int end = i + groups.size; i < end; i += Widened<BITS>::EACH) {
            const Ints packed = Widened<BITS>::load(groups.numbers(i, c));
            for (int place = 0; place < Widened<BITS>::EACH; place++) store(out + i + place, widened(packed, place)[lane]);
        }
    }
}

// Likewise, of a matrix of any kind.
template <typename T>
void widen(const Matrix& weight, int64_t output, int k, T* out) {
    const int64_t first = output / PANEL * PANEL * k, c = output % PANEL;
    if (weight.bits == 4) widen<4>(weight, output, k, out);
    if (weight.bits == 8) widen<8>(weight, output, k, out);
    if (weight.bits == 16)
        for (int i = 0; i < k; i++)
            store(out + i, as_float(((const BFloat16*)weight.weights)[first + i / 2 * 2 * PANEL + 2 * c + i % 2]));
    if (weight.bits == 32)
        for (int i = 0; i < k; i++) store(out + i, ((const float*)weight.weights)[first + int64_t(i) * PANEL + c]);
}

}  // namespace
