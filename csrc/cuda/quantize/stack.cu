// Quantization of the matrices of a stack in tiles, and their amaxes, in one launch each.

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/kernel.cuh"

namespace zerofp4::cuda {
namespace {

__global__ void clear_stack_amaxes_kernel(const __grid_constant__ AmaxArgs first, int64_t experts) {
    wait_for_previous_kernel();
    if (is_skipped(first.skip)) return;
    for (int64_t e = threadIdx.x; e < experts; e += kThreads) first.amax[e] = 0.0f;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    stack_amax_kernel(const __grid_constant__ AmaxArgs first, uint32_t parts) {
    wait_for_previous_kernel();
    if (is_skipped(first.skip)) return;
    const uint32_t expert = blockIdx.x / parts;
    raise_amaxes<T, false>(matrix_of(first, expert), blockIdx.x - expert * parts);
}

// As quantize_kernel, with the bands of one matrix after those of another.
template <typename T, Columns kColumns>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocksPerSm<T>)
    quantize_stack_kernel(const __grid_constant__ QuantizeArgs first, int64_t experts, uint32_t bands,
                          uint32_t shift) {
    wait_for_previous_kernel();
    if (is_skipped(first.skip)) return;
    const int64_t index = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int64_t expert = index / bands, band = index - expert * bands;
    if (expert >= experts) return;
    const QuantizeArgs args = matrix_of(first, expert);
    const uint32_t column = blockIdx.x >> shift, step = blockIdx.x - (column << shift);
    if (band == 0 && blockIdx.x == 0 && threadIdx.x == 0) store_amaxes(args);
    const int64_t row = ((band << shift) + step) * kTileRows;
    if (row < args.rows) quantize_tile<T, true, kColumns>(args, row, int64_t{column} * kTileCols, args.rows);
}

template <typename T>
void quantize_stack_as(const QuantizeArgs& first, int64_t experts, cudaStream_t stream) {
    const auto kernel = first.columnwise_data ? quantize_stack_kernel<T, Columns::kPlain>
                                              : quantize_stack_kernel<T, Columns::kNone>;
    const TileGrid grid(first);
    launch("quantize", kernel, grid.blocks(experts), stream, first, experts,
           static_cast<uint32_t>(grid.bands), grid.shift);
}

}  // namespace

void tensor_amax_stack(const AmaxArgs& first, int64_t experts, cudaStream_t stream) {
    launch("tensor_amax", clear_stack_amaxes_kernel, 1, stream, first, experts);
    const int64_t parts = amax_parts(first.rows, first.cols);
    with_dtype(first.dtype, [&](auto t) {
        launch("tensor_amax", stack_amax_kernel<decltype(t)>, parts * experts, stream, first,
               static_cast<uint32_t>(parts));
    });
}

void quantize_stack(const QuantizeArgs& first, int64_t experts, cudaStream_t stream) {
    with_dtype(first.dtype, [&](auto t) { quantize_stack_as<decltype(t)>(first, experts, stream); });
}

}  // namespace zerofp4::cuda
