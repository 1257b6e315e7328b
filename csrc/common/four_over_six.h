#pragma once
// Four over six: of two scales for a block, one that maps its amax to 6 and one that maps it to 4, the one
// with the smaller error is taken; the first where they are equal.

#include "common/layout.h"
#include "common/scale.h"

namespace zerofp4 {

struct FourOverSix {
    float e4m3_max;         // 448 or 256; 0 where four over six is not wanted
    int32_t squared_error;  // 0: mean absolute error, 1: mean squared error
};

struct ScaleCandidates {
    uint32_t six;
    uint32_t four;
};

ZEROFP4_HD ScaleCandidates scale_candidates(float block_amax, const TensorScale& tensor) {
    const float base = (block_amax / 6.0f) * tensor.encode;
    return {magnitude_to_e4m3(base), magnitude_to_e4m3(base * 1.5f)};
}

ZEROFP4_HD float error_of(float difference, bool squared) {
    return squared ? difference * difference : absolute(difference);
}

// The error of one element; those of a block's row are added in the order of its columns, the sums of a
// tile's rows as a tree: 8, 4, 2, 1 apart.
ZEROFP4_HD float element_error(float x, float value, float scale, float amax, const FourOverSix& choice) {
    const float decoded = ((value * scale) * amax) / (kE2M1Max * choice.e4m3_max);
    return error_of(decoded - x, choice.squared_error != 0);
}

using BlockCodes = uint32_t[2];  // the first of 16 codes in the lowest nibble

// Encodes a block under a scale byte, and returns its error.
ZEROFP4_HD float encode_any_block(const float (&x)[kBlock], uint32_t scale_byte, float amax,
                                  const TensorScale& tensor, const FourOverSix& choice, BlockCodes& codes) {
    const float scale = e4m3_to_float(scale_byte), factor = encode_of(scale, tensor);
    uint64_t packed = 0;
    float error = 0.0f;
    ZEROFP4_KEEP_LOOP
    for (int k = 0; k < kBlock; ++k) {
        const uint32_t code = float_to_e2m1(x[k] * factor);
        packed |= static_cast<uint64_t>(code) << (4 * k);
        error += element_error(x[k], e2m1_to_float(code), scale, amax, choice);
    }
    codes[0] = static_cast<uint32_t>(packed), codes[1] = static_cast<uint32_t>(packed >> 32);
    return error;
}

// The same errors, by a division per block instead of one per element. A code stands for m * 2^e with m = 1
// or 1.5. Its product with a scale is exact, and as long as all products are normal floats a power of two
// changes no rounding:
//
//     ((m * 2^e * scale) * amax) / divisor  ==  2^e * (((m * scale) * amax) / divisor)
//
// Tensors with these amaxes keep the products of all scales normal.
ZEROFP4_HD bool has_short_errors(float amax) { return amax >= 0x1p-90f && amax <= 0x1p110f; }

// What the codes of 1 and 1.5 decode to under a scale.
struct DecodedPair {
    float one;
    float one_and_a_half;
};

// What any code decodes to, given its value.
ZEROFP4_HD float decoded_value(float value, const DecodedPair& pair) {
    const uint32_t bits = to_bits(value);
    return from_bits(bits & 0xff800000u) * (bits & 0x00400000u ? pair.one_and_a_half : pair.one);
}

// x / divisor with the rounding of a division, if `inverse` is 1 / divisor and the quotient is a normal float
// or 0: the remainder of x * inverse is exact.
ZEROFP4_HD float short_quotient(float x, float divisor, float inverse) {
    const float quotient = x * inverse;
    return fused_multiply_add(fused_multiply_add(-quotient, divisor, x), inverse, quotient);
}

ZEROFP4_HD DecodedPair short_decoded_pair(float scale, float amax, float divisor, float inverse) {
    return {short_quotient(scale * amax, divisor, inverse),
            short_quotient((1.5f * scale) * amax, divisor, inverse)};
}

// The product that scale_candidates rounds, in a tensor with short errors. Amaxes of blocks with a quotient
// that is not normal have a product far below the least scale, exact or not.
ZEROFP4_HD float short_base(float block_amax, const TensorScale& tensor) {
    return short_quotient(block_amax, 6.0f, 1.0f / 6.0f) * tensor.encode;
}

// Encodes a block under a factor that leaves all products below 7, and returns its error; the codes have no
// signs. `decoded(n)` is what the code in biased_code's bits n decodes to.
template <bool kSquared, class Decoded>
ZEROFP4_HD float encode_short_block(const float (&x)[kBlock], float factor, const Decoded& decoded,
                                    BlockCodes& codes) {
    float error = 0.0f;
    // The biases of the first two codes sum up to this; those of the others are shifted out.
    codes[0] = codes[1] = 0u - kBiasedZero * 17u;
    ZEROFP4_UNROLL
    for (int k = 0; k < kBlock; ++k) {
        const float magnitude = absolute(x[k]);
        const uint32_t n = biased_code(magnitude * factor);
        codes[k / 8] += n << (4 * (k % 8));
        error += error_of(decoded(n) - magnitude, kSquared);
    }
    return error;
}

}  // namespace zerofp4
