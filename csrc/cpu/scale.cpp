// fused_scale: the scale bytes of every tile of every weight, in every layout and orientation with a buffer.

#include "common/scale.h"

#include "cpu/bytes.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kGroupRows = kScaleTiles * kBlock;  // matrix rows of a group of 8 x 8 tiles: those of an atom
constexpr int64_t kGroupGrain = 16;               // groups that are worth a thread

// Scale bytes of a group; zero where there is no tile.
struct Group {
    uint8_t byte[kScaleTiles][kScaleTiles];
};

// Where a group lies in one orientation: tiles [tile_row, +8) x [tile_col, +8) of a matrix of `rows` rows.
struct Place {
    int64_t tile_row, tile_col;
    int64_t tile_rows, tile_cols;  // of the whole matrix
    int64_t rows;
};

void write_compact(const Group& group, const Place& at, uint8_t* out) {
    const int64_t count = least(kScaleTiles, at.tile_cols - at.tile_col);
    for (int64_t i = 0; i < kScaleTiles && at.tile_row + i < at.tile_rows; ++i) {
        copy_bytes<kScaleTiles>(out + (at.tile_row + i) * at.tile_cols + at.tile_col, group.byte[i], count);
    }
}

// The bytes of matrix row `row` of the group: zero past the last row, even inside a tile.
ZEROFP4_HD void load_row(const Group& group, const Place& at, int64_t row, uint8_t (&bytes)[kScaleTiles]) {
    std::memset(bytes, 0, sizeof bytes);
    if (at.tile_row * kBlock + row < at.rows) std::memcpy(bytes, group.byte[row / kBlock], sizeof bytes);
}

void write_expanded(const Group& group, const Place& at, uint8_t* out) {
    const int64_t width = round_up(at.tile_cols, kAtomColumns);
    const int64_t count = least(kScaleTiles, width - at.tile_col);
    for (int64_t r = 0; r < kGroupRows; ++r) {
        uint8_t bytes[kScaleTiles];
        load_row(group, at, r, bytes);
        copy_bytes<kScaleTiles>(out + (at.tile_row * kBlock + r) * width + at.tile_col, bytes, count);
    }
}

void write_swizzled(const Group& group, const Place& at, uint8_t* out) {
    uint8_t atoms[2][kAtomBytes];
    for (int64_t r = 0; r < kGroupRows; ++r) {
        uint8_t bytes[kScaleTiles];
        load_row(group, at, r, bytes);
        std::memcpy(atoms[0] + swizzled_offset(r, 0, kAtomColumns), bytes, kAtomColumns);
        std::memcpy(atoms[1] + swizzled_offset(r, 0, kAtomColumns), bytes + kAtomColumns, kAtomColumns);
    }
    const bool both = at.tile_col + kAtomColumns < at.tile_cols;
    copy_short<2 * kAtomBytes>(out + swizzled_offset(at.tile_row * kBlock, at.tile_col, at.tile_cols), atoms,
                               both ? 2 * kAtomBytes : kAtomBytes);
}

void write_layouts(const Group& group, const Place& at, uint8_t* const (&scale)[kScaleLayouts]) {
    if (scale[kCompact]) write_compact(group, at, scale[kCompact]);
    if (scale[kExpanded]) write_expanded(group, at, scale[kExpanded]);
    if (scale[kSwizzled]) write_swizzled(group, at, scale[kSwizzled]);
}

Group group_scales(const float* tile_amax, const Place& at, const TensorScale& tensor) {
    float amax[kScaleTiles][kScaleTiles] = {};
    const int64_t count = least(kScaleTiles, at.tile_cols - at.tile_col);
    for (int64_t i = 0; i < kScaleTiles && at.tile_row + i < at.tile_rows; ++i) {
        std::memcpy(amax[i], tile_amax + (at.tile_row + i) * at.tile_cols + at.tile_col,
                    static_cast<size_t>(count) * sizeof(float));
    }
    Group group;
    for (int i = 0; i < kScaleTiles; ++i) {
        for (int j = 0; j < kScaleTiles; ++j) {
            // A tile that is not there has amax 0 and so scale 0, which is what padding holds.
            group.byte[i][j] = static_cast<uint8_t>(block_scale(amax[i][j], tensor));
        }
    }
    return group;
}

Group transposed(const Group& group) {
    Group result;
    for (int i = 0; i < kScaleTiles; ++i) {
        for (int j = 0; j < kScaleTiles; ++j) result.byte[j][i] = group.byte[i][j];
    }
    return result;
}

void scale_groups(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const float amax = group_amax(table, weight);
    if (is_skipped(table, amax)) {
        const float one = 1.0f;
        if (table.found_inf) __atomic_store(table.found_inf, &one, __ATOMIC_RELAXED);
        return;
    }
    if (begin == 0) {  // the thread that has the weight's first group
        if (weight.amax) *weight.amax = amax;
        if (weight.columnwise_amax) *weight.columnwise_amax = amax;
    }
    const TensorScale tensor = tensor_scale(amax);
    const int64_t tile_rows = ceil_div(weight.rows, kBlock), tile_cols = ceil_div(weight.cols, kBlock);
    const int64_t groups_per_row = ceil_div(tile_cols, kScaleTiles);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / groups_per_row * kScaleTiles, col = unit % groups_per_row * kScaleTiles;
        const Place rowwise{row, col, tile_rows, tile_cols, weight.rows};
        const Place columnwise{col, row, tile_cols, tile_rows, weight.cols};
        const Group group = group_scales(table.reduced + weight.tile_offset, rowwise, tensor);
        write_layouts(group, rowwise, weight.rowwise_scale);
        write_layouts(transposed(group), columnwise, weight.columnwise_scale);
    }
}

}  // namespace

void fused_scale(const CastTable& table, int threads) {
    const int32_t status = header_status(table);
    if (status != kOk) {
        if (table.status) *table.status = status;
        return;
    }
    parallel_items(table.weights, table.count, &WeightDescriptor::scale_begin, table.scale_units, threads,
                   kGroupGrain, [&](const WeightDescriptor& weight, int64_t begin, int64_t end) {
                       scale_groups(table, weight, begin, end);
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
