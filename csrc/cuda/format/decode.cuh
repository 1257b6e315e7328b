#pragma once
// E2M1 codes to values, 16 bytes of them at a time.

#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// Elements of 16 bytes.
template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// Bytes of two words, chosen by the nibbles of the selector; one with bit 3 set would give a byte's sign.
__device__ __forceinline__ uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}

// Values of the eight codes of a word, or of the first four. As float16 they have zeros in the low byte, so
// that one look-up in eight bytes gives the high bytes of four.
template <int kCount>
__device__ __forceinline__ void decode_codes(uint32_t codes, float (&values)[kCount]) {
    const uint32_t magnitudes = codes & 0x77777777u;
    const uint32_t even_signs = codes << 4;  // in bit 7 of each byte; those of the odd codes are there
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const uint32_t bytes = choose_bytes(0x3e3c3800u, 0x46444240u, magnitudes >> (4 * i));
        const uint32_t signs = choose_bytes(codes, even_signs, i == 0 ? 0x1504u : 0x3726u) & 0x80808080u;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const uint32_t pair = choose_bytes(bytes | signs, 0u, k == 0 ? 0x1404u : 0x3424u);
            const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
            values[i + k] = both.x;
            values[i + k + 1] = both.y;
        }
    }
}

// 16 bytes of output: consecutive codes, each times its factor.
template <typename T>
__device__ __forceinline__ void decode_vector(uint32_t codes, const float (&factors)[kVector<T>],
                                              uint32_t (&words)[4]) {
    float values[kVector<T>];
    decode_codes(codes, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float products[kPerWord<T>];
#pragma unroll
        for (int k = 0; k < kPerWord<T>; ++k) {
            products[k] = values[kPerWord<T> * i + k] * factors[kPerWord<T> * i + k];
        }
        words[i] = pack_word<T>(products);
    }
}

template <typename T>
__device__ __forceinline__ void decode_vector(uint32_t codes, float factor, uint32_t (&words)[4]) {
    float same[kVector<T>];
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) same[k] = factor;
    decode_vector<T>(codes, same, words);
}

}  // namespace zerofp4::cuda
