#pragma once
// Quantization of a matrix, of a stack of them or of groups of rows, with given amaxes and in one pass over
// the input: a thread block takes a tile of 256 rows by 128 columns.

#include "cuda/quantize/groups.cuh"

namespace zerofp4::cuda {

// Of groups all is given; else only `whole`, the only matrix or the first of a stack.
struct QuantizeLaunch {
    GroupedArgs given;
    Matrices matrices;
    uint32_t shift;  // TileGrid
    uint32_t bands;
    int64_t experts;
};

// The tiles of a matrix in bands of 2^shift tiles one below another, as far as they go; those of a stack's
// matrices one after another. A band's are taken down its columns: what is written at one time should lie
// side by side, down the rows for the columnwise copy, but no further than the L2 cache keeps cut vectors of
// the other. With shift 1:
//
//   band 0   0  2  4    blockIdx.x, the same in all bands;
//            1  3  5    blockIdx.y and z count the bands
//   band 1   0  2  4
//            1  3  5
struct TileGrid {
    uint32_t shift = 0;
    int64_t bands;
    int64_t columns;

    explicit TileGrid(const QuantizeArgs& args) : columns(ceil_div(args.cols, kTileCols)) {
        constexpr uint32_t kMostShift = 3;
        const int64_t down = ceil_div(args.rows, kTileRows);
        while (args.columnwise_data && shift < kMostShift && int64_t{1} << shift < down) ++shift;
        bands = ceil_div(down, int64_t{1} << shift);
    }

    // None for matrices without elements.
    dim3 blocks(int64_t experts) const {
        constexpr int64_t kMostY = 65535;  // of a grid
        const int64_t y = std::clamp<int64_t>(bands * experts, 1, kMostY);
        return dim3(grid_size("quantize", columns << shift), static_cast<unsigned>(y),
                    static_cast<unsigned>(ceil_div(bands * experts, y)));
    }
};

// The block's tile of the only matrix or of one of a stack. 32-bit: there are fewer than 2^32 tiles.
__device__ __forceinline__ TilePlace tile_of_bands(const QuantizeLaunch& launch, OwnMatrix& own) {
    const QuantizeArgs& whole = launch.given.whole;
    uint32_t band = blockIdx.z * gridDim.y + blockIdx.y;
    if (launch.matrices == Matrices::kStack) {
        const uint32_t expert = in_uniform_register(band / launch.bands);
        band -= expert * launch.bands;
        if (expert >= launch.experts) return {};
        if (threadIdx.x == 0) {
            own = {matrix_of(whole, expert), whole.rows};
            if (band == 0 && blockIdx.x == 0) store_amaxes(own.args);
        }
        __syncthreads();
    } else if (band == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        store_amaxes(whole);
    }
    const uint32_t across = blockIdx.x >> launch.shift, step = blockIdx.x - (across << launch.shift);
    const uint32_t down = (band << launch.shift) + step;
    return {down, across, int64_t{down} * kTileRows < whole.rows};
}

template <typename T, bool kTiles, Columns kColumns, class Rounding>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<T>)
    quantize_kernel(const __grid_constant__ QuantizeLaunch launch) {
    wait_for_previous_kernel();
    if (is_skipped(launch.given.whole.skip)) return;
    __shared__ OwnMatrix own;
    const bool are_groups = !kTiles && launch.matrices == Matrices::kGroups;
    const TilePlace tile =
        are_groups ? tile_of_groups<kColumns>(launch.given, own) : tile_of_bands(launch, own);
    if (!tile.exists) return;
    const TileMatrix matrix(launch.given.whole, own, launch.matrices == Matrices::kOne);
    quantize_tile<T, kTiles, kColumns, Rounding>(matrix, tile);
}

template <typename T, class Rounding>
void launch_quantize_of(const QuantizeLaunch& given, dim3 blocks, cudaStream_t stream) {
    const QuantizeArgs& args = given.given.whole;
    const bool tiles = args.block_rows == kBlock;
    auto kernel = tiles ? quantize_kernel<T, true, Columns::kNone, Rounding>
                        : quantize_kernel<T, false, Columns::kNone, Rounding>;
    if (args.columnwise_data && tiles) kernel = quantize_kernel<T, true, Columns::kPlain, Rounding>;
    if (args.columnwise_data && !tiles) {
        kernel = args.hadamard ? quantize_kernel<T, false, Columns::kHadamard, Rounding>
                               : quantize_kernel<T, false, Columns::kPlain, Rounding>;
    }
    launch("quantize", kernel, blocks, stream, given);
}

// Halves are rare, and kernels of their own would be a third of all: those of floats widen them.
template <class Rounding>
void launch_quantize(const QuantizeLaunch& given, dim3 blocks, cudaStream_t stream) {
    if (given.given.whole.dtype == DType::kBFloat16)
        return launch_quantize_of<BFloat16, Rounding>(given, blocks, stream);
    launch_quantize_of<float, Rounding>(given, blocks, stream);
}

void launch_quantize_stochastic(const QuantizeLaunch&, dim3 blocks, cudaStream_t stream);  // stochastic.cu

}  // namespace zerofp4::cuda
