// average_means: the mean of what hosts have sent in few bits. A thread has 16 elements of each message.

#include "common/args/means.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {
namespace {

template <MeansFormat kFormat>
__device__ __forceinline__ void decode_means(const AverageMeansArgs& args, const uint8_t* message,
                                             int64_t place, int64_t strip, float (&values)[kBlock]) {
    if constexpr (kFormat == MeansFormat::kMxfp8) {
        const uint4 codes = *reinterpret_cast<const uint4*>(message + place);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        const float factor = mxfp8_decode(message[scales_at(args) + place / kMxfp8Block]);
#pragma unroll
        for (int i = 0; i < kBlock; ++i)
            values[i] = signed_e4m3_to_float(words[i / 4] >> 8 * (i % 4) & 0xffu) * factor;
    } else {
        const uint2 codes = *reinterpret_cast<const uint2*>(message + place / 2);
        const float amax = reinterpret_cast<const float*>(message + amaxes_at(args))[strip];
        const float factor = block_decode(message[scales_at(args) + place / kBlock], amax);
#pragma unroll
        for (int i = 0; i < kBlock; ++i)
            values[i] = e2m1_to_float((i < 8 ? codes.x : codes.y) >> 4 * (i % 8) & 15u) * factor;
    }
}

template <MeansFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    average_means_kernel(const __grid_constant__ AverageMeansArgs args) {
    const int64_t place = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBlock;
    wait_for_previous_kernel();
    if (place >= args.numel) return;
    const int64_t at = args.slice * args.numel + place;
    const MeansPiece piece = find_piece<&MeansPiece::begin>(args, at);
    float sums[kBlock] = {};
    if (left_of(piece, at) > 0) {
        int64_t strip = 0;
        if constexpr (kFormat == MeansFormat::kNvfp4)
            strip = strip_of(piece, at - piece.begin) - args.slice * args.strips;
        decode_means<kFormat>(args, args.received, place, strip, sums);
        for (int64_t host = 1; host < args.hosts; ++host) {
            float values[kBlock];
            decode_means<kFormat>(args, args.received + host * args.bytes, place, strip, values);
#pragma unroll
            for (int i = 0; i < kBlock; ++i) sums[i] += values[i];
        }
        const float hosts = static_cast<float>(args.hosts);
#pragma unroll
        for (int i = 0; i < kBlock; ++i) sums[i] /= hosts;
        if constexpr (kFormat == MeansFormat::kNvfp4) inverse_hadamard(sums);
    }
#pragma unroll
    for (int i = 0; i < kBlock; i += 4)
        *reinterpret_cast<float4*>(args.output + place + i) =
            make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}

}  // namespace

void average_means(const AverageMeansArgs& args, cudaStream_t stream) {
    const auto kernel = args.format == MeansFormat::kMxfp8 ? average_means_kernel<MeansFormat::kMxfp8>
                                                           : average_means_kernel<MeansFormat::kNvfp4>;
    launch("average_means", kernel, ceil_div(args.numel, int64_t{kThreads} * kBlock), stream, args);
}

}  // namespace zerofp4::cuda
