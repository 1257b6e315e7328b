#pragma once
// Means of a host, rounded at random to the bfloat16 in which they travel to other hosts.

#include "common/dtype.h"
#include "common/macros.h"
#include "common/stochastic.h"

namespace zerofp4 {

// Elements [first, first + numel) of a parameter. They are at values + begin; begin and first are multiples
// of kRoundedAtOnce. Lists are in ascending order of begin.
struct RoundedPiece {
    int64_t begin;
    int64_t numel;
    int64_t first;
    int64_t number;  // of the parameter in the optimizer
};

// output[i] is values[i], rounded, for all elements of pieces, and 0 for all others.
struct RoundMeansArgs {
    const float* values;
    BFloat16* output;
    const RoundedPiece* pieces;
    int64_t count;  // of pieces
    int64_t numel;  // of values
    uint32_t step;  // number of the update
    uint32_t host;  // number of the host that sends
};

constexpr int kRoundedAtOnce = 8;  // elements whose two bytes each are a block of Philox

// The random bytes of a parameter's elements [8 * block, 8 * block + 8).
template <class Block>
ZEROFP4_HD auto wire_bytes(const RoundMeansArgs& args, int64_t number, Block block) {
    using Word = decltype(low_word(block));
    return philox(low_word(block), high_word(block), Word(args.step), Word(static_cast<uint32_t>(number)),
                  uint64_t{args.host} + 1);
}

// Up for as many of the 65,536 numbers r as the lower 16 bits count. A finite value stays finite.
ZEROFP4_HD uint16_t float_to_bfloat16_stochastic(float x, uint32_t r) {
    constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 0x7f7fffffu, kNaN = 0x7fc0u;
    const uint32_t bits = to_bits(x), size = bits & 0x7fffffffu;
    const uint32_t sum = size + r < kLargest ? size + r : kLargest;
    const uint32_t rounded = ((size < kInfinity ? sum : kInfinity) | (bits & 0x80000000u)) >> 16;
    return static_cast<uint16_t>(size > kInfinity ? kNaN : rounded);
}

}  // namespace zerofp4
