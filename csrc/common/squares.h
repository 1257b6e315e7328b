#pragma once
// Sums of squares that do not depend on who adds them up. 128 neighbours are added as floats, in a tree; such
// sums are added as integers, in words for ranges of exponents, so that any order gives the same bits.

#include "common/bits.h"

namespace zerofp4 {

constexpr int kSquareChunk = 128;               // elements that are added as floats
constexpr int kSquareQuad = 4;                  // of them, which are added one after the other
constexpr int kSquareRanges = 32;               // of 8 exponents each
constexpr int kSquareInfinite = kSquareRanges;  // the word that counts chunks with an infinite sum
constexpr int kSquareNan = kSquareRanges + 1;   // and that for NaN
constexpr int kSquareWords = kSquareRanges + 2;
constexpr int kSquareCopies = 32;  // of the words, which are added up in the end: GPU blocks do not queue up

ZEROFP4_HD float quad_of_squares(const float* x) {
    return ((x[0] * x[0] + x[1] * x[1]) + x[2] * x[2]) + x[3] * x[3];
}

// What the sum of a chunk adds to which word: a sum that is not negative, as an integer times 2^(8 word -
// 150).
struct SquareWord {
    int word;
    uint64_t add;
};

ZEROFP4_HD SquareWord square_word(float sum) {
    const uint32_t bits = to_bits(sum) & 0x7fffffffu;
    if (bits >= kInfBits) return {bits == kInfBits ? kSquareInfinite : kSquareNan, 1};
    const uint32_t exponent = bits >> 23;
    const uint64_t mantissa = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
    const uint32_t from = exponent ? exponent : 1u;
    return {static_cast<int>(from >> 3), mantissa << (from & 7u)};
}

}  // namespace zerofp4
