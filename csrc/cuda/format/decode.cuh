#pragma once
// E2M1 codes and E4M3 bytes to values, 16 bytes of them at a time.

#include "common/e4m3.h"
#include "cuda/device/vector.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {

// Values of the eight codes of a word, or of the first four. As float16 they have zeros in the low byte, so
// that one look-up in eight bytes gives the high bytes of four.
template <int kCount>
__device__ __forceinline__ void decode_codes(uint32_t codes, float (&values)[kCount]) {
    const uint32_t magnitudes = codes & 0x77777777u;
    const uint32_t even_signs = codes << 4;  // in bit 7 of each byte; those of the odd codes are there
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const uint32_t bytes = permute(0x3e3c3800u, 0x46444240u, magnitudes >> (4 * i));
        const uint32_t signs = permute(codes, even_signs, i == 0 ? 0x1504u : 0x3726u) & 0x80808080u;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const uint32_t pair = permute(bytes | signs, 0u, k == 0 ? 0x1404u : 0x3424u);
            const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
            values[i + k] = both.x;
            values[i + k + 1] = both.y;
        }
    }
}

// Four E4M3 bytes to floats.
__device__ __forceinline__ void decode_codes_e4m3(uint32_t codes, float (&values)[4]) {
#if __CUDA_ARCH__ >= 890
    uint32_t halves[2];
    asm("{\n"
        "    .reg .b16 low, high;\n"
        "    mov.b32 {low, high}, %2;\n"
        "    cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "    cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(halves[0]), "=r"(halves[1])
        : "r"(codes));
    unpack<Float16>(halves, values);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = signed_e4m3_to_float(codes >> (8 * i) & 0xffu);
#endif
}

// 16 bytes of output: values, element i times factor(i).
template <typename T, typename Factor>
__device__ __forceinline__ void scale_vector(const float (&values)[kVector<T>], const Factor& factor,
                                             uint32_t (&words)[kVectorWords]) {
#pragma unroll
    for (int i = 0; i < kVectorWords; ++i) {
        float products[kPerWord<T>];
#pragma unroll
        for (int k = 0; k < kPerWord<T>; ++k) {
            products[k] = values[kPerWord<T> * i + k] * factor(kPerWord<T> * i + k);
        }
        words[i] = pack_word<T>(products);
    }
}

// The same of consecutive E2M1 codes.
template <typename T, typename Factor>
__device__ __forceinline__ void decode_vector(uint32_t codes, const Factor& factor,
                                              uint32_t (&words)[kVectorWords]) {
    float values[kVector<T>];
    decode_codes(codes, values);
    scale_vector<T>(values, factor, words);
}

// The same of E4M3 bytes.
template <typename T, typename Factor>
__device__ __forceinline__ void decode_vector(const uint32_t (&codes)[kVector<T> / 4], const Factor& factor,
                                              uint32_t (&words)[kVectorWords]) {
    float values[kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; i += 4) {
        float four[4];
        decode_codes_e4m3(codes[i / 4], four);
#pragma unroll
        for (int k = 0; k < 4; ++k) values[i + k] = four[k];
    }
    scale_vector<T>(values, factor, words);
}

}  // namespace zerofp4::cuda
