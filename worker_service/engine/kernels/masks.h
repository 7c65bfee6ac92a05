// Logits cut down to the tokens that a structure allows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// In place, for one row of `count` logits. `bits`: one for each, the least significant ones first, set where the token is
// allowed; whole bytes.
inline void mask(float* row, const uint8_t* bits, int count) {
    constexpr int kWord = 64;
    int at = 0;
    for (; at + kWord <= count; at += kWord) {
        uint64_t allowed;
        std::memcpy(&allowed, bits + at / 8, sizeof allowed);
        if (allowed == ~uint64_t{0}) continue;
        for (int begin = 0; begin < kWord; begin += 8) {
            const unsigned eight = bits[(at + begin) / 8];
            float* const out = row + at + begin;
            for (int i = 0; i < 8; i++) out[i] = eight >> i & 1 ? out[i] : -INFINITY;
        }
    }
    for (; at < count; at++) {
        if (!(bits[at / 8] >> at % 8 & 1)) row[at] = -INFINITY;
    }
}
