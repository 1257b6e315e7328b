#pragma once
// Four over six. A lane takes one block of 16 elements; half a warp takes 16 blocks below one another, which
// are a tile under 2D scaling.

#include "common/scale.h"
#include "cuda/device/units.cuh"
#include "cuda/format/convert.cuh"

namespace zerofp4::cuda {

constexpr unsigned kHalf = kLanes / 2;

template <bool kTiles>
__device__ __forceinline__ uint32_t amax_bits(const float (&x)[kBlock]) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) bits = max(bits, magnitude_bits(x[k]));
    if constexpr (kTiles) {
#pragma unroll
        for (unsigned mask = kHalf / 2; mask > 0; mask /= 2)
            bits = max(bits, __shfl_xor_sync(kAllLanes, bits, mask));
    }
    return bits;
}

using BlockCodes = uint32_t[2];

__device__ __forceinline__ void round_nearest(const float (&x)[kBlock], float encode, BlockCodes& codes) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        codes[h] = 0;
#pragma unroll
        for (int k = 8 * h; k < 8 * h + 8; k += 4) {
            const uint32_t four =
                convert_four({x[k] * encode, x[k + 1] * encode, x[k + 2] * encode, x[k + 3] * encode});
            codes[h] |= four << (4 * (k % 8));
        }
    }
}

// The error of a block with these codes; under 2D scaling that of the tile.
template <bool kTiles>
__device__ __forceinline__ float error_of(const float (&x)[kBlock], const BlockCodes& codes, uint32_t scale,
                                          float amax, const FourOverSix& choice) {
    const float scale_value = e4m3_to_float(scale);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
        const float value = e2m1_to_float(codes[k / 8] >> (4 * (k % 8)) & 15u);
        sum += element_error(x[k], value, scale_value, amax, choice);
    }
    if constexpr (kTiles) {
#pragma unroll
        for (unsigned mask = kHalf / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
    }
    return sum;
}

// Returns the scale byte.
template <bool kTiles>
__device__ __forceinline__ uint32_t four_over_six(const float (&x)[kBlock], float amax,
                                                  const TensorScale& tensor, const FourOverSix& choice,
                                                  BlockCodes& codes) {
    const ScaleCandidates scales = scale_candidates(amax_of_bits(amax_bits<kTiles>(x)), tensor);
    BlockCodes codes_four;
    round_nearest(x, block_encode(scales.six, tensor), codes);
    round_nearest(x, block_encode(scales.four, tensor), codes_four);
    const float error_six = error_of<kTiles>(x, codes, scales.six, amax, choice);
    const float error_four = error_of<kTiles>(x, codes_four, scales.four, amax, choice);
    const bool take_four = error_four < error_six;
    codes[0] = take_four ? codes_four[0] : codes[0];
    codes[1] = take_four ? codes_four[1] : codes[1];
    return take_four ? scales.four : scales.six;
}

}  // namespace zerofp4::cuda
