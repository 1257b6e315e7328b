// find_nonfinite: one pass over a list of tensors, at the speed of memory. A thread block reads a piece of
// one tensor; only one that finds something writes.

#include "common/args/nonfinite.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kScanVectors = 8;  // of a thread
template <typename T>
constexpr int64_t kScanElements = static_cast<int64_t>(kThreads) * kScanVectors * kVector<T>;

// The tensor that a block works on.
__device__ __forceinline__ int tensor_of_block(const NonfiniteArgs& args) {
    int low = 0, high = args.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (args.block_begin[middle] <= static_cast<int>(blockIdx.x) ? low : high) = middle;
    }
    return low;
}

template <typename T>
__device__ __forceinline__ uint32_t most_of_vectors(const T* first) {
    constexpr int64_t kNext = static_cast<int64_t>(kThreads) * kVector<T>;
    uint32_t words[kScanVectors][kVectorWords];
#pragma unroll
    for (int v = 0; v < kScanVectors; ++v) load_words<false>(first + v * kNext, words[v]);
    uint32_t most = 0;
#pragma unroll
    for (int v = 0; v < kScanVectors; ++v) {
        float values[kVector<T>];
        unpack<T>(words[v], values);
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) most = max(most, magnitude_bits(values[k]));
    }
    return most;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    find_nonfinite_kernel(const __grid_constant__ NonfiniteArgs args) {
    wait_for_previous_kernel();
    const int t = tensor_of_block(args);
    const T* tensor = static_cast<const T*>(args.tensors[t]);
    const int64_t block = static_cast<int>(blockIdx.x) - args.block_begin[t];
    const int64_t begin = block * kScanElements<T>;
    const int64_t end = min(begin + kScanElements<T>, args.numels[t]);
    uint32_t most = 0;
    if (end - begin == kScanElements<T> && is_aligned(tensor, 16)) {
        most = most_of_vectors(tensor + begin + static_cast<int64_t>(threadIdx.x) * kVector<T>);
    } else {
        for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
            most = max(most, magnitude_bits(load_float(tensor[i])));
    }
    if (most >= kInfBits) atomicMax(args.found, args.words[t]);
}

template <typename T>
void find_nonfinite_as(NonfiniteArgs args, cudaStream_t stream) {
    int64_t blocks = 0;
    for (int t = 0; t < args.count; ++t) {
        args.block_begin[t] = static_cast<int32_t>(blocks);
        blocks += ceil_div(args.numels[t], kScanElements<T>);
        grid_size("find_nonfinite", blocks);  // raises where the numbers of blocks are too large
    }
    if (blocks > 0) launch("find_nonfinite", find_nonfinite_kernel<T>, blocks, stream, args);
}

}  // namespace

void find_nonfinite(const NonfiniteArgs& args, cudaStream_t stream) {
    with_dtype(args.dtype, [&](auto t) { find_nonfinite_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
