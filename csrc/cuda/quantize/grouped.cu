// quantize, rounding to nearest, and tensor_amax for groups of consecutive rows, in one launch each. Neither
// the host nor the grid knows the splits: there are as many blocks as the worst of them need.

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/grouped.cuh"

namespace zerofp4::cuda {
namespace {

__global__ void clear_amaxes_kernel(const __grid_constant__ GroupedAmaxArgs args) {
    wait_for_previous_kernel();
    for (int64_t group = threadIdx.x; group < args.splits.count; group += kThreads) {
        if (args.whole.amax) args.whole.amax[group] = 0.0f;
        if (args.whole.hadamard_amax) args.whole.hadamard_amax[group] = 0.0f;
    }
}

template <typename T, bool kTransform>
__global__ void __launch_bounds__(kThreads)
    grouped_amax_kernel(const __grid_constant__ GroupedAmaxArgs args) {
    wait_for_previous_kernel();
    const auto parts_of = [&](int64_t rows) { return amax_parts(rows, args.whole.cols); };
    const GroupSearch& search = search_groups(args.splits, parts_of, [](const GroupPlace&) {});
    if (search.has_unit()) raise_amaxes<T, kTransform>(arguments_of(args.whole, search.place), search.unit);
}

template <typename T>
void grouped_amax_as(const GroupedAmaxArgs& args, cudaStream_t stream) {
    const auto kernel =
        args.whole.hadamard_amax ? grouped_amax_kernel<T, true> : grouped_amax_kernel<T, false>;
    // A group ends within a part, which another one would go on with.
    const int64_t parts = amax_parts(most_data_rows(args.splits), args.whole.cols) + args.splits.count;
    launch("grouped_amax", kernel, parts, stream, args);
}

}  // namespace

void quantize_grouped_stochastic(const GroupedArgs& args, cudaStream_t stream);  // grouped_stochastic.cu

void grouped_amax(const GroupedAmaxArgs& args, cudaStream_t stream) {
    launch("grouped_amax", clear_amaxes_kernel, 1, stream, args);
    if (args.whole.rows == 0 || args.whole.cols == 0) return;
    with_dtype(args.whole.dtype, [&](auto t) { grouped_amax_as<decltype(t)>(args, stream); });
}

void quantize_grouped(const GroupedArgs& args, cudaStream_t stream) {
    if (args.whole.rng_state) return quantize_grouped_stochastic(args, stream);
    quantize_grouped_by<Nearest>(args, stream);
}

}  // namespace zerofp4::cuda
