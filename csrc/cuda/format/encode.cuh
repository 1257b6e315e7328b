#pragma once
// Blocks of 16-bit values to E2M1 codes, in fewer operations than convert_four takes for any values: signs
// are moved for several values at once, and magnitudes are known not to need a clamp.

#include "cuda/device/vector.cuh"
#include "cuda/format/convert.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {

// Whether the values of a block, the largest magnitude of which is given, may be encoded here: products of 7
// and more would give codes of 8 and more. A scale byte of 1 or 2 may have such, and has 0 unless all values
// are 0; also one that is saturated because the tensor's amax was not its own, and NaN.
__device__ __forceinline__ bool is_encodable(uint32_t amax_bits, float factor) {
    return from_bits(amax_bits) * factor < 7.0f;
}

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000

// The codes of values, the first in the lowest nibble; signs may be missing.
template <int kCount>
__device__ __forceinline__ uint32_t encode(const float (&values)[kCount], float factor) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const uint32_t four = convert_four(
            {values[i] * factor, values[i + 1] * factor, values[i + 2] * factor, values[i + 3] * factor});
        codes |= four << (4 * i);
    }
    return codes;
}

#else

// The codes of values, the first in the lowest nibble; signs may be missing. The exponent bits of the first
// and the second, with its bias, sum up to 2^32, those of the others are shifted out.
template <int kCount>
__device__ __forceinline__ uint32_t encode(const float (&values)[kCount], float factor) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
        const float a = fabsf(values[i]) * factor;
        codes = codes * 16u + (i == 1 ? biased_code<0x500000u>(a) : biased_code(a));
    }
    return codes;
}

#endif

// The codes of four neighbours.
template <typename T>
__device__ __forceinline__ uint32_t encode_four(const uint32_t (&words)[2], float factor) {
    float x[4];
    unpack<T>(words, x);
    const uint32_t even = permute<0x00d9>(words[0], words[1]), odd = permute<0x00fb>(words[0], words[1]);
    return or_masked<0x8080u>(or_masked<0x0808u>(encode(x, factor), even), odd);
}

// The codes of eight neighbours.
template <typename T>
__device__ __forceinline__ uint32_t encode_eight(const uint32_t (&words)[4], float factor) {
    float x[8];
    unpack<T>(words, x);
    // The upper bytes, then their signs in all bits.
    const uint32_t low = permute<0x7531>(words[0], words[1]), high = permute<0x7531>(words[2], words[3]);
    const uint32_t even = permute<0xeca8>(low, high), odd = permute<0xfdb9>(low, high);
    return or_masked<0x80808080u>(or_masked<0x08080808u>(encode(x, factor), even), odd);
}

// Eight neighbours, given as the pairs 0 and 2, 1 and 3, 4 and 6, 5 and 7, are encoded in two steps: their
// signs, with all bits of a code set, then their magnitudes.
using Pairs = uint32_t[4];

struct Signs {
    uint32_t even, odd;

    __device__ __forceinline__ explicit Signs(const Pairs& pairs)
        : even(permute<0xfdb9>(pairs[0], pairs[2])), odd(permute<0xfdb9>(pairs[1], pairs[3])) {}

    __device__ __forceinline__ uint32_t add_to(uint32_t codes) const {
        return or_masked<0x80808080u>(or_masked<0x08080808u>(codes, even), odd);
    }
};

template <typename T>
__device__ __forceinline__ void unpack_pairs(const Pairs& pairs, float (&values)[8]) {
    float halves[8];
    unpack<T>(pairs, halves);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = halves[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
}

template <typename T>
__device__ __forceinline__ uint32_t encode_eight(const Pairs& pairs, const Signs& signs, float factor) {
    float x[8];
    unpack_pairs<T>(pairs, x);
    return signs.add_to(encode(x, factor));
}

}  // namespace zerofp4::cuda
