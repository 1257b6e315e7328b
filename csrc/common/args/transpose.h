#pragma once
// The packed transposes of a list of matrices.

#include "common/macros.h"

namespace zerofp4 {

// A packed transpose [rows, cols] -> [cols, rows]; both even. Units are square tiles of codes.
constexpr int kTransposeTile = 128;  // on the CPU, row-major
constexpr int kBlockTile = 256;      // on CUDA, column-major

struct TransposeDescriptor {
    const uint8_t* input;  // [rows, cols / 2]
    uint8_t* output;       // [cols, rows / 2]
    int64_t rows;
    int64_t cols;
    int64_t tile_begin;
};

struct TransposeTable {
    const TransposeDescriptor* items;
    int64_t count;
    int64_t tiles;
    const int32_t* tile_items;  // CUDA: the item of every tile
};

}  // namespace zerofp4
