// Quantization with four over six: blocks along the rows of the input, or along its columns, and tiles.

#include "common/args/quantize.h"
#include "cuda/device/tuning.cuh"
#include "cuda/format/four_over_six.cuh"
#include "cuda/format/magnitudes.cuh"
#include "cuda/format/scale_block.cuh"
#include "cuda/format/transform.cuh"

namespace zerofp4::cuda {
namespace {

// A warp takes a strip: 16 rows by 8 blocks. Half of it takes four neighbouring blocks of a row, one after
// another, whose scales are a word of every padded layout.
constexpr int kStripBlocks = kStripColumns / kBlock;
constexpr int kTurns = kAtomColumns;
static_assert(kStripBlocks == 2 * kTurns);

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

// The block at p, along the rows or, kColumnwise, down a column; 0 past its first `count` elements.
template <typename T, bool kColumnwise>
__device__ __forceinline__ void load_block(const QuantizeArgs& args, const T* p, int count,
                                           float (&x)[kBlock]) {
    if constexpr (kColumnwise) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) x[r] = r < count ? load_float(p[r * args.cols]) : 0.0f;
        if (args.hadamard) {
            transform<T>(x, args.signs);
#pragma unroll
            for (int r = 0; r < kBlock; ++r) x[r] = quarter(x[r]);
            round_all<BFloat16>(x);
        }
    } else {
        load_elements(p, count, x);
    }
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
__device__ __forceinline__ void store_values(T* p, int count, const BlockCodes& codes, float decode) {
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

// The tile's codes of a column, which are a row of the transpose, and its scale.
__device__ __forceinline__ void store_transpose(const Copy& copy, int64_t row, int64_t block,
                                                const BlockCodes& codes, uint32_t scale) {
    const int64_t col = block * kBlock;
    if (row < copy.rows)
        store8(copy.data + (row * copy.cols + col) / 2, codes, clamp_count(copy.cols - col, kBlock) / 2);
    write_scale(copy.rows, copy.scale_columns(), row, block, scale, copy.scales);
}

// `across` strips beside each other, down to where the padding of the layouts ends.
template <typename T, bool kColumnwise, bool kTiles>
__global__ void __launch_bounds__(kThreads, kTuning.four_over_six_blocks)
    four_over_six_kernel(const __grid_constant__ QuantizeArgs args, uint32_t strips, uint32_t across) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    const uint32_t strip = blockIdx.x * kWarps + warp_index();
    if (strip >= strips) return;
    const Copy copy = kColumnwise ? columnwise_copy(args) : rowwise_copy(args);
    const float amax = kColumnwise && args.columnwise_amax ? *args.columnwise_amax : *args.amax;
    const ChoosingTensor tensor(amax, tensor_scale(amax, args.choice.e4m3_max), args.choice);
    // This lane's row and the first of its elements there, and how many of them there are.
    const uint32_t down = strip / across;
    const int64_t i = down * int64_t{kBlock} + lane_index() % kHalf;
    const int64_t j = (strip - down * across) * int64_t{kStripBlocks} + lane_index() / kHalf * kTurns;
    const int64_t start = j * kBlock;
    const auto count_of = [&](int64_t length) {
        return i < copy.rows ? clamp_count(length - start, kTurns * kBlock) : 0;
    };
    const int count = count_of(kColumnwise ? args.rows : args.cols);
    const int codes_of_row = count_of(copy.cols), code_bytes = copy.data ? codes_of_row / 2 : 0;
    const T* input =
        static_cast<const T*>(args.input) + (kColumnwise ? start * args.cols + i : i * args.cols + start);
    uint8_t* data = copy.data + (i * copy.cols + start) / 2;

    uint32_t words[4] = {}, scales = 0;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        float x[kBlock];
        load_block<T, kColumnwise>(args, input, count - turn * kBlock, x);
        input += kColumnwise ? kBlock * args.cols : kBlock;
        BlockCodes codes;
        const uint32_t scale = four_over_six<kTiles>(x, tensor, codes);
        scales = scales >> 8 | scale << 24;
        // The codes of two blocks are stored together.
        words[0] = words[2], words[1] = words[3], words[2] = codes[0], words[3] = codes[1];
        if (turn % 2 == 1) {
            store16(data, words, code_bytes - (turn - 1) * (kBlock / 2));
            data += kBlock;
        }
        if constexpr (!kColumnwise) {
            if (args.values)
                store_values(static_cast<T*>(args.values) + i * args.cols + start + turn * kBlock,
                             count - turn * kBlock, codes, block_decode_by(scale, amax, tensor.inverse));
        }
        if constexpr (kTiles) {
            if (!args.columnwise_data) continue;
            transpose_tile(codes);
            store_transpose(columnwise_copy(args), (j + turn) * kBlock + lane_index() % kHalf, down, codes,
                            scale);
        }
    }
    write_four_scales(copy.scale_columns(), kTiles, i, j, (codes_of_row + kBlock - 1) / kBlock,
                      i < copy.rows ? scales : 0, copy.scales);
}

template <typename T, bool kColumnwise, bool kTiles>
void launch_four_over_six(const QuantizeArgs& args, cudaStream_t stream) {
    const int64_t rows = kColumnwise ? args.cols : args.rows, cols = kColumnwise ? args.rows : args.cols;
    const int64_t across = ceil_div(cols, kStripColumns),
                  strips = round_up(rows, kAtomRows) / kBlock * across;
    launch("quantize", four_over_six_kernel<T, kColumnwise, kTiles>, ceil_div(strips, kWarps), stream, args,
           static_cast<uint32_t>(strips), static_cast<uint32_t>(across));
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
