#pragma once
// A patch is what the kernels work on: up to 16 rows by 128 columns of a row-major matrix. Patches that are
// cut by an edge of the matrix or of a shard are copied into a zero-filled buffer, so that the inner loops
// have fixed bounds.

#include "common/args/cast.h"
#include "cpu/device/bytes.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

constexpr int kPatchTiles = kStripColumns / kBlock;
constexpr int64_t kPatchGrain = 16;  // patches (32k elements) that are worth a thread

struct Patch {
    int64_t row, col;    // of its first element
    int64_t rows, cols;  // what lies inside the matrix
};

ZEROFP4_HD Patch patch_at(int64_t strip, int64_t chunk, int64_t rows, int64_t cols) {
    const int64_t row = strip * kBlock, col = chunk * kStripColumns;
    return {row, col, least(kBlock, rows - row), least(kStripColumns, cols - col)};
}

ZEROFP4_HD Patch patch_of_unit(const ShardGeometry& weight, int64_t unit) {
    return patch_at(weight.first_strip + unit / weight.chunks, weight.first_chunk + unit % weight.chunks,
                    weight.rows, weight.cols);
}

// The columns of matrix row `row` that are both in the patch and in the shard, counted from patch.col.
ZEROFP4_HD ColumnRange owned_in_patch(const ShardGeometry& weight, const Patch& patch, int64_t row) {
    const ColumnRange owned = owned_columns(weight, row);
    const int64_t begin = owned.begin - patch.col, end = owned.end - patch.col;
    return {begin > 0 ? begin : 0, least(end, patch.cols)};
}

ZEROFP4_HD bool wholly_owned(const ShardGeometry& weight, const Patch& patch) {
    const int64_t first = patch.row * weight.cols + patch.col;
    const int64_t last = first + (kBlock - 1) * weight.cols + kStripColumns - 1;
    return patch.rows == kBlock && patch.cols == kStripColumns && weight.start <= first &&
           last < weight.start + weight.numel;
}

// Prefetches what the next patch has of a row, given the row of this one: rows of patches are short, and too
// many streams for the processor to see.
template <class T>
ZEROFP4_HD void prefetch_next(const T* row) {
    for (int i = 0; i < kStripColumns; i += 64 / static_cast<int>(sizeof(T)))
        __builtin_prefetch(row + kStripColumns + i);
}

// The elements of a patch as 16 rows of 128, `stride` apart.
template <class T>
struct PatchView {
    const T* data;
    int64_t stride;
};

// The owned elements of a patch of the master, in place when all are owned; zero where they are not.
template <class T>
inline PatchView<T> view_master(const WeightDescriptor& weight, const Patch& patch,
                                T (&buffer)[kBlock][kStripColumns]) {
    const T* master = static_cast<const T*>(weight.master);
    const int64_t first = patch.row * weight.cols + patch.col - weight.start;
    if (wholly_owned(weight, patch)) return {master + first, weight.cols};
    std::memset(buffer, 0, sizeof buffer);
    for (int64_t r = 0; r < patch.rows; ++r) {
        const ColumnRange owned = owned_in_patch(weight, patch, patch.row + r);
        if (owned.begin >= owned.end) continue;
        copy_short<kStripColumns* static_cast<int>(sizeof(T))>(
            &buffer[r][owned.begin], master + (first + r * weight.cols + owned.begin),
            (owned.end - owned.begin) * static_cast<int64_t>(sizeof(T)));
    }
    return {&buffer[0][0], kStripColumns};
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
