// MXFP8 dequantize: either copy, compact or swizzled scales.

#include "common/args/mxfp8.h"
#include "cuda/device/lists.cuh"
#include "cuda/device/tuning.cuh"
#include "cuda/format/decode.cuh"
#include "cuda/mxfp8/units.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kSteps = kMxfp8WarpRows;
static_assert(kUnitWarps == kWarps);

template <typename T>
constexpr int kUnitCols = kWarpBytes / static_cast<int>(sizeof(T));
static_assert(kUnitCols<float> == kLanes * kVector<float>);

// The factors of a lane's rows. They are in one group of 32, and so 16 bytes apart in swizzled scales.
template <typename Lane>
__device__ __forceinline__ void rowwise_factors(const Mxfp8DequantizeDescriptor& item, const Unit& unit,
                                                int64_t col, const Lane& extent, float (&decode)[kSteps]) {
    const int64_t columns = ceil_div(item.cols, kMxfp8Block), block = col / kMxfp8Block;
    const int64_t pitch = item.swizzled ? 16 : columns;
    const uint8_t* p = in_global(item.scale) + (item.swizzled ? swizzled_offset(unit.row, block, columns)
                                                              : unit.row * columns + block);
    uint32_t byte[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s, p += pitch) byte[s] = extent.count(s) > 0 ? *p : 0u;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) decode[s] = mxfp8_decode(byte[s]);
}

// The factors of a lane's columns, which are in one group of 32, too.
template <bool kWhole, typename T>
__device__ __forceinline__ void columnwise_factors(const Mxfp8DequantizeDescriptor& item, const Unit& unit,
                                                   int64_t col, int count, float (&decode)[kVector<T>]) {
    const int64_t block = unit.row / kMxfp8Block;
    uint32_t words[kVector<T> / 4] = {};
    const uint8_t* scale = in_global(item.scale);
    if (item.swizzled) {
        const uint8_t* p = scale + swizzled_offset(col, block, ceil_div(item.rows, kMxfp8Block));
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
            if (i < count) words[i / 4] |= static_cast<uint32_t>(p[16 * i]) << (8 * (i % 4));
        }
    } else {
        load_vector<kWhole, false>(scale + block * item.cols + col, count, words);
    }
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) decode[i] = mxfp8_decode(words[i / 4] >> (8 * (i % 4)) & 0xffu);
}

template <typename T, bool kColumnwise, bool kWhole>
__device__ __forceinline__ void dequantize_unit(const Mxfp8DequantizeDescriptor& item, const Unit& unit) {
    const int64_t col = unit.col + lane_index() * kVector<T>;
    const Extent<kSteps, kVector<T>, kWhole> extent(item.rows - unit.row, item.cols - col);
    const int64_t first = unit.row * item.cols + col;
    const uint8_t* data = in_global(item.data) + first;
    uint32_t codes[kSteps][kVector<T> / 4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s, data += item.cols)
        load_vector<kWhole, false>(data, extent.count(s), codes[s]);

    float decode[kColumnwise ? kVector<T> : kSteps];
    if constexpr (kColumnwise) {
        columnwise_factors<kWhole, T>(item, unit, col, extent.count(0), decode);
    } else {
        rowwise_factors(item, unit, col, extent, decode);
    }
    T* output = in_global(static_cast<T*>(item.output)) + first;
#pragma unroll
    for (int s = 0; s < kSteps; ++s, output += item.cols) {
        uint32_t words[kVectorWords];
        decode_vector<T>(codes[s], [&](int i) { return decode[kColumnwise ? i : s]; }, words);
        store_vector<kWhole>(output, extent.count(s), words);
    }
}

// `block` counts the item's thread blocks.
template <typename T, bool kColumnwise>
__device__ __forceinline__ void dequantize_block(const Mxfp8DequantizeDescriptor& item, uint32_t block) {
    const Unit unit = unit_of_warp<kSteps, kUnitCols<T>>(block, item.across);
    if (item.aligned && unit.row + kSteps <= item.rows && unit.col + kUnitCols<T> <= item.cols) {
        dequantize_unit<T, kColumnwise, true>(item, unit);
    } else if (unit.row < item.rows) {
        dequantize_unit<T, kColumnwise, false>(item, unit);
    }
}

template <typename T, bool kColumnwise>
__global__ void __launch_bounds__(kThreads, kTuning.dequantize_mxfp8_blocks)
    dequantize_mxfp8_kernel(const __grid_constant__ Mxfp8DequantizeDescriptor item) {
    wait_for_previous_kernel();
    dequantize_block<T, kColumnwise>(item, blockIdx.x);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kTuning.dequantize_mxfp8_blocks)
    dequantize_mxfp8_list_kernel(const __grid_constant__ Mxfp8DequantizeTable table,
                                 const __grid_constant__ ItemArguments<Mxfp8DequantizeDescriptor> arguments) {
    wait_for_previous_kernel();
    const Mxfp8DequantizeDescriptor item = item_of_block(table, arguments);
    const uint32_t block = blockIdx.x - static_cast<uint32_t>(item.unit_begin);
    if (item.columnwise) {
        dequantize_block<T, true>(item, block);
    } else {
        dequantize_block<T, false>(item, block);
    }
}

template <typename T>
void dequantize_as(const Mxfp8DequantizeTable& table, const Mxfp8DequantizeDescriptor* host,
                   cudaStream_t stream) {
    const auto single =
        host[0].columnwise ? dequantize_mxfp8_kernel<T, true> : dequantize_mxfp8_kernel<T, false>;
    launch_list("dequantize_mxfp8", single, dequantize_mxfp8_list_kernel<T>, table, host, stream);
}

}  // namespace

void dequantize_mxfp8(const Mxfp8DequantizeTable& table, DType dtype, const Mxfp8DequantizeDescriptor* host,
                      cudaStream_t stream) {
    with_dtype(dtype, [&](auto t) { dequantize_as<decltype(t)>(table, host, stream); });
}

}  // namespace zerofp4::cuda
