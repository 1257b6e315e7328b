// Quantization of a matrix with given amaxes, rounding to nearest, in one pass over the input: a thread block
// takes a tile of 256 rows by 128 columns.

#include "cuda/quantize_body.cuh"

namespace zerofp4::cuda {
namespace {

template <typename T, bool kTiles, Columns kColumns>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocksPerSm<T, kColumns>)
    quantize_kernel(const __grid_constant__ QuantizeArgs args) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    quantize_tile<T, kTiles, kColumns>(args, blockIdx.x, args.rows);
}

template <typename T>
void quantize_as(const QuantizeArgs& args, cudaStream_t stream) {
    const bool tiles = args.block_rows == kBlock;
    auto kernel =
        tiles ? quantize_kernel<T, true, Columns::kNone> : quantize_kernel<T, false, Columns::kNone>;
    if (args.columnwise_data && tiles) kernel = quantize_kernel<T, true, Columns::kPlain>;
    if (args.columnwise_data && !tiles) {
        kernel = !args.hadamard ? quantize_kernel<T, false, Columns::kPlain>
                 : !args.signs  ? quantize_kernel<T, false, Columns::kHadamard>
                                : quantize_kernel<T, false, Columns::kRandomHadamard>;
    }
    const int64_t blocks = ceil_div(args.rows, kTileRows) * ceil_div(args.cols, kTileCols);
    launch("quantize", kernel, blocks, stream, args);
}

}  // namespace

void quantize_blocks(const QuantizeArgs& args, cudaStream_t stream);  // quantize_blocks.cu

void quantize(const QuantizeArgs& args, cudaStream_t stream) {
    if (args.rng_state || args.choice.e4m3_max > 0.0f) return quantize_blocks(args, stream);
    switch (args.dtype) {
        case DType::kFloat32:
            return quantize_as<float>(args, stream);
        case DType::kBFloat16:
            return quantize_as<BFloat16>(args, stream);
        case DType::kFloat16:
            return quantize_as<Float16>(args, stream);
    }
}

}  // namespace zerofp4::cuda
