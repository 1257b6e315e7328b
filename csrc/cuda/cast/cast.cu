// Masters to packed codes, with the scales of the reduced amaxes. Only bytes and nibbles of the shard are
// written.

#include "common/args/cast.h"
#include "common/scale.h"
#include "cuda/format/convert.cuh"
#include "cuda/strip/master_strip.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kCastBlocksPerSm = 3;

// A row's four codes of a lane whose strip is wholly owned.
__device__ __forceinline__ void store_codes(uint8_t* p, uint32_t codes) {
    if (is_aligned(p, 2)) {
        *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(codes);
    } else {
        p[0] = static_cast<uint8_t>(codes);
        p[1] = static_cast<uint8_t>(codes >> 8);
    }
}

// One byte of which the shard may own either nibble, both or none. No other thread of this rank writes to it.
__device__ __forceinline__ void store_owned(uint8_t* p, uint32_t pair, bool owns_low, bool owns_high) {
    if (owns_low && owns_high) {
        *p = static_cast<uint8_t>(pair);
    } else if (owns_low || owns_high) {
        const uint32_t mask = owns_low ? 0x0fu : 0xf0u;
        *p = static_cast<uint8_t>((*p & ~mask) | (pair & mask));
    }
}

// Encodes rows [row, row + kStepRows) of this lane. Columns and row lengths are even: a pair of codes starts
// at an even element, whichever element the shard starts with.
__device__ __forceinline__ void cast_step(const WeightDescriptor& weight, const Strip& strip, int64_t row,
                                          StepValues& values, float encode) {
    round_step(weight.weight_dtype, values);
    const int64_t element = row * weight.cols + strip.col;
    uint8_t* codes = in_global(weight.codes) + (element / 2 - weight.start / 2);
    const int64_t pitch = weight.cols / 2;
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
        const uint32_t four = convert_four(
            {values[r][0] * encode, values[r][1] * encode, values[r][2] * encode, values[r][3] * encode});
        uint8_t* p = codes + r * pitch;
        if (strip.access != Access::kMasked) {
            store_codes(p, four);
        } else {
            const LaneRange owned = lane_range(weight, element + r * weight.cols - weight.start, strip.col);
            store_owned(p, four, owned.has(0), owned.has(1));
            store_owned(p + 1, four >> 8, owned.has(2), owned.has(3));
        }
    }
}

// The amax of this lane's tile; 0 past the last column.
__device__ __forceinline__ float reduced_amax(const CastTable& table, const WeightDescriptor& weight,
                                              const Strip& strip) {
    const int64_t tile_columns = ceil_div(weight.cols, kBlock);
    if (strip.tile_column() >= tile_columns) return 0.0f;
    return table.reduced[weight.tile_offset + strip.tile_row() * tile_columns + strip.tile_column()];
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    partial_cast_kernel(const __grid_constant__ CastTable table,
                        const __grid_constant__ WeightDescriptor single) {
    wait_for_previous_kernel();
    if (header_status(table) != kOk) return;
    constexpr int kShare = kShareStrips<kSingle>;
    const int64_t block = table.cast_begin / kShare + blockIdx.x;
    ItemCursor<WeightDescriptor, &WeightDescriptor::strip_begin, kSingle> cursor(
        table.weights, table.count, table.strip_units, table.strip_items + block, single);
    bool skipped = false;
    TensorScale tensor = {};
    const Share share = block_share<kShare>(table.cast_end, block);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        const bool moved = cursor.seek(unit);
        const WeightDescriptor& weight = cursor.item();
        if (moved) {
            const float amax = group_amax(table, weight);
            skipped = is_skipped(amax);
            tensor = tensor_scale(amax);
        }
        if (skipped) continue;
        const Strip strip = strip_of(weight, unit);
        // The first loads are under way before anything waits.
        StepValues values;
        load_step<true>(weight, strip, strip.row, values);
        const float amax = reduced_amax(table, weight, strip);
        const float encode = encode_of(rounded_scale(amax, tensor).value, tensor);
        cast_step(weight, strip, strip.row, values, encode);
#pragma unroll 1
        for (int step = kStepRows; step < kBlock; step += kStepRows) {
            load_step<true>(weight, strip, strip.row + step, values);
            cast_step(weight, strip, strip.row + step, values, encode);
        }
    }
}

}  // namespace

void partial_cast(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    const int64_t units = table.cast_end - table.cast_begin;
    if (units == 0) return;
    const bool single = table.count == 1;
    const auto kernel = single ? partial_cast_kernel<true> : partial_cast_kernel<false>;
    const int share = single ? kShareStrips<true> : kShareStrips<false>;
    launch("partial_cast", kernel, ceil_div(units, share), stream, table, host[0]);
}

}  // namespace zerofp4::cuda
