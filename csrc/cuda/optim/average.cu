// average: the mean of pieces that lie side by side, added in their order, and the sums of its squares. A
// thread keeps the sums of a few vectors in registers and reads them from every piece once.

#include "common/args/average.h"
#include "common/squares.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kVectors = 2;  // of a thread, from each piece
template <typename T>
constexpr int64_t kBlockElements = static_cast<int64_t>(kThreads) * kVectors * kVector<T>;

using Words = unsigned long long[kSquareWords];

// The sum of a chunk of which this lane has the quads next to each other, and `kLanesOfChunk` neighbouring
// lanes all.
template <int kLanesOfChunk>
__device__ __forceinline__ void add_chunk(float sum, Words& words) {
#pragma unroll
    for (int lanes = 1; lanes < kLanesOfChunk; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    if (lane_index() % kLanesOfChunk != 0 || sum == 0.0f) return;
    const SquareWord found = square_word(sum);
    atomicAdd(&words[found.word], static_cast<unsigned long long>(found.add));
}

template <typename T, bool kSquares>
__device__ __forceinline__ void average_vectors(const AverageArgs& args, int64_t first,
                                                Words& words_of_block) {
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
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) sums[v][k] /= count;
        if (args.output != nullptr) {
            float4* output = reinterpret_cast<float4*>(args.output + first + v * kNext);
#pragma unroll
            for (int k = 0; k < kVector<T>; k += 4)
                output[k / 4] = make_float4(sums[v][k], sums[v][k + 1], sums[v][k + 2], sums[v][k + 3]);
        }
        if constexpr (kSquares) {
            float quads = quad_of_squares(sums[v]);
            if constexpr (kVector<T> == 2 * kSquareQuad) quads += quad_of_squares(sums[v] + kSquareQuad);
            add_chunk<kSquareChunk / kVector<T>>(quads, words_of_block);
        }
    }
}

template <typename T>
__device__ __forceinline__ float average_one(const AverageArgs& args, int64_t i) {
    float sum = load_float(piece_of<T>(args, 0)[i]);
    for (int64_t r = 1; r < args.count; ++r) sum += load_float(piece_of<T>(args, r)[i]);
    sum /= static_cast<float>(args.count);
    if (args.output != nullptr) args.output[i] = sum;
    return sum;
}

// Elements [begin, end), of any number and at any address; `begin` is that of a chunk. A warp takes a chunk.
template <typename T, bool kSquares>
__device__ __forceinline__ void average_elements(const AverageArgs& args, int64_t begin, int64_t end,
                                                 Words& words_of_block) {
    if constexpr (!kSquares) {
        for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) average_one<T>(args, i);
    } else {
        for (int64_t chunk = begin + warp_index() * kSquareChunk; chunk < end;
             chunk += kWarps * kSquareChunk) {
            const int64_t first = chunk + lane_index() * kSquareQuad;
            float means[kSquareQuad];
#pragma unroll
            for (int k = 0; k < kSquareQuad; ++k)
                means[k] = first + k < end ? average_one<T>(args, first + k) : 0.0f;
            add_chunk<kSquareChunk / kSquareQuad>(quad_of_squares(means), words_of_block);
        }
    }
}

template <typename T, bool kSquares>
__global__ void __launch_bounds__(kThreads)
    average_kernel(const __grid_constant__ AverageArgs args, const bool aligned) {
    __shared__ Words words;
    if constexpr (kSquares) {
        if (threadIdx.x < kSquareWords) words[threadIdx.x] = 0;
        __syncthreads();
    }
    wait_for_previous_kernel();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBlockElements<T>;
    const int64_t end = min(begin + kBlockElements<T>, args.numel);
    if (aligned && end - begin == kBlockElements<T>) {
        average_vectors<T, kSquares>(args, begin + static_cast<int64_t>(threadIdx.x) * kVector<T>, words);
    } else {
        average_elements<T, kSquares>(args, begin, end, words);
    }
    if constexpr (kSquares) {
        __syncthreads();
        if (threadIdx.x < kSquareWords && words[threadIdx.x] != 0) {
            uint64_t* copy = args.squares + (blockIdx.x % kSquareCopies) * kSquareWords;
            atomicAdd(reinterpret_cast<unsigned long long*>(copy + threadIdx.x), words[threadIdx.x]);
        }
    }
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
    if (args.numel == 0) return;
    with_dtype(args.dtype, [&](auto t) { average_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
