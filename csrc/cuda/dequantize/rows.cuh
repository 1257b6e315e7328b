#pragma once
// Rows of codes along which blocks lie to values, 16 bytes of them per lane.

#include "common/args/dequantize.h"
#include "common/scale.h"
#include "cuda/device/units.cuh"
#include "cuda/format/decode.cuh"

namespace zerofp4::cuda {

// A lane's vector of columns: where its codes, their scale and its values lie in the first row, and how far
// it is to the next, in bytes. Lanes that share a block lie side by side.
struct LaneRows {
    const uint8_t* data;
    const uint8_t* scale;
    uint8_t* output;
    uint32_t data_pitch;
    uint32_t scale_pitch;
    uint64_t pitch;
    float amax;
    float factor;  // decode_factor(e4m3_max), scale.h
};

template <typename T>
__device__ __forceinline__ uint32_t load_codes(const uint8_t* data) {
    if constexpr (kVector<T> == 8) {
        return *reinterpret_cast<const uint32_t*>(data);
    } else {
        return *reinterpret_cast<const uint16_t*>(data);
    }
}

// kRows of them, which begin at a multiple of it. Lanes that share a block decode the scales of some rows
// each. For all lanes of a warp.
template <typename T, int kRows>
__device__ __forceinline__ void decode_rows(LaneRows at) {
    constexpr int kDecodedRows = kRows < 8 ? kRows : 8;
    constexpr int kSharing = kBlock / kVector<T>;
    constexpr int kScales = kDecodedRows / kSharing;
    at.scale += at.scale_pitch * (lane_index() % kSharing);
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kDecodedRows) {
        uint32_t codes[kDecodedRows];
#pragma unroll
        for (int r = 0; r < kDecodedRows; ++r, at.data += at.data_pitch) codes[r] = load_codes<T>(at.data);
        float mine[kScales], factors[kDecodedRows];
#pragma unroll
        for (int i = 0; i < kScales; ++i, at.scale += at.scale_pitch * kSharing)
            mine[i] = block_decode_by(*at.scale, at.amax, at.factor);
#pragma unroll
        for (int r = 0; r < kDecodedRows; ++r)
            factors[r] = __shfl_sync(kAllLanes, mine[r / kSharing], r % kSharing, kSharing);
#pragma unroll
        for (int r = 0; r < kDecodedRows; ++r, at.output += at.pitch) {
            uint32_t words[4];
            decode_vector<T>(codes[r], [&](int) { return factors[r]; }, words);
            *reinterpret_cast<uint4*>(at.output) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// `count` of the rows, by each lane for itself.
template <typename T>
__device__ __forceinline__ void decode_some_rows(LaneRows at, int count) {
    for (int r = 0; r < count; ++r) {
        const float factor = block_decode_by(*at.scale, at.amax, at.factor);
        uint32_t words[4];
        decode_vector<T>(load_codes<T>(at.data), [&](int) { return factor; }, words);
        *reinterpret_cast<uint4*>(at.output) = make_uint4(words[0], words[1], words[2], words[3]);
        at.data += at.data_pitch, at.scale += at.scale_pitch, at.output += at.pitch;
    }
}

}  // namespace zerofp4::cuda
