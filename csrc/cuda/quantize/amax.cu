// The largest magnitude of a matrix and that of its transform along the columns, in one pass.

#include "common/args/quantize.h"
#include "cuda/quantize/amax.cuh"

namespace zerofp4::cuda {
namespace {

__global__ void clear_amaxes_kernel(const __grid_constant__ AmaxArgs args) {
    wait_for_previous_kernel();
    if (threadIdx.x != 0 || is_skipped(args.skip)) return;
    if (args.amax) *args.amax = 0.0f;
    if (args.hadamard_amax) *args.hadamard_amax = 0.0f;
}

template <typename T, bool kTransform>
__global__ void __launch_bounds__(kThreads) tensor_amax_kernel(const __grid_constant__ AmaxArgs args) {
    wait_for_previous_kernel();
    if (is_skipped(args.skip)) return;
    raise_amaxes<T, kTransform>(args, blockIdx.x);
}

template <typename T>
void tensor_amax_as(const AmaxArgs& args, cudaStream_t stream) {
    const auto kernel = args.hadamard_amax ? tensor_amax_kernel<T, true> : tensor_amax_kernel<T, false>;
    launch("tensor_amax", kernel, amax_parts(args.rows, args.cols), stream, args);
}

}  // namespace

void tensor_amax(const AmaxArgs& args, cudaStream_t stream) {
    launch("tensor_amax", clear_amaxes_kernel, 1, stream, args);
    with_dtype(args.dtype, [&](auto t) { tensor_amax_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
