#pragma once
// Stochastic rounding, as a policy of quantize_tile; Nearest is the other. The lanes of a warp draw the
// random bytes of a strip, 16 at a time, and find their own in shared memory.

#include "common/stochastic.h"
#include "cuda/device/units.cuh"
#include "cuda/format/encode.cuh"
#include "cuda/format/magnitudes.cuh"

namespace zerofp4::cuda {

// Between 0 and 1, rounded toward zero; 0 for NaN.
__device__ __forceinline__ float saturated_fma(float a, float b, float c) {
    float result;
    asm("fma.rz.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}

// 2^23 + kBias + n as the bits of a float, where n is 256 c + 1/2 rounded down, c being the code of a
// magnitude with its fraction of a step. The code that float_to_e2m1_stochastic gives with a random byte r is
// (n + r) / 256 rounded down, for every magnitude but NaN and every byte.
//
// c grows by 4 from the magnitude 0 to 2, by 2 to 4 and by 1 to 6, where it stays: three lines that saturate.
// Each begins early by its part of the 1/2; what it then adds to the line before it is less than 1 and cut
// off. 2^-27 stands for a rounding of float_to_e2m1_stochastic: below 1/4 its sum may reach the next step by
// being rounded; from 1/4 on so little is below the last bit of a magnitude and changes nothing.
template <uint32_t kBias>
__device__ __forceinline__ uint32_t code_steps(float a) {
    const float first = saturated_fma(a, 0.5f, 0x1p-11f + 0x1p-27f);
    const float second = saturated_fma(a, 0.5f, 0x1p-10f - 1.0f);
    const float third = saturated_fma(a, 0.5f, 0x1p-9f - 2.0f);
    const float n = __fmaf_rz(first, 1024.0f, 8388608.0f + kBias);
    return to_bits(__fmaf_rz(third, 256.0f, __fmaf_rz(second, 512.0f, n)));
}

// The codes of two magnitudes in bytes 1 and 3, given a random byte for each in bytes 0 and 2. The exponent
// bits of the one and the bias of the other sum up to 2^32.
__device__ __forceinline__ uint32_t code_pair(float low, float high, uint32_t random) {
    return code_steps<0xb500u>(high) * 65536u + code_steps<0u>(low) + random;
}

// Bytes 0 and 2 of a word, and bytes 1 and 3, in halves.
__device__ __forceinline__ uint32_t even_bytes(uint32_t word) { return word & 0x00ff00ffu; }
__device__ __forceinline__ uint32_t odd_bytes(uint32_t word) { return permute<0x4341>(word, 0u); }

// Puts infinity in place of NaN, which has the code that NaN should have.
template <typename T>
__device__ __forceinline__ void drop_nans(Pairs& magnitudes, Signs& signs) {
    constexpr uint32_t kInfinities = std::is_same_v<T, BFloat16> ? 0x7f807f80u : 0x7c007c00u;
    Pairs is_nan;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        is_nan[i] = __vcmpgtu2(magnitudes[i], kInfinities);
        magnitudes[i] = __vminu2(magnitudes[i], kInfinities);
    }
    const Signs dropped(is_nan);
    signs.even &= ~dropped.even;
    signs.odd &= ~dropped.odd;
}

class Stochastic {
  public:
    using Bytes = uint32_t;  // random ones of four elements

    __device__ __forceinline__ explicit Stochastic(const int64_t* rng_state)
        : state_{in_uniform_register(rng_state[0]), in_uniform_register(rng_state[1])}, vectors_(buffer()) {}

    // For the rows of a strip that begins at (row, col), 16 elements a lane and turn.
    __device__ __forceinline__ void draw_rows(int64_t row, int64_t col, int64_t cols) {
        constexpr int kAcross = kStripColumns / kBlock;
        const int64_t own_row = row + lane_index() / kAcross, own_col = col + lane_index() % kAcross * kBlock;
        draw(kRowwiseStream, own_row * cols + own_col, kLanes / kAcross, cols);
    }
    // For the lane's columns of a strip, the first of which begins at (row, col). `rows`: of a stored column.
    __device__ __forceinline__ void draw_columns(int64_t row, int64_t col, int64_t rows) {
        draw(kColumnwiseStream, col * rows + row, 1, rows);
    }

    // Of the lane's part of a row.
    __device__ __forceinline__ Bytes row_bytes(int r) const {
        return reinterpret_cast<const uint32_t*>(vectors_)[r * kLanes + lane_index()];
    }
    // Of a column, four rows at a time.
    __device__ __forceinline__ void column_bytes(int k, Bytes (&bytes)[kBlock / 4]) const {
        const uint4 x = vectors_[k * kLanes + lane_index()];
        bytes[0] = x.x, bytes[1] = x.y, bytes[2] = x.z, bytes[3] = x.w;
    }

    // Whether no value of a block is NaN.
    static __device__ __forceinline__ bool is_regular(uint32_t amax_bits, float) {
        return amax_bits <= kInfBits;
    }
    template <typename T>
    static constexpr bool kTakesAny = false;

    // The codes of four neighbours in the low half.
    template <typename T>
    static __device__ __forceinline__ uint32_t encode_row(const uint32_t (&words)[kLaneColumns / kPerWord<T>],
                                                          float factor, bool regular, Bytes random) {
        float x[kLaneColumns];
        unpack<T>(words, x);
        // One byte each of the elements 0, 2, 1 and 3.
        uint32_t codes =
            permute<0x7531>(code_pair(fabsf(x[0]) * factor, fabsf(x[2]) * factor, even_bytes(random)),
                            code_pair(fabsf(x[1]) * factor, fabsf(x[3]) * factor, odd_bytes(random)));
        codes = or_masked<0x08080808u>(codes, signs_of<T>(words));
        if (!regular) {
            const float order[kLaneColumns] = {x[0], x[2], x[1], x[3]};
#pragma unroll
            for (int i = 0; i < kLaneColumns; ++i) {
                if (order[i] != order[i]) codes = (codes & ~(0xffu << (8 * i))) | 7u << (8 * i);
            }
        }
        return codes + (codes >> 12);
    }

    // The codes of a block, of floats or of pairs.
    static __device__ __forceinline__ void encode_block(const float (&x)[kBlock], float factor, bool regular,
                                                        const Bytes (&random)[kBlock / 4],
                                                        uint32_t (&codes)[2]) {
        uint32_t words[kBlock / 4][kLaneColumns];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) words[r / kLaneColumns][r % kLaneColumns] = to_bits(x[r]);
        if (!regular) {
#pragma unroll
            for (int r = 0; r < kBlock; ++r) {
                if (x[r] != x[r]) words[r / kLaneColumns][r % kLaneColumns] = kInfBits;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t first = encode_row<float>(words[2 * h], factor, true, random[2 * h]);
            const uint32_t second = encode_row<float>(words[2 * h + 1], factor, true, random[2 * h + 1]);
            codes[h] = __byte_perm(first, second, 0x5410);
        }
    }
    template <typename T>
    static __device__ __forceinline__ void encode_block(const Pairs (&values)[2], Signs (&signs)[2],
                                                        float factor, bool regular,
                                                        const Bytes (&random)[kBlock / 4],
                                                        uint32_t (&codes)[2]) {
        Pairs pairs[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 4; ++i) pairs[h][i] = values[h][i];
        if (!regular) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                for (int i = 0; i < 4; ++i) pairs[h][i] = magnitudes<T>(pairs[h][i]);
                drop_nans<T>(pairs[h], signs[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x[8];
            unpack_pairs<T>(pairs[h], x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = fabsf(x[i]) * factor;
            const uint32_t first = random[2 * h], second = random[2 * h + 1];
            const uint32_t even = permute<0x7531>(code_pair(x[0], x[2], even_bytes(first)),
                                                  code_pair(x[4], x[6], even_bytes(second)));
            const uint32_t odd = permute<0x7531>(code_pair(x[1], x[3], odd_bytes(first)),
                                                 code_pair(x[5], x[7], odd_bytes(second)));
            codes[h] = signs[h].add_to(even + odd * 16u);
        }
    }

  private:
    // Of a warp: the bytes of a strip row by row, or a vector for each column of a lane.
    static __device__ __forceinline__ uint4* buffer() {
        __shared__ uint4 vectors[kWarps][kLaneColumns][kLanes];
        return vectors[warp_index()][0];
    }

    // Draws four vectors a lane: for 16 elements of the stored matrix from `first` on, and for those that lie
    // `lines` lines of it below the ones before.
    __device__ __forceinline__ void draw(RandomStream stream, uint64_t first, int lines, int64_t line) {
        uint4* to = vectors_ + lane_index();
        __syncwarp();
        if (line % kBlock == 0) {
            const uint64_t group = first / kBlock, step = lines * (line / kBlock);
#pragma unroll
            for (int i = 0; i < kLaneColumns; ++i)
                store(to + i * kLanes, random_bytes(state_, group + i * step, stream).words);
        } else {
#pragma unroll 1
            for (int i = 0; i < kLaneColumns; ++i, first += lines * line) {
                // The end of one group of 16 and the beginning of the next.
                uint32_t both[8], words[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const RandomBytes bytes = random_bytes(state_, first / kBlock + h, stream);
#pragma unroll
                    for (int w = 0; w < 4; ++w) both[4 * h + w] = bytes.words[w];
                }
                shift_words<1>(both, static_cast<uint32_t>(first % kBlock), words);
                store(to + i * kLanes, words);
            }
        }
        __syncwarp();
    }

    static __device__ __forceinline__ void store(uint4* to, const uint32_t (&words)[4]) {
        *to = make_uint4(words[0], words[1], words[2], words[3]);
    }

    // The signs of the elements 0, 2, 1 and 3, each in all bits of its byte.
    template <typename T>
    static __device__ __forceinline__ uint32_t signs_of(const uint32_t (&words)[kLaneColumns / kPerWord<T>]) {
        if constexpr (kPerWord<T> == 2) {
            return permute<0xfbd9>(words[0], words[1]);
        } else {
            return __byte_perm(permute<0x00fb>(words[0], words[2]), permute<0x00fb>(words[1], words[3]),
                               0x5410);
        }
    }

    int64_t state_[2];
    uint4* vectors_;
};

}  // namespace zerofp4::cuda
