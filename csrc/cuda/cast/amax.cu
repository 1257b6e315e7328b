// The start of a step: the reduced vector is cleared, then raised to the amaxes of what this rank owns.

#include "common/args/cast.h"
#include "cuda/device/tuning.cuh"
#include "cuda/strip/tile_amax.cuh"

namespace zerofp4::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    cast_begin_kernel(const __grid_constant__ CastTable table, float error) {
    wait_for_previous_kernel();
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < table.reduced_numel;
         i += stride) {
        table.reduced[i] = i < kHeaderWords ? header_word(static_cast<int>(i), error, table.hash) : 0.0f;
    }
}

// The amax of this lane's tile in the strip.
__device__ __forceinline__ float tile_amax(const WeightDescriptor& weight, const Strip& strip) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int step = 0; step < kBlock; step += kStepRows) {
        StepValues values;
        load_step<false>(weight, strip, strip.row + step, values);
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
#pragma unroll
            for (int k = 0; k < kLaneColumns; ++k) bits = max(bits, magnitude_bits(values[r][k]));
        }
    }
    return tile_amax_of(weight.weight_dtype, bits);
}

// The amaxes of what is owned of the blocks in which the shard begins and ends, where other ranks have parts
// of them, too: half a warp each.
__device__ __forceinline__ void publish_cut_blocks(float* reduced, const WeightDescriptor& weight) {
    const int half = lane_index() / kBlock;
    const RowBlock block = boundary_block(weight, half);
    const int64_t element = block.begin + lane_index() % kBlock, index = element - weight.start;
    uint32_t bits = 0;
    if (element < block.end && index >= 0 && index < weight.numel) {
        with_dtype(weight.master_dtype, [&](auto t) {
            const auto* master = in_global(static_cast<const decltype(t)*>(weight.master));
            bits = magnitude_bits(load_float(master[index]));
        });
    }
    bits = most_of_lanes<kBlock>(bits);
    const int64_t offset = weight.cut_offsets[half];
    if (lane_index() % kBlock == 0 && offset >= 0)
        reduced[offset] = round_to(weight.weight_dtype, amax_of_bits(bits));
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kTuning.cast_amax_blocks)
    partial_amax_kernel(const __grid_constant__ CastTable table,
                        const __grid_constant__ WeightDescriptor single) {
    wait_for_previous_kernel();
    ItemCursor<WeightDescriptor, &WeightDescriptor::strip_begin, kSingle> cursor(
        table.weights, table.count, table.strip_units, table.strip_items + blockIdx.x, single);
    const WeightDescriptor* left = nullptr;
    float left_amax = 0.0f;  // of this lane's elements of it
    const Share share = block_share<kShareStrips<kSingle>>(table.strip_units);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        const bool moved = cursor.seek(unit);
        const WeightDescriptor& weight = cursor.item();
        if (moved) {
            if (left != nullptr) raise_words(table.reduced, *left, left_amax);
            left = &weight;
            left_amax = 0.0f;
        }
        const Strip strip = strip_of(weight, unit);
        const float amax = tile_amax(weight, strip);
        left_amax = amax > left_amax ? amax : left_amax;
        if (weight.tile_offset >= 0) {
            publish_tile(table.reduced, weight, strip.row, strip.col, amax);
        } else if (unit == weight.strip_begin) {
            publish_cut_blocks(table.reduced, weight);
        }
    }
    if (left != nullptr) raise_words(table.reduced, *left, left_amax);
}

}  // namespace

void cast_begin(const CastTable& table, float error, cudaStream_t stream) {
    launch("cast_begin", cast_begin_kernel,
           resident_blocks("cast_begin", ceil_div(table.reduced_numel, kThreads), 8), stream, table, error);
}

void partial_amax(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    if (table.strip_units == 0) return;
    const bool single = table.count == 1;
    const auto kernel = single ? partial_amax_kernel<true> : partial_amax_kernel<false>;
    const int share = single ? kShareStrips<true> : kShareStrips<false>;
    launch("partial_amax", kernel, ceil_div(table.strip_units, share), stream, table, host[0]);
}

}  // namespace zerofp4::cuda
