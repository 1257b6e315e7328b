// add_squares: the sums of the squares of a list of tensors, in one pass over them. A thread block reads a
// piece of one tensor, and adds the sums of its chunks up in shared memory.

#include "common/args/squares.h"
#include "cuda/device/vector.cuh"
#include "cuda/optim/squares.cuh"
#include "cuda/optim/tensor_list.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kSquareVectors = 8;  // of a thread
template <typename T>
constexpr int64_t kSquareElements = static_cast<int64_t>(kThreads) * kSquareVectors * kVector<T>;

template <typename T>
__device__ __forceinline__ void add_vectors(const T* first, SquareSums& sums) {
    constexpr int64_t kNext = static_cast<int64_t>(kThreads) * kVector<T>;
    uint32_t words[kSquareVectors][kVectorWords];
#pragma unroll
    for (int v = 0; v < kSquareVectors; ++v) load_words<false>(first + v * kNext, words[v]);
    float of_chunks[kSquareVectors];
#pragma unroll
    for (int v = 0; v < kSquareVectors; ++v) {
        float values[kVector<T>];
        unpack<T>(words[v], values);
        of_chunks[v] = squares_of_vector(values);
    }
    add_chunks<kSquareChunk / kVector<T>>(of_chunks, sums);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) add_squares_kernel(const __grid_constant__ SquaresArgs args) {
    __shared__ SquareSums sums;
    clear(sums);
    wait_for_previous_kernel();
    const ListPiece<T> piece = piece_of_block<T, kSquareElements<T>>(args.list, static_cast<int>(blockIdx.x));
    if (piece.numel == kSquareElements<T> && is_aligned(piece.first, 16)) {
        add_vectors(piece.first + static_cast<int64_t>(threadIdx.x) * kVector<T>, sums);
    } else {
        add_elements(0, piece.numel, sums, [&](int64_t i) { return load_float(piece.first[i]); });
    }
    add_to_all(sums, args.squares);
}

template <typename T>
void add_squares_as(SquaresArgs args, cudaStream_t stream) {
    const int64_t blocks = share_out<kSquareElements<T>>(args.list, "add_squares");
    launch("add_squares", add_squares_kernel<T>, blocks, stream, args);
}

}  // namespace

void add_squares(const SquaresArgs& args, cudaStream_t stream) {
    with_dtype(args.list.dtype, [&](auto t) { add_squares_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
