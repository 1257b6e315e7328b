// Quantization with four over six: blocks along the rows of the input, or along its columns, and tiles.

#include "common/args/quantize.h"
#include "cuda/format/four_over_six.cuh"
#include "cuda/format/magnitudes.cuh"
#include "cuda/format/scale_block.cuh"
#include "cuda/format/transform.cuh"

namespace zerofp4::cuda {
namespace {

// Padded layouts end at a multiple of so many blocks in both directions.
constexpr int64_t kPaddedBlocks = kAtomRows / kBlock;

// One copy of the tensor: a matrix [rows, cols] of which the input is the one or the other orientation.
struct Copy {
    int64_t rows;
    int64_t cols;  // of the codes
    uint8_t* data;
    uint8_t* const* scales;  // by ScaleLayout

    __device__ __forceinline__ int64_t scale_columns() const { return ceil_div(cols, kBlock); }
};

__device__ __forceinline__ Copy rowwise_copy(const QuantizeArgs& args) {
    return {args.rows, args.cols, args.rowwise_data, args.rowwise_scale};
}

__device__ __forceinline__ Copy columnwise_copy(const QuantizeArgs& args) {
    const int64_t cols = args.hadamard ? round_up(args.rows, kBlock) : args.rows;
    return {args.cols, cols, args.columnwise_data, args.columnwise_scale};
}

// The elements of block `j` of stored row `i`; 0 past the edges.
template <typename T, bool kColumnwise>
__device__ __forceinline__ void load_block(const QuantizeArgs& args, int64_t i, int64_t j,
                                           float (&x)[kBlock]) {
    const T* input = static_cast<const T*>(args.input);
    if constexpr (kColumnwise) {
        const int count = i < args.cols ? clamp_count(args.rows - j * kBlock, kBlock) : 0;
#pragma unroll
        for (int r = 0; r < kBlock; ++r)
            x[r] = r < count ? load_float(input[(j * kBlock + r) * args.cols + i]) : 0.0f;
        if (args.hadamard) {
            transform<T>(x, args.signs);
#pragma unroll
            for (int r = 0; r < kBlock; ++r) x[r] = quarter(x[r]);
            round_all<BFloat16>(x);
        }
    } else {
        const int count = i < args.rows ? clamp_count(args.cols - j * kBlock, kBlock) : 0;
        load_elements(input + i * args.cols + j * kBlock, count, x);
    }
}

__device__ __forceinline__ void store_block(const Copy& copy, int64_t i, int64_t j, const BlockCodes& codes) {
    if (!copy.data || i >= copy.rows) return;
    const int count = clamp_count(copy.cols - j * kBlock, kBlock) / 2;
    store8(copy.data + (i * copy.cols + j * kBlock) / 2, codes, count);
}

// Lane `i` of half a warp gives 16 codes of row i and gets those of column i.
__device__ __forceinline__ void transpose_tile(BlockCodes& codes) {
    // Words between lanes 8 apart, then halves, bytes and nibbles of both words between lanes 4, 2 and 1
    // apart.
    const bool lower = lane_index() & 8;
    const uint32_t received = __shfl_xor_sync(kAllLanes, lower ? codes[0] : codes[1], 8);
    (lower ? codes[0] : codes[1]) = received;
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        const uint32_t low = distance == 4 ? 0x0000ffffu : distance == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, codes[h], distance);
            codes[h] = lane_index() & distance ? (codes[h] & ~low) | (other >> (4 * distance) & low)
                                               : (codes[h] & low) | (other << (4 * distance) & ~low);
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_values(const QuantizeArgs& args, int64_t i, int64_t j,
                                             const BlockCodes& codes, float decode) {
    T* p = static_cast<T*>(args.values) + i * args.cols + j * kBlock;
    const int count = i < args.rows ? clamp_count(args.cols - j * kBlock, kBlock) : 0;
#pragma unroll
    for (int k = 0; k < kBlock; k += 2) {
        const uint32_t pair = codes[k / 8] >> (4 * (k % 8));
        const float x[2] = {e2m1_to_float(pair & 15u) * decode, e2m1_to_float(pair >> 4 & 15u) * decode};
        uint8_t* bytes = reinterpret_cast<uint8_t*>(p + k);
        if constexpr (kPerWord<T> == 1) {
            store8(bytes, {to_bits(x[0]), to_bits(x[1])}, k < count ? 8 : 0);
        } else {
            store4(bytes, pack_word<T>(x), k < count ? 4 : 0);
        }
    }
}

template <typename T, bool kColumnwise, bool kTiles>
__global__ void __launch_bounds__(kThreads) four_over_six_kernel(const __grid_constant__ QuantizeArgs args) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    const Copy copy = kColumnwise ? columnwise_copy(args) : rowwise_copy(args);
    const float amax = kColumnwise && args.columnwise_amax ? *args.columnwise_amax : *args.amax;
    const TensorScale tensor = tensor_scale(amax, args.choice.e4m3_max);
    // Two tiles a warp, side by side; they cover what padded layouts have, in either orientation.
    const int64_t across = round_up(copy.scale_columns(), kPaddedBlocks);
    const int64_t tile = grid_warp() * 2 + lane_index() / kHalf;
    const int64_t down = tile / across, j = tile - down * across;
    if (down * kBlock >= round_up(copy.rows, kAtomRows)) return;
    const int64_t i = down * kBlock + lane_index() % kHalf;

    float x[kBlock];
    load_block<T, kColumnwise>(args, i, j, x);
    BlockCodes codes;
    const uint32_t scale = four_over_six<kTiles>(x, amax, tensor, args.choice, codes);
    store_block(copy, i, j, codes);
    write_scale(copy.rows, copy.scale_columns(), kTiles, i, j, scale, copy.scales);
    if constexpr (!kColumnwise) {
        if (args.values) store_values<T>(args, i, j, codes, block_decode(scale, amax, args.choice.e4m3_max));
    }
    if constexpr (kTiles) {
        if (!args.columnwise_data) return;
        transpose_tile(codes);
        const int64_t column = j * kBlock + lane_index() % kHalf;
        const Copy transpose = columnwise_copy(args);
        store_block(transpose, column, down, codes);
        write_scale(transpose.rows, transpose.scale_columns(), kTiles, column, down, scale, transpose.scales);
    }
}

template <typename T, bool kColumnwise, bool kTiles>
void launch_four_over_six(const QuantizeArgs& args, cudaStream_t stream) {
    const int64_t rows = round_up(kColumnwise ? args.cols : args.rows, kAtomRows);
    const int64_t cols = round_up(kColumnwise ? args.rows : args.cols, kAtomRows);
    const int64_t tiles = rows / kBlock * (cols / kBlock);
    launch("quantize", four_over_six_kernel<T, kColumnwise, kTiles>, ceil_div(tiles, 2 * kWarps), stream,
           args);
}

template <typename T>
void four_over_six_as(const QuantizeArgs& args, cudaStream_t stream) {
    if (args.block_rows == kBlock) return launch_four_over_six<T, false, true>(args, stream);
    if (args.rowwise_data || args.values) launch_four_over_six<T, false, false>(args, stream);
    if (args.columnwise_data) launch_four_over_six<T, true, false>(args, stream);
}

}  // namespace

void quantize_four_over_six(const QuantizeArgs& args, cudaStream_t stream) {
    with_dtype(args.dtype, [&](auto t) { four_over_six_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
