#pragma once
// What quantize and tensor_amax do with a part of a matrix, for operations that share out several of them.

#include "common/args/quantize.h"
#include "cpu/strip/patch.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

constexpr int kTile = kStripColumns;  // rows and columns of a tile
constexpr int64_t kTileGrain = 2;     // tiles (32k elements) that are worth a thread

ZEROFP4_HD int64_t tiles_of(int64_t rows, int64_t cols) {
    return ceil_div(rows, kTile) * ceil_div(cols, kTile);
}
ZEROFP4_HD int64_t patches_of(int64_t rows, int64_t cols) {
    return ceil_div(rows, kBlock) * ceil_div(cols, kStripColumns);
}

// Tiles [begin, end) of the matrix, row by row. Rows of it from `input_rows` on are zeros that are not in the
// input, 15 at most.
void quantize_tiles(const QuantizeArgs& args, int64_t input_rows, int64_t begin, int64_t end);

// Raises the amaxes, which are not cleared, by patches [begin, end) of the matrix.
void raise_amaxes(const AmaxArgs& args, int64_t begin, int64_t end);

}  // namespace zerofp4::cpu::ZEROFP4_ISA
