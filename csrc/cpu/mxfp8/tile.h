#pragma once
// Tiles of 32 rows by 128 columns, as the MXFP8 operations take them.

#include "common/args/mxfp8.h"
#include "cpu/device/bytes.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

constexpr int kTileRows = kMxfp8Block;
constexpr int kTileCols = 128;
static_assert(kTileCols == kMxfp8PieceColumns);
constexpr int kRowBlocks = kTileCols / kMxfp8Block;
constexpr int64_t kTileGrain = 8;  // tiles (32k elements) that are worth a thread

struct Tile {
    int64_t row, col;    // of its first element
    int64_t rows, cols;  // what lies inside the matrix; not positive for one that is padding only
};

ZEROFP4_HD Tile tile_at(int64_t tile, int64_t across, int64_t rows, int64_t cols) {
    const int64_t row = tile / across * kTileRows, col = tile % across * kTileCols;
    return {row, col, least(kTileRows, rows - row), least(kTileCols, cols - col)};
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
