// average: the mean of pieces that lie side by side, added in their order, and the sums of its squares. A
// thread keeps the sums of a few vectors in registers and reads them from every piece once.

#include "common/args/average.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/optim/squares.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kVectors = 2;  // of a thread, from each piece
template <typename T>
constexpr int64_t kBlockElements = static_cast<int64_t>(kThreads) * kVectors * kVector<T>;

template <typename T, bool kSquares>
__device__ __forceinline__ void average_vectors(const AverageArgs& args, int64_t first, SquareSums& squares) {
    constexpr int64_t kNext = static_cast<int64_t>(kThreads) * kVector<T>;
    float sums[kVectors][kVector<T>];
    const T* piece = piece_of<T>(args, 0) + first;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        uint32_t words[kVectorWords];
        load_words<true>(piece + v * kNext, words);
        unpack<T>(words, sums[v]);
    }
    for (int64_t r = 1; r < args.count; ++r) {
        piece = piece_of<T>(args, r) + first;
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
    float of_chunks[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) sums[v][k] /= count;
        float4* output = reinterpret_cast<float4*>(args.output + first + v * kNext);
#pragma unroll
        for (int k = 0; k < kVector<T>; k += 4)
            output[k / 4] = make_float4(sums[v][k], sums[v][k + 1], sums[v][k + 2], sums[v][k + 3]);
        if constexpr (kSquares) of_chunks[v] = squares_of_vector(sums[v]);
    }
    if constexpr (kSquares) add_chunks<kSquareChunk / kVector<T>>(of_chunks, squares);
}

template <typename T>
__device__ __forceinline__ float average_one(const AverageArgs& args, int64_t i) {
    float sum = load_float(piece_of<T>(args, 0)[i]);
    for (int64_t r = 1; r < args.count; ++r) sum += load_float(piece_of<T>(args, r)[i]);
    sum /= static_cast<float>(args.count);
    args.output[i] = sum;
    return sum;
}

// Elements [begin, end), of any number and at any address; `begin` is that of a chunk.
template <typename T, bool kSquares>
__device__ __forceinline__ void average_elements(const AverageArgs& args, int64_t begin, int64_t end,
                                                 SquareSums& squares) {
    if constexpr (!kSquares) {
        for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) average_one<T>(args, i);
    } else {
        add_elements(begin, end, squares, [&](int64_t i) { return average_one<T>(args, i); });
    }
}

template <typename T, bool kSquares>
__global__ void __launch_bounds__(kThreads)
    average_kernel(const __grid_constant__ AverageArgs args, const bool aligned) {
    __shared__ SquareSums squares;
    if constexpr (kSquares) clear(squares);
    wait_for_previous_kernel();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBlockElements<T>;
    const int64_t end = min(begin + kBlockElements<T>, args.numel);
    if (aligned && end - begin == kBlockElements<T>) {
        average_vectors<T, kSquares>(args, begin + static_cast<int64_t>(threadIdx.x) * kVector<T>, squares);
    } else {
        average_elements<T, kSquares>(args, begin, end, squares);
    }
    if constexpr (kSquares) add_to_all(squares, args.squares);
}

template <typename T>
void average_as(const AverageArgs& args, cudaStream_t stream) {
    const auto is_vector = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    bool aligned = is_vector(args.output);
    for (int64_t r = 0; r < args.count; ++r) aligned = aligned && is_vector(piece_of<T>(args, r));
    const int64_t blocks = ceil_div(args.numel, kBlockElements<T>);
    if (args.squares == nullptr) {
        launch("average", average_kernel<T, false>, blocks, stream, args, aligned);
    } else {
        launch("average and squares", average_kernel<T, true>, blocks, stream, args, aligned);
    }
}

}  // namespace

void average(const AverageArgs& args, cudaStream_t stream) {
    with_dtype(args.dtype, [&](auto t) { average_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
