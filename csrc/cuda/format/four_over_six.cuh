#pragma once
// Four over six. A lane takes one block of 16 elements; half a warp takes 16 blocks below one another, which
// are a tile under 2D scaling.

#include "common/four_over_six.h"
#include "cuda/device/reciprocal.cuh"
#include "cuda/device/units.cuh"
#include "cuda/format/encode.cuh"
#include "cuda/format/magnitudes.cuh"

namespace zerofp4::cuda {

constexpr unsigned kHalf = kLanes / 2;

template <bool kTiles>
__device__ __forceinline__ uint32_t amax_bits(const float (&x)[kBlock]) {
    uint32_t bits = to_bits(x[0]);
#pragma unroll
    for (int k = 1; k < kBlock; ++k) bits = larger_magnitudes<float>(bits, to_bits(x[k]));
    bits = magnitudes<float>(bits);
    if constexpr (kTiles) {
#pragma unroll
        for (unsigned mask = kHalf / 2; mask > 0; mask /= 2)
            bits = max(bits, __shfl_xor_sync(kAllLanes, bits, mask));
    }
    return bits;
}

// The sum of a block's errors; under 2D scaling the tile's.
template <bool kTiles>
__device__ __forceinline__ float sum_of_tile(float sum) {
    if constexpr (kTiles) {
#pragma unroll
        for (unsigned mask = kHalf / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
    }
    return sum;
}

// What all blocks of a tensor have in common.
struct ChoosingTensor {
    float amax;
    TensorScale scale;
    FourOverSix choice;
    float inverse;  // of the divisor in element_error

    __device__ __forceinline__ ChoosingTensor(float amax, const TensorScale& scale, const FourOverSix& choice)
        : amax(amax), scale(scale), choice(choice), inverse(decode_factor(choice.e4m3_max)) {}
};

struct ChosenBlock {
    BlockCodes codes;
    uint32_t scale;
};

// Any block, by the formulas. A call, so that the registers of the usual way do not depend on it.
template <bool kTiles>
__device__ __noinline__ ChosenBlock choose_any(const float (&x)[kBlock], float block_amax,
                                               ChoosingTensor tensor) {
    const ScaleCandidates scales = scale_candidates(block_amax, tensor.scale);
    ChosenBlock six{{}, scales.six}, four{{}, scales.four};
    const float error_six =
        encode_any_block(x, six.scale, tensor.amax, tensor.scale, tensor.choice, six.codes);
    const float error_four =
        encode_any_block(x, four.scale, tensor.amax, tensor.scale, tensor.choice, four.codes);
    return sum_of_tile<kTiles>(error_four) < sum_of_tile<kTiles>(error_six) ? four : six;
}

// What the eight magnitudes decode to under a block's two scales, in shared memory. No look-up has bank
// conflicts: a lane has a column of words to itself, and a tile, for which half a warp has one table, has
// eight words in eight banks.
template <bool kTiles>
struct DecodedLayout {
    static constexpr int kPitch = kTiles ? 4 : 4 * kLanes;  // bytes from code to code
    static constexpr int kTable = 8 * kPitch;               // bytes from the table of six to that of four
    static constexpr int kWarp = kTiles ? 4 * kTable : 2 * kTable;
};

__device__ __forceinline__ void store_shared(uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Returns the address of code 0 under six for this lane.
template <bool kTiles>
__device__ __forceinline__ uint32_t make_tables(float scale_six, float scale_four,
                                                const ChoosingTensor& tensor) {
    using Layout = DecodedLayout<kTiles>;
    __shared__ alignas(128) uint8_t tables[kWarps][Layout::kWarp];
    const auto warp = static_cast<uint32_t>(__cvta_generic_to_shared(&tables[warp_index()]));
    const float divisor = kE2M1Max * tensor.choice.e4m3_max;
    if constexpr (kTiles) {
        // Each lane of a half makes one entry: the first eight lanes those of six.
        const int entry = lane_index() % kHalf;
        const float scale = entry < 8 ? scale_six : scale_four, value = e2m1_to_float(entry % 8);
        const float decoded = short_quotient((value * scale) * tensor.amax, divisor, tensor.inverse);
        __syncwarp();
        store_shared(warp + 4 * lane_index(), decoded);
        __syncwarp();
        return warp + lane_index() / kHalf * (2 * Layout::kTable);
    } else {
        const uint32_t lane = warp + 4 * lane_index();
        const DecodedPair pairs[2] = {short_decoded_pair(scale_six, tensor.amax, divisor, tensor.inverse),
                                      short_decoded_pair(scale_four, tensor.amax, divisor, tensor.inverse)};
#pragma unroll
        for (int entry = 0; entry < 16; ++entry) {
            const float value = e2m1_to_float(entry % 8);
            store_shared(lane + entry * Layout::kPitch,
                         value > 0.0f ? decoded_value(value, pairs[entry / 8]) : 0.0f);
        }
        return lane;
    }
}

// Looks up the code in biased_code's bits, `kOffset` bytes after the address.
template <int kPitch, int kOffset>
struct DecodedTable {
    // Shared memory lies below 2^24, so that an OR takes the bias away. A subtraction the compiler would move
    // into every look-up.
    static constexpr uint32_t kMinusBias = 0u - kBiasedZero * kPitch;
    static_assert(kMinusBias << 8 == 0);

    uint32_t biased;

    __device__ __forceinline__ explicit DecodedTable(uint32_t address) : biased(address | kMinusBias) {}

    __device__ __forceinline__ float operator()(uint32_t n) const {
        float x;
        asm volatile("ld.shared.f32 %0, [%1 + %2];"
                     : "=f"(x)
                     : "r"(n * kPitch + biased), "n"(kOffset)
                     : "memory");
        return x;
    }
};

// Bits 3 of eight codes.
__device__ __forceinline__ uint32_t add_signs(const float* x, uint32_t codes) {
    codes = or_masked<0x00000808u>(codes, permute<0x00fb>(to_bits(x[0]), to_bits(x[2])));
    codes = or_masked<0x00008080u>(codes, permute<0x00fb>(to_bits(x[1]), to_bits(x[3])));
    codes = or_masked<0x08080000u>(codes, permute<0xfb00>(to_bits(x[4]), to_bits(x[6])));
    return or_masked<0x80800000u>(codes, permute<0xfb00>(to_bits(x[5]), to_bits(x[7])));
}

// Returns the scale byte.
template <bool kTiles>
__device__ __forceinline__ uint32_t four_over_six(const float (&x)[kBlock], const ChoosingTensor& tensor,
                                                  BlockCodes& codes) {
    const uint32_t bits = amax_bits<kTiles>(x);
    const float base = short_base(amax_of_bits(bits), tensor.scale);
    const uint32_t six = convert_scale(base), four = convert_scale(base * 1.5f);
    const float scale_six = e4m3_to_float(six), scale_four = e4m3_to_float(four);
    const auto factor_of = [&tensor](float scale) {
        return scale > 0.0f ? short_reciprocal(scale * tensor.scale.decode) : kFloatMax;
    };
    const float factor_six = factor_of(scale_six), factor_four = factor_of(scale_four);
    // The factor of six is not the smaller one. NaN and infinity are not encodable.
    if (!__all_sync(kAllLanes, has_short_errors(tensor.amax) && is_encodable(bits, factor_six))) {
        float copy[kBlock];  // x stays in registers
#pragma unroll
        for (int k = 0; k < kBlock; ++k) copy[k] = x[k];
        const ChosenBlock chosen = choose_any<kTiles>(copy, amax_of_bits(bits), tensor);
        codes[0] = chosen.codes[0], codes[1] = chosen.codes[1];
        return chosen.scale;
    }
    const uint32_t address = make_tables<kTiles>(scale_six, scale_four, tensor);
    const DecodedTable<DecodedLayout<kTiles>::kPitch, 0> of_six(address);
    const DecodedTable<DecodedLayout<kTiles>::kPitch, DecodedLayout<kTiles>::kTable> of_four(address);
    BlockCodes codes_four;
    float error_six, error_four;
    if (tensor.choice.squared_error) {
        error_six = encode_short_block<true>(x, factor_six, of_six, codes);
        error_four = encode_short_block<true>(x, factor_four, of_four, codes_four);
    } else {
        error_six = encode_short_block<false>(x, factor_six, of_six, codes);
        error_four = encode_short_block<false>(x, factor_four, of_four, codes_four);
    }
    const bool take_four = sum_of_tile<kTiles>(error_four) < sum_of_tile<kTiles>(error_six);
#pragma unroll
    for (int h = 0; h < 2; ++h) codes[h] = add_signs(x + 8 * h, take_four ? codes_four[h] : codes[h]);
    return take_four ? four : six;
}

}  // namespace zerofp4::cuda
