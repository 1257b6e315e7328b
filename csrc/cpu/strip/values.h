#pragma once
// A patch as floats: reading it, its transform, the largest magnitudes of its blocks.

#include "common/dtype.h"
#include "common/hadamard.h"
#include "cpu/device/vectors.h"
#include "cpu/strip/patch.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

constexpr int kPatchElements = kBlock * kStripColumns;
constexpr int kPatchBlocks = kPatchElements / kBlock;  // 1 x 16, along either side

using Values = float[kPatchElements];  // row-major

// Zero where the patch is cut off.
template <class T>
ZEROFP4_HD void load_values(const T* matrix, int64_t cols, const Patch& patch, Values& values) {
    const T* in = matrix + patch.row * cols + patch.col;
    if (patch.rows < kBlock || patch.cols < kStripColumns) std::memset(values, 0, sizeof values);
    for (int64_t r = 0; r < patch.rows; ++r, in += cols) {
        float* row = values + r * kStripColumns;
        if (patch.cols == kStripColumns) {
            for (int c = 0; c < kStripColumns; ++c) row[c] = load_float(element_at(in, c));
        } else {
            for (int64_t c = 0; c < patch.cols; ++c) row[c] = load_float(element_at(in, c));
        }
    }
}

// Rows far apart are too many streams for the processor to see.
template <class T>
ZEROFP4_HD void prefetch_values(const T* in, int64_t cols) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int r = 0; r < kBlock; ++r, in += cols) {
        for (int c = 0; c < kStripColumns; c += kLine) __builtin_prefetch(in + c);
    }
}

ZEROFP4_HD void round_to_bfloat16(Values& values) {
    for (int i = 0; i < kPatchElements; ++i) values[i] = round_to<BFloat16>(values[i]);
}

// The Hadamard transform of every column.
ZEROFP4_HD void transform_columns(DType dtype, uint32_t signs, Values& values) {
    if (dtype != DType::kBFloat16) round_to_bfloat16(values);
    for (int c = 0; c < kStripColumns; c += kFloats) {
        Floats x[kBlock];
        for (int r = 0; r < kBlock; ++r) std::memcpy(&x[r], values + r * kStripColumns + c, sizeof x[r]);
        hadamard(x, signs);
        for (int r = 0; r < kBlock; ++r) std::memcpy(values + r * kStripColumns + c, &x[r], sizeof x[r]);
    }
    round_to_bfloat16(values);
}

// out[i] = the larger of in[2 i] and in[2 i + 1].
template <int kCount>
ZEROFP4_HD void halve(const uint32_t (&in)[2 * kCount], uint32_t (&out)[kCount]) {
    for (int i = 0; i < kCount; ++i) out[i] = larger(in[2 * i], in[2 * i + 1]);
}

// Of the blocks along the rows, row by row.
ZEROFP4_HD void row_amaxes(const Values& values, uint32_t (&amax)[kPatchBlocks]) {
    uint32_t pairs[kPatchElements / 2], fours[kPatchElements / 4], eights[kPatchElements / 8];
    for (int i = 0; i < kPatchElements / 2; ++i) {
        pairs[i] = larger(magnitude_bits(values[2 * i]), magnitude_bits(values[2 * i + 1]));
    }
    halve(pairs, fours);
    halve(fours, eights);
    halve(eights, amax);
}

// Of the columns.
ZEROFP4_HD void column_amaxes(const Values& values, uint32_t (&amax)[kPatchBlocks]) {
    for (int c = 0; c < kStripColumns; ++c) amax[c] = magnitude_bits(values[c]);
    for (int r = 1; r < kBlock; ++r) {
        const float* row = values + r * kStripColumns;
        for (int c = 0; c < kStripColumns; ++c) amax[c] = larger(amax[c], magnitude_bits(row[c]));
    }
}

// Of the tiles, repeated for each of their rows.
ZEROFP4_HD void tile_amaxes(const Values& values, uint32_t (&amax)[kPatchBlocks]) {
    uint32_t columns[kStripColumns];
    column_amaxes(values, columns);
    for (int t = 0; t < kPatchTiles; ++t) {
        amax[t] = 0;
        for (int c = 0; c < kBlock; ++c) amax[t] = larger(amax[t], columns[t * kBlock + c]);
    }
    for (int b = kPatchTiles; b < kPatchBlocks; ++b) amax[b] = amax[b % kPatchTiles];
}

// 128 runs of 16 elements to 16 rows of 128. With run and element as one number of 11 bits, moving the even
// elements before the odd ones rotates it by a bit; after four rounds they have changed places.
template <class T>
ZEROFP4_HD void transpose_runs(const T (&in)[kPatchElements], T (&out)[kPatchElements]) {
    constexpr int kHalf = kPatchElements / 2;
    T other[kPatchElements];
    const auto round = [](const T(&from)[kPatchElements], T(&to)[kPatchElements]) {
        for (int i = 0; i < kHalf; ++i) to[i] = from[2 * i], to[i + kHalf] = from[2 * i + 1];
    };
    round(in, other);
    round(other, out);
    round(out, other);
    round(other, out);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
