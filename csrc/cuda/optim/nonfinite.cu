// find_nonfinite: one pass over a list of tensors, at the speed of memory. A thread block reads a piece of
// one tensor; only one that finds something writes. Where `when` may end it at once, the grid is small, for
// blocks that do nothing take time too, and each block reads piece after piece.

#include <algorithm>

#include "common/args/nonfinite.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/optim/tensor_list.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kScanVectors = 8;  // of a thread
constexpr int64_t kLoopingBlocks = 4096;
template <typename T>
constexpr int64_t kScanElements = static_cast<int64_t>(kThreads) * kScanVectors * kVector<T>;

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
    find_nonfinite_kernel(const __grid_constant__ NonfiniteArgs args, int pieces) {
    wait_for_previous_kernel();
    if (args.when != nullptr && args.when[0] == 0 && args.when[1] == 0) return;
    for (int p = static_cast<int>(blockIdx.x); p < pieces; p += static_cast<int>(gridDim.x)) {
        const ListPiece<T> piece = piece_of_block<T, kScanElements<T>>(args.list, p);
        uint32_t most = 0;
        if (piece.numel == kScanElements<T> && is_aligned(piece.first, 16)) {
            most = most_of_vectors(piece.first + static_cast<int64_t>(threadIdx.x) * kVector<T>);
        } else {
            for (int64_t i = threadIdx.x; i < piece.numel; i += kThreads)
                most = max(most, magnitude_bits(load_float(piece.first[i])));
        }
        if (most >= kInfBits) atomicMax(args.found, args.words[piece.tensor]);
    }
}

template <typename T>
void find_nonfinite_as(NonfiniteArgs args, cudaStream_t stream) {
    const int64_t pieces = share_out<kScanElements<T>>(args.list, "find_nonfinite");
    const int64_t blocks = args.when == nullptr ? pieces : std::min(pieces, kLoopingBlocks);
    launch("find_nonfinite", find_nonfinite_kernel<T>, blocks, stream, args, static_cast<int>(pieces));
}

}  // namespace

void find_nonfinite(const NonfiniteArgs& args, cudaStream_t stream) {
    with_dtype(args.list.dtype, [&](auto t) { find_nonfinite_as<decltype(t)>(args, stream); });
}

}  // namespace zerofp4::cuda
