// widen: the values of a list of tensors as float32, in one pass over them. A thread block has a piece of one
// tensor.

#include "common/args/widen.h"
#include "cuda/device/vector.cuh"
#include "cuda/optim/tensor_list.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kWidenVectors = 4;  // of a thread
template <typename T>
constexpr int64_t kWidenElements = static_cast<int64_t>(kThreads) * kWidenVectors * kVector<T>;

template <typename T>
__device__ __forceinline__ void widen_vectors(const T* first, float* output) {
    constexpr int64_t kNext = static_cast<int64_t>(kThreads) * kVector<T>;
    uint32_t words[kWidenVectors][kVectorWords];
#pragma unroll
    for (int v = 0; v < kWidenVectors; ++v) load_words<true>(first + v * kNext, words[v]);
#pragma unroll
    for (int v = 0; v < kWidenVectors; ++v) {
        float values[kVector<T>];
        unpack<T>(words[v], values);
        float4* to = reinterpret_cast<float4*>(output + v * kNext);
#pragma unroll
        for (int k = 0; k < kVector<T>; k += 4)
            to[k / 4] = make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) widen_kernel(const __grid_constant__ WidenArgs args) {
    wait_for_previous_kernel();
    const ListPiece<T> piece = piece_of_block<T, kWidenElements<T>>(args.list, static_cast<int>(blockIdx.x));
    const T* tensor = static_cast<const T*>(args.list.tensors[piece.tensor]);
    float* output = args.outputs[piece.tensor] + (piece.first - tensor);
    if (piece.numel == kWidenElements<T> && is_aligned(piece.first, 16) && is_aligned(output, 16)) {
        const int64_t own = static_cast<int64_t>(threadIdx.x) * kVector<T>;
        widen_vectors(piece.first + own, output + own);
    } else {
        for (int64_t i = threadIdx.x; i < piece.numel; i += kThreads) output[i] = load_float(piece.first[i]);
    }
}

template <typename T>
void widen_as(WidenArgs args, cudaStream_t stream) {
    const int64_t blocks = share_out<kWidenElements<T>>(args.list, "widen");
    launch("widen", widen_kernel<T>, blocks, stream, args);
}

}  // namespace

void widen(const WidenArgs& args, cudaStream_t stream) {
    with_dtype(args.list.dtype, [&](auto t) { widen_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
