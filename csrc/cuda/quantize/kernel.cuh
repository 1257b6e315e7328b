#pragma once
// Quantization of a matrix with given amaxes, in one pass over the input: a thread block takes a tile of 256
// rows by 128 columns. Tiles are taken down the columns of bands of 2^shift tiles one below another: what is
// written at one time should lie side by side, down the rows for the columnwise copy, but no further than the
// L2 cache keeps cut vectors of the other.

#include "cuda/quantize/wide_rows.cuh"

namespace zerofp4::cuda {

template <typename T, bool kTiles, Columns kColumns, class Rounding>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocksPerSm<T>)
    quantize_kernel(const __grid_constant__ QuantizeArgs args, uint32_t shift) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    const int64_t band = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const uint32_t column = blockIdx.x >> shift, step = blockIdx.x - (column << shift);
    if (band == 0 && blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    const int64_t row = ((band << shift) + step) * kTileRows;
    if (row < args.rows)
        quantize_tile<T, kTiles, kColumns, Rounding>(args, row, int64_t{column} * kTileCols, args.rows);
}

// How the tiles of a matrix are shared out: `bands` of 2^shift tiles one below another, as far as they go.
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

    // Of so many matrices; none for matrices without elements.
    dim3 blocks(int64_t matrices) const {
        constexpr int64_t kMostY = 65535;  // of a grid
        const int64_t y = std::clamp<int64_t>(bands * matrices, 1, kMostY);
        return dim3(grid_size("quantize", columns << shift), static_cast<unsigned>(y),
                    static_cast<unsigned>(ceil_div(bands * matrices, y)));
    }
};

template <typename T, class Rounding>
void quantize_as(const QuantizeArgs& args, cudaStream_t stream) {
    const bool tiles = args.block_rows == kBlock;
    if constexpr (std::is_same_v<Rounding, Nearest> && kPerWord<T> == 2) {
        if (has_wide_rows<T>(args)) return quantize_wide_rows<T>(args, stream);
    }
    auto kernel = tiles ? quantize_kernel<T, true, Columns::kNone, Rounding>
                        : quantize_kernel<T, false, Columns::kNone, Rounding>;
    if (args.columnwise_data && tiles) kernel = quantize_kernel<T, true, Columns::kPlain, Rounding>;
    if (args.columnwise_data && !tiles) {
        kernel = !args.hadamard ? quantize_kernel<T, false, Columns::kPlain, Rounding>
                 : !args.signs  ? quantize_kernel<T, false, Columns::kHadamard, Rounding>
                                : quantize_kernel<T, false, Columns::kRandomHadamard, Rounding>;
    }
    const TileGrid grid(args);
    launch("quantize", kernel, grid.blocks(1), stream, args, grid.shift);
}

template <class Rounding>
void quantize_by(const QuantizeArgs& args, cudaStream_t stream) {
    with_dtype(args.dtype, [&](auto t) { quantize_as<decltype(t), Rounding>(args, stream); });
}

}  // namespace zerofp4::cuda
