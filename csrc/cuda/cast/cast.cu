// Masters to packed codes: tiles with the scales of the reduced amaxes, others with scales that are found
// here and written, too. Only bytes and nibbles of the shard are written.

#include "common/args/cast.h"
#include "cuda/device/tuning.cuh"
#include "cuda/format/four_over_six.cuh"
#include "cuda/strip/master_strip.cuh"

namespace zerofp4::cuda {
namespace {

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

// Encodes rows [row, row + kStepRows) of this lane, row r times encode_of_row(r). Columns and row lengths are
// even: a pair of codes starts at an even element, whichever element the shard starts with.
template <typename EncodeOfRow>
__device__ __forceinline__ void encode_step(const WeightDescriptor& weight, const Strip& strip, int64_t row,
                                            const StepValues& values, const EncodeOfRow& encode_of_row) {
    const int64_t element = row * weight.cols + strip.col;
    uint8_t* codes = in_global(weight.codes) + (element / 2 - weight.start / 2);
    const int64_t pitch = weight.cols / 2;
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
        const float encode = encode_of_row(r);
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

// Tiles, 4 lanes each.
__device__ __forceinline__ void cast_tiles(const CastTable& table, const WeightDescriptor& weight,
                                           const Strip& strip, const TensorScale& tensor) {
    // The first loads are under way before anything waits.
    StepValues values;
    load_step<true>(weight, strip, strip.row, values);
    const float amax = reduced_amax(table, weight, strip);
    const float encode = encode_of(rounded_scale(amax, tensor).value, tensor);
    const auto encode_of_row = [encode](int) { return encode; };
    round_step(weight.weight_dtype, values);
    encode_step(weight, strip, strip.row, values, encode_of_row);
#pragma unroll 1
    for (int step = kStepRows; step < kBlock; step += kStepRows) {
        load_step<true>(weight, strip, strip.row + step, values);
        round_step(weight.weight_dtype, values);
        encode_step(weight, strip, strip.row + step, values, encode_of_row);
    }
}

// Of a step the rows whose blocks one of a block's 4 lanes has, the first, fifth, ... or the second, sixth,
// ... of them.
constexpr int kLaneRows = kStepRows / kTileLanes;

// The largest magnitudes of this lane's block of its rows.
__device__ __forceinline__ void row_amaxes(const StepValues& values, float (&amaxes)[kLaneRows]) {
    static_assert(kStepRows == 8 && kTileLanes == 4);
    uint32_t most[kStepRows];
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
        most[r] = max(max(magnitude_bits(values[r][0]), magnitude_bits(values[r][1])),
                      max(magnitude_bits(values[r][2]), magnitude_bits(values[r][3])));
    }
    // Each lane keeps one of two neighbouring values and gives the other away, twice.
#pragma unroll
    for (int mask = 1, count = kStepRows / 2; mask < kTileLanes; mask *= 2, count /= 2) {
        const bool second = lane_index() & mask;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const uint32_t keep = second ? most[2 * i + 1] : most[2 * i];
            const uint32_t give = second ? most[2 * i] : most[2 * i + 1];
            most[i] = max(keep, __shfl_xor_sync(kAllLanes, give, mask));
        }
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) amaxes[i] = from_bits(most[i]);
}

// Blocks of 1x16, 4 lanes each. Rows [row, row + kStepRows).
template <bool kMasked>
__device__ __forceinline__ void cast_row_step(const CastTable& table, const WeightDescriptor& weight,
                                              const Strip& strip, int64_t row, StepValues& values,
                                              const TensorScale& tensor) {
    round_step(weight.weight_dtype, values);
    float amaxes[kLaneRows], encodes[kLaneRows];
    row_amaxes(values, amaxes);
    const int64_t columns = ceil_div(weight.cols, kBlock), column = strip.tile_column();
    const int64_t first_row = row + lane_index() % kTileLanes;
    uint8_t* scales = in_global(weight.rowwise_scale[kCompact]) + first_row * columns + column;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        bool has_part = true;
        if constexpr (kMasked) {
            const RowBlock block = row_block(weight, first_row + i * kTileLanes, strip.col);
            const int64_t begin = block.begin - weight.start, end = block.end - weight.start;
            has_part = column < columns && end > 0 && begin < weight.numel;
            if (has_part && (begin < 0 || end > weight.numel))
                amaxes[i] = table.reduced[weight.cut_offsets[begin < 0 ? 0 : 1]];
        }
        const E4M3Magnitude scale = rounded_scale(amaxes[i], tensor);
        encodes[i] = encode_of(scale.value, tensor);
        if (has_part) scales[i * kTileLanes * columns] = static_cast<uint8_t>(scale.byte);
    }
    encode_step(weight, strip, row, values, [&encodes](int r) {
        return __shfl_sync(kAllLanes, encodes[r / kTileLanes], r % kTileLanes, kTileLanes);
    });
}

__device__ __forceinline__ void cast_rows(const CastTable& table, const WeightDescriptor& weight,
                                          const Strip& strip, const TensorScale& tensor) {
#pragma unroll 1
    for (int step = 0; step < kBlock; step += kStepRows) {
        StepValues values;
        load_step<true>(weight, strip, strip.row + step, values);
        if (strip.access == Access::kMasked) {
            cast_row_step<true>(table, weight, strip, strip.row + step, values, tensor);
        } else {
            cast_row_step<false>(table, weight, strip, strip.row + step, values, tensor);
        }
    }
}

// Rounds a block to the weight's dtype.
__device__ __forceinline__ void round_block(DType dtype, float (&x)[kBlock]) {
    if (dtype == DType::kBFloat16) round_all<BFloat16>(x);
    if (dtype == DType::kFloat16) round_all<Float16>(x);
}

// Four over six, of blocks of 1x16 or of tiles that the shard has whole: a lane takes four neighbouring
// blocks of a row, one after another, half a warp those of 16 rows.
template <bool kOfTiles>
__device__ __forceinline__ void cast_chosen(const WeightDescriptor& weight, const Strip& strip,
                                            const ChoosingTensor& tensor) {
    constexpr int kTurns = kStripColumns / kBlock / 2, kElements = kTurns * kBlock;
    const int64_t row = strip.row + lane_index() % kHalf;
    const int64_t col = strip.col - lane_index() * kLaneColumns + lane_index() / kHalf * kElements;
    // Of the lane's elements the shard has [begin, end): its first is `index` elements before them.
    const int64_t index = row * weight.cols + col - weight.start;
    const int begin = clamp_count(-index, kElements);
    const int end =
        clamp_count(weight.numel - index, row < weight.rows ? clamp_count(weight.cols - col, kElements) : 0);
    uint8_t* codes_out = in_global(weight.codes) + ((row * weight.cols + col) / 2 - weight.start / 2);
    const int64_t line = kOfTiles ? row / kBlock : row;
    uint8_t* scales =
        in_global(weight.rowwise_scale[kCompact]) + line * ceil_div(weight.cols, kBlock) + col / kBlock;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        const int count = turn * kBlock >= begin ? end - turn * kBlock : 0;
        float x[kBlock];
        with_dtype(weight.master_dtype, [&](auto t) {
            const auto* master = in_global(static_cast<const decltype(t)*>(weight.master));
            load_elements(master + index + turn * kBlock, count, x);
        });
        round_block(weight.weight_dtype, x);
        BlockCodes codes;
        const uint32_t scale = four_over_six<kOfTiles>(x, tensor, codes);
        if (count <= 0) continue;
        store8(codes_out + turn * (kBlock / 2), codes, count / 2);
        if (!kOfTiles || row % kBlock == 0) scales[turn] = static_cast<uint8_t>(scale);
    }
}

// Weights of one kind; the others are left to other launches.
template <bool kSingle, CastKind kKind>
__global__ void __launch_bounds__(kThreads, kTuning.cast_blocks)
    partial_cast_kernel(const __grid_constant__ CastTable table,
                        const __grid_constant__ WeightDescriptor single) {
    wait_for_previous_kernel();
    if (header_status(table) != kOk) return;
    constexpr int kShare = kShareStrips<kSingle>;
    const int64_t block = table.cast_begin / kShare + blockIdx.x;
    ItemCursor<WeightDescriptor, &WeightDescriptor::strip_begin, kSingle> cursor(
        table.weights, table.count, table.strip_units, table.strip_items + block, single);
    bool skipped = false;
    float amax = 0.0f;
    TensorScale tensor = {};
    const Share share = block_share<kShare>(table.cast_end, block);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        const bool moved = cursor.seek(unit);
        const WeightDescriptor& weight = cursor.item();
        if (moved) {
            amax = group_amax(table, weight);
            skipped = is_skipped(amax) || kind_of(weight) != kKind;
            tensor = tensor_scale_of(weight, amax);
        }
        if (skipped) continue;
        const Strip strip = strip_of(weight, unit);
        if constexpr (kKind == kTiles) {
            cast_tiles(table, weight, strip, tensor);
        } else if constexpr (kKind == kRows) {
            cast_rows(table, weight, strip, tensor);
        } else {
            cast_chosen<kKind == kChosenTiles>(weight, strip,
                                               ChoosingTensor(amax, tensor, choice_of(weight)));
        }
    }
}

template <CastKind kKind>
void cast_kind(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    if (!table.has_kind[kKind]) return;
    const bool single = table.count == 1;
    const auto kernel = single ? partial_cast_kernel<true, kKind> : partial_cast_kernel<false, kKind>;
    const int share = single ? kShareStrips<true> : kShareStrips<false>;
    const int64_t blocks = ceil_div(table.cast_end - table.cast_begin, share);
    launch("partial_cast", kernel, blocks, stream, table, host[0]);
}

}  // namespace

void partial_cast(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    cast_kind<kTiles>(table, host, stream);
    cast_kind<kRows>(table, host, stream);
    cast_kind<kChosenTiles>(table, host, stream);
    cast_kind<kChosenRows>(table, host, stream);
}

}  // namespace zerofp4::cuda
