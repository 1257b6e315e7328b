#pragma once
// Dequantize on a list of matrices, and how their values are cut into units.

#include "common/args/list.h"
#include "common/layout.h"

namespace zerofp4 {

// One copy of a quantized matrix [rows, cols], and where its values go. The stored matrix is the transpose
// when the copy is columnwise.
struct DequantizeDescriptor {
    const uint8_t* data;   // of the stored matrix, packed
    const uint8_t* scale;  // of the stored matrix
    const float* amax;     // float[1]
    void* output;          // [rows, cols]
    int64_t rows;
    int64_t cols;
    int32_t columnwise;
    uint32_t factor_bits;  // of decode_factor(e4m3_max), scale.h
    uint32_t scale_pitch;  // of a row of `scale`
    int32_t scale_shift;   // 4 where 16 rows share a row of `scale`, else 0
    int32_t swizzled;
    int32_t aligned;  // whole vectors of a lane of the CUDA kernel lie at multiples of their size
    int64_t unit_begin;

    ZEROFP4_HD float factor() const { return from_bits(factor_bits); }

    // Of the scale byte of row i of the stored matrix and scale column j.
    ZEROFP4_HD int64_t scale_offset(int64_t i, int64_t j) const {
        return swizzled ? swizzled_offset(i, j, scale_pitch) : (i >> scale_shift) * scale_pitch + j;
    }

    // From one row to the next, of 16 that begin at a multiple of 16.
    ZEROFP4_HD uint32_t scale_step() const { return swizzled ? 16 : scale_shift ? 0 : scale_pitch; }
};

using DequantizeTable = ItemTable<DequantizeDescriptor>;

// The factor of a product of two quantized matrices, whose values are written without their global scales:
// the product of those, each of which is rounded first.
struct ProductScale {
    const float* amax[2];  // float[1] each
    float factor[2];       // decode_factor(e4m3_max), scale.h
    float* alpha;          // float[1], written

    ZEROFP4_HD float value() const { return (*amax[0] * factor[0]) * (*amax[1] * factor[1]); }
};

// How a matrix of values is cut into units: on the CPU 32 x 128 elements,
constexpr int kValueRows = 32;
constexpr int kValueColumns = 128;
// on CUDA the pieces of 8 warps, each 16 rows of 512 bytes of output, or of a columnwise copy 64 x 64
// elements.
constexpr int kUnitWarps = 8;
constexpr int kWarpRows = 16;
constexpr int kWarpBytes = 512;
constexpr int kWarpSquare = 64;

}  // namespace zerofp4
