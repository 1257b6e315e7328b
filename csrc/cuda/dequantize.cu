// Packed codes and compact scales back to elements. A warp takes 8 rows of one run of columns, each lane as
// many columns as fill 16 bytes of output.

#include "common/scale.h"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kDequantizeBlocksPerSm = 4;
constexpr int kUnitRows = 8;

template <typename T>
constexpr int kLaneElements = 16 / static_cast<int>(sizeof(T));

template <typename T>
constexpr int kUnitColumns = kLanes * kLaneElements<T>;

// Elements of consecutive codes as words of T.
template <typename T>
__device__ __forceinline__ void decode_codes(uint32_t codes, float decode, uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float values[kPerWord<T>];
#pragma unroll
        for (int k = 0; k < kPerWord<T>; ++k) {
            const uint32_t code = codes >> (4 * (kPerWord<T> * i + k)) & 15u;
            values[k] = e2m1_to_float(code) * decode;
        }
        words[i] = pack_word<T>(values);
    }
}

template <typename T>
__device__ __forceinline__ void dequantize_unit(const DequantizeArgs& args, float amax, int64_t row,
                                                int64_t col) {
    constexpr int kBytes = kLaneElements<T> / 2;
    const int rows = clamp_count(args.rows - row, kUnitRows);
    const int count = clamp_count(args.cols - col, kLaneElements<T>);
    if (count == 0) return;
    const uint8_t* data = args.data + (row * args.cols + col) / 2;
    const uint8_t* scale = args.scale + col / kBlock;
    const int64_t scale_pitch = ceil_div(args.cols, kBlock);
    const int shift = args.block_rows == kBlock ? 4 : 0;
    const bool whole =
        count == kLaneElements<T> && args.cols % kLaneElements<T> == 0 && is_aligned(args.data, kBytes);

    uint32_t codes[kUnitRows];
    uint32_t scales[kUnitRows];
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r) {
        const uint8_t* p = data + r * (args.cols / 2);
        codes[r] = scales[r] = 0;
        if (r < rows) {
            scales[r] = scale[((row + r) >> shift) * scale_pitch];
            if (!whole) {
                codes[r] = load4(p, count / 2);
            } else if constexpr (kBytes == 4) {
                codes[r] = *reinterpret_cast<const uint32_t*>(p);
            } else {
                codes[r] = *reinterpret_cast<const uint16_t*>(p);
            }
        }
    }
    uint8_t* output = static_cast<uint8_t*>(args.output) + (row * args.cols + col) * sizeof(T);
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r) {
        uint32_t words[4];
        decode_codes<T>(codes[r], block_decode(scales[r], amax), words);
        if (r < rows) store16(output + r * args.cols * sizeof(T), words, count * static_cast<int>(sizeof(T)));
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kDequantizeBlocksPerSm)
    dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
    wait_for_previous_kernel();
    const float amax = *args.amax;
    const int64_t across = ceil_div(args.cols, kUnitColumns<T>);
    const int64_t units = ceil_div(args.rows, kUnitRows) * across;
    for (int64_t unit = grid_warp(); unit < units; unit += grid_warps()) {
        const int64_t down = unit / across;
        const int64_t col = (unit - down * across) * kUnitColumns<T> + lane_index() * kLaneElements<T>;
        dequantize_unit<T>(args, amax, down * kUnitRows, col);
    }
}

template <typename T>
void dequantize_as(const DequantizeArgs& args, cudaStream_t stream) {
    const int64_t units = ceil_div(args.rows, kUnitRows) * ceil_div(args.cols, kUnitColumns<T>);
    launch("dequantize", dequantize_kernel<T>,
           resident_blocks("dequantize", ceil_div(units, kWarps), kDequantizeBlocksPerSm), stream, args);
}

}  // namespace

void dequantize(const DequantizeArgs& args, cudaStream_t stream) {
    switch (args.dtype) {
        case DType::kFloat32:
            return dequantize_as<float>(args, stream);
        case DType::kBFloat16:
            return dequantize_as<BFloat16>(args, stream);
        case DType::kFloat16:
            return dequantize_as<Float16>(args, stream);
    }
}

}  // namespace zerofp4::cuda
