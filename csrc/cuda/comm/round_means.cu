// round_means: means of a host, rounded at random for other hosts. A thread has 8 elements of bfloat16 or 16
// of others, which share a block of Philox. A block of threads has a strip of NVFP4.

#include "common/args/means.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kMeansThreads = kBlock * kStripBlocks;  // those of a strip
static_assert(kMeansThreads == 4 * kLanes);

template <int kCount>
__device__ __forceinline__ void load_means(const float* values, float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(values + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

// The random bytes of the thread, which has the elements from one of the tensor on.
template <int kCount>
__device__ __forceinline__ RandomBytes draw(const RoundMeansArgs& args, const MeansPiece& piece, int64_t at) {
    return wire_bytes(args, piece, static_cast<uint64_t>(piece.first + at - piece.begin) / kCount);
}

template <int kCount>
__device__ __forceinline__ uint32_t magnitude_of_means(const float (&x)[kCount]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) most = max(most, magnitude_bits(x[i]));
    return most;
}

__device__ __forceinline__ uint4 round_eight(const RoundMeansArgs& args, const MeansPiece& piece, int64_t at,
                                             int64_t count) {
    float x[8];
    load_means(args.values + at, x);
    const RandomBytes random = draw<8>(args, piece, at);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = float_to_bfloat16_stochastic(x[2 * i], random.words[i] & 0xffffu);
        const uint32_t high = float_to_bfloat16_stochastic(x[2 * i + 1], random.words[i] >> 16);
        words[i] = (2 * i < count ? low : 0) | (2 * i + 1 < count ? high : 0) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(kMeansThreads)
    round_bfloat16_kernel(const __grid_constant__ RoundMeansArgs args) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * kMeansThreads + threadIdx.x) * 8;
    wait_for_previous_kernel();
    if (at >= args.slices * args.numel) return;
    const MeansPiece piece = find_piece<&MeansPiece::begin>(args, at);
    const int64_t count = left_of(piece, at);
    reinterpret_cast<uint4*>(args.output)[at / 8] =
        count > 0 ? round_eight(args, piece, at, count) : make_uint4(0, 0, 0, 0);
}

__global__ void __launch_bounds__(kMeansThreads)
    round_mxfp8_kernel(const __grid_constant__ RoundMeansArgs args) {
    wait_for_previous_kernel();
    const int64_t place = (static_cast<int64_t>(blockIdx.x) * kMeansThreads + threadIdx.x) * 16;
    const int64_t slice = blockIdx.y, at = slice * args.numel + place;
    const MeansPiece piece = find_piece<&MeansPiece::begin>(args, at);
    const bool is_inside = place < args.numel && left_of(piece, at) > 0;  // both threads of a block, or none
    float x[16] = {};
    if (is_inside) load_means(args.values + at, x);
    uint32_t amax = magnitude_of_means(x);
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
    if (!is_inside) return;
    const uint32_t scale = mxfp8_scale(from_bits(amax));
    const float encode = mxfp8_encode(scale);
    const RandomBytes random = draw<16>(args, piece, at);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const uint32_t byte = random.words[i / 4] >> 8 * (i % 4) & 0xffu;
        words[i / 4] |= float_to_e4m3_stochastic(x[i] * encode, byte) << 8 * (i % 4);
    }
    uint8_t* message = args.output + slice * args.bytes;
    *reinterpret_cast<uint4*>(message + place) = make_uint4(words[0], words[1], words[2], words[3]);
    if (threadIdx.x % 2 == 0) message[scales_at(args) + place / kMxfp8Block] = static_cast<uint8_t>(scale);
}

__global__ void __launch_bounds__(kMeansThreads)
    round_nvfp4_kernel(const __grid_constant__ RoundMeansArgs args) {
    __shared__ uint32_t amaxes[4];  // of warps
    wait_for_previous_kernel();
    const int64_t slice = blockIdx.y, number = slice * args.strips + blockIdx.x;
    const int row = static_cast<int>(threadIdx.x) / kStripBlocks, block = threadIdx.x % kStripBlocks;
    const MeansPiece piece = find_piece<&MeansPiece::strip>(args, number);
    if (!has_strip(piece, number)) return;
    const MeansStrip strip = strip_at(piece, number - piece.strip);
    const int64_t at = piece.begin + strip.element + row * piece.cols + block * kBlock;
    const bool is_inside = row < strip.rows && block < strip.blocks;
    float x[kBlock] = {};
    if (is_inside) {
        load_means(args.values + at, x);
        hadamard(x, kRandomSigns);
    }
    const uint32_t own = magnitude_of_means(x), of_warp = __reduce_max_sync(kAllLanes, own);
    if (threadIdx.x % kLanes == 0) amaxes[threadIdx.x / kLanes] = of_warp;
    __syncthreads();
    const float strip_amax = amax_of_bits(max(max(amaxes[0], amaxes[1]), max(amaxes[2], amaxes[3])));
    uint8_t* message = args.output + slice * args.bytes;
    const int64_t place = at - slice * args.numel;
    if (threadIdx.x == 0) reinterpret_cast<float*>(message + amaxes_at(args))[blockIdx.x] = strip_amax;
    if (!is_inside) return;
    const TensorScale tensor = tensor_scale(strip_amax);
    const E4M3Magnitude scale = covering_scale(amax_of_bits(own), tensor);
    const float encode = encode_of(scale.value, tensor);
    const RandomBytes random = draw<16>(args, piece, at);
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        const uint32_t byte = random.words[i / 4] >> 8 * (i % 4) & 0xffu;
        words[i / 8] |= float_to_e2m1_stochastic(x[i] * encode, byte) << 4 * (i % 8);
    }
    *reinterpret_cast<uint2*>(message + place / 2) = make_uint2(words[0], words[1]);
    message[scales_at(args) + place / kBlock] = static_cast<uint8_t>(scale.byte);
}

}  // namespace

void round_means(const RoundMeansArgs& args, cudaStream_t stream) {
    const auto run = [&](auto kernel, int64_t blocks, int64_t slices) {
        launch<kMeansThreads>("round_means", kernel,
                              dim3(grid_size("round_means", blocks), static_cast<unsigned>(slices)), stream,
                              args);
    };
    switch (args.format) {
        case MeansFormat::kBFloat16:
            return run(round_bfloat16_kernel, ceil_div(args.slices * args.numel, int64_t{kMeansThreads} * 8),
                       1);
        case MeansFormat::kMxfp8:
            return run(round_mxfp8_kernel, ceil_div(args.numel, int64_t{kMeansThreads} * 16), args.slices);
        case MeansFormat::kNvfp4:
            return run(round_nvfp4_kernel, args.strips, args.slices);
    }
}

}  // namespace zerofp4::cuda
