// Products in tiles, 16 rows by 16 outputs at a time, where the processor has registers for them (Intel's AMX) and the
// system lets a process use them. Weights lie as for vectors. Sums are taken in another order than there, which is one
// and the same for any number of rows.
#pragma once
#include "products.h"
#if defined(__AMX_BF16__) && defined(__linux__)
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

    // out[rows][PANEL] = start + a[rows][k] * panel. `start` has `start_stride` floats from one row to the next, and may
    // be `out`; null: zeros. `out` has `stride` floats from one row to the next.
    void multiply(const BFloat16* a, const BFloat16* panel, const float* start, int start_stride, float* out, int stride,
                  int rows, int k) {
        for (int n; rows > 0; rows -= n, a += int64_t(n) * k, out += int64_t(n) * stride) {
            n = std::min(rows, 2 * TILE_ROWS);
            shape(n);
            (n > TILE_ROWS ? in_height<2> : in_height<1>)(a, panel, start, start_stride, out, stride, k);
            if (start) start += int64_t(n) * start_stride;
        }
    }

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
        _tile_loadconfig(&shape);
    }

    // HEIGHT tiles of rows, and the two of outputs that a panel has.
    template <int HEIGHT>
    static void in_height(const BFloat16* a, const BFloat16* panel, const float* start, int start_stride, float* out,
                          int stride, int k) {
        constexpr int LINE = STEP<BFloat16> * PANEL, NEXT = TILE_ROWS * LINE;  // numbers of a panel for a step, for a tile's
        const int64_t from = start_stride * sizeof(float), to = stride * sizeof(float), width = k * sizeof(BFloat16);
        const float *low_start = start, *high_start = start + int64_t(TILE_ROWS) * start_stride;
        float* high_out = out + int64_t(TILE_ROWS) * stride;
        if (start) {
            _tile_loadd(0, low_start, from);
            _tile_loadd(1, low_start + TILE_ROWS, from);
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
        for (int i = 0; i < k; i += TILE_STEP, panel += NEXT) {
            for (int line = 0; line < NEXT; line += CACHE_LINE / sizeof(BFloat16)) __builtin_prefetch(panel + NEXT + line, 0, 2);
            _tile_loadd(6, panel, LINE * sizeof(BFloat16));
            _tile_loadd(7, panel + LINE / 2, LINE * sizeof(BFloat16));
            _tile_loadd(4, a + i, width);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (HEIGHT == 2) {
                _tile_loadd(5, a + int64_t(TILE_ROWS) * k + i, width);
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

}  // namespace
