#pragma once
// Amaxes of the tiles of a patch, to the reduced vector.

#include "common/dtype.h"
#include "cpu/device/raise.h"
#include "cpu/strip/patch.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

// Magnitude in the weight's dtype; what is not finite is inf.
ZEROFP4_HD float rounded_magnitude(float x, DType weight_dtype) {
    const float rounded = round_to(weight_dtype, x);
    return rounded <= kFloatMax ? rounded : kInf;
}

// The largest bits of a magnitude in each column of a patch: as integers they sort like the magnitudes, NaN
// above Inf.
using ColumnBits = uint32_t[kStripColumns];

// Of tile t of the patch.
inline float tile_magnitude(const ColumnBits& most, int64_t t) {
    uint32_t bits = 0;
    for (int c = 0; c < kBlock; ++c) bits = larger(bits, most[t * kBlock + c]);
    return from_bits(bits);
}

// The tile amaxes of a patch go to the reduced vector, if it has words for them; returns the largest.
// magnitude_of(t) is the largest magnitude that is owned of tile t of the patch.
template <class MagnitudeOf>
inline float publish_tiles(float* reduced, const ShardGeometry& weight, const Patch& patch,
                           const MagnitudeOf& magnitude_of) {
    float* tile = nullptr;
    if (weight.tile_offset >= 0) {
        tile = reduced + weight.tile_offset + patch.row / kBlock * ceil_div(weight.cols, kBlock) +
               patch.col / kBlock;
    }
    float amax = 0.0f;
    for (int64_t t = 0; t * kBlock < patch.cols; ++t) {
        const float found = rounded_magnitude(magnitude_of(t), weight.weight_dtype);
        // Never true for a tile without owned elements, which must stay as it is.
        if (tile != nullptr && found > tile[t]) tile[t] = found;
        amax = found > amax ? found : amax;
    }
    return amax;
}

// Raises the words of a weight that have the amax of all that is owned.
inline void raise_words(float* reduced, const ShardGeometry& weight, float amax) {
    raise_to(reduced + weight.amax_offset, amax);
    if (weight.own_offset >= 0) raise_to(reduced + weight.own_offset, amax);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
