// fused_scale: the scale bytes of every tile of every weight, in every layout and orientation with a buffer.
// spread_scales: the same from compact rowwise ones.

#include "common/scale.h"

#include "cpu/format/scale_square.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kTileShift = 4;        // a tile's byte stands for 16 rows
constexpr int64_t kGroupGrain = 16;  // groups that are worth a thread

// Scale bytes of a group of 8 x 8 tiles; zero where there is no tile.
struct Group {
    uint8_t byte[kScaleTiles][kScaleTiles];
};

// Of the tiles [row, +8) x [col, +8) of `tile_rows` x `tile_cols`.
Group group_scales(const float* tile_amax, int64_t row, int64_t col, int64_t tile_rows, int64_t tile_cols,
                   const TensorScale& tensor) {
    float amax[kScaleTiles][kScaleTiles] = {};
    const int64_t count = least(kScaleTiles, tile_cols - col);
    for (int64_t i = 0; i < kScaleTiles && row + i < tile_rows; ++i) {
        std::memcpy(amax[i], tile_amax + (row + i) * tile_cols + col,
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

// The same from compact scales.
Group group_scales(const uint8_t* compact, int64_t row, int64_t col, int64_t tile_rows, int64_t tile_cols) {
    Group group{};
    for (int64_t i = 0; i < kScaleTiles && row + i < tile_rows; ++i) {
        copy_bytes<kScaleTiles>(group.byte[i], compact + (row + i) * tile_cols + col,
                                least(kScaleTiles, tile_cols - col));
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

// Groups [begin, end) of a weight; make(row, col, tile_rows, tile_cols) gives that of the tiles from there
// on.
template <class Make>
void write_groups(const WeightDescriptor& weight, int64_t begin, int64_t end, const Make& make) {
    const int64_t tile_rows = ceil_div(weight.rows, kBlock), tile_cols = ceil_div(weight.cols, kBlock);
    const int64_t groups_per_row = ceil_div(tile_cols, kScaleTiles);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / groups_per_row * kScaleTiles, col = unit % groups_per_row * kScaleTiles;
        const Group rowwise = make(row, col, tile_rows, tile_cols);
        const Group columnwise = transposed(rowwise);
        write_layouts({rowwise.byte, kTileShift, row * kBlock, weight.rows, col, tile_cols},
                      weight.rowwise_scale);
        write_layouts({columnwise.byte, kTileShift, col * kBlock, weight.cols, row, tile_rows},
                      weight.columnwise_scale);
    }
}

void scale_groups(const CastTable& table, const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const float amax = group_amax(table, weight);
    if (is_skipped(amax)) {
        const float one = 1.0f;
        if (table.found_inf) __atomic_store(table.found_inf, &one, __ATOMIC_RELAXED);
        return;
    }
    if (begin == 0) {  // the thread that has the weight's first group
        if (weight.amax) *weight.amax = amax;
        if (weight.columnwise_amax) *weight.columnwise_amax = amax;
    }
    if (weight.tile_offset < 0) return;  // the cast makes its scales
    const TensorScale tensor = tensor_scale(amax);
    const float* tiles = table.reduced + weight.tile_offset;
    write_groups(weight, begin, end, [&](int64_t row, int64_t col, int64_t tile_rows, int64_t tile_cols) {
        return group_scales(tiles, row, col, tile_rows, tile_cols, tensor);
    });
}

void spread_groups(const WeightDescriptor& weight, int64_t begin, int64_t end) {
    const uint8_t* compact = weight.rowwise_scale[kCompact];
    write_groups(weight, begin, end, [&](int64_t row, int64_t col, int64_t tile_rows, int64_t tile_cols) {
        return group_scales(compact, row, col, tile_rows, tile_cols);
    });
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

void spread_scales(const CastTable& table, int threads) {
    parallel_items(table.weights, table.count, &WeightDescriptor::scale_begin, table.scale_units, threads,
                   kGroupGrain, [&](const WeightDescriptor& weight, int64_t begin, int64_t end) {
                       spread_groups(weight, begin, end);
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
