// Products with weights of few bits, taken as they lie in memory, and those weights by themselves.
#pragma once
#include "fixed_point.h"

namespace {

// So many rows are multiplied at a time where words of weights need registers, too. More rows than that share weights that
// were widened into memory.
constexpr int PACKED_ROWS = REGISTERS == 16 ? 5 : 8;

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

    // Of each word the number for k = `place` of those that it has.
    Floats operator()(Ints words, int place) const {
        const int i = place % 4 * (8 / BITS) + place / 4;
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
                    packed[v] = load_words(from + v * sizeof(Ints));
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
                const Ints packed = load_words(from);
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
            const Ints packed = load_words(groups.numbers(i, c));
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
