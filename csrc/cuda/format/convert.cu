// Floats to other formats, element by element, with the conversions that the other kernels use.

#include "common/args/convert.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/convert.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kConvertBlocksPerSm = 8;
constexpr int kLaneElements = 4;

__device__ __forceinline__ void store_codes(const float (&x)[kLaneElements], uint8_t* output, int count) {
    const uint32_t codes = convert_four(x);
    const uint32_t spread =
        (codes & 0x000fu) | (codes & 0x00f0u) << 4 | (codes & 0x0f00u) << 8 | (codes & 0xf000u) << 12;
    store4(output, spread, count);
}

template <typename T>
__device__ __forceinline__ void store_halves(const float (&x)[kLaneElements], uint8_t* output, int count) {
    store8(output, {pack_word<T>({x[0], x[1]}), pack_word<T>({x[2], x[3]})}, 2 * count);
}

__global__ void __launch_bounds__(kThreads) convert_kernel(const __grid_constant__ ConvertArgs args) {
    wait_for_previous_kernel();
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kLaneElements;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLaneElements;
    for (int64_t i = first; i < args.numel; i += stride) {
        const int count = clamp_count(args.numel - i, kLaneElements);
        float x[kLaneElements];
        load_elements(args.input + i, count, x);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) x[k] *= args.factor;
        uint8_t* output = static_cast<uint8_t*>(args.output);
        switch (args.format) {
            case Format::kE2M1:
                store_codes(x, output + i, count);
                break;
            case Format::kE4M3:
                store4(output + i, convert_four_e4m3(x), count);
                break;
            case Format::kBFloat16:
                store_halves<BFloat16>(x, output + 2 * i, count);
                break;
            case Format::kFloat16:
                store_halves<Float16>(x, output + 2 * i, count);
                break;
        }
    }
}

}  // namespace

void convert(const ConvertArgs& args, cudaStream_t stream) {
    const int64_t blocks = ceil_div(args.numel, kThreads * kLaneElements);
    launch("convert", convert_kernel, resident_blocks("convert", blocks, kConvertBlocksPerSm), stream, args);
}

}  // namespace zerofp4::cuda
