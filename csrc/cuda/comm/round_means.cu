// round_means: means of a host, rounded at random to bfloat16. A thread has the 8 elements of a Philox block.

#include "common/args/round_means.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

// The last piece that begins at or before an element, or the first one.
__device__ __forceinline__ const RoundedPiece& find_piece(const RoundMeansArgs& args, int64_t element) {
    int64_t low = 0, high = args.count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (args.pieces[middle].begin <= element ? low : high) = middle;
    }
    return args.pieces[low];
}

// Eight elements from `element` on, of which `count` are in the piece.
__device__ __forceinline__ uint4 round_eight(const RoundMeansArgs& args, const RoundedPiece& piece,
                                             int64_t element, int64_t count) {
    const float4* values = reinterpret_cast<const float4*>(args.values + element);
    const float4 first = values[0], second = values[1];
    const float x[kRoundedAtOnce] = {first.x,  first.y,  first.z,  first.w,
                                     second.x, second.y, second.z, second.w};
    const uint64_t block = static_cast<uint64_t>(piece.first + element - piece.begin) / kRoundedAtOnce;
    const RandomBytes random = wire_bytes(args, piece.number, block);
    uint32_t words[kRoundedAtOnce / 2];
#pragma unroll
    for (int i = 0; i < kRoundedAtOnce / 2; ++i) {
        const uint32_t low = float_to_bfloat16_stochastic(x[2 * i], random.words[i] & 0xffffu);
        const uint32_t high = float_to_bfloat16_stochastic(x[2 * i + 1], random.words[i] >> 16);
        words[i] = (2 * i < count ? low : 0) | (2 * i + 1 < count ? high : 0) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(kThreads) round_means_kernel(const __grid_constant__ RoundMeansArgs args) {
    const int64_t element =
        (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * int64_t{kRoundedAtOnce};
    wait_for_previous_kernel();
    if (element >= args.numel) return;
    const RoundedPiece piece = find_piece(args, element);
    const int64_t at = element - piece.begin;
    const bool is_inside = at >= 0 && at < piece.numel;
    *reinterpret_cast<uint4*>(args.output + element) =
        is_inside ? round_eight(args, piece, element, piece.numel - at) : make_uint4(0, 0, 0, 0);
}

}  // namespace

void round_means(const RoundMeansArgs& args, cudaStream_t stream) {
    const int64_t blocks = ceil_div(args.numel, int64_t{kThreads} * kRoundedAtOnce);
    launch("round_means", round_means_kernel, blocks, stream, args);
}

}  // namespace zerofp4::cuda
