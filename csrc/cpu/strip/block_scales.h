#pragma once
// The scales of the 128 blocks of a patch.

#include "common/four_over_six.h"
#include "cpu/strip/values.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// How one copy of a tensor is scaled.
struct Scaling {
    float amax;
    float e4m3_max;
    TensorScale tensor;
    FourOverSix choice;
};

ZEROFP4_HD Scaling make_scaling(float amax, const FourOverSix& choice) {
    const float e4m3_max = choice.e4m3_max > 0.0f ? choice.e4m3_max : kE4M3Max;
    return {amax, e4m3_max, tensor_scale(amax, e4m3_max), choice};
}

struct BlockScales {
    uint8_t byte[kPatchBlocks];
    float encode[kPatchBlocks];  // what the elements are multiplied with
};

ZEROFP4_HD void set_scales(const uint32_t (&byte)[kPatchBlocks], const Scaling& scaling,
                           BlockScales& blocks) {
    const TensorScale tensor = scaling.tensor;  // a copy, which no store to a float can change
    for (int b = 0; b < kPatchBlocks; ++b) blocks.encode[b] = block_encode(byte[b], tensor);
    for (int b = 0; b < kPatchBlocks; ++b) blocks.byte[b] = static_cast<uint8_t>(byte[b]);
}

ZEROFP4_HD void nearest_scales(const uint32_t (&amax)[kPatchBlocks], const Scaling& scaling,
                               BlockScales& blocks) {
    const TensorScale tensor = scaling.tensor;
    uint32_t byte[kPatchBlocks];
    for (int b = 0; b < kPatchBlocks; ++b) byte[b] = block_scale(amax_of_bits(amax[b]), tensor);
    set_scales(byte, scaling, blocks);
}

// The errors of blocks that run down the columns of x, with these scale bytes.
inline void block_errors(const Values& x, const uint32_t (&byte)[kPatchBlocks], const Scaling& scaling,
                         float (&error)[kPatchBlocks]) {
    const auto [amax, e4m3_max, tensor, choice] = scaling;
    float encode[kPatchBlocks], scale[kPatchBlocks];
    for (int b = 0; b < kPatchBlocks; ++b) {
        encode[b] = block_encode(byte[b], tensor);
        scale[b] = e4m3_to_float(byte[b]);
        error[b] = 0.0f;
    }
    for (int r = 0; r < kBlock; ++r) {
        const float* row = x + r * kPatchBlocks;
        for (int b = 0; b < kPatchBlocks; ++b) {
            const float value = e2m1_to_float(float_to_e2m1(row[b] * encode[b]));
            error[b] += element_error(row[b], value, scale[b], amax, choice);
        }
    }
}

// The sums of a tile's rows, 8 tiles beside each other, as a tree; repeated for each row.
ZEROFP4_HD void add_rows(float (&error)[kPatchBlocks]) {
    for (int half = kPatchBlocks / 2; half >= kPatchTiles; half /= 2) {
        for (int b = 0; b < half; ++b) error[b] += error[b + half];
    }
    for (int b = kPatchTiles; b < kPatchBlocks; ++b) error[b] = error[b % kPatchTiles];
}

// Four over six, for blocks that run down the columns of x; of tiles, these are the rows.
inline void chosen_scales(const Values& x, const uint32_t (&amax)[kPatchBlocks], bool tiles,
                          const Scaling& scaling, BlockScales& blocks) {
    const TensorScale tensor = scaling.tensor;
    uint32_t six[kPatchBlocks], four[kPatchBlocks];
    for (int b = 0; b < kPatchBlocks; ++b) {
        const ScaleCandidates candidates = scale_candidates(amax_of_bits(amax[b]), tensor);
        six[b] = candidates.six, four[b] = candidates.four;
    }
    float error_six[kPatchBlocks], error_four[kPatchBlocks];
    block_errors(x, six, scaling, error_six);
    block_errors(x, four, scaling, error_four);
    if (tiles) add_rows(error_six), add_rows(error_four);
    for (int b = 0; b < kPatchBlocks; ++b) six[b] = error_four[b] < error_six[b] ? four[b] : six[b];
    set_scales(six, scaling, blocks);
}

// Blocks along the rows, row by row, whose amaxes are known; where a block is a tile, its scale is that of
// each of its rows.
inline void row_scales(const Values& values, const uint32_t (&amax)[kPatchBlocks], bool tiles,
                       const Scaling& scaling, BlockScales& blocks) {
    if (scaling.choice.e4m3_max > 0.0f) {
        Values transposed;
        transpose_runs(values, transposed);
        chosen_scales(transposed, amax, tiles, scaling, blocks);
    } else {
        nearest_scales(amax, scaling, blocks);
    }
}

inline void row_scales(const Values& values, bool tiles, const Scaling& scaling, BlockScales& blocks) {
    uint32_t amax[kPatchBlocks];
    tiles ? tile_amaxes(values, amax) : row_amaxes(values, amax);
    row_scales(values, amax, tiles, scaling, blocks);
}

// Blocks down the columns.
inline void column_scales(const Values& values, const Scaling& scaling, BlockScales& blocks) {
    uint32_t amax[kPatchBlocks];
    column_amaxes(values, amax);
    if (scaling.choice.e4m3_max > 0.0f) {
        chosen_scales(values, amax, false, scaling, blocks);
    } else {
        nearest_scales(amax, scaling, blocks);
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
