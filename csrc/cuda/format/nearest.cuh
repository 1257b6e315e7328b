#pragma once
// Rounding to nearest, as a policy of quantize_tile; Stochastic is the other. A policy draws the random bytes
// of a strip, where it needs any, and makes codes of the rows of a strip and of the blocks along its columns.

#include "cuda/device/units.cuh"
#include "cuda/format/encode.cuh"
#include "cuda/format/magnitudes.cuh"

namespace zerofp4::cuda {

struct Nearest {
    struct Bytes {};  // random ones: none

    __device__ __forceinline__ explicit Nearest(const int64_t*) {}
    __device__ __forceinline__ void draw_rows(int64_t, int64_t, int64_t) {}
    __device__ __forceinline__ void draw_columns(int64_t, int64_t, int64_t) {}
    __device__ __forceinline__ Bytes row_bytes(int) const { return {}; }
    __device__ __forceinline__ void column_bytes(int, Bytes (&)[kBlock / 4]) const {}

    // Whether the values of a block may be encoded as `regular` ones, and for which dtypes it does not
    // matter.
    static __device__ __forceinline__ bool is_regular(uint32_t amax_bits, float factor) {
        return is_encodable(amax_bits, factor);
    }
    template <typename T>
    static constexpr bool kTakesAny = kPerWord<T> == 1;

    // The codes of four neighbours.
    template <typename T>
    static __device__ __forceinline__ uint32_t encode_row(const uint32_t (&words)[kLaneColumns / kPerWord<T>],
                                                          float factor, bool regular, Bytes) {
        if constexpr (kPerWord<T> == 2) {
            if (regular) return encode_four<T>(words, factor);
        }
        float x[kLaneColumns];
        unpack<T>(words, x);
        return convert_four({x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor});
    }

    // The codes of eight neighbours of 16 bits.
    template <typename T>
    static __device__ __forceinline__ uint32_t encode_row(const uint32_t (&words)[kVectorWords], float factor,
                                                          bool regular) {
        if (regular) return encode_eight<T>(words, factor);
        const uint32_t low = encode_row<T>({words[0], words[1]}, factor, false, {});
        return low | encode_row<T>({words[2], words[3]}, factor, false, {}) << 16;
    }

    // The codes of a block, of floats or of pairs.
    static __device__ __forceinline__ void encode_block(const float (&x)[kBlock], float factor, bool,
                                                        const Bytes (&)[kBlock / 4], uint32_t (&codes)[2]) {
        uint32_t fours[kBlock / 4];
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i) {
            fours[i] = convert_four(
                {x[4 * i] * factor, x[4 * i + 1] * factor, x[4 * i + 2] * factor, x[4 * i + 3] * factor});
        }
        codes[0] = fours[0] | fours[1] << 16;
        codes[1] = fours[2] | fours[3] << 16;
    }
    template <typename T>
    static __device__ __forceinline__ void encode_block(const Pairs (&values)[2], Signs (&signs)[2],
                                                        float factor, bool regular,
                                                        const Bytes (&)[kBlock / 4], uint32_t (&codes)[2]) {
        if (regular) {
#pragma unroll
            for (int h = 0; h < 2; ++h) codes[h] = encode_eight<T>(values[h], signs[h], factor);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Pairs& x = values[h];
                codes[h] = encode_any<T>(x[0], x[1], x[2], x[3], signs[h], factor);
            }
        }
    }

  private:
    // The codes of any eight values in pairs, NaN without its sign. Pairs one by one, which stay in
    // registers.
    template <typename T>
    static __device__ __noinline__ uint32_t encode_any(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                                       Signs signs, float factor) {
        float x[8];
        unpack_pairs<T>({magnitudes<T>(a), magnitudes<T>(b), magnitudes<T>(c), magnitudes<T>(d)}, x);
        const uint32_t first = convert_four({x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor});
        const uint32_t second = convert_four({x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor});
        uint32_t nan_signs = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) nan_signs |= x[i] == x[i] ? 0u : 8u << (4 * i);
        return signs.add_to(first | second << 16) & ~nan_signs;
    }
};

}  // namespace zerofp4::cuda
