// partial_cast: the packed codes of the owned part of every weight, and the scales of blocks that are known
// here alone.

#include "common/scale.h"
#include "cpu/format/codes.h"
#include "cpu/kernels.h"
#include "cpu/strip/block_scales.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

// What each of 128 columns is multiplied with.
void load_encode(const CastTable& table, const WeightDescriptor& weight, const Patch& patch,
                 TensorScale tensor, float (&encode)[kStripColumns]) {
    const int64_t tiles_per_row = ceil_div(weight.cols, kBlock);
    const float* amax =
        table.reduced + weight.tile_offset + patch.row / kBlock * tiles_per_row + patch.col / kBlock;
    float tile[kPatchTiles] = {};
    copy_bytes<sizeof tile>(tile, amax, ceil_div(patch.cols, kBlock) * static_cast<int64_t>(sizeof(float)));
    for (int t = 0; t < kPatchTiles; ++t) tile[t] = block_encode(block_scale(tile[t], tensor), tensor);
    spread(tile, encode);
}

// The codes of row r of a patch, of which columns `owned`, not none, are the shard's.
template <class W, class T>
void write_codes(const WeightDescriptor& weight, const Patch& patch, int64_t r, const ColumnRange& owned,
                 const T* row, const float (&encode)[kStripColumns]) {
    const int64_t first = (patch.row + r) * weight.cols + patch.col + owned.begin;
    uint8_t* codes = weight.codes + (first / 2 - weight.start / 2);
    if (owned.begin == 0 && owned.end == kStripColumns) return encode_row<W>(row, encode, codes);
    uint8_t packed[kPatchBytes];
    encode_row<W>(row, encode, packed);
    store_codes(packed, owned.begin, owned.end, codes);
}

// T is the type of a master's elements, W that of the weight's.
template <class T, class W>
void cast_tiles(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const TensorScale tensor = tensor_scale(group_amax(table, weight));
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(weight, unit);
        T buffer[kBlock][kStripColumns];
        const PatchView<T> view = view_master(weight, patch, buffer);
        float encode[kStripColumns];
        load_encode(table, weight, patch, tensor, encode);
        for (int64_t r = 0; r < patch.rows; ++r) {
            const ColumnRange owned = owned_in_patch(weight, patch, patch.row + r);
            if (owned.begin >= owned.end) continue;
            prefetch_next(view.data + r * view.stride);
            write_codes<W>(weight, patch, r, owned, view.data + r * view.stride, encode);
        }
    }
}

template <class T, class W>
ZEROFP4_HD void load_rounded(const PatchView<T>& view, Values& values) {
    for (int r = 0; r < kBlock; ++r) {
        const T* row = view.data + r * view.stride;
        float* out = values + r * kStripColumns;
        for (int c = 0; c < kStripColumns; ++c) out[c] = round_to<W>(load_float(element_at(row, c)));
    }
}

// Of blocks that the shard has a part of, the amaxes that the ranks have reduced.
void take_cut_blocks(const CastTable& table, const WeightDescriptor& weight, const Patch& patch,
                     uint32_t (&amax)[kPatchBlocks]) {
    for (int i = 0; i < 2; ++i) {
        if (weight.cut_offsets[i] < 0) continue;
        const int64_t element = boundary_block(weight, i).begin;
        const int64_t r = element / weight.cols - patch.row, c = element % weight.cols - patch.col;
        if (r >= 0 && r < patch.rows && c >= 0 && c < patch.cols)
            amax[r * kPatchTiles + c / kBlock] = to_bits(table.reduced[weight.cut_offsets[i]]);
    }
}

// Blocks of 1x16, and tiles of four over six.
template <class T, class W>
void cast_blocks(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const Scaling scaling = make_scaling(group_amax(table, weight), choice_of(weight));
    const bool tiles = weight.block_rows == kBlock;
    const int64_t blocks_per_row = ceil_div(weight.cols, kBlock);
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(weight, unit);
        T buffer[kBlock][kStripColumns];
        Values values;
        load_rounded<T, W>(view_master(weight, patch, buffer), values);
        uint32_t amax[kPatchBlocks];
        tiles ? tile_amaxes(values, amax) : row_amaxes(values, amax);
        take_cut_blocks(table, weight, patch, amax);
        BlockScales blocks;
        row_scales(values, amax, tiles, scaling, blocks);
        for (int64_t r = 0; r < patch.rows; ++r) {
            const ColumnRange owned = owned_in_patch(weight, patch, patch.row + r);
            if (owned.begin >= owned.end) continue;
            float encode[kStripColumns];
            spread(blocks.encode + r * kPatchTiles, encode);
            write_codes<float>(weight, patch, r, owned, values + r * kStripColumns, encode);
            if (tiles && r > 0) continue;  // the tile's scale is there
            const int64_t first = owned.begin / kBlock, line = (patch.row + r) / weight.block_rows;
            uint8_t* scale = weight.rowwise_scale[kCompact] + line * blocks_per_row;
            copy_bytes<kPatchTiles>(scale + patch.col / kBlock + first, blocks.byte + r * kPatchTiles + first,
                                    ceil_div(owned.end, kBlock) - first);
        }
    }
}

}  // namespace

void partial_cast(const CastTable& table, int threads) {
    if (header_status(table) != kOk) return;
    const auto cast_some = [&](const WeightDescriptor& weight, int64_t begin, int64_t end) {
        if (is_skipped(group_amax(table, weight))) return;
        with_dtype(weight.master_dtype, [&](auto t) {
            with_dtype(weight.weight_dtype, [&](auto w) {
                using T = decltype(t);
                using W = decltype(w);
                if (kind_of(weight) == kTiles) return cast_tiles<T, W>(table, weight, begin, end);
                cast_blocks<T, W>(table, weight, begin, end);
            });
        });
    };
    parallel_items(table.weights, table.count, &WeightDescriptor::strip_begin, table.cast_end, threads,
                   kPatchGrain, cast_some, table.cast_begin);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
