// Products in tiles, 16 rows by 16 outputs at a time, where the processor has registers for them (Intel's AMX) and the
// system lets a process use them. Weights lie as for vectors. Sums are taken in another order than there, which is one
// and the same for any number of rows.
#pragma once
#include "products.h"
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__linux__)  // the second is that of clang 14
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE_ROWS = 16, TILE_STEP = 32;  // rows, and outputs, of a tile; numbers of a sum that are multiplied at a time

#ifdef TILES
// A process asks the system once, for all its threads: the registers make each thread's saved state larger.
const bool has_tiles = [] {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILE_DATA in Linux
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}();

// A thread's tile registers: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. They are given back at the end.
class TileRegisters {
   public:
    ~TileRegisters() {
        if (shaped_for) _tile_release();
    }

    // out[rows][width] = start + a[rows][k] * b[k][width]. Of a row of `a`, `start` and `out` to the next it is so many
    // numbers as their strides say; `start` may be `out`, or null: zeros. b lies in steps, [k / STEP][...][STEP], with
    // `b_stride` numbers from one to the next. What lies `ahead` numbers further will be wanted soon.
    void multiply(const BFloat16* a, int a_stride, const BFloat16* b, int b_stride, const float* start, int start_stride,
                  float* out, int out_stride, int rows, int k, int width, int64_t ahead) {
        for (int n; rows > 0; rows -= n, ahead = 0) {
            n = std::min(rows, 2 * TILE_ROWS);
            shape(n);
            const auto columns = n > TILE_ROWS ? in_height<2> : in_height<1>;
            for (int c = 0; c < width; c += 2 * TILE_ROWS)
                columns(a, a_stride, b + c * STEP<BFloat16>, b_stride, start ? start + c : nullptr, start_stride, out + c,
                        out_stride, k, ahead);
            a += int64_t(n) * a_stride, out += int64_t(n) * out_stride;
            if (start) start += int64_t(n) * start_stride;
        }
    }
    void multiply(...) {}  // of other numbers: never called

   private:
    int shaped_for = 0;  // rows

    void shape(int rows) {
        if (rows == shaped_for) return;
        shaped_for = rows;
        const uint8_t low = std::min(rows, TILE_ROWS), high = std::max(rows - low, 1);
        struct alignas(64) {  // as the processor wants it
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } shape;
        const uint8_t each[] = {low, low, high, high, low, high, TILE_ROWS, TILE_ROWS};
        std::copy(std::begin(each), std::end(each), shape.rows);
        written(&shape);
        _tile_loadconfig(&shape);
    }

    // All that was written is in memory from here on. Compilers know too little of what these instructions read: GCC 12's
    // header names 8 of a shape's 64 bytes, and nothing that is loaded. They might leave the rest in registers, or out.
    static void written(const void* what) { asm volatile("" : : "r"(what) : "memory"); }

    // HEIGHT tiles of rows, and two of columns.
    template <int HEIGHT>
    static void in_height(const BFloat16* a, int a_stride, const BFloat16* b, int b_stride, const float* start,
                          int start_stride, float* out, int out_stride, int k, int64_t ahead) {
        constexpr int HALF = TILE_ROWS * STEP<BFloat16>;  // numbers of a step for one tile: a cache line
        const int64_t from = 4 * int64_t(start_stride), to = 4 * int64_t(out_stride);  // in bytes
        const int64_t a_bytes = 2 * int64_t(a_stride), b_bytes = 2 * int64_t(b_stride);
        const float* high_start = start ? start + int64_t(TILE_ROWS) * start_stride : nullptr;
        float* high_out = out + int64_t(TILE_ROWS) * out_stride;
        written(a);
        if (start) {
            _tile_loadd(0, start, from);
            _tile_loadd(1, start + TILE_ROWS, from);
            if (HEIGHT == 2) {
                _tile_loadd(2, high_start, from);
                _tile_loadd(3, high_start + TILE_ROWS, from);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int i = 0; i < k; i += TILE_STEP, b += TILE_ROWS * b_stride) {
            for (int line = 0; ahead && line < TILE_ROWS; line++) {
                __builtin_prefetch(b + ahead + line * b_stride, 0, 2);
                __builtin_prefetch(b + ahead + line * b_stride + HALF, 0, 2);
            }
            _tile_loadd(6, b, b_bytes);
            _tile_loadd(7, b + HALF, b_bytes);
            _tile_loadd(4, a + i, a_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (HEIGHT == 2) {
                _tile_loadd(5, a + int64_t(TILE_ROWS) * a_stride + i, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, to);
        _tile_stored(1, out + TILE_ROWS, to);
        if (HEIGHT == 2) {
            _tile_stored(2, high_out, to);
            _tile_stored(3, high_out + TILE_ROWS, to);
        }
    }
};
#else
constexpr bool has_tiles = false;
struct TileRegisters {
    void multiply(...) {}
};
#endif

// Whether products of so many numbers a sum, for so many columns, are taken in tiles: for any number of rows or for none,
// or sums would differ.
template <typename T>
bool tiled(int k, int width) {
    return std::is_same_v<T, BFloat16> && has_tiles && k % TILE_STEP == 0 && width % PANEL == 0;
}

}  // namespace
