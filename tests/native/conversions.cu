#include "conversions.h"
#include "cuda/device/vector.cuh"
#include "cuda/format/convert.cuh"

using namespace zerofp4;
using namespace zerofp4::cuda;

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4096;
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

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const float* input, float factor, int64_t numel, int format, uint8_t* output) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kLaneElements;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLaneElements;
    for (int64_t i = first; i < numel; i += stride) {
        const int count = clamp_count(numel - i, kLaneElements);
        float x[kLaneElements];
        load_elements(input + i, count, x);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) x[k] *= factor;
        switch (format) {
            case kE2M1:
                store_codes(x, output + i, count);
                break;
            case kE4M3:
                store4(output + i, convert_four_e4m3(x), count);
                break;
            case kBFloat16:
                store_halves<BFloat16>(x, output + 2 * i, count);
                break;
            case kFloat16:
                store_halves<Float16>(x, output + 2 * i, count);
                break;
        }
    }
}

}  // namespace

extern "C" int convert(const float* input, float factor, int64_t numel, int format, void* output,
                       void* stream) {
    convert_kernel<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        input, factor, numel, format, static_cast<uint8_t*>(output));
    return cudaGetLastError();
}
