// average: the mean of pieces that lie side by side, added in their order. A thread keeps the sums of a few
// vectors in registers and reads them from every piece once.

#include "common/args/average.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kVectors = 2;  // of a thread, from each piece
template <typename T>
constexpr int64_t kBlockElements = static_cast<int64_t>(kThreads) * kVectors * kVector<T>;

template <typename T>
__device__ __forceinline__ void average_vectors(const AverageArgs& args, int64_t first) {
    constexpr int64_t kNext = static_cast<int64_t>(kThreads) * kVector<T>;
    const T* piece = static_cast<const T*>(args.pieces) + first;
    float sums[kVectors][kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        uint32_t words[kVectorWords];
        load_words<true>(piece + v * kNext, words);
        unpack<T>(words, sums[v]);
    }
    for (int64_t r = 1; r < args.count; ++r) {
        piece += args.numel;
        uint32_t words[kVectors][kVectorWords];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) load_words<true>(piece + v * kNext, words[v]);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float values[kVector<T>];
            unpack<T>(words[v], values);
#pragma unroll
            for (int k = 0; k < kVector<T>; ++k) sums[v][k] += values[k];
        }
    }
    const float count = static_cast<float>(args.count);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        float4* output = reinterpret_cast<float4*>(args.output + first + v * kNext);
#pragma unroll
        for (int k = 0; k < kVector<T>; k += 4) {
            const float* sum = sums[v] + k;
            output[k / 4] = make_float4(sum[0] / count, sum[1] / count, sum[2] / count, sum[3] / count);
        }
    }
}

template <typename T>
__device__ __forceinline__ void average_one(const AverageArgs& args, int64_t i) {
    const T* piece = static_cast<const T*>(args.pieces) + i;
    float sum = load_float(*piece);
    for (int64_t r = 1; r < args.count; ++r) sum += load_float(piece[r * args.numel]);
    args.output[i] = sum / static_cast<float>(args.count);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    average_kernel(const __grid_constant__ AverageArgs args, const bool aligned) {
    wait_for_previous_kernel();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBlockElements<T>;
    const int64_t end = min(begin + kBlockElements<T>, args.numel);
    if (aligned && end - begin == kBlockElements<T>) {
        average_vectors<T>(args, begin + static_cast<int64_t>(threadIdx.x) * kVector<T>);
        return;
    }
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) average_one<T>(args, i);
}

template <typename T>
void average_as(const AverageArgs& args, cudaStream_t stream) {
    const auto is_vector = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    const bool aligned = is_vector(args.pieces) && is_vector(args.output) && args.numel % kVector<T> == 0;
    launch("average", average_kernel<T>, ceil_div(args.numel, kBlockElements<T>), stream, args, aligned);
}

}  // namespace

void average(const AverageArgs& args, cudaStream_t stream) {
    if (args.numel == 0) return;
    with_dtype(args.dtype, [&](auto t) { average_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
