#pragma once
// Compact optimizer state: masters of 24 bits, and moments in codes of 8 bits with two float32 scales for a
// group of elements. docs/numerics.md has the formulas, reference/compact.py has them in PyTorch.

#include "common/adamw.h"
#include "common/stochastic.h"

namespace zerofp4 {

// The strips of an update on a GPU, which reads one byte or two of an element.
constexpr int kCompactStripColumns = 256;

// Masters: the upper 24 bits of a float, stored as the bfloat16 next to it and the lowest of the three bytes,
// which as a signed number says how many of its steps the master is further from zero than the bfloat16. A
// byte of -128, half of a step of the bfloat16, does not occur.

// The bits of x with the last 8 rounded away, up for as many of the 256 random bytes as they count. From a
// low byte of 0x80 it is one more step, up for even random bytes and down for odd ones.
ZEROFP4_HD uint32_t round_master(float x, uint32_t random_byte) {
    const uint32_t rounded = ((x == x ? to_bits(x) : 0x7fc00000u) + random_byte) & 0xffffff00u;
    return rounded + ((rounded & 0xff00u) == 0x8000u ? 0x100u - (random_byte & 1u) * 0x200u : 0u);
}
ZEROFP4_HD BFloat16 high_of_master(uint32_t bits) { return {static_cast<uint16_t>((bits + 0x8000u) >> 16)}; }
ZEROFP4_HD uint8_t low_of_master(uint32_t bits) { return static_cast<uint8_t>(bits >> 8); }

// A bfloat16 of zero that somebody has written is a master of zero, whatever the byte is.
ZEROFP4_HD float join_master(BFloat16 high, uint8_t low) {
    const int32_t magnitude = (high.bits & 0x7fff) * 65536 + static_cast<int8_t>(low) * 256;
    const uint32_t sign = static_cast<uint32_t>(high.bits & 0x8000u) << 16;
    return from_bits(static_cast<uint32_t>(magnitude > 0 ? magnitude : 0) | sign);
}

// The random bytes of masters: a block of Philox is for 16 neighbours of a row, from a multiple of 16 on.
// `block` counts them, row-major [rows, blocks of a row].
constexpr int kRandomColumns = 16;
template <class Block>
ZEROFP4_HD auto master_bytes(uint32_t number, uint32_t count, Block block) {
    using Word = decltype(low_word(block));
    return philox(low_word(block), high_word(block), Word(count), Word(number), 0);
}

// Moments: an element over the scale of its group is x, with a magnitude up to 1, and its code is the integer
// next to kCodes * x (7 - 3 |x|) / 4.
constexpr float kCodes = 127.0f;      // of a first moment, and as many below 0
constexpr float kRootCodes = 255.0f;  // of the square root of a second moment, from 1 on: none becomes 0

// The code, in the last byte of the bits of a float.
ZEROFP4_HD uint32_t code_bits(float x, float magnitude, float codes) {
    const float slope = fused_multiply_add(magnitude, codes * -0.75f, codes * 1.75f);
    return to_bits(fused_multiply_add(x, slope, 0x1.8p23f));
}
ZEROFP4_HD uint32_t moment_code(float x) { return code_bits(x, absolute(x), kCodes); }
ZEROFP4_HD uint32_t root_code(float x) {
    const uint32_t code = code_bits(x, x, kRootCodes), least = to_bits(0x1.8p23f) + 1;
    return code > least ? code : least;
}

// x of the codes, by their bytes.
struct CodeValues {
    float moments[256];
    float roots[256];
};

constexpr double newton_root(double x) {
    double root = x > 1.0 ? x : 1.0;
    for (double next = 0.5 * (root + x / root); next < root; next = 0.5 * (root + x / root)) root = next;
    return root;
}
// The x with x (7 - 3 x) / 4 = y: (7 - sqrt(49 - 48 y)) / 6, without its cancellation.
constexpr float value_of_code(double y) {
    return static_cast<float>(8.0 * y / (7.0 + newton_root(49.0 - 48.0 * y)));
}
constexpr CodeValues make_code_values() {
    CodeValues values{};
    for (int byte = 0; byte < 256; ++byte) {
        const int code = byte < 128 ? byte : 256 - byte;
        const float moment = value_of_code((code < 127 ? code : 127) / 127.0);
        values.moments[byte] = byte < 128 ? moment : -moment;
        values.roots[byte] = value_of_code((byte > 0 ? byte : 1) / 255.0);
    }
    return values;
}

// A scale of first moments from here up to there is divided by as it is; others, and their elements, times
// 2^64 or 2^-64.
constexpr float kSmallScale = 0x1p-100f, kLargeScale = 0x1p100f;
ZEROFP4_HD float scale_factor(float scale) {
    return scale < kSmallScale ? 0x1p64f : scale >= kLargeScale ? 0x1p-64f : 1.0f;
}

// The root of a second moment is at most that of the largest float, also of an infinite one.
constexpr float kMostRoot = 0x1p64f;

}  // namespace zerofp4
