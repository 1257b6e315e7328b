#pragma once
// Quantizing a 16-bit matrix along its rows alone, in blocks of 1x16 and to nearest: a thread block takes 128
// rows by 256 columns, a warp strips of 8 rows by 256 columns, each lane 8 neighbouring columns of every row.
// Of a row it writes 128 bytes of codes and 16 of scales side by side, twice as many as quantize_tile.

#include "cuda/device/tuning.cuh"
#include "cuda/quantize/tile.cuh"

namespace zerofp4::cuda {

constexpr int kWideRows = 8;  // of a strip
constexpr int kWideTurns = 2;
constexpr int kWideTileRows = kWarps * kWideRows * kWideTurns;
constexpr int kWideTileCols = kVector<BFloat16> * kLanes;
constexpr int kWideScaleColumns = kWideTileCols / kBlock;

// A lane's vectors of a strip; 0 past the edges.
using WideWords = uint32_t[kWideRows][kVectorWords];

// Where a lane's vectors are, one in each row, and how many of them exist.
template <typename T, bool kWhole>
struct WidePlace {
    int64_t first;  // of its elements
    int64_t pitch;
    int rows;

    __device__ __forceinline__ WidePlace(const QuantizeArgs& args, int64_t row, int64_t col)
        : first(row * args.cols + col),
          pitch(args.cols),
          rows(col < args.cols ? clamp_count(args.rows - row, kWideRows) : 0) {}

    // Not evict-first, unlike other kernels': 97% of a copy on an H200, instead of 86%.
    __device__ __forceinline__ void load(const void* input, WideWords& words) const {
        const T* p = static_cast<const T*>(input) + first;
#pragma unroll
        for (int r = 0; r < kWideRows; ++r, p += pitch) {
            if (kWhole || r < rows) {
                load_words<false>(p, words[r]);
            } else {
                words[r][0] = words[r][1] = words[r][2] = words[r][3] = 0;
            }
        }
    }
    // codes(r) are those of row r.
    template <typename Codes>
    __device__ __forceinline__ void store(uint8_t* data, const Codes& codes) const {
        uint8_t* p = data + first / 2;
#pragma unroll
        for (int r = 0; r < kWideRows; ++r, p += pitch / 2) {
            const uint32_t word = codes(r);
            if (kWhole || r < rows) *reinterpret_cast<uint32_t*>(p) = word;
        }
    }
};

// Lane q of the 2 of a block gets the amaxes of the rows 4 i + 2 q and 4 i + 2 q + 1 and finds their scales
// and factors. Returns whether all blocks of the strip are regular ones.
template <typename T>
__device__ __forceinline__ bool scale_wide_rows(const WideWords& words, const Scales& scales,
                                                uint8_t (*bytes)[kWideScaleColumns],
                                                float (&factors)[kWideRows / 2]) {
    const int q = lane_index() % 2;
    RowPairs<T> pairs;
#pragma unroll
    for (int p = 0; p < kWideRows / 2; ++p) {
        const auto& a = words[2 * p];
        const auto& b = words[2 * p + 1];
        pairs.set(p, {larger_magnitudes<T>(a[0], a[1]), larger_magnitudes<T>(a[2], a[3])},
                  {larger_magnitudes<T>(b[0], b[1]), larger_magnitudes<T>(b[2], b[3])});
    }
#pragma unroll
    for (int i = 0; i < kWideRows / 4; ++i) pairs.exchange(i, 2 * i, q, 1);
    bool regular = true;
#pragma unroll
    for (int slot = 0; slot < kWideRows / 2; ++slot) {
        const uint32_t byte = scales.byte_of(pairs.bits(slot));
        bytes[4 * (slot / 2) + 2 * q + slot % 2][lane_index() / 2] = static_cast<uint8_t>(byte);
        factors[slot] = scales.factor_of(byte);
        regular = regular && Nearest::is_regular(pairs.bits(slot), factors[slot]);
    }
    return __all_sync(kAllLanes, regular);
}

template <typename T, bool kWhole>
__device__ __forceinline__ void quantize_wide_strip(const WideWords& words, const WidePlace<T, kWhole>& at,
                                                    const Scales& scales, uint8_t (*bytes)[kWideScaleColumns],
                                                    uint8_t* data) {
    float factors[kWideRows / 2];
    const bool regular = scale_wide_rows<T>(words, scales, bytes, factors);
    const auto encoded = [&](int r, bool all_regular) {
        const float factor = __shfl_sync(kAllLanes, factors[r / 4 * 2 + r % 2], r / 2 % 2, 2);
        return Nearest::encode_row<T>(words[r], factor, all_regular);
    };
    if (regular) {
        at.store(data, [&](int r) { return encoded(r, true); });
    } else {
        at.store(data, [&](int r) { return encoded(r, false); });
    }
}

// Shared memory of a thread block.
struct WideBuffers {
    float encode[kScaleBytes];
    alignas(16) uint8_t scales[kWideTileRows][kWideScaleColumns];
};

template <typename T, bool kWhole>
__device__ __forceinline__ void quantize_wide_tile(const QuantizeArgs& args, int64_t row, int64_t col,
                                                   WideBuffers& tile) {
    Scales scales;
#pragma unroll
    for (int turn = 0; turn < kWideTurns; ++turn) {
        const int strip = (turn * kWarps + warp_index()) * kWideRows;
        const WidePlace<T, kWhole> at(args, row + strip, col + lane_index() * kVector<T>);
        WideWords words;
        at.load(args.input, words);
        if (turn == 0) {  // the first strip is on its way
            const TensorScale tensor = tensor_scale(pin(*args.amax));
            if (threadIdx.x < kScaleBytes) tile.encode[threadIdx.x] = block_encode(threadIdx.x, tensor);
            scales = {tensor.block_factor, tile.encode, true};
            __syncthreads();
        }
        quantize_wide_strip<T>(words, at, scales, &tile.scales[strip], args.rowwise_data);
    }
}

// Not inlined, so that its registers and its code are not those of whole tiles.
template <typename T>
__device__ __noinline__ void quantize_cut_wide_tile(const QuantizeArgs& args, int64_t row, int64_t col,
                                                    WideBuffers& tile) {
    quantize_wide_tile<T, false>(args, row, col, tile);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kTuning.quantize_wide_rows_blocks)
    quantize_wide_rows_kernel(const __grid_constant__ QuantizeArgs args, uint32_t across) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    __shared__ WideBuffers tile;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    const uint32_t down = blockIdx.x / across;
    const int64_t row = int64_t{down} * kWideTileRows,
                  col = int64_t{blockIdx.x - down * across} * kWideTileCols;
    if (row + kWideTileRows <= args.rows && col + kWideTileCols <= args.cols) {
        quantize_wide_tile<T, true>(args, row, col, tile);
    } else {
        quantize_cut_wide_tile<T>(args, row, col, tile);
    }
    __syncthreads();
    write_scales(
        ScaleTile<kWideTileRows, kWideScaleColumns, 0, false>{
            tile.scales[0], kWideScaleColumns, args.rows, ceil_div(args.cols, kBlock), row, col / kBlock, 0},
        args.rowwise_scale);
}

// Whether the kernel can quantize this: rows of vectors of 16-bit elements at aligned addresses, and nothing
// but their copy.
inline bool has_wide_rows(const QuantizeArgs& args) {
    constexpr int kElements = kVector<BFloat16>;
    return args.dtype != DType::kFloat32 && args.block_rows == 1 && !args.rng_state && args.rowwise_data &&
           !args.columnwise_data && !args.values && args.cols % kElements == 0 &&
           is_aligned(args.input, 4 * kVectorWords) && is_aligned(args.rowwise_data, kElements / 2);
}

inline void quantize_wide_rows(const QuantizeArgs& args, cudaStream_t stream) {
    const int64_t across = ceil_div(args.cols, kWideTileCols);
    // One row of tiles at least: a matrix without rows has amaxes, too.
    const int64_t down = std::max<int64_t>(1, ceil_div(args.rows, kWideTileRows));
    const auto kernel = args.dtype == DType::kBFloat16 ? quantize_wide_rows_kernel<BFloat16>
                                                       : quantize_wide_rows_kernel<Float16>;
    launch("quantize", kernel, across * down, stream, args, static_cast<uint32_t>(across));
}

}  // namespace zerofp4::cuda
