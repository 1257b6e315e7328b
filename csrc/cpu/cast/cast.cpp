// partial_cast: the packed codes of the owned part of every weight.

#include "common/scale.h"
#include "cpu/format/codes.h"
#include "cpu/kernels.h"
#include "cpu/strip/patch.h"

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

// T is the type of a master's elements, W that of the weight's.
template <class T, class W>
void cast_units(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const TensorScale tensor = tensor_scale(group_amax(table, weight));
    for (int64_t unit = begin; unit < end; ++unit) {
        const Patch patch = patch_of_unit(weight, unit);
        T buffer[kBlock][kStripColumns];
        const PatchView<T> view = view_master(weight, patch, buffer);
        float encode[kStripColumns];
        load_encode(table, weight, patch, tensor, encode);
        const bool whole = wholly_owned(weight, patch);
        const int64_t first = patch.row * weight.cols + patch.col;
        for (int64_t r = 0; r < patch.rows; ++r) {
            const T* row = view.data + r * view.stride;
            if (whole) {
                encode_row<W>(row, encode, weight.codes + ((first + r * weight.cols) / 2 - weight.start / 2));
                continue;
            }
            const ColumnRange owned = owned_in_patch(weight, patch, patch.row + r);
            if (owned.begin >= owned.end) continue;
            uint8_t packed[kPatchBytes];
            encode_row<W>(row, encode, packed);
            const int64_t byte = (first + r * weight.cols + owned.begin) / 2 - weight.start / 2;
            store_codes(packed, owned.begin, owned.end, weight.codes + byte);
        }
    }
}

}  // namespace

void partial_cast(const CastTable& table, int threads) {
    if (header_status(table) != kOk) return;
    const auto cast_some = [&](const WeightDescriptor& weight, int64_t begin, int64_t end) {
        if (is_skipped(group_amax(table, weight))) return;
        with_dtype(weight.master_dtype, [&](auto t) {
            with_dtype(weight.weight_dtype,
                       [&](auto w) { cast_units<decltype(t), decltype(w)>(table, weight, begin, end); });
        });
    };
    parallel_items(table.weights, table.count, &WeightDescriptor::strip_begin, table.cast_end, threads,
                   kPatchGrain, cast_some, table.cast_begin);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
